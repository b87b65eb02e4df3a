"""A run that a table, sweep or study asks for, and how it is held while somebody carries it out."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from dualprompt.config import RunConfig
from dualprompt.errors import DualPromptError
from dualprompt.files import disk_errors, held
from dualprompt.progress import Progress
from dualprompt.run.folder import Run

BUSY = "another process is carrying it out; wait for that one"
AGAIN = "nothing is lost, go on with the same command"


@dataclass(frozen=True)
class Obtained:
    """A run that was asked for, and why it has no result, if it has none."""

    run: Run
    config: RunConfig
    error: str | None = None
    other_code: bool = False  # whether other code than that at hand made it

    @property
    def name(self) -> str:
        """What notes and complaints call the run."""
        return f"{self.run.folder.name} (seed {self.config.seed})"

    @property
    def seconds(self) -> float:
        """How long a finished run trained, without evaluation; an interrupted task counts from where it went on."""
        return self.run.seconds()["train"]


Count = Callable[[Obtained, str | None, str], None]  # notes the end of a run: its error, if any, and the details


class Workers(Protocol):
    """Others that carry runs out, maybe on other machines."""

    def carry_out(self, missing: Sequence[Obtained], progress: Progress, count: Count) -> None:
        """Carry every run out in its folder, and count each when it ends."""


def complain(found: Sequence[Obtained]) -> None:
    """Raise an error that names the runs without a result, if there are any."""
    runs = {each.run.folder: each for each in found}
    failed = [each for each in runs.values() if each.error]
    if failed:
        reasons = "; ".join(f"{each.name}: {each.error}" for each in failed)
        raise DualPromptError(f"{len(failed)} of {len(runs)} runs failed, the next call tries them again: {reasons}")


def held_run(folder: Path, patience: float = 0) -> contextlib.AbstractContextManager[int]:
    """Keep other processes from working on the run in `folder`."""
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    return held(folder, BUSY, patience)


def first_line(error: Exception) -> str:
    """Return the kind of an error that nobody foresaw, and the first line of what it says."""
    text = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
