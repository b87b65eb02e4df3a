"""Runs in processes of their own, several at a time."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from dualprompt.errors import DualPromptError, InterruptedRunError
from dualprompt.files import INHERITED, disk_errors, read_bytes, reason, write_json
from dualprompt.sweeps.obtained import AGAIN, Count, Obtained, held_run
from dualprompt.training import group

OUTPUT = "output.txt"  # what a run in a process of its own writes
MOST_OUTPUT = 2**28  # bytes


def side_by_side(missing: Sequence[Obtained], jobs: int, count: Count) -> None:
    """Carry runs out in `jobs` processes at a time; when this one is stopped, so are they, and save themselves."""
    waiting, running = list(missing), []
    with contextlib.ExitStack() as stack:
        stack.enter_context(sigterm_interrupts())
        stack.callback(lambda: _stop(running))
        while waiting or running:
            while waiting and len(running) < jobs:
                asked = waiting.pop(0)
                try:
                    running.append(_Child(asked, jobs))
                except DualPromptError as error:
                    count(asked, str(error), "")
            for child in [child for child in running if child.process.poll() is not None]:
                running.remove(child)
                count(child.asked, *child.end())
            time.sleep(0.02)


class _Child:
    """A run in a process of its own: `dualprompt resume` of a folder where at least the plan is laid down."""

    def __init__(self, asked: Obtained, jobs: int) -> None:
        self.asked, folder = asked, asked.run.folder
        command = [sys.executable, "-m", "dualprompt.cli", "resume", str(folder), "--device", asked.config.device]
        command += ["--track", ",".join(asked.config.track) or "none"]
        threads = str(max(1, (os.cpu_count() or 1) // jobs))
        with contextlib.ExitStack() as stack, disk_errors(folder):
            lock = stack.enter_context(held_run(folder))
            if not group.is_run(folder):
                member = {"folder": ".", "config": asked.config.model_dump(mode="json")}
                write_json(folder / "group.json", {"members": [member]})
            with (folder / OUTPUT).open("w", encoding="utf-8") as output:
                self.process = subprocess.Popen(
                    command,
                    stdout=output,
                    stderr=output,
                    env={"OMP_NUM_THREADS": threads} | os.environ | {INHERITED: str(lock)},
                    start_new_session=True,  # Ctrl-C is for us; we tell the children, once
                    pass_fds=[lock],  # the folder stays held while anybody works in it
                )
            self.held = stack.pop_all()

    def end(self) -> tuple[str | None, str]:
        """Return what went wrong in the ended process, if anything, and all that it wrote."""
        self.held.close()
        output = _output(self.asked.run.folder / OUTPUT)
        if self.process.returncode == 0:
            return None, output
        last = output.strip().rpartition("\n")[2].removeprefix("dualprompt: error: ")
        return last or f"its process ended with code {self.process.returncode}", output


def _output(path: Path) -> str:
    """Return what a process wrote; it may have been removed or replaced meanwhile."""
    try:
        return read_bytes(path, MOST_OUTPUT).decode(errors="replace")
    except OSError as error:
        return f"{path} cannot be read ({reason(error)})"


def _stop(running: Sequence[_Child]) -> None:
    """Ask every child to stop, and wait until it has saved itself."""
    for child in running:
        child.process.terminate()
    for child in running:
        child.process.wait()
        child.held.close()


@contextlib.contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """Turn SIGTERM into the exception that Ctrl-C raises, and both into one line that says how to go on."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    except KeyboardInterrupt:
        raise InterruptedRunError(f"stopped; {AGAIN}") from None
    finally:
        signal.signal(signal.SIGTERM, before)
