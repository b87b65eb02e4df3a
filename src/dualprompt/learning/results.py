"""What a learner answers, as plain typed data."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


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
    similarity: float  # cosine of the image and the nearest thing that is kept of any task
    top: tuple[Score, ...]  # the best classes, best first, also where the label is None

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

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return {**asdict(self), "classes": list(self.classes)}


@dataclass(frozen=True)
class Evaluation:
    """How a learner does on labelled images."""

    images: int
    accuracy: float  # percent
    by_class: dict[str, float]  # percent
    matching: float | None  # percent of images matched to a task that has their class; None: the method matches none
    rejected: float  # percent answered with "none of these", which counts as wrong

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return asdict(self)


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
