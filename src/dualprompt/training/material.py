"""Which images a phase of training works on."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dualprompt.data.images import Images
from dualprompt.data.stream import Subset
from dualprompt.methods.base import Method, Phase


def material(method: Method, phase: Phase, seen: Sequence[Subset], buffer: Subset | None) -> Subset:
    """Return the images of a phase of the newest task, given the training images of every task `seen` so far.

    Old images reach a method through its buffer alone; only one that is no continual learner gets everything.
    """
    if phase.data == "everything":
        assert method.joint, f"{method.config.name} may not see the images of old tasks"
        return union(seen)
    if phase.data == "task":
        return seen[-1]
    assert method.buffer is not None, f"{method.config.name} has no buffer"
    held = [buffer] if buffer is not None and len(buffer) else []
    return union(held if phase.data == "buffer" else [seen[-1], *held])


def union(subsets: Sequence[Subset]) -> Subset:
    """Return the images of several subsets, one after another."""
    if len(subsets) == 1:
        return subsets[0]
    labels = torch.cat([subset.labels for subset in subsets])
    if all(subset.images is subsets[0].images for subset in subsets):
        return Subset(subsets[0].images, torch.cat([subset.indices for subset in subsets]), labels)
    images = Images.concat([subset.images.select(subset.indices) for subset in subsets])
    return Subset(images, torch.arange(len(images)), labels)
