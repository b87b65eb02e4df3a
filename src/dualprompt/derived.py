"""What is worked out from parameters and kept while nothing trains: the joined rows of a head, a stack of prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self, TypeVar

from torch import nn

T = TypeVar("T")


class Deriving(nn.Module):
    """A module that keeps what it derives from its parameters while it is in evaluation mode.

    In training nothing is kept, and every `train()`, `eval()` and move to a device drops what was. Nothing finer would
    do: a step that is replayed as a CUDA graph changes parameters and runs no Python that could take notice.
    """

    def __init__(self) -> None:
        super().__init__()
        self._derived: dict[object, Any] = {}

    def derived(self, name: object, make: Callable[[], T]) -> T:
        """Return what `make` derives from the parameters; in evaluation mode it is asked once."""
        if self.training:
            return make()
        kept = self._derived  # another thread may drop it meanwhile
        if name not in kept:
            kept[name] = make()
        return kept[name]

    def drop_derived(self) -> None:
        """Drop what is kept, because parameters come, go or are replaced."""
        self._derived = {}

    def train(self, mode: bool = True) -> Self:
        """Set the mode, here and below; what was derived before is dropped."""
        self.drop_derived()
        return super().train(mode)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        self.drop_derived()
        return super()._apply(fn, recurse)


@contextmanager
def predicting(module: nn.Module) -> Iterator[None]:
    """Put a module into evaluation mode for a while, in the middle of training too: it has the newest weights."""
    before = module.training
    module.eval()
    try:
        yield
    finally:
        module.train(before)
