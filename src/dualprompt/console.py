"""Progress bars and notes on a terminal, with rate and time left; they go to stderr, results to stdout."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

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
from dualprompt.texts import visible


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
            left = f", about {duration(pace.left)} left" if pace.left else ""
            return f"[{number}/{runs}] {name}: {ended} ({_remark(pace)}{left})"
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
    match remark:  # the time left has a column of its own
        case Loss(value):
            return f"loss {value:.3f}"
        case RunUnderWay(number, runs, method, seed):
            return f"run {number} of {runs}: {method}, seed {seed}"
        case Pace(each):
            return f"{each:.0f} s a run"


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
        rate = ""
        if task.speed and unit != "runs":  # of which a remark tells the pace
            rate = f" {task.speed:.1f}/s" if task.speed < 10 and unit != "B" else f" {show(task.speed)}/s"
        return Text(f"{show(task.completed)}{total} {'' if unit == 'B' else unit}{rate}", style="cyan")


class _Left(TimeRemainingColumn):
    """The time left. Bars that count runs, which are few and of unlike length, have it from whoever knows them."""

    max_refresh = None

    def __init__(self, guess: Callable[[], float | None]) -> None:
        super().__init__()
        self.guess = guess  # while nobody knows

    def render(self, task: Task) -> Text:
        """Show hours, minutes and seconds."""
        if task.fields["unit"] != "runs":
            return super().render(task)
        due, style = task.fields["due"], "progress.remaining"
        if due is not None:
            return Text(clock(max(0.0, due - time.monotonic())), style=style)
        guess = self.guess()
        return Text("-:--:--" if guess is None else f"~{clock(guess)}", style=style)


def clock(seconds: float) -> str:
    """Return hours, minutes and seconds as a clock shows them."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


class Terminal(Progress):
    """Shows every bar while its work lasts. Where stderr is no terminal, only the notes are shown."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True, quiet=not speaks())
        self._shown: dict[Work, TaskID] = {}
        self._bars = RichProgress(
            TextColumn("{task.description}", markup=False),  # names are no markup
            BarColumn(bar_width=24),
            _Rate(),
            TimeElapsedColumn(),
            _Left(self._guess),
            TextColumn("{task.fields[remark]}", style="dim", markup=False),
            console=self.console,
            transient=True,
            disable=self.console.quiet or not self.console.is_terminal,
        )

    def __enter__(self) -> Terminal:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def _guess(self) -> float | None:
        """Return the seconds that all runs take if every task of each takes as long as the one that is trained."""
        trained = next((work for work in self._shown if work.kind == "training" and work.total), None)
        runs = next((work.total for work in self._shown if work.kind == "runs"), None)
        bars = {bar.id: bar for bar in self._bars.tasks}
        if trained is None or not trained.total or runs is None or self._shown[trained] not in bars:
            return None
        bar = bars[self._shown[trained]]
        done = bar.completed - trained.done
        if not done or bar.elapsed is None:
            return None
        share = bar.completed / trained.total
        tasks = (1 - share) + trained.tasks - trained.task + trained.tasks * (runs - 1)
        return bar.elapsed * trained.total / done * tasks

    def receive(self, event: Event) -> None:
        """Show a bar while its work lasts, and print above the bars what stays."""
        match event:
            case Began(work):
                start = int(work.done)
                self._shown[work] = self._bars.add_task(
                    visible(words(event)), total=work.total, completed=start, unit=work.unit, remark="", due=None
                )
            case Advanced(work, done):
                self._bars.update(self._shown[work], completed=done)
            case Remarked(work, remark):
                left = None if isinstance(remark, Loss) else remark.left
                due = None if left is None else time.monotonic() + left
                self._bars.update(self._shown[work], remark=visible(words(event)), due=due)
            case Ended(work):
                self._bars.remove_task(self._shown.pop(work))
            case _:
                self.console.print(visible(words(event)), highlight=False, markup=False, soft_wrap=True)
