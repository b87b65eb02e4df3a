"""Few-shot and long-tailed variants of any dataset: which of a class's training images are left."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from dualprompt.seeds import derive


@dataclass(frozen=True)
class Thinning:
    """How many training images of each class are left, and which: drawn by the seed and the class's name."""

    seed: int = 0
    shots: int | None = None  # images of each class; None: all
    shots_from: int = 1  # first task with so few, counted from 1
    shares: Mapping[str, float] = field(default_factory=dict)  # of a class's images that stay; none said: all

    def __call__(self, rows: np.ndarray, name: str, task: int) -> np.ndarray:
        """Return what is left of a class's rows, at least one, in their order; `task` counts from 0."""
        count = max(1, int(len(rows) * self.shares.get(name, 1.0)))
        if self.shots is not None and task + 1 >= self.shots_from:
            count = min(count, self.shots)
        if count >= len(rows):
            return rows
        rng = np.random.default_rng(derive(self.seed, "thinning", name))
        return np.sort(rng.permutation(rows)[:count])


def long_tail(names: Sequence[str], ratio: float, seed: int) -> dict[str, float]:
    """Return the share of its images that each class keeps: 1 for the largest, 1/`ratio` for the smallest.

    Between them it falls exponentially, as in Cao et al. (2019). Which class has which rank is drawn.
    """
    ranks = np.random.default_rng(derive(seed, "imbalance")).permutation(len(names))
    return {name: float(ratio ** -(rank / max(1, len(names) - 1))) for name, rank in zip(names, ranks, strict=True)}
