"""How often images go through backbones, and about how many operations that takes: counted where they do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from dualprompt.backbones.base import Backbone


@dataclass
class Passes:
    """Passes forward of images, each as the share of the backbone that was computed, and all operations with them.

    Going back counts as much as going forward for the gradients of what passes, and as much again for those of weights.
    """

    forward: float = 0.0
    operations: float = 0.0  # floating-point, forward and back

    def __add__(self, other: Passes) -> Passes:
        """Return both together."""
        return Passes(self.forward + other.forward, self.operations + other.operations)

    def __mul__(self, times: float) -> Passes:
        """Return so many times as many."""
        return Passes(self.forward * times, self.operations * times)

    def report(self) -> dict[str, float]:
        """Return passes, and operations in 10⁹, to six digits: the last bits depend on how batches are cut."""
        return {"passes": float(f"{self.forward:.6g}"), "gflops": float(f"{self.operations / 1e9:.6g}")}


_counting: list[Passes] = []  # the innermost, which alone counts, is the last


@contextmanager
def counted() -> Iterator[Passes]:
    """Count what passes through any backbone; what is counted inside by another is that one's alone."""
    _counting.append(Passes())
    try:
        yield _counting[-1]
    finally:
        _counting.pop()


def passed(backbone: Backbone, out: Tensor, share: float = 1.0) -> Tensor:
    """Note that images have passed a share of a backbone, from whose end or middle `out` came; return `out`."""
    if _counting:
        back = 0 if not out.requires_grad else 1 if backbone.frozen else 2
        images = share * out.shape[0]
        _counting[-1].forward += images
        _counting[-1].operations += (1 + back) * images * backbone.operations
    return out
