"""Trackers: what a run writes to its log, shown in TensorBoard or Weights & Biases while it is written.

A tracker is told the lines of `metrics.jsonl` in their order, beginning with those that stand there when a run is
resumed. So it shows each of them once, however often the run was interrupted and wherever the tracker was switched on.
A tracker that fails costs a note, never the run.
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from dualprompt.config import flat
from dualprompt.errors import DualPromptError
from dualprompt.files import digest, read_bytes, write_text
from dualprompt.metrics import summarise
from dualprompt.progress import Progress
from dualprompt.run.folder import Run

AFTER_TASK = ("average_accuracy", "forgetting", "matching_accuracy")
HEADLINE = (
    *(*AFTER_TASK, "image_weighted_accuracy", "mean_over_steps", "backward_transfer", "learning_accuracy"),
    *("coda_forgetting", "forward_transfer", "task_known_accuracy", "calibration_error", "unseen_auroc"),
)


@dataclass(frozen=True)
class Point:
    """Numbers that belong to one moment of a run."""

    line: int  # of the log, counted from 1
    axis: Literal["epoch", "task", "images"]
    at: int  # epochs trained so far over all tasks, or tasks learned, or images of an online stream that have come
    values: dict[str, float]


class Tracker(Protocol):
    """What shows a run. It is made from the run, and may raise anything."""

    @property
    def place(self) -> str:
        """Where people look at it."""
        ...

    def tell(self, point: Point) -> None:
        """Show the numbers of one line of the log; lines come in order, told ones again after a resume."""
        ...

    def conclude(self, headline: Point) -> None:
        """Show the final numbers."""
        ...

    def close(self, finished: bool) -> None:
        """Let go of the run, which is finished or was interrupted."""
        ...


@contextmanager
def tracked(run: Run, trackers: Sequence[str], progress: Progress) -> Iterator[None]:
    """Tell these trackers all that the run has logged and will log in this context."""
    if not trackers:
        yield
        return
    audience = _Audience(run, trackers, progress)
    finished = False
    run.listener = audience.receive
    try:
        for event in run.lines():
            audience.receive(event)
        yield
        finished = True
    finally:
        run.listener = None
        audience.close(finished)


def require(trackers: Sequence[str]) -> None:
    """Refuse trackers whose package is not installed; each is called like its package and its extra."""
    for name in trackers:
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise DualPromptError(
                f"tracker '{name}' needs the extra '{name}' ({error}): pip install 'dualprompt[{name}]', "
                "or leave it out with --track none"
            ) from None


class _Audience:
    """The trackers of a run, less those that failed."""

    def __init__(self, run: Run, names: Sequence[str], progress: Progress) -> None:
        self.progress = progress
        self.story = _Story()
        self.trackers: dict[str, Tracker] = {}
        for name in names:
            with self._unharmed(name):
                self.trackers[name] = _TRACKERS[name](run)
                progress.note(f"{name}: {self.trackers[name].place}")

    def receive(self, event: dict[str, Any]) -> None:
        """Tell all trackers of a line of the log, or of the result."""
        concludes = event["event"] == "result"
        point = self.story.headline(event) if concludes else self.story.point(event)
        for name, tracker in list(self.trackers.items()):
            with self._unharmed(name):
                tracker.conclude(point) if concludes else tracker.tell(point)

    def close(self, finished: bool) -> None:
        """Let all trackers go."""
        for name, tracker in list(self.trackers.items()):
            with self._unharmed(name):
                tracker.close(finished)

    @contextmanager
    def _unharmed(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # noqa: BLE001 — no network, a full disk, a bug of theirs: not the run's trouble
            self.trackers.pop(name, None)
            reason = str(error).strip().partition("\n")[0] or type(error).__name__
            self.progress.note(f"{name} failed, the run goes on without it: {reason}")


class _Story:
    """Turns the lines of a log into points."""

    def __init__(self) -> None:
        self.lines = self.epochs = 0
        self.matrix: list[list[float]] = []

    def point(self, line: dict[str, Any]) -> Point:
        """Return what the next line of the log says."""
        self.lines += 1
        if line["event"] == "epoch":
            self.epochs += 1
            name = f"loss/{line['phase']}" if "phase" in line else "loss"
            return Point(self.lines, "epoch", self.epochs, {name: line["loss"]})
        if line["event"] == "anytime":
            values = {"accuracy/so_far": line["accuracy"], "classes": line["classes"]}
            loss = {} if line.get("loss") is None else {"loss/so_far": line["loss"]}
            return Point(self.lines, "images", line["images"], values | loss)
        values = {f"accuracy/task_{number}": value for number, value in enumerate(line["accuracy"], start=1)}
        if len(line["accuracy"]) == len(self.matrix) + 1:  # else lines of the log were lost
            self.matrix.append(line["accuracy"])
            values |= _numbers(summarise(self.matrix, line["matching"]), AFTER_TASK)
        return Point(self.lines, "task", line["task"], values)

    def headline(self, result: dict[str, Any]) -> Point:
        """Return the final numbers."""
        values = {f"final/{name}": value for name, value in _numbers(result, HEADLINE).items()}
        return Point(self.lines, "task", len(result["tasks"]), values)


def _numbers(values: dict[str, Any], names: Sequence[str]) -> dict[str, float]:
    return {name: values[name] for name in names if values[name] is not None}


def _number(path: Path) -> int:
    try:
        return int(read_bytes(path, 100))
    except (OSError, ValueError):
        raise DualPromptError(f"{path} is damaged (it holds no number); delete it, and W&B is told all again") from None


class _TensorBoard:
    """Event files in the run's folder: `tensorboard --logdir RUNS` shows all runs below it."""

    def __init__(self, run: Run) -> None:
        from torch.utils.tensorboard.writer import SummaryWriter

        folder = run.folder / "tensorboard"
        for old in folder.glob("events.out.tfevents.*"):
            old.write_bytes(b"")  # it is told again; a reader that has the file open would stumble if it vanished
        self.place = f"tensorboard --logdir {folder}"
        self.config = run.manifest()["config"]
        self.writer = SummaryWriter(str(folder), purge_step=0)  # who has read the old ones drops that

    def tell(self, point: Point) -> None:
        """See Tracker."""
        for name, value in point.values.items():
            self.writer.add_scalar(name, value, point.at)
        self.writer.flush()

    def conclude(self, headline: Point) -> None:
        """See Tracker. The config and these numbers are a line of TensorBoard's table of hyper-parameters."""
        from torch.utils.tensorboard.summary import hparams

        self.tell(headline)
        config = {key: v if isinstance(v, int | float | str) else json.dumps(v) for key, v in flat(self.config).items()}
        for summary in hparams(config, headline.values):  # add_hparams() would open another event file for them
            self.writer._get_file_writer().add_summary(summary)

    def close(self, finished: bool) -> None:
        """See Tracker."""
        self.writer.close()


