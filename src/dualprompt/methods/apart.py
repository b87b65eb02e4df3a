"""Which images of a task a phase does without: those held out to choose by, and what common classes have more of."""

from __future__ import annotations

import torch

from dualprompt.data.experience import Subset, with_copies
from dualprompt.methods.buffer import part
from dualprompt.seeds import derive


def hold_out(subset: Subset, share: float, seed: int, task: int) -> tuple[Subset, Subset | None]:
    """Return a task's images without a share of each class, at least one of two, and that share, copies with it."""
    if not share:
        return subset, None
    generator = torch.Generator().manual_seed(derive(seed, "hold out", task))
    apart = torch.zeros(len(subset), dtype=torch.bool)
    for label in subset.labels.unique():
        mine = (subset.labels == label).nonzero()[:, 0]
        count = min(max(1, int(len(mine) * share)), len(mine) - 1)
        drawn = mine[torch.randperm(len(mine), generator=generator)]
        apart[with_copies(drawn, subset.alike, count)] = True
    return part(subset, ~apart), part(subset, apart)


def cut_to_rarest(subset: Subset, seed: int, task: int) -> Subset:
    """Return as many images of every class as the rarest has, drawn by the seed and the task."""
    generator = torch.Generator().manual_seed(derive(seed, "cut", task))
    classes, counts = subset.labels.unique(return_counts=True)
    of_each = [(subset.labels == label).nonzero()[:, 0] for label in classes]
    fewest = int(counts.min())
    rows = [mine[torch.randperm(len(mine), generator=generator)[:fewest]] for mine in of_each]
    return part(subset, torch.cat(rows).sort().values)
