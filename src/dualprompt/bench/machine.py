"""What this machine does while something is measured: processor time of some processes, and of all others."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")


def processor() -> str | None:
    """Return what the processor calls itself, where the system tells."""
    try:
        lines = (PROC / "cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return None


def cpu_seconds(process: int) -> float | None:
    """Return the processor time that a process has taken, all its threads together."""
    try:
        # Its name is in brackets, and may hold anything.
        user, system = (PROC / str(process) / "stat").read_text().rpartition(")")[2].split()[11:13]
    except (OSError, ValueError):
        return None
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def busy_seconds() -> float | None:
    """Return the processor time that was not idle since the machine started; a hypervisor's own counts too."""
    try:
        user, nice, system, _idle, _wait, *rest = map(int, (PROC / "stat").read_text().splitlines()[0].split()[1:9])
    except (OSError, ValueError):
        return None
    return (user + nice + system + sum(rest)) / os.sysconf("SC_CLK_TCK")


@dataclass
class Usage:
    """Seconds that went by, and processor time meanwhile: of one process, of others that take part, of everybody."""

    wall: float = 0.0
    own: float | None = 0.0
    others: float | None = 0.0  # of all that had no part in the measurement

    def __add__(self, more: Usage) -> Usage:
        def total(one: float | None, other: float | None) -> float | None:
            return None if one is None or other is None else one + other

        return Usage(self.wall + more.wall, total(self.own, more.own), total(self.others, more.others))

    @property
    def others_share(self) -> float | None:
        """The part of all cores that others had."""
        return None if self.others is None or not self.wall else self.others / self.wall / (os.cpu_count() or 1)


class Meter:
    """Counts from its beginning on; `process` is measured, and `beside` takes part."""

    def __init__(self, process: int, beside: Sequence[int] = ()) -> None:
        self.process, self.beside = process, tuple(beside)
        self._began = self._read()

    def _read(self) -> tuple[float, float | None, float | None]:
        own, parts, all_of_it = cpu_seconds(self.process), [cpu_seconds(each) for each in self.beside], busy_seconds()
        known = [each for each in parts if each is not None]
        told = own is not None and all_of_it is not None and len(known) == len(parts)
        others = all_of_it - own - sum(known) if told and own is not None and all_of_it is not None else None
        return time.perf_counter(), own, others

    def usage(self) -> Usage:
        """Return what was used since it began."""
        (then, own, others), (now, own_now, others_now) = self._began, self._read()
        mine = None if own is None or own_now is None else own_now - own
        theirs = None if others is None or others_now is None else max(0.0, others_now - others)
        return Usage(now - then, mine, theirs)
