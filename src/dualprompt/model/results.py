"""What a learner answers, as plain typed data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import numpy as np

from dualprompt.metrics import wilson

NONE = ""
"""The label of "none of these" in a confusion matrix; no class is called so."""


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
    probability: float | None  # of that class, among all known ones; None: there is none
    task: str | None  # the task that taught that class
    similarity: float  # cosine with the nearest key or class mean of the task it was matched to
    top: tuple[Score, ...]  # the best classes, best first, also where the label is None

    @property
    def trust(self) -> float:
        """How sure it is that the image shows one of the classes, 0 to 1."""
        return float(trust(self.similarity, self.top[0].probability))

    def as_none(self) -> Answer:
        """Return it as "none of these"."""
        return replace(self, label=None, probability=None, task=None)

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return {**asdict(self), "top": [asdict(score) for score in self.top]}


@dataclass(frozen=True)
class PromptChoice:
    """Whether prompts were trained in a lesson, and why."""

    used: bool
    why: str
    held: int = 0  # images that both were compared on; 0: they were not compared
    without: int = 0  # right without prompts
    with_prompts: int = 0  # right with them


@dataclass(frozen=True)
class TaskInfo:
    """What is known of a task that was learned."""

    id: int  # never given to another task
    name: str
    classes: tuple[str, ...]
    images: int  # that it was taught with, those held out included
    learned: str  # when, ISO 8601
    bytes: int  # that are kept for it alone
    accuracy: float | None  # percent of the images held or left out, among all classes known then; None: not measured
    held: int = 0  # images behind the accuracy
    correct: int = 0  # of them
    left_one_out: bool = False  # whether each was judged by all others; else they were held out of learning
    prompts: PromptChoice | None = None  # None: its method always does as it does
    measured: Mapping[int, float] = field(default_factory=dict)  # percent, by task id, recorded while it was the newest

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        measured = {str(task): value for task, value in self.measured.items()}
        interval = None if self.interval is None else list(self.interval)
        return {**asdict(self), "classes": list(self.classes), "measured": measured, "interval": interval}

    @property
    def interval(self) -> tuple[float, float] | None:
        """Where the accuracy lies with 95 % confidence, in percent (Wilson); None: not measured."""
        return None if self.accuracy is None or not self.held else wilson(self.correct, self.held)


@dataclass(frozen=True)
class Evaluation:
    """How a learner does on labelled images."""

    images: int
    accuracy: float  # percent
    by_class: dict[str, float]  # percent
    by_task: dict[int, float]  # percent, by the task's id
    matching: float | None  # percent of images answered with a class of a task that has theirs; None: it matches none
    rejected: float  # percent answered with "none of these", which counts as wrong
    best: float  # percent whose best class is right, whether or not it was named
    # How many images of each class were given which label; "none of these" is the key NONE.
    confusion: dict[str, dict[str, int]]

    @property
    def correct(self) -> int:
        """How many were right."""
        return sum(row.get(label, 0) for label, row in self.confusion.items())

    @property
    def interval(self) -> tuple[float, float]:
        """Where the accuracy lies with 95 % confidence, in percent (Wilson)."""
        return wilson(self.correct, self.images)

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        table = self.confusion
        counts = {label: sum(row.values()) for label, row in table.items()}
        return {
            **asdict(self),
            "correct": self.correct,
            "interval": list(self.interval),
            "counts": counts,
            "intervals": {label: list(wilson(row.get(label, 0), counts[label])) for label, row in table.items()},
            "by_task": {str(task): value for task, value in self.by_task.items()},
        }


@dataclass(frozen=True)
class Threshold:
    """Below which trust the answer is "none of these", and who says so."""

    value: float | None = None  # None: never
    by: Literal["lessons", "user"] = "lessons"


@dataclass(frozen=True)
class Level:
    """A threshold, and what it does."""

    threshold: float
    accepted: float  # percent of the held-out images of known classes that get a class
    rejected: float | None  # percent of the unknown images that get none; None: there were none


@dataclass(frozen=True)
class Calibration:
    """Thresholds for "none of these", from lenient to strict, and the one that was chosen."""

    threshold: float
    known: int  # images that were held or left out while learning
    unknown: int
    unknown_given: bool  # else they are images of known classes, asked as if their own class were not known
    levels: tuple[Level, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return {**asdict(self), "levels": [asdict(level) for level in self.levels]}
