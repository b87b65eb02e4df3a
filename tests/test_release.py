"""What a release needs: one version everywhere, files that say what they should, and a CI that runs what people run."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

import dualprompt

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
GITHUB = ROOT / ".github"


def test_there_is_one_version() -> None:
    assert PROJECT["project"]["dynamic"] == ["version"]
    assert PROJECT["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "dualprompt.__version__"}
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert str(citation["version"]) == dualprompt.__version__
    newest = re.search(r"^## \[(.+?)\] – (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None
    assert newest[1] == dualprompt.__version__
    assert newest[2] == str(citation["date-released"])


def test_extras_bring_what_is_asked_for_by_name() -> None:
    extras = set(PROJECT["project"]["optional-dependencies"]) - {"dev"}
    named = {
        match
        for path in (ROOT / "src").rglob("*.py")
        for match in re.findall(r"dualprompt\[([a-z]+)\]", path.read_text(encoding="utf-8"))
    }
    named |= {"tensorboard", "wandb"}  # which `run/tracking.py` puts in by their names
    named |= {"docs"}  # which `make docs` asks for
    assert named == extras
    dev = next(each for each in PROJECT["project"]["optional-dependencies"]["dev"] if each.startswith("dualprompt["))
    assert set(re.findall(r"[a-z]+", dev.partition("[")[2])) == extras


def test_every_kind_of_file_in_the_package_is_packed() -> None:
    patterns = PROJECT["tool"]["setuptools"]["package-data"]["dualprompt"]
    package = Path(dualprompt.__file__).parent
    packed = {path for pattern in patterns for path in package.glob(pattern)}
    others = {path for path in package.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")}
    assert others == packed


@pytest.mark.parametrize("path", sorted(GITHUB.rglob("*.yml")), ids=lambda path: path.name)
def test_files_of_the_ci_are_whole(path: Path) -> None:
    value: Any = yaml.safe_load(path.read_text())
    if path.parent.name == "ISSUE_TEMPLATE":
        assert {"name", "description", "body"} <= value.keys()
        assert all({"type", "attributes"} <= part.keys() for part in value["body"])
        return
    steps = [step for job in value["jobs"].values() for step in job["steps"]]
    commands = [step["run"] for step in steps if "run" in step]
    assert value["permissions"] == {"contents": "read"}
    assert commands
    if path.name == "test.yml":
        assert commands == ["make test", "make docs"]
    for command in commands:
        for target in re.findall(r"make (\S+)", command):
            assert f"\n{target}:" in (ROOT / "Makefile").read_text()
        for script in re.findall(r"tools/\S+\.py", command):
            assert (ROOT / script).is_file()


def test_hooks_run_what_lint_runs() -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    lint = (ROOT / "Makefile").read_text().partition("\nlint:")[2].partition("\n\n")[0]
    for hook in hooks:
        assert hook["entry"].removesuffix(" --force-exclude").removeprefix(".venv/bin/") in lint
