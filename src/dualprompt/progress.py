"""How library code tells whoever watches that long work advances; silent unless someone listens."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator


def speaks() -> bool:
    """Return whether this process is the one that talks, where several carry out one run together."""
    ranks = ("RANK", "LOCAL_RANK", "NODE_RANK", "SLURM_PROCID")
    return all(os.environ.get(rank, "0") == "0" for rank in ranks)


def duration(seconds: float) -> str:
    """Return how long something takes, in words that are about right."""
    minutes = round(seconds / 60)
    return f"{seconds:.0f} s" if minutes < 2 else f"{minutes} min" if minutes < 120 else f"{minutes / 60:.1f} h"


def counted(number: int, noun: str, plural: str = "") -> str:
    """Return a number with its noun; `plural` where that is more than an s."""
    return f"{number} {noun if number == 1 else plural or f'{noun}s'}"


class Bar:
    """One piece of long work. This one shows nothing."""

    def advance(self, amount: float = 1) -> None:
        """Say that `amount` more units are done."""

    def say(self, text: str) -> None:
        """Show a short remark (the current loss, say) beside the bar."""


class Progress:
    """What a listener provides. This one shows nothing, so that the library is quiet by default."""

    @contextlib.contextmanager
    def bar(self, description: str, total: float | None, unit: str = "it", done: float = 0) -> Iterator[Bar]:
        """Yield a bar for work of `total` units (None: unknown), of which `done` were finished earlier."""
        yield Bar()

    def note(self, text: str) -> None:
        """Show one line that stays."""


SILENT = Progress()
