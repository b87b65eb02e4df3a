"""How library code tells whoever watches that long work advances: typed events; silent unless someone listens.

Words are made where they are shown (`dualprompt.console.words`).
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

Kind = Literal["reading", "decoding", "downloading", "unpacking", "features", "training", "evaluating", "runs"]
Unit = Literal["img", "images", "files", "B", "runs"]


@dataclass(frozen=True, eq=False)
class Work:
    """A piece of long work."""

    kind: Kind
    total: float | None  # units; None: unknown
    unit: Unit
    done: float = 0  # units that were finished earlier
    name: str = ""  # of the task, the file or the archive
    task: int = 0  # of training: the task's number, from 1
    tasks: int = 0  # of training: how many there are
    phase: str | None = None  # of training: which phase, where a task has several


@dataclass(frozen=True)
class Loss:
    """The mean loss of the epoch that has ended."""

    value: float


@dataclass(frozen=True)
class RunUnderWay:
    """Which of several runs is carried out, and the seconds that all of them will still take, where that is known."""

    number: int
    runs: int
    method: str
    seed: int
    left: float | None


@dataclass(frozen=True)
class Pace:
    """The seconds that a run took on average, and that those to come will take."""

    each: float
    left: float


@dataclass(frozen=True)
class Began:
    """A piece of work begins."""

    work: Work


@dataclass(frozen=True)
class Advanced:
    """So many units of a piece of work are done, those of earlier included."""

    work: Work
    done: float


@dataclass(frozen=True)
class Remarked:
    """Something is known that belongs beside a piece of work."""

    work: Work
    remark: Loss | RunUnderWay | Pace


@dataclass(frozen=True)
class Ended:
    """A piece of work is over, whether it was finished or not."""

    work: Work


@dataclass(frozen=True)
class TaskEvaluated:
    """A task is learned, and every task so far evaluated: accuracies and matching accuracies in percent."""

    task: int
    name: str
    accuracy: tuple[float, ...]
    matching: tuple[float, ...] = ()


@dataclass(frozen=True)
class AnytimeEvaluated:
    """So many images of an online stream have come, with so many classes, and these were evaluated: in percent."""

    images: int
    classes: int
    accuracy: float


@dataclass(frozen=True)
class RunBegan:
    """A run of several begins, or goes on, in a folder."""

    run: RunUnderWay
    folder: str


@dataclass(frozen=True)
class RunEnded:
    """One of several runs has come to its end, with an average accuracy in percent or an error."""

    number: int
    runs: int
    name: str
    outcome: float | str
    pace: Pace


@dataclass(frozen=True)
class Note:
    """One line that stays."""

    text: str


Event = Began | Advanced | Remarked | Ended | TaskEvaluated | AnytimeEvaluated | RunBegan | RunEnded | Note


def speaks() -> bool:
    """Return whether this process is the one that talks, where several carry out one run together."""
    ranks = ("RANK", "LOCAL_RANK", "NODE_RANK", "SLURM_PROCID")
    return all(os.environ.get(rank, "0") == "0" for rank in ranks)


class Progress:
    """What a listener provides: `receive`. This one does nothing, so that the library is quiet by default."""

    def receive(self, event: Event) -> None:
        """Take one event."""

    @contextlib.contextmanager
    def bar(self, work: Work) -> Iterator[Bar]:
        """Tell of a piece of work while it lasts."""
        self.receive(Began(work))
        try:
            yield Bar(self, work)
        finally:
            self.receive(Ended(work))

    def note(self, text: str) -> None:
        """Tell one line that stays."""
        self.receive(Note(text))

    def note_all(self, texts: Iterable[str]) -> None:
        """Tell several."""
        for text in texts:
            self.note(text)


def counted(number: int, noun: str, plural: str = "") -> str:
    """Return a number with its noun; `plural` where that is more than an s."""
    return f"{number} {noun if number == 1 else plural or f'{noun}s'}"


class Bar:
    """Tells how far one piece of work is."""

    def __init__(self, listener: Progress, work: Work) -> None:
        self.listener, self.work, self.done = listener, work, work.done

    def advance(self, amount: float = 1) -> None:
        """Tell that `amount` more units are done."""
        self.done += amount
        self.listener.receive(Advanced(self.work, self.done))

    def remark(self, remark: Loss | RunUnderWay | Pace) -> None:
        """Tell what belongs beside the work: the current loss, say."""
        self.listener.receive(Remarked(self.work, remark))


SILENT = Progress()


class Watch:
    """Shows which run of a group is under way, and the time left.

    A task to come is taken to last as long as those of its method did, or else as the mean of all did.
    """

    def __init__(self, waiting: Sequence[tuple[str, int]], total: int, bar: Bar) -> None:
        self.waiting, self.total, self.bar = list(waiting), total, bar  # method and seed of each run to come
        self.name, self.seed, self.tasks, self.done = "", 0, 0, 0  # of the run under way
        self.since = time.monotonic()
        self.seconds: dict[str, list[float]] = {}  # of each task that was learned, by method

    def begin(self, tasks: int) -> RunUnderWay:
        """Go on to the next run, of so many tasks; return which it is."""
        self.name, self.seed = self.waiting.pop(0)
        self.tasks, self.done, self.since = tasks, 0, time.monotonic()
        return self._show()

    def learned(self, done: int) -> None:
        """Note that the run under way has learned and evaluated one more task, and so many in all."""
        now = time.monotonic()
        self.seconds.setdefault(self.name, []).append(now - self.since)
        self.bar.advance((done - self.done) / self.tasks)
        self.since, self.done = now, done
        self._show()

    def left(self) -> float | None:
        """Return the seconds that the runs will take from now on; None while nothing was learned."""
        every = [seconds for found in self.seconds.values() for seconds in found]
        if not every:
            return None

        def each(name: str) -> float:
            found = self.seconds.get(name, every)
            return sum(found) / len(found)

        return (self.tasks - self.done) * each(self.name) + sum(self.tasks * each(name) for name, _ in self.waiting)

    def _show(self) -> RunUnderWay:
        number = self.total - len(self.waiting)
        under_way = RunUnderWay(number, self.total, self.name, self.seed, self.left())
        self.bar.remark(under_way)
        return under_way
