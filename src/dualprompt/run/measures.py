"""The metrics that take single answers: of all evaluations of a run, from what it answered image by image."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from dualprompt.metrics import auroc, calibration_error, forward_transfer, reliability
from dualprompt.run.predictions import Predictions, read

# What `measured` returns; a result from before lacks them.
NAMES = (
    "task_known_accuracy", "task_known_matrix", "calibration_error", "calibration", "unseen_auroc",
    "unseen_auroc_over_tasks", "forward_transfer", "class_accuracy",
)  # fmt: skip
UNKNOWN: dict[str, Any] = dict.fromkeys(NAMES)


def of_file(path: Path) -> dict[str, Any]:
    """Return what the file of a run's answers says; nothing where there is none."""
    return measured(read(path)) if path.is_file() else dict(UNKNOWN)


def measured(found: Predictions) -> dict[str, Any]:
    """Return every metric that is made of single answers; None where what it needs was not shown, or not kept."""
    last = len(found) - 1
    judged, right, matrix = found.judged(last), found.right[last], _task_known(found)
    ahead = [_accuracy_ahead(found, after) for after in range(last)]
    unseen = [_unseen(found, after) for after in range(last)]
    told = [value for value in unseen if value is not None]
    bins = None if judged is None else reliability(found.probability[last][judged], right[judged])
    return {
        "task_known_accuracy": None if matrix is None else float(np.mean(matrix[-1])),
        "task_known_matrix": matrix,
        "calibration_error": None if bins is None else calibration_error(bins),
        "calibration": bins,
        "unseen_auroc": float(np.mean(told)) if told else None,
        "unseen_auroc_over_tasks": unseen if told else None,
        "forward_transfer": forward_transfer(ahead, found.classes_seen[:last].tolist()),
        "class_accuracy": None if judged is None else _by_class(found, judged, right),
    }


def _percent(right: np.ndarray) -> float:
    return 100 * int(right.sum()) / len(right)


def _task_known(found: Predictions) -> list[list[float]] | None:
    """Return the accuracy on each task after each task, of answers among the classes of the image's task."""
    if any(found.judged(after) is None for after in range(len(found))):
        return None
    right = found.task_known_answer == found.truth
    return [[_percent(right[after][found.task == t]) for t in range(after + 1)] for after in range(len(found))]


def _unseen(found: Predictions, after: int) -> float | None:
    """Return how well the probability of an answer tells images of known classes from those of classes to come."""
    judged, known = found.judged(after), found.classes_seen[after]
    unseen = (found.answer[after] >= 0) & (found.truth >= known)
    if judged is None or not unseen.any():
        return None
    return auroc(found.probability[after][judged], found.probability[after][unseen])


def _accuracy_ahead(found: Predictions, after: int) -> float | None:
    """Return the accuracy on the next task, where all of its classes are known."""
    following = found.task == after + 1
    shown = following & (found.answer[after] >= 0)
    if not shown.any() or (found.truth[following] >= found.classes_seen[after]).any():
        return None
    return _percent(found.right[after][shown])


def _by_class(found: Predictions, judged: np.ndarray, right: np.ndarray) -> dict[str, float]:
    """Return the accuracy on each class, by its name."""
    there = np.unique(found.truth[judged])
    return {str(found.classes[label]): _percent(right[judged & (found.truth == label)]) for label in there}
