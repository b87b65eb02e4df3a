"""The pages: none too long, no link that leads nowhere, drawings as their script makes them, the README's Python."""

from __future__ import annotations

import re
import tomllib
import zipfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tools.site.drawings import DRAWINGS

import dualprompt
from plugins import python_blocks

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
SITE = sorted(path for path in DOCS.rglob("*.md") if "_build" not in path.parts)
PAGES = [*SITE, *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md"))]
MOST_WORDS, MOST_OF_README = 1200, 800
FENCED = re.compile(r"^(`{3,}).*?^\1$", re.MULTILINE | re.DOTALL)
COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
LINK = re.compile(r"\]\(([^()\s]+)\)")


def prose(path: Path) -> str:
    """Return a page without its code and what nobody sees."""
    text = COMMENT.sub("", FENCED.sub("", path.read_text(encoding="utf-8")))
    return "\n".join(line for line in text.splitlines() if not line.startswith("    "))


def words(lines: list[str]) -> int:
    return len(re.findall(r"[^\s|]*\w[^\s|]*", LINK.sub("]", "\n".join(lines))))


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_no_page_is_long(path: Path) -> None:
    lines = prose(path).splitlines()
    assert words([line for line in lines if not line.lstrip().startswith("|")]) <= MOST_WORDS
    if path.name == "README.md" and path.parent == ROOT:
        assert words(lines) <= MOST_OF_README


@cache
def anchors(path: Path) -> set[str]:
    """Return the places of a page as GitHub names them."""
    headings = re.findall(r"^#+ (.+)$", FENCED.sub("", path.read_text(encoding="utf-8")), flags=re.MULTILINE)
    plain = [re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings]
    return {heading.replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(path: Path) -> None:
    for link in LINK.findall(prose(path)):
        if re.match(r"https://[\w.-]+\.\w+(/\S*)?$", link):
            continue
        name, _, place = link.partition("#")
        target = path if not name else (path.parent / name).resolve()
        assert target.exists(), link
        generated = target.parent == DOCS / "reference"  # whose sections are made from the code; see `make docs`
        if place and target.suffix == ".md" and not generated:
            assert place in anchors(target), link


def test_the_layers_of_the_architecture_page_are_those_that_are_checked() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    layers = project["tool"]["importlinter"]["contracts"][0]["layers"]
    checked = [[name.strip().removeprefix("dualprompt.") for name in layer.split("|")] for layer in layers]
    section = (DOCS / "architecture.md").read_text(encoding="utf-8").split("\n## ")[1]
    cells = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    assert [re.findall(r"`([^`]+)`", cell) for cell in cells] == checked


@pytest.mark.parametrize("name", DRAWINGS)
def test_drawings_are_what_their_script_makes(name: str) -> None:
    assert (DOCS / "images" / f"drawing-{name}.svg").read_text(encoding="utf-8") == DRAWINGS[name]().svg()


def test_the_lines_of_the_readme_and_the_quick_start_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with zipfile.ZipFile(Path(dualprompt.__file__).parent / "assets" / "mini.zip") as pack:  # a little of what it names
        some = re.compile(r"(fruit|leaves)/(train|test)/(plum|orange|apple-scab|grape-esca)/0[1-3]\.")
        pack.extractall("photos", [name for name in pack.namelist() if some.match(name)])
    (block,) = python_blocks(ROOT / "README.md")
    assert len(block.splitlines()) <= 10
    names: dict[str, Any] = {}
    exec(block, names)
    assert names["learner"].classes == ("orange", "plum", "apple-scab", "grape-esca")
    assert names["answer"].label == "plum"
    assert capsys.readouterr().out.startswith("plum ")
    asking, fitting = python_blocks(DOCS / "quickstart.md")
    exec(asking, names)
    assert names["answer"].label == "apple-scab"
    exec(fitting, names)
    assert names["run"].accuracy_matrix.shape == (5, 5)


def test_the_lines_of_the_page_on_backbones_work() -> None:
    (block,) = python_blocks(DOCS / "backbones.md")
    names: dict[str, Any] = {}
    exec(block, names)
    assert names["features"].shape == (2, names["backbone"].dim)
