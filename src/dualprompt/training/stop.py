"""Stopping on request: at a safe moment, and in all processes at the same one."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from dualprompt.errors import InterruptedRunError
from dualprompt.progress import Progress
from dualprompt.training.distributed import total

if TYPE_CHECKING:
    from lightning_fabric import Fabric


class Stop:
    """A request to stop, which Ctrl-C and SIGTERM make and the loop honours after the current step."""

    def __init__(self, fabric: Fabric, progress: Progress) -> None:
        self.fabric, self.progress = fabric, progress
        self.signal: str | None = None

    @property
    def asked(self) -> bool:
        """Whether any process was asked to stop; all must leave at the same step."""
        asked = self.signal is not None
        if self.fabric.world_size == 1:
            return asked
        return bool(total(self.fabric, torch.tensor(float(asked), device=self.fabric.device)))

    def leave(self) -> None:
        """Raise if this process was asked to stop, for work that nothing needs to be saved of."""
        if self.signal is not None:
            raise self.error()

    def error(self) -> InterruptedRunError:
        """Return what to raise."""
        return InterruptedRunError(f"stopped by {self.signal or 'another process'}")

    @contextmanager
    def on_signals(self) -> Iterator[None]:
        """Take signals for requests; a second one kills."""
        try:
            previous = {number: signal.signal(number, self._receive) for number in (signal.SIGINT, signal.SIGTERM)}
        except ValueError:  # not in the main thread: whoever runs us there handles signals
            yield
            return
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _receive(self, number: int, _: Any) -> None:
        if self.signal is not None:
            raise KeyboardInterrupt
        self.signal = signal.Signals(number).name
        self.progress.note("stopping at the next safe moment; ask once more to stop at once, at the last checkpoint")
