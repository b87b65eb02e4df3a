"""How often the model is unsure, hour by hour: a share that grows says that the pictures have changed."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from dualprompt.learner import Answer

HOURS = 14 * 24
HOUR = 3600
UNSURE = 0.5  # a probability below this, where the model has no threshold


def is_unsure(answer: Answer) -> bool:
    """Return whether an answer is 'none of these', or of a class that is less probable than all others together."""
    return answer.label is None or answer.top[0].probability < UNSURE


@dataclass
class Hour:
    """What was answered within an hour, which begins at `start` (seconds since 1970)."""

    start: int
    answers: int = 0
    unsure: int = 0


class Drift:
    """Counts of the last two weeks, in memory alone: numbers, nothing of the pictures."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._hours: OrderedDict[int, Hour] = OrderedDict()

    def count(self, unsure: bool) -> None:
        """Note an answer."""
        start = int(self._clock()) // HOUR * HOUR
        hour = self._hours.setdefault(start, Hour(start))
        hour.answers += 1
        hour.unsure += unsure
        while len(self._hours) > HOURS or next(iter(self._hours)) <= start - HOURS * HOUR:
            self._hours.popitem(last=False)

    def hours(self) -> list[Hour]:
        """Return the hours in which anything was answered, oldest first."""
        return list(self._hours.values())
