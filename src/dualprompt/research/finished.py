"""What a run, a group of runs or a study has left in its folder."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from dualprompt.backbones import weights
from dualprompt.config import RunConfig
from dualprompt.data.images import Images
from dualprompt.data.memory import pixels_of
from dualprompt.errors import DualPromptError, nearest
from dualprompt.files import with_home
from dualprompt.methods.base import METHODS, Batch, Method, StreamKind, method_config
from dualprompt.metrics import mean_and_deviation
from dualprompt.pictures.drawing import figure_of
from dualprompt.progress import counted
from dualprompt.report import figures, study_files
from dualprompt.report.run_files import finished_runs
from dualprompt.report.sheet import as_html
from dualprompt.report.study_files import StudyRecord
from dualprompt.report.tables import MORE, headline_sheet, label, matrix_sheet
from dualprompt.run import predictions
from dualprompt.run.checkpoint import of_method
from dualprompt.run.folder import Run
from dualprompt.run.predictions import Predictions
from dualprompt.training.group import is_run
from dualprompt.training.setup import view_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

NUMBERS = ("average_accuracy", "forgetting", "mean_over_steps", "learning_accuracy", "matching_accuracy", *MORE)
AT_ONCE = 64  # images that are predicted together


@dataclass(frozen=True, repr=False, eq=False)
class LearnedPrompts:
    """The prompts of a run after one of its tasks; layers count from 1, and None stands for what a method has not."""

    g: Tensor  # (layers, parts, length, dim); parts are K and V for Pre-T, one for Pro-T
    e: Tensor  # (tasks, layers, parts, length, dim)
    keys: Tensor | None  # (tasks, dim)
    g_layers: tuple[int, ...]
    e_layers: tuple[int, ...]

    def __repr__(self) -> str:
        keys = "none" if self.keys is None else tuple(self.keys.shape)
        g, e = (f"{tuple(each.shape)}" for each in (self.g, self.e))
        return f"<prompts: g {g} in layers {self.g_layers}, e {e} in layers {self.e_layers}, keys {keys}>"


@dataclass(frozen=True, repr=False, eq=False)
class FinishedRun:
    """What a finished run has left: one method on one benchmark with one seed."""

    run: Run

    @property
    def folder(self) -> Path:
        """The folder of the run."""
        return self.run.folder

    @cached_property
    def config(self) -> RunConfig:
        """The resolved config of the run."""
        return self.run.config()

    @cached_property
    def result(self) -> dict[str, Any]:
        """The content of `result.json`."""
        return self.run.result()

    @property
    def method(self) -> str:
        """The method's name, as in tables."""
        return label(self.result)

    @property
    def seed(self) -> int:
        """Its seed."""
        return self.result["seed"]

    @cached_property
    def tasks(self) -> tuple[tuple[str, ...], ...]:
        """The names of the classes of each task."""
        return tuple(tuple(task["classes"]) for task in self.run.manifest()["tasks"])

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of all classes, in the order of their labels."""
        return tuple(dict.fromkeys(name for task in self.tasks for name in task))

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
        """Its answers to every test image after each task: `answer[-1]` is after the last."""
        return predictions.read(self.run.predictions_path)

    def frame(self) -> DataFrame:
        """Return the accuracy matrix as a pandas DataFrame, named by tasks."""
        names = self.result["tasks"]
        return _pandas().DataFrame(self.accuracy_matrix, index=names, columns=names)

    def answers(self) -> DataFrame:
        """Return a row for each test image as a pandas DataFrame: its task and class, and the last answer."""
        found, names = self.predictions, np.array(self.classes, dtype=object)
        tasks = np.array(self.result["tasks"], dtype=object)
        selected = [tasks[task] if task >= 0 else None for task in found.selected[-1].tolist()]
        columns = {"task": tasks[found.task], "truth": names[found.truth]}
        columns |= {"answer": names[found.answer[-1]], "probability": found.probability[-1]}
        return _pandas().DataFrame(columns | {"right": found.answer[-1] == found.truth, "matched": selected})

    def state(self, task: int = -1) -> dict[str, Tensor]:
        """Return the method's tensors as they were after a task, by name."""
        return of_method(self.run.checkpoints.after_task(self._numbered(task)))

    def prompts(self, task: int = -1) -> LearnedPrompts:
        """Return the G-Prompt, the E-Prompts and the keys as they were after a task."""
        number, state = self._numbered(task), self.state(task)
        names = [f"bank.e_prompt.{each}" for each in range(number + 1)]
        if "bank.g_prompt" not in state or not all(name in state for name in names):
            raise DualPromptError(f"method '{self.method}' has no G- and E-Prompts; see what it has with .state()")
        keys = [state[name] for each in range(number + 1) if (name := f"bank.task_key.{each}") in state]
        layers = (tuple(self.config.method.get(key) or ()) for key in ("g_layers", "e_layers"))
        e = torch.stack([state[name] for name in names])
        return LearnedPrompts(state["bank.g_prompt"], e, torch.stack(keys) if keys else None, *layers)

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

    def images(self, images: Any) -> Tensor:
        """Return images as the model takes them, (count, 3, side, side).

        `images` is an array, (count, height, width, 3) uint8, or a list of PIL images, arrays or tensors of any sizes.
        """
        info = weights.read(self.config.backbone.name, seed=self.config.seed).info
        parts = [Images.from_array(each[None]) for each in pixels_of("images", images)]
        found = Images.concat(parts)
        return view_of(self.config, info).fixed(found.gather(torch.arange(len(found))))

    def logits(self, images: Any, task: int = -1, device: str = "cpu") -> Tensor:
        """Return the logits of all classes seen after a task, (count, classes), for images as `images` takes them.

        Each image is answered by itself, whatever the run's own selection.
        """
        method, views = self.model(task, device), self.images(images).to(device)
        selection = "query" if "query" in method.selections else None
        found = []
        for part in views.split(AT_ONCE):
            unknown = torch.zeros(len(part), dtype=torch.int64, device=part.device)  # labels, which no answer needs
            with torch.set_grad_enabled(method.predicts_with_gradients):
                answer = method.predict(Batch(lambda part=part: part, unknown), selection)
            found.append(answer.logits.detach().float().cpu())
        return torch.cat(found)

    def figure(self) -> Figure:
        """Return the accuracy matrix as a matplotlib figure."""
        return figure_of(figures.accuracy_grid([self.result]))

    def curves(self) -> Figure:
        """Return average accuracy and forgetting over the tasks as a matplotlib figure."""
        return figure_of(*figures.curves([self.result]))

    def _kind(self) -> StreamKind:
        names = [name for task in self.tasks for name in task]
        return StreamKind(returns=len(set(names)) < len(names))

    def _numbered(self, task: int) -> int:
        count = len(self.tasks)
        if not -count <= task < count:
            raise DualPromptError(f"run {self.folder} has {count} tasks, 0 to {count - 1}; found {task}")
        return task % count

    def __repr__(self) -> str:
        result = self.result
        numbers = f"A {result['average_accuracy']:.2f} %, F {result['forgetting']:.2f} %"
        tasks = counted(len(self.tasks), "task")
        return f"<{self.method} on {result['benchmark']}, {tasks}, seed {self.seed}: {numbers}; {self.folder}>"

    def _repr_html_(self) -> str:
        return as_html(headline_sheet([self.result])) + as_html(matrix_sheet(self.result))


