"""Metrics as pure functions: the paper's and others' of the accuracy matrix, and those of single answers.

`S[t][τ]` is the accuracy, in percent, on task τ after training task t; row t has t + 1 entries. Functions take the
rows up to the moment they describe, so `average_accuracy(S)` is A_T and `average_accuracy(S[:t])` is A_t. What each
metric says, and when it misleads: docs/metrics.md.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

Matrix = Sequence[Sequence[float]]
BINS = 15  # of probabilities, for the calibration error


def check(S: Matrix) -> None:
    """Refuse a matrix whose row t does not have t + 1 entries."""
    for t, row in enumerate(S):
        if len(row) != t + 1:
            raise ValueError(f"row {t + 1} of an accuracy matrix has {t + 1} entries, found {len(row)}")
    if not len(S):
        raise ValueError("an accuracy matrix has at least one row")


def average_accuracy(S: Matrix) -> float:
    """A_t: the mean accuracy over all tasks seen, after the last of them."""
    check(S)
    return float(np.mean(S[-1]))


def forgetting(S: Matrix) -> float:
    """F_t: the mean over earlier tasks of the largest drop from any earlier accuracy to the last; 0 for one task."""
    check(S)
    last = len(S) - 1
    if last == 0:
        return 0.0
    return float(np.mean([max(S[t][task] for t in range(task, last)) - S[last][task] for task in range(last)]))


def backward_transfer(S: Matrix) -> float:
    """BWT: the mean over earlier tasks of the last accuracy minus the one right after learning; 0 for one task.

    It is −F unless the accuracy on some task rose above what it was right after learning, before the last task.
    """
    check(S)
    last = len(S) - 1
    if last == 0:
        return 0.0
    return float(np.mean([S[last][task] - S[task][task] for task in range(last)]))


def coda_forgetting(S: Matrix) -> float:
    """Forgetting as CODA-Prompt's code has it: the mean over steps of the mean drop on old tasks; 0 for one task.

    A step's drop is from the evaluation just before it. So a task that is lost at once counts in one step only, and one
    that recovers counts against its loss.
    """
    check(S)
    if len(S) == 1:
        return 0.0
    return float(np.mean([np.subtract(before, after[:-1]).mean() for before, after in itertools.pairwise(S)]))


def image_weighted_accuracy(S: Matrix, images: Sequence[int]) -> float:
    """Return the share of all images that are right after the last task; `images[τ]` were evaluated of task τ."""
    check(S)
    return float(np.average(S[-1], weights=images))


def mean_over_steps(S: Matrix) -> float:
    """Return the mean of A_1 … A_T, which some papers call average or anytime accuracy."""
    check(S)
    return float(np.mean([np.mean(row) for row in S]))


def learning_accuracy(S: Matrix) -> float:
    """Return the mean accuracy on each task right after learning it."""
    check(S)
    return float(np.mean([row[-1] for row in S]))


def over_tasks(S: Matrix) -> dict[str, list[float]]:
    """Return A_t and F_t after each task t, for curves."""
    steps = range(1, len(S) + 1)
    return {
        "average_accuracy": [average_accuracy(S[:t]) for t in steps],
        "forgetting": [forgetting(S[:t]) for t in steps],
    }


Curve = Sequence[tuple[int, int, float]]
"""Of an online stream: images so far, classes so far, and the accuracy in percent on all images of these classes."""


def area_under_curve(curve: Curve) -> float:
    """A_auc: the mean accuracy of evaluations after every n images, so the area under the curve (Koh et al., 2022)."""
    if not curve:
        raise ValueError("a curve has at least one point")
    return float(np.mean([accuracy for _, _, accuracy in curve]))


def anytime(curve: Curve, S: Matrix) -> dict[str, Any]:
    """Return what is said of an online stream: the curve, A_auc, and A_last, the accuracy when all have come."""
    return {
        "area_under_curve": area_under_curve(curve) if curve else None,
        "last_accuracy": average_accuracy(S),
        "anytime_curve": [list(point) for point in curve],
    }


def mean_and_deviation(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean and the sample standard deviation over seeds (0 for a single seed)."""
    return float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else 0.0


