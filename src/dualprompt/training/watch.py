"""How far the runs of a group are, and how long all of them will still take."""

from __future__ import annotations

import time
from collections.abc import Sequence

from dualprompt.progress import Bar, RunUnderWay


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
