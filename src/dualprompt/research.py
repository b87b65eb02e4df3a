"""Runs in Python: fit a method to a benchmark in a line, and read what a run has left.

import dualprompt

run = dualprompt.fit("mini", method="dualprompt", train={"epochs": 2})
run.accuracy_matrix                     # NumPy, one row after each task
run.model().state()                     # the method as it was after the last task
dualprompt.load_run("runs/cifar").frame()
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from dualprompt.backbones import weights
from dualprompt.config import RunConfig, as_layer, compose, own_defaults, parse
from dualprompt.data.images import Images
from dualprompt.data.memory import dataset_of, known
from dualprompt.data.sources import Dataset
from dualprompt.errors import DualPromptError
from dualprompt.methods.base import METHODS, Method, StreamKind, method_config
from dualprompt.progress import SILENT, Progress
from dualprompt.report import study_files
from dualprompt.report.figures import accuracy_grid
from dualprompt.report.study_files import StudyRecord
from dualprompt.report.tables import MORE, label
from dualprompt.run import predictions
from dualprompt.run.checkpoint import of_method
from dualprompt.run.folder import Run
from dualprompt.run.predictions import Predictions
from dualprompt.training import group
from dualprompt.training.setup import view_of
from dualprompt.values import flat, merge, nested

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

# For benchmarks that no preset describes.
RECIPE = {"recipe": "own", "epochs": 5, "batch_size": 16, "lr": 0.005}
NUMBERS = ("average_accuracy", "forgetting", "mean_over_steps", "learning_accuracy", "matching_accuracy", *MORE)


@dataclass(frozen=True)
class FinishedRun:
    """What a finished run has left: one method on one benchmark with one seed."""

    run: Run

    @property
    def folder(self) -> Path:
        """Where it lies."""
        return self.run.folder

    @cached_property
    def config(self) -> RunConfig:
        """What was run, resolved."""
        return self.run.config()

    @cached_property
    def result(self) -> dict[str, Any]:
        """Everything that `result.json` says."""
        return self.run.result()

    @property
    def method(self) -> str:
        """What tables call it."""
        return label(self.result)

    @cached_property
    def tasks(self) -> tuple[tuple[str, ...], ...]:
        """The names of the classes of each task."""
        return tuple(tuple(task["classes"]) for task in self.run.manifest()["tasks"])

    @property
    def accuracy_matrix(self) -> np.ndarray:
        """The accuracy on each task (column) after each task (row) in percent, (tasks, tasks); NaN where not yet."""
        rows = self.result["accuracy_matrix"]
        matrix = np.full((len(rows), len(rows)), np.nan)
        for number, row in enumerate(rows):
            matrix[number, : len(row)] = row
        return matrix

    @property
    def class_accuracy(self) -> dict[str, float]:
        """The accuracy on each class after the last task in percent, by its name; empty if that was not noted."""
        return dict(self.result.get("class_accuracy") or {})

    @cached_property
    def predictions(self) -> Predictions:
        """What it answered for every test image after each task: `answer[-1]` is after the last."""
        return predictions.read(self.run.predictions_path)

    def frame(self) -> DataFrame:
        """Return the accuracy matrix as a pandas DataFrame, named by tasks."""
        names = self.result["tasks"]
        return _pandas().DataFrame(self.accuracy_matrix, index=names, columns=names)

    def state(self, task: int = -1) -> dict[str, Tensor]:
        """Return the method's tensors as they were after a task: prompts, keys, classifier, by name."""
        return of_method(self.run.checkpoints.after_task(self._numbered(task)))

    def model(self, task: int = -1, device: str = "cpu") -> Method:
        """Return the method as it was after a task, ready to predict."""
        number = self._numbered(task)
        checkpoint = weights.read(self.config.backbone.name, seed=self.config.seed)
        if checkpoint.info.sha256 != self.run.identity.weights:
            raise DualPromptError(
                f"the weights of backbone '{self.config.backbone.name}' are not those that run {self.folder} began "
                "with; restore them"
            )
        own = self.config.backbone
        backbones = weights.factory(checkpoint, input_size=own.input_size, gelu=own.gelu)
        options = method_config(self.config.method)
        method = METHODS[options.name](options, backbones)
        method.accept(self._kind())
        method.load_state(self.state(number))
        return method.to(device).eval()

    def _kind(self) -> StreamKind:
        names = [name for task in self.tasks for name in task]
        return StreamKind(returns=len(set(names)) < len(names))

    def _numbered(self, task: int) -> int:
        count = len(self.tasks)
        if not -count <= task < count:
            raise DualPromptError(f"run {self.folder} has {count} tasks, 0 to {count - 1}; found {task}")
        return task % count

    def images(self, pixels: np.ndarray) -> Tensor:
        """Return images, (count, height, width, 3) uint8, as the model takes them, (count, 3, side, side)."""
        info = weights.read(self.config.backbone.name, seed=self.config.seed).info
        images = Images.from_array(pixels)
        return view_of(self.config, info).fixed(images.gather(torch.arange(len(images))))

    def figure(self) -> Figure:
        """Return the accuracy matrix as a matplotlib figure."""
        from matplotlib.figure import Figure

        grid = accuracy_grid([self.result])
        figure = Figure(figsize=grid.size, layout="constrained")
        axes = figure.subplots()
        grid.draw(axes)
        axes.set(title=grid.title, xlabel=grid.x, ylabel=grid.y)
        return figure


