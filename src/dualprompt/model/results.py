"""What a learner answers, as plain typed data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np


def trust(similarity: Any, probability: Any) -> Any:
    """Return how sure a model is that images show classes it knows, 0 to 1: what the threshold is for.

    Similarity stays what it was when new classes come, probability shrinks; its root shrinks by half as much.
    """
    return np.maximum(similarity, 0.0) * probability**0.5


@dataclass(frozen=True)
class Score:
    """A class and how probable it is."""

    label: str
    probability: float


@dataclass(frozen=True)
class Answer:
    """What a learner says of one image."""

    path: str | None  # None: the image came without a name
    label: str | None  # None: none of the classes it knows
    probability: float  # of the best class, among all known ones
    task: str | None  # the task that the image was matched to
    similarity: float  # how like that task it is: cosine with its nearest key or class mean
    top: tuple[Score, ...]  # the best classes, best first, also where the label is None

    @property
    def trust(self) -> float:
        """How sure it is that the image shows one of the classes, 0 to 1."""
        return float(trust(self.similarity, self.probability))

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return {**asdict(self), "top": [asdict(score) for score in self.top]}


@dataclass(frozen=True)
class TaskInfo:
    """What is known of a task that was learned."""

    id: int  # never given to another task
    name: str
    classes: tuple[str, ...]
    images: int  # that it was taught with, those held out included
    learned: str  # when, ISO 8601
    bytes: int  # that are kept for it alone
    accuracy: float | None  # percent of the held-out images, among all classes known then; None: none were held out
    measured: Mapping[int, float] = field(default_factory=dict)  # percent, by task id, recorded while it was the newest

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        measured = {str(task): value for task, value in self.measured.items()}
        return {**asdict(self), "classes": list(self.classes), "measured": measured}


@dataclass(frozen=True)
class Evaluation:
    """How a learner does on labelled images."""

    images: int
    accuracy: float  # percent
    by_class: dict[str, float]  # percent
    by_task: dict[int, float]  # percent, by the task's id
    matching: float | None  # percent of images matched to a task that has their class; None: the method matches none
    rejected: float  # percent answered with "none of these", which counts as wrong

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return {**asdict(self), "by_task": {str(task): value for task, value in self.by_task.items()}}


@dataclass(frozen=True)
class Level:
    """A threshold, and what it does."""

    threshold: float
    accepted: float  # percent of the held-out images of known classes that get a class
    rejected: float | None  # percent of the unknown images that get none; None: no unknown images were given


@dataclass(frozen=True)
class Calibration:
    """Thresholds for "none of these", from lenient to strict, and the one that was chosen."""

    threshold: float
    known: int  # images that were held out while learning
    unknown: int
    levels: tuple[Level, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return {**asdict(self), "levels": [asdict(level) for level in self.levels]}