def variance(S: Matrix, images: Sequence[int]) -> float:
    """Return the binomial variance of A_T, in squared percent: how it would scatter over draws of the test images.

    All right or all wrong is no proof that nothing scatters: such a task counts as if one image more had been right and
    one more wrong (Laplace).
    """
    check(S)
    shares = [s if 0 < s < 100 else 100 * (s * n / 100 + 1) / (n + 2) for s, n in zip(S[-1], images, strict=True)]
    return float(sum(s * (100 - s) / n for s, n in zip(shares, images, strict=True)) / len(S) ** 2)


def summarise(
    S: Matrix, matching: Sequence[float] | None, images: Sequence[int] | None = None
) -> dict[str, float | None]:
    """Return every metric of a finished run.

    `matching` is the last row of per-task matching accuracies; `images` are those evaluated of each task, if known.
    """
    return {
        "average_accuracy": average_accuracy(S),
        "forgetting": forgetting(S),
        "matching_accuracy": None if matching is None else float(np.mean(matching)),
        "image_weighted_accuracy": image_weighted_accuracy(S, images) if images else None,
        "mean_over_steps": mean_over_steps(S),
        "backward_transfer": backward_transfer(S),
        "coda_forgetting": coda_forgetting(S),
        "learning_accuracy": learning_accuracy(S),
    }


def forward_transfer(ahead: Sequence[float | None], classes: Sequence[int]) -> float | None:
    """FWT: the mean over tasks of the accuracy on the next one before it is learned, less that of guessing.

    `ahead[t]` is the accuracy on task t + 1 after task t, among `classes[t]` classes; None where that task has classes
    that are new, on which no answer can be right. Then there is no FWT, nor for one task.
    """
    gains = [value - 100 / count for value, count in zip(ahead, classes, strict=True) if value is not None]
    return float(np.mean(gains)) if gains and len(gains) == len(ahead) else None


def reliability(probability: np.ndarray, right: np.ndarray, bins: int = BINS) -> dict[str, list[float]]:
    """Return how sure and how right answers are in equally wide bins of the probability that each was given.

    Of each bin: its images, their mean probability and the share that is right, in percent; both 0 where it is empty.
    A bin has its upper edge, not its lower one.
    """
    exact = probability.astype(np.float64)
    place = np.clip(np.ceil(exact * bins).astype(int) - 1, 0, bins - 1)
    images = np.bincount(place, minlength=bins)
    sums = (np.bincount(place, weights=values, minlength=bins) for values in (exact, right.astype(np.float64)))
    confidence, accuracy = (100 * total / np.maximum(images, 1) for total in sums)
    return {"images": images.tolist(), "confidence": confidence.tolist(), "accuracy": accuracy.tolist()}


def calibration_error(bins: Mapping[str, Sequence[float]]) -> float:
    """ECE: the mean over images of the gap, in its bin of `reliability`, between how sure and how right answers are."""
    gaps = np.abs(np.subtract(bins["confidence"], bins["accuracy"]))
    return float(np.average(gaps, weights=bins["images"]))


def auroc(known: np.ndarray, unknown: np.ndarray) -> float:
    """Return how often a known image has a higher score than an unknown one, in percent; a tie counts half."""
    ranked = np.sort(unknown)
    lower, not_higher = (np.searchsorted(ranked, known, side=side) for side in ("left", "right"))
    return float(100 * (lower + not_higher).mean() / 2 / len(unknown))


def wilson(correct: int, total: int) -> tuple[float, float]:
    """Return where a share lies with 95 % confidence, in percent (Wilson, 1927), given `correct` of `total`."""
    z = 1.96  # standard deviations of a normal distribution that hold 95 % of it
    share, spread = correct / total, z * z / total
    centre = (share + spread / 2) / (1 + spread)
    half = z / (1 + spread) * (share * (1 - share) / total + spread / (4 * total)) ** 0.5
    return 100 * max(0.0, centre - half), 100 * min(1.0, centre + half)
