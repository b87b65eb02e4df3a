"""What the site is made by: a reference that misses nothing, notebooks that run, links that are checked."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import Field
from tools.site import commands, keys, links, notebooks

from dualprompt.cli import build_parser
from dualprompt.config import RunConfig, Strict
from dualprompt.methods.base import METHODS
from dualprompt.values import flat

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))


class Example(Strict):
    """One key of each kind."""

    count: int = Field(default=3, ge=1, le=10_000, description="a number")
    share: float | None = Field(default=None, gt=0, lt=1, description="a share")
    layers: tuple[int, ...] = Field(default=(1, 2), description="a list")
    sizes: tuple[int, int] = Field(default=(8, 16), description="a pair")
    flag: bool = Field(default=False, description="a|b")
    name: str = Field(description="a name")


def test_keys_are_read_from_the_models_that_check_them() -> None:
    assert [(key.name, key.type, key.default, key.range) for key in keys.keys(Example, "x.")] == [
        ("x.count", "int", "`3`", "≥ 1, ≤ 10,000"),
        ("x.share", "float or null", "`null`", "> 0, < 1"),
        ("x.layers", "list of int", "`1,2`", ""),
        ("x.sizes", "2 × int", "`8,16`", ""),
        ("x.flag", "bool", "`false`", ""),
        ("x.name", "str", "required", ""),
    ]
    assert keys.table(list(keys.keys(Example))).splitlines()[-2] == "| `flag` | bool | `false` |  | a\\|b |"


def test_every_key_of_a_run_is_described() -> None:
    found = list(keys.keys(RunConfig))
    assert all(key.description for key in found), [key.name for key in found if not key.description]
    shown = keys.run_config()
    for name in flat(RunConfig(benchmark={"dataset": "mini"}).model_dump(exclude={"method"})):  # type: ignore[arg-type]
        assert f"| `{name}` |" in shown


@pytest.mark.parametrize("name", METHODS.names())
def test_every_option_of_a_method_is_described(name: str) -> None:
    found = list(keys.keys(METHODS[name].Config))
    assert {key.name for key in found} == set(METHODS[name].Config.model_fields)
    assert all(key.description for key in found if key.name != "name"), name


def test_the_reference_has_every_method_and_what_it_brings() -> None:
    shown = keys.methods()
    sections = {part.partition("`")[0]: part for part in shown.split("## `")[1:]}
    assert list(sections) == METHODS.names()
    assert "`train.lr 5e-05`" in sections["ewc"]
    assert "`query`, `batch_vote`, `oracle`" in sections["dualprompt"]
    assert "Takes no stream in which classes come back" in sections["bic"]


def test_the_reference_has_every_command_and_option() -> None:
    shown = commands.commands()
    names = [line.removeprefix("## ") for line in shown.splitlines() if line.startswith("## ")]
    parser, _ = build_parser()
    found = dict(commands.leaves(parser))
    assert names == list(found)
    assert {"run", "data", "learn", "serve"} <= found.keys()
    for name, sub in found.items():
        section = commands.section(name, sub)
        for action in filter(commands.visible, sub._actions):
            for flag in action.option_strings:
                assert f"`{flag}" in section, (name, flag)


def test_a_command_stands_there_once_and_an_alias_not_at_all() -> None:
    parser = argparse.ArgumentParser()
    inner = parser.add_subparsers()
    inner.add_parser("first", aliases=["1st"])
    inner.add_parser("second").add_subparsers().add_parser("part")
    assert [name for name, _ in commands.leaves(parser)] == ["first", "second part"]


def test_what_stands_below_the_options_is_prose_and_code() -> None:
    epilog = "With --top-k it ends\nin `a --b` *.\n\n  <!-- x -->\n\n  code\n    more\n\nexamples:\n  dualprompt x\n"
    assert list(commands.paragraphs(epilog)) == [
        "With `--top-k` it ends\nin `a --b` \\*.",
        "```text\n<!-- x -->\n\ncode\n  more\n```",
        "Examples:",
        "```text\ndualprompt x\n```",
    ]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_holds_what_it_gives(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    METHODS.names()
    monkeypatch.setattr(METHODS, "_things", dict(METHODS._things))  # one of them adds a method
    kept = json.loads(path.read_text(encoding="utf-8"))
    done = notebooks.run(kept, tmp_path)
    assert notebooks.kinds(done) == notebooks.kinds(kept)
    assert [cell["source"] for cell in done["cells"]] == [cell["source"] for cell in kept["cells"]]


def cell(source: str) -> dict[str, Any]:
    return {"cell_type": "code", "source": [source], "outputs": [], "execution_count": None}


def test_a_notebook_is_a_page(tmp_path: Path) -> None:
    text = {"cell_type": "markdown", "source": ["# Title\n", "words"]}
    book = {"cells": [text, cell("a = 2\nprint(a)\na + 1"), cell("b = a")]}
    done = notebooks.run(book, tmp_path)
    assert notebooks.kinds(done) == [["stdout", "text/plain"], []]
    assert notebooks.markdown(json.dumps(done)) == (
        "# Title\nwords\n\n```python\na = 2\nprint(a)\na + 1\n```\n\n```text\n2\n```\n\n```text\n3\n```\n\n"
        "```python\nb = a\n```\n"
    )
    with pytest.raises(ZeroDivisionError):
        notebooks.run({"cells": [cell("1 / 0")]}, tmp_path)


def test_wrong_links_are_found(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "other.html").write_text('<h1 id="top">x</h1><img src="../gone.png">')
    right = ("sub/other.html", "sub/other.html#top", "#here", "https://example.org/a", "mailto:a@example.org")
    wrong = ("sub/none.html", "sub/other.html#bottom", "#there", "http://example.org", "https://nowhere")
    anchors = "".join(f'<a href="{link}">x</a>' for link in right + wrong)
    (tmp_path / "index.html").write_text(f'<p id="here">{anchors}</p>')
    found = links.faults(tmp_path)
    assert [line.split()[1] for line in found] == [*wrong, "../gone.png"]


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "sphinx", "--quiet", "--fresh-env", "--fail-on-warning", "--keep-going"]
    built = subprocess.run([*command, str(ROOT / "docs"), str(tmp_path)], capture_output=True, text=True, cwd=ROOT)
    assert built.returncode == 0, built.stderr
    assert links.faults(tmp_path) == []
