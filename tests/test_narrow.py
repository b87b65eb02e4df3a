"""What the commands of a model print on a terminal of 80 columns: names are wrapped, never cut."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from dualprompt import ContinualLearner
from sandbox import World, call, pictures

LONG = "a very long name of a class, as people do give them to folders of pictures"


@pytest.fixture(scope="module")
def model(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    learner = ContinualLearner(str(world.weights), "lda", device="cpu")
    learner.learn({LONG: pictures(world, "ash"), "birch": pictures(world, "birch")}, name="the first month of the year")
    learner.learn({f"kind {number}": pictures(world, "cedar")[:1] for number in range(30)}, name="many")
    path = learner.save(tmp_path_factory.mktemp("narrow") / "model")
    learner.rename("birch", "silver birch")
    return learner.save(path)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")


def cells(printed: str, column: int) -> str:
    """Return all that is in a column of the first table, without the borders and spaces that wrapping put there."""
    rows = [line.split("│") for line in re.sub(r"\x1b\[[\d;]*m", "", printed).splitlines() if line.startswith("│")]
    return "".join(row[column].strip() for row in rows).replace(" ", "")


def test_names_are_wrapped_and_numbers_are_whole(world: World, model: Path, tmp_path: Path, terminal: None) -> None:
    printed = call("info", model).out
    assert "…" not in printed
    assert cells(printed, 2).startswith("thefirstmonthoftheyear")
    assert LONG.replace(" ", "") in cells(printed, 3)
    assert "kind26and10more" in cells(printed, 3)

    printed = call("versions", model).out
    assert "…" not in printed
    assert "renamed'birch'to'silverbirch'" in cells(printed, 3)

    picture = tmp_path / ("holiday-" * 12 + "1.png")
    shutil.copy(pictures(world, "ash")[0], picture)
    printed = call("predict", model, picture).out
    assert str(picture).replace(" ", "") in cells(printed, 1)
    assert LONG.replace(" ", "") in cells(printed, 2)
    odd = tmp_path / "two\nlines\x1b[2J.png"  # which would wipe the screen
    shutil.copy(picture, odd)
    printed = call("predict", model, odd).out
    assert "two\\nlines\\x1b[2J.png" in cells(printed, 1)
    assert "\x1b[2J" not in printed


def test_accuracy_by_task_has_its_count_and_interval(world: World, model: Path, tmp_path: Path) -> None:
    for name, shown in ((LONG, "ash"), ("silver birch", "birch"), ("kind 3", "cedar")):
        (tmp_path / name).mkdir()
        for picture in pictures(world, shown, "test"):
            shutil.copy(picture, tmp_path / name)
    found = call("evaluate", model, tmp_path, "--json").json
    printed = call("evaluate", model, tmp_path).out
    [row] = [line for line in printed.splitlines() if line.startswith("│ the first month")]
    images = sum(sum(found["confusion"][name].values()) for name in (LONG, "silver birch"))
    assert re.search(rf"│ {images} +│ {found['by_task']['1']:.1f} % +│ \d+–\d+ +│", row)
