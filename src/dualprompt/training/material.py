"""Which images a phase of training works on."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dualprompt.data.images import Images
from dualprompt.data.stream import Subset, Task
from dualprompt.methods.base import Method, Phase
from dualprompt.seeds import derive


def material(method: Method, phase: Phase, seen: Sequence[Task], buffer: Subset | None, seed: int) -> Subset:
    """Return the images of a phase of the newest of the tasks `seen`.

    Old images reach a method through its buffer alone; only one that is no continual learner gets everything.
    """
    if phase.data == "everything":
        assert method.joint, f"{method.config.name} may not see the images of old tasks"
        found = union([task.train for task in seen])
    elif phase.data == "task":
        found = seen[-1].train
    else:
        assert method.buffer is not None, f"{method.config.name} has no buffer"
        held = [buffer] if buffer is not None and len(buffer) else []
        found = union(held if phase.data == "buffer" else [seen[-1].train, *held])
    if phase.part == "all":
        return found
    out = held_out(found.labels, torch.Generator().manual_seed(derive(seed, "held out", len(seen) - 1)))
    return _rows(found, out.nonzero()[:, 0] if phase.part == "held out" else (~out).nonzero()[:, 0])


def union(subsets: Sequence[Subset]) -> Subset:
    """Return the images of several subsets, one after another."""
    if len(subsets) == 1:
        return subsets[0]
    labels = torch.cat([subset.labels for subset in subsets])
    if all(subset.images is subsets[0].images for subset in subsets):
        return Subset(subsets[0].images, torch.cat([subset.indices for subset in subsets]), labels)
    images = Images.concat([subset.images.select(subset.indices) for subset in subsets])
    return Subset(images, torch.arange(len(images)), labels)


def held_out(labels: Tensor, generator: torch.Generator) -> Tensor:
    """Mark as many images of every class, drawn at random: a tenth of what the rarest class has, at least one."""
    classes, counts = labels.unique(return_counts=True)
    each = max(1, int(counts.min()) // 10)
    marked = torch.zeros(len(labels), dtype=torch.bool)
    for label in classes:
        mine = (labels == label).nonzero()[:, 0]
        marked[mine[torch.randperm(len(mine), generator=generator)[:each]]] = True
    return marked


def _rows(subset: Subset, rows: Tensor) -> Subset:
    return Subset(subset.images, subset.indices[rows], subset.labels[rows])
