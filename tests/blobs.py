"""Tasks of features that stand for images: clouds about class means, of a common shape."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from dualprompt.methods.base import Batch, Method, TaskView
from helpers import of_labels, seeded, task_view

DIM = 32

Data = tuple[Tensor, Tensor]


def blobs(task: int, sizes: list[int], spread: float = 1.0) -> tuple[Tensor, Tensor]:
    """Correlated features of a task whose classes, numbered from 0, have `sizes` samples each."""
    generator = seeded(500 + task)
    labels = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    mixing = torch.randn(DIM, DIM, generator=seeded(9)) / DIM**0.5
    means = 3 + torch.randn(len(sizes), DIM, generator=generator)
    noise = torch.randn(len(labels), DIM, generator=generator)
    shuffled = torch.randperm(len(labels), generator=generator)
    return (means[labels] + spread * noise @ mixing)[shuffled], labels[shuffled]


def known(features: Tensor) -> Batch:
    """A batch of which only the frozen features are known."""
    return Batch(lambda: pytest.fail("no image is needed"), torch.zeros(len(features), dtype=torch.int64), features)


def task_of(index: int, labels: Tensor, classes: int = 2) -> TaskView:
    """The `index`-th of tasks with new classes; the labels of its images count from 0."""
    return task_view(index, classes, labels=labels + index * classes)


def taught(method: Method, tasks: list[Data]) -> Method:
    """The method after tasks whose labels count from 0 in each; they may have any number of classes."""
    first = 0
    for index, (features, labels) in enumerate(tasks):
        classes = int(labels.max()) + 1
        view = of_labels(task_view(index, classes, features, labels=labels + first), first, classes)
        method.begin_task(view)
        assert not method.phases(view)
        method.end_task(view)
        first += classes
    return method


def whole(tasks: list[Data]) -> tuple[np.ndarray, np.ndarray]:
    """All tasks' features and labels at once, in float64."""
    features, labels, first = [], [], 0
    for own, classes in tasks:
        features.append(own.double().numpy())
        labels.append(classes.numpy() + first)
        first += int(classes.max()) + 1
    return np.concatenate(features), np.concatenate(labels)


def in_portions(parts: list[Data], classes: int) -> list[TaskView]:
    """Tasks whose labels come back: the first has them all, later ones the highest of their labels and those below."""
    views, seen = [], 0
    for index, (features, labels) in enumerate(parts):
        present = tuple(labels.unique().tolist())
        known, seen = seen, max(seen, present[-1] + 1)
        view = task_view(index, classes, features, labels=labels)
        new = tuple(label for label in present if label >= known)
        views.append(replace(view, labels=present, new_labels=new, seen=tuple(range(seen))))
    return views


def ridge_solution(inputs: np.ndarray, labels: np.ndarray, classes: int, strength: float) -> np.ndarray:
    """The minimum of ‖HW − Y‖² + λ‖W‖², as least squares with λ's rows added, which never forms HᵀH."""
    dim = inputs.shape[1]
    rows = np.concatenate([inputs, strength**0.5 * np.eye(dim)])
    targets = np.concatenate([np.eye(classes)[labels], np.zeros((dim, classes))])
    return np.linalg.lstsq(rows, targets, rcond=None)[0]
