"""Progress bars and notes on a terminal, with rate and time left; they go to stderr, results to stdout."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, ProgressColumn, Task, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress
from rich.text import Text

from dualprompt.progress import Bar, Progress, speaks


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


class _RichBar(Bar):
    def __init__(self, progress: RichProgress, task: int) -> None:
        self.progress, self.task = progress, task

    def advance(self, amount: float = 1) -> None:
        """Move the bar on."""
        self.progress.advance(self.task, amount)  # pyright: ignore[reportArgumentType]

    def say(self, text: str) -> None:
        """Show a remark beside the bar."""
        self.progress.update(self.task, remark=text)  # pyright: ignore[reportArgumentType]


class Terminal(Progress):
    """Shows every bar while its work lasts. Where stderr is no terminal, only the notes are shown."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True, quiet=not speaks())
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

    @contextlib.contextmanager
    def bar(self, description: str, total: float | None, unit: str = "it", done: float = 0) -> Iterator[Bar]:
        """Show a bar until the work ends."""
        task = self._bars.add_task(description, total=total, completed=int(done), unit=unit, remark="")
        try:
            yield _RichBar(self._bars, task)
        finally:
            self._bars.remove_task(task)

    def note(self, text: str) -> None:
        """Print one line above the bars."""
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)
