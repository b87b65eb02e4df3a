"""Which labels the other images doubt: each image is classified by all but itself, from frozen features."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

FEWEST = 3  # images of a class, below which its others cannot speak for or against one
RIDGES = tuple(float(10.0**power) for power in range(-3, 4))  # of features of mean square 1, to choose from


@dataclass(frozen=True)
class Doubt:
    """An image that the others take for another class."""

    row: int
    instead: int  # the class that they take it for
    margin: float  # by how much its score is above that of the image's own class


def doubts(features: np.ndarray, labels: np.ndarray) -> tuple[list[Doubt], float]:
    """Return the images whose label the others doubt, the clearest first, and the percent of labels they agree with.

    `features` are (images, dim), `labels` (images,). An image is doubted where another class scores best, and at least
    as high as that class's own images do on average (confident learning: Northcutt et al., 2021). Scores are those of
    a ridge regression on all images but this one.
    """
    names, own = np.unique(labels, return_inverse=True)
    counts = np.bincount(own)
    if len(names) < 2 or len(labels) < FEWEST:
        return [], 100.0
    scores = _left_out_scores(features.astype(np.float64), np.eye(len(names))[own])
    rows = np.arange(len(labels))
    mine = scores[rows, own]
    usual = np.bincount(own, weights=mine) / counts
    best = scores.argmax(axis=1)
    doubted = (best != own) & (scores[rows, best] >= usual[best]) & (counts[own] >= FEWEST) & (counts[best] >= FEWEST)
    margins = scores[rows, best] - mine
    order = sorted(np.flatnonzero(doubted).tolist(), key=lambda row: -margins[row])
    found = [Doubt(row, int(names[best[row]]), float(margins[row])) for row in order]
    return found, 100 * float(np.mean(best == own))


def _left_out_scores(features: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Return what a ridge regression on all other images gives each one; the ridge with the least error is taken.

    In closed form: leaving an image out changes its residual by a factor of 1 / (1 - h), h its leverage.
    """
    centred = features - features.mean(axis=0)
    centred = centred / max(float(np.sqrt((centred**2).mean())), 1e-12)
    left, singular, _ = np.linalg.svd(centred, full_matrices=False)
    along, mean = left.T @ targets, targets.mean(axis=0)
    best, least = targets, np.inf
    for ridge in RIDGES:
        kept = singular**2 / (singular**2 + ridge * len(features))
        leverage = (left**2) @ kept + 1 / len(features)
        residual = (targets - mean - left @ (kept[:, None] * along)) / np.maximum(1 - leverage, 1e-9)[:, None]
        error = float((residual**2).mean())
        if error < least:
            best, least = targets - residual, error
    return best