class _WeightsAndBiases:
    """A run in W&B's project `dualprompt`; `WANDB_MODE=offline`, `WANDB_PROJECT` and the like are W&B's own."""

    def __init__(self, run: Run) -> None:
        import wandb

        manifest = run.manifest()
        config = manifest["config"]
        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "dualprompt"),
            name=f"{config['method']['name']} on {config['benchmark']['name']}, seed {config['seed']}",
            # The same when this run is resumed, another when the same config is run once more.
            id=digest([manifest["identity"], manifest["started"]])[:16],
            resume="allow",
            reinit="create_new",
            dir=run.folder,
            config=config,
            # What we tell it, and nothing that it finds out by itself.
            settings=wandb.Settings(
                console="off",
                silent=True,
                save_code=False,
                disable_git=True,
                x_disable_meta=True,
                x_disable_stats=True,
                x_save_requirements=False,
            ),
        )
        self.place = f"wandb sync {Path(self.run.dir).parent}" if self.run.offline else self.run.url or "disabled"
        # W&B can only append. Its server knows which lines it has; offline we must.
        self.count = run.folder / "wandb" / "lines.txt" if self.run.offline else None
        self.told = self.run.starting_step - 1
        if self.count is not None and self.count.is_file():
            self.told = _number(self.count)
        self.known: set[str] = set()

    def tell(self, point: Point) -> None:
        """See Tracker."""
        if point.line <= self.told:
            return
        for name in point.values.keys() - self.known:
            self.run.define_metric(name, step_metric=point.axis)
            self.known.add(name)
        self.run.log(point.values | {point.axis: point.at}, step=point.line, commit=True)
        if self.count is not None:
            write_text(self.count, str(point.line))

    def conclude(self, headline: Point) -> None:
        """See Tracker."""
        self.run.summary.update(headline.values)

    def close(self, finished: bool) -> None:
        """See Tracker."""
        self.run.finish(exit_code=0 if finished else 1)


_TRACKERS: dict[str, type[_TensorBoard] | type[_WeightsAndBiases]] = {
    "tensorboard": _TensorBoard,
    "wandb": _WeightsAndBiases,
}