@dataclass(frozen=True, repr=False, eq=False)
class FinishedGroup:
    """Runs that were asked for together: methods, seeds. `group["dualprompt"]` are those of one method."""

    folder: Path
    runs: tuple[FinishedRun, ...]

    @property
    def methods(self) -> tuple[str, ...]:
        """The names of the methods, as in tables."""
        return tuple(dict.fromkeys(run.method for run in self.runs))

    @property
    def accuracy_matrices(self) -> np.ndarray:
        """The accuracy matrices of all runs, (runs, tasks, tasks); NaN where not yet."""
        return np.stack([run.accuracy_matrix for run in self.runs])

    def frame(self) -> DataFrame:
        """Return a row for each run as a pandas DataFrame: method, seed, and its numbers."""
        rows = [
            {"method": run.method, "seed": run.seed, **{key: run.result.get(key) for key in NUMBERS}}
            for run in self.runs
        ]
        return _pandas().DataFrame(rows)

    def summary(self) -> dict[str, dict[str, tuple[float, float | None]]]:
        """Return mean and standard deviation over seeds of each number of each method; None for the latter of one."""
        found: dict[str, dict[str, tuple[float, float | None]]] = {}
        for method in self.methods:
            results = [run.result for run in self.runs if run.method == method]
            columns = {key: [result[key] for result in results if result.get(key) is not None] for key in NUMBERS}
            found[method] = {
                key: mean_and_deviation(values) if len(values) > 1 else (values[0], None)
                for key, values in columns.items()
                if values
            }
        return found

    def curves(self) -> Figure:
        """Return average accuracy and forgetting over the tasks, a line a method, as a matplotlib figure."""
        return figure_of(*figures.curves([run.result for run in self.runs]))

    def __getitem__(self, method: str) -> FinishedRun | FinishedGroup:
        found = tuple(run for run in self.runs if run.method == method)
        if not found:
            raise DualPromptError(f"{self.folder} has no run of '{method}'; {nearest(method, self.methods)}")
        return found[0] if len(found) == 1 else FinishedGroup(self.folder, found)

    def _ipython_key_completions_(self) -> list[str]:
        return list(self.methods)

    def __iter__(self) -> Iterator[FinishedRun]:
        return iter(self.runs)

    def __len__(self) -> int:
        return len(self.runs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or not hasattr(FinishedRun, name):
            raise AttributeError(f"a FinishedGroup has no '{name}'")
        one = f"group[{self.methods[0]!r}]" if len(self.methods) == len(self.runs) else "group.runs[0]"
        raise AttributeError(f"'{name}' is what a single run has: take one of the {len(self)}, as {one}.{name}")

    def __repr__(self) -> str:
        return "\n".join([f"<{counted(len(self), 'run')} in {self.folder}:", *(f"  {run!r}" for run in self.runs), ">"])

    def _repr_html_(self) -> str:
        return as_html(headline_sheet([run.result for run in self.runs]))


@dataclass(frozen=True, repr=False, eq=False)
class FinishedStudy:
    """What a study has left."""

    folder: Path
    record: StudyRecord

    @property
    def finding(self) -> str:
        """Its conclusion, in words."""
        return self.record.finding

    def frames(self) -> dict[str, DataFrame]:
        """Return its tables as pandas DataFrames, by title."""
        return {
            table.title: _pandas().DataFrame(
                [row for rows in table.groups for row in rows], columns=[column.heading for column in table.columns]
            )
            for table in self.record.tables
        }

    def figures(self) -> dict[str, Figure]:
        """Return its drawings as matplotlib figures, by name."""
        return {name: figure_of(picture) for name, picture in self.record.pictures.items()}

    def runs(self) -> tuple[FinishedRun, ...]:
        """Return its runs, as far as they are still there and finished."""
        folders = dict.fromkeys(Path(folder) for row in self.record.rows for folder in row.runs)
        return tuple(FinishedRun(run) for folder in folders if (run := Run(folder)).finished)

    def __repr__(self) -> str:
        return f"<study {self.record.study} on {self.record.benchmark}: {self.finding}; {self.folder}>"

    def _repr_html_(self) -> str:
        return "".join(map(as_html, self.record.tables))


def load_run(path: str | Path) -> FinishedRun | FinishedGroup | FinishedStudy:
    """Return what a run, a group of runs or a study has left in a folder."""
    folder = with_home(path)
    if study_files.is_study(folder):
        return FinishedStudy(folder, study_files.read(folder))
    if folder.is_dir() and not is_run(folder):
        found = sorted(each.name for each in folder.iterdir() if is_run(each) or study_files.is_study(each))
        if found:
            raise DualPromptError(f"{folder} holds {_some(found)}; give the folder of one of them")
    runs = tuple(map(FinishedRun, finished_runs(folder)))
    return runs[0] if len(runs) == 1 and runs[0].folder == folder else FinishedGroup(folder, runs)


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return f"{', '.join(names[:5])}{more}"


def _pandas() -> Any:
    try:
        return importlib.import_module("pandas")
    except ImportError:
        raise DualPromptError("a DataFrame needs pandas; install it with: pip install 'dualprompt[pandas]'") from None
