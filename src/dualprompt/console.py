"""Progress bars and notes on a terminal, with rate and time left; they go to stderr, results to stdout."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.filesize import decimal
from rich.progress import (
    BarColumn,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as RichProgress
from rich.text import Text

from dualprompt.progress import (
    Advanced,
    AnytimeEvaluated,
    Began,
    Ended,
    Event,
    Loss,
    Note,
    Pace,
    Progress,
    Remarked,
    RunBegan,
    RunEnded,
    RunUnderWay,
    TaskEvaluated,
    Work,
    speaks,
)


def duration(seconds: float) -> str:
    """Return how long something takes, in words that are about right."""
    minutes = round(seconds / 60)
    return f"{seconds:.0f} s" if minutes < 2 else f"{minutes} min" if minutes < 120 else f"{minutes / 60:.1f} h"


def words(event: Event) -> str:
    """Return what people are shown of an event; of one that only moves a bar, nothing."""
    match event:
        case Began(work):
            return _work(work)
        case Remarked(_, remark):
            return _remark(remark)
        case TaskEvaluated(task, name, accuracy, matching):
            text = f"after task {task} ({name}): A = {_mean(accuracy):.2f} %, newest task {accuracy[-1]:.2f} %"
            return text + (f", matching {_mean(matching):.2f} %" if matching else "")
        case AnytimeEvaluated(images, classes, accuracy):
            return f"after {images:,} images, {classes} classes so far: {accuracy:.2f} %"
        case RunBegan(run, folder):
            left = "" if run.left is None else f" (about {duration(run.left)} left)"
            return f"[{run.number}/{run.runs}] {run.method}, seed {run.seed} → {folder}{left}"
        case RunEnded(number, runs, name, outcome, pace):
            ended = f"failed: {outcome}" if isinstance(outcome, str) else f"A = {outcome:.2f} %"
            return f"[{number}/{runs}] {name}: {ended} ({_remark(pace)})"
        case Note(text):
            return text
        case Advanced() | Ended():
            return ""


def _work(work: Work) -> str:
    match work.kind:
        case "training":
            phase = "" if work.phase is None else f", {work.phase}"
            return f"task {work.task}/{work.tasks} {work.name}{phase}"
        case "downloading" | "unpacking":
            return f"{work.kind} {work.name}"
        case "reading" | "decoding":
            return f"{work.kind} images"
        case "features":
            return "frozen features"
        case "evaluating":
            return "evaluate"
        case "runs":
            return "all runs"


def _remark(remark: Loss | RunUnderWay | Pace) -> str:
    match remark:
        case Loss(value):
            return f"loss {value:.3f}"
        case RunUnderWay(number, runs, method, seed, left):
            place = f"run {number} of {runs}: {method}, seed {seed}"
            return place if left is None else f"{place}; about {duration(left)} left"
        case Pace(each, left):
            return f"{each:.0f} s a run" + (f", about {duration(left)} left" if left else "")


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


class _Rate(ProgressColumn):
    """Units a second, and how far."""

    def render(self, task: Task) -> Text:
        """Show `done/total unit (rate/s)`."""
        unit = task.fields["unit"]

        def show(value: float) -> str:
            return decimal(int(value)) if unit == "B" else f"{int(value + 1e-6):,}"  # half a run is none

        total = f"/{show(task.total)}" if task.total is not None else ""
        rate = f" {show(task.speed)}/s" if task.speed and task.speed >= 1 else ""  # slower work says so in words
        return Text(f"{show(task.completed)}{total} {'' if unit == 'B' else unit}{rate}", style="cyan")


class _Left(TimeRemainingColumn):
    """The time left, but for bars that count runs: there are few, of unlike length, and a remark says it better."""

    def render(self, task: Task) -> Text:
        """Show hours, minutes and seconds."""
        return Text("") if task.fields["unit"] == "runs" else super().render(task)


class Terminal(Progress):
    """Shows every bar while its work lasts. Where stderr is no terminal, only the notes are shown."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True, quiet=not speaks())
        self._shown: dict[Work, TaskID] = {}
        self._bars = RichProgress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            _Rate(),
            TimeElapsedColumn(),
            _Left(),
            TextColumn("{task.fields[remark]}", style="dim"),
            console=self.console,
            transient=True,
            disable=self.console.quiet or not self.console.is_terminal,
        )

    def __enter__(self) -> Terminal:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def receive(self, event: Event) -> None:
        """Show a bar while its work lasts, and print above the bars what stays."""
        match event:
            case Began(work):
                start = int(work.done)
                self._shown[work] = self._bars.add_task(
                    words(event), total=work.total, completed=start, unit=work.unit, remark=""
                )
            case Advanced(work, done):
                self._bars.update(self._shown[work], completed=done)
            case Remarked(work, _):
                self._bars.update(self._shown[work], remark=words(event))
            case Ended(work):
                self._bars.remove_task(self._shown.pop(work))
            case _:
                self.console.print(words(event), highlight=False, markup=False, soft_wrap=True)
