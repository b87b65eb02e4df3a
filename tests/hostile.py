"""Files that we read back, and what is done with them, for tests that damage them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from dualprompt.errors import DualPromptError
from dualprompt.learner import ContinualLearner
from dualprompt.model import card
from dualprompt.pictures.kinds import Cloud, Grid, Line, Lines, Points, as_plain
from dualprompt.progress import SILENT
from dualprompt.report import gallery, run_files, tables
from dualprompt.report.sheet import Column, Sheet
from dualprompt.run.folder import Run
from dualprompt.run.tracking import _Story
from dualprompt.sweeps.obtained import Obtained
from dualprompt.training import group
from sandbox import World, call, interrupted

Mutate = Callable[[bytes, Random], bytes]


@pytest.fixture(scope="module")
def finished(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("finished") / "run"
    assert call("run", world.preset, "--out", out, "--train.epochs", 1).code == 0
    return out


@pytest.fixture(scope="module")
def stopped(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return interrupted(world, tmp_path_factory.mktemp("stopped") / "run", "--checkpoint.every_seconds", 0)


@contextlib.contextmanager
def mutated(path: Path, mutate: Mutate, rng: Random) -> Iterator[None]:
    content = path.read_bytes()
    try:
        path.write_bytes(mutate(content, rng))
        yield
    finally:
        path.write_bytes(content)


def outcome(read: Callable[[], Any]) -> Any:
    """What was read, or the one line that it was refused with; any other exception fails the test."""
    refused = ""
    try:
        return read()
    except DualPromptError as error:
        refused = str(error)
    assert refused.isprintable()
    assert 0 < len(refused) < 2000
    return None


def uses_model(path: Path) -> None:
    """Do with a model what commands and the server do."""
    learner = ContinualLearner.load(path, "cpu")
    json.dumps(learner.info(), allow_nan=False)
    card.text(learner.info())
    learner.accuracy_matrix()
    if learner.tasks:
        answers = learner.predict_pixels(np.full((2, learner.side, learner.side, 3), 200, np.uint8))
        json.dumps([answer.to_dict() for answer in answers], allow_nan=False)
        learner.forget(learner.tasks[0].id)


def looks_at(folder: Path) -> None:
    """Do with a run what commands do, but for drawing."""
    members = group.members_of(folder)
    runs = [Run(folder / member.folder) for member in members]
    for run in runs:
        run.check_same(run_identity(run))
        assert run.precision in ("fp32", "bf16")
    results = [run.result() for run in runs]
    tables.text(tables.headline(results), *(tables.accuracy_matrix(result) for result in results))
    json.dumps(run_files.combined(runs, folder))
    run_files.task_keys(runs[0])
    with contextlib.suppress(DualPromptError):  # of other images, or none
        gallery._stream(runs[0], SILENT)
    story = _Story()
    for line in runs[0].lines():
        story.point(line)
    story.headline(results[0])
    assert Obtained(runs[0], members[0].config).seconds >= -1e300


def run_identity(run: Run) -> Any:
    from dualprompt.run.identity import Identity

    return Identity(**run.manifest()["identity"])


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a study with a table, a photo and a picture of each kind."""
    folder = tmp_path_factory.mktemp("study")
    drawn = {
        "matrix": Grid("a", "x", "y", ["1", "2"], ["3"], [[5.0, None]], framed=[[0, 1]], spread=[[0.5, None]]),
        "curves": Lines("b", "x", "y", [Line("l", [0, 1], [2.0, 3.0], [0.1, None])], places=["p", "q"], mark_best=True),
        "plane": Points("c", [Cloud("d", [1.0], [2.0], 0)]),
    }
    value = {
        "study": "lengths", "title": "t", "paper": "p", "finding": "f", "benchmark": "b", "backbone": "e",
        "recipe": "r", "rows": [{"runs": ["/nowhere"]}], "photos": {"photo.png": "caption"},
        "tables": [asdict(Sheet("s", (Column("h"),), ((("cell",),),), ("remark",)))],
        "pictures": {name: as_plain(picture) for name, picture in drawn.items()},
    }  # fmt: skip
    (folder / "study.json").write_text(json.dumps(value))
    (folder / "photo.png").write_bytes(b"any")
    return folder
