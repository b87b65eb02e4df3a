"""Images of new classes as a task of the training loop, some of them held out; and what identifies it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import torch

from dualprompt.data.experience import with_copies
from dualprompt.data.images import Images
from dualprompt.data.stream import Experience, Subset
from dualprompt.files import digest
from dualprompt.run.checkpoint import State
from dualprompt.seeds import derive

HELD_OUT, MOST_HELD_OUT, FEWEST = 0.2, 10, 5  # of each class: the share, at most so many, from so many images on


def held_out(labels: np.ndarray, classes: Sequence[str], seed: int, alike: np.ndarray | None = None) -> np.ndarray:
    """Return which images are not trained on, (images,) bool; a class's own depend on its name alone, and on copies.

    Args:
        labels: (images,) the class of each.
        classes: their names.
        seed: of the draw.
        alike: (images,) numbers that images share with their copies, which are held out together.
    """
    held, shared = np.zeros(len(labels), bool), tensor_of(alike)
    for label, name in enumerate(classes):
        mine = np.flatnonzero(labels == label)
        if len(mine) >= FEWEST:
            count = min(int(len(mine) * HELD_OUT), MOST_HELD_OUT)
            rng = np.random.default_rng(derive(seed, "held out", name))
            held[with_copies(torch.from_numpy(rng.permutation(mine)), shared, count).numpy()] = True
    return held


def tensor_of(values: np.ndarray | None) -> torch.Tensor | None:
    """Return numbers as a tensor, where there are any."""
    return None if values is None else torch.from_numpy(values)


def task_of(
    index: int,
    name: str,
    classes: tuple[str, ...],
    known: int,
    pixels: np.ndarray,
    labels: np.ndarray,
    held: np.ndarray,
    alike: np.ndarray | None = None,
) -> Experience:
    """Return the task, an experience of new classes after `known` others; `alike` are those of `held_out`."""
    seen = tuple(range(known + len(classes)))
    images = Images.from_array(pixels)

    def subset(rows: np.ndarray) -> Subset:
        shared = tensor_of(None if alike is None else alike[rows])
        return Subset(images, torch.from_numpy(rows), torch.from_numpy(labels[rows] + known), alike=shared)

    none = subset(np.empty(0, np.int64))
    trained = subset(np.flatnonzero(~held))
    return Experience(index, name, seen[known:], seen[known:], seen, classes, trained, none, none)


def fingerprint(task: Experience) -> str:
    """Return a hash of the images and labels that are trained on."""
    pixels = hashlib.sha256(task.train.images.flat.numpy().data).hexdigest()
    return digest([pixels, task.classes, task.train.indices.tolist(), task.train.labels.tolist()])


def state_digest(state: State) -> str:
    """Return a hash of tensors and their names."""
    found = hashlib.sha256()
    for name, value in sorted(state.items()):
        found.update(f"{name} {tuple(value.shape)} ".encode())
        found.update(np.ascontiguousarray(value.cpu().numpy()).tobytes())
    return found.hexdigest()