@dataclass(frozen=True)
class FinishedGroup:
    """Runs that were asked for together: methods, seeds."""

    folder: Path
    runs: tuple[FinishedRun, ...]

    def frame(self) -> DataFrame:
        """Return a row for each run as a pandas DataFrame: method, seed, and its numbers."""
        rows = [
            {"method": run.method, "seed": run.result["seed"], **{key: run.result.get(key) for key in NUMBERS}}
            for run in self.runs
        ]
        return _pandas().DataFrame(rows)


@dataclass(frozen=True)
class FinishedStudy:
    """What a study has left."""

    folder: Path
    record: StudyRecord

    def frames(self) -> dict[str, DataFrame]:
        """Return its tables as pandas DataFrames, by title."""
        return {
            table.title: _pandas().DataFrame(
                [row for rows in table.groups for row in rows], columns=[column.heading for column in table.columns]
            )
            for table in self.record.tables
        }


def load_run(path: str | Path) -> FinishedRun | FinishedGroup | FinishedStudy:
    """Return what a run, a group of runs or a study has left in a folder."""
    folder = Path(path).expanduser()
    if study_files.is_study(folder):
        return FinishedStudy(folder, study_files.read(folder))
    runs = tuple(FinishedRun(member.run(folder)) for member in group.members_of(folder))
    for each in runs:
        each.run.result()  # says so, if one is not finished
    return runs[0] if len(runs) == 1 and runs[0].folder == folder else FinishedGroup(folder, runs)


def fit(
    benchmark: str | Dataset | Sequence[Dataset],
    method: str | Mapping[str, Any] = "dualprompt",
    *,
    backbone: str = "embedded",
    tasks: int | list[int] | list[list[str]] | None = None,
    seeds: int = 1,
    recipe: str | None = None,
    out: str | Path | None = None,
    progress: Progress = SILENT,
    **options: Any,
) -> FinishedRun | FinishedGroup:
    """Train a method on a benchmark, and return what that leaves; for one seed the run, for several the group.

    Args:
        benchmark: a preset's name or file, a dataset (see `dualprompt.data.memory.dataset_of`) that is cut into
            `tasks`, or several, a task each.
        method: a method's name, or a mapping with `name` and options.
        backbone: a name as for `dualprompt run`.
        tasks: how one dataset is cut: a number, numbers of classes, or names of classes.
        seeds: how many, from 0 on or from `seed=…` on.
        recipe: of the preset.
        out: a new folder for the runs; by default one below `runs/` with the time in its name.
        progress: receives what happens.
        options: sections of the config, as `train={"epochs": 2}`, or values, as `device="cpu"`.
    """
    if seeds < 1:
        raise DualPromptError(f"seeds must be at least 1, found {seeds}")
    given = {} if isinstance(benchmark, str) else _named(benchmark)
    chosen = {"name": method} if isinstance(method, str) else dict(method)
    above = {**flat(options), **flat({"method": chosen}), "backbone.name": backbone}
    folder = Path(out).expanduser() if out else Path("runs") / time.strftime("fit-%Y%m%d-%H%M%S")
    with known(given):
        if isinstance(benchmark, str):
            above |= {} if tasks is None else {"benchmark.tasks": tasks}
            config = compose(benchmark, recipe, above)
        else:
            config = _own(given, tasks, above)
        first = config.seed
        configs = [config.model_copy(update={"seed": first + number}) for number in range(seeds)]
        runs = group.start(group.plan(configs, baseline=False), folder, progress)
    found = tuple(FinishedRun(run) for run in runs)
    return found[0] if seeds == 1 else FinishedGroup(folder, found)


def _named(benchmark: Dataset | Sequence[Dataset]) -> dict[str, Dataset]:
    datasets = [benchmark] if isinstance(benchmark, Dataset) else list(benchmark)
    if not datasets or not all(isinstance(each, Dataset) for each in datasets):
        raise DualPromptError("benchmark is a preset's name, a Dataset or several; make one with `dataset_of`")
    found = {each.name: each for each in datasets}
    if len(found) < len(datasets):
        raise DualPromptError("two of the datasets have one name; give each its own")
    return found


def _own(given: Mapping[str, Dataset], tasks: Any, above: Mapping[str, Any]) -> RunConfig:
    """Return the config of a benchmark that no preset describes: below what was asked for, the method's own values."""
    names = list(given)
    benchmark = {"name": "-".join(names)[:80], "dataset": names if len(names) > 1 else names[0], "tasks": tasks}
    asked: dict[str, Any] = {}
    for key, value in above.items():
        asked = merge(asked, nested(key, value))
    values = merge({"benchmark": benchmark, "train": RECIPE}, as_layer(own_defaults(asked["method"]["name"])))
    return parse(RunConfig, merge(values, asked))


def _pandas() -> Any:
    try:
        return importlib.import_module("pandas")
    except ImportError:
        raise DualPromptError("a DataFrame needs pandas; install it with: pip install 'dualprompt[pandas]'") from None


__all__ = ["FinishedGroup", "FinishedRun", "FinishedStudy", "dataset_of", "fit", "load_run"]
