"""Asking a model: answers to images, how many of them are right, and from which trust on it is to be believed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch

from dualprompt.errors import DualPromptError, nearest
from dualprompt.methods.base import Method
from dualprompt.model.foundation import Foundation, Model, Trust
from dualprompt.model.images import ImageLike, read_all
from dualprompt.model.results import Answer, Calibration, Evaluation, Level, Score, TaskInfo
from dualprompt.model.task import FEWEST
from dualprompt.progress import Progress, Work

BATCH = 64
ACCEPTED = (0.99, 0.98, 0.95, 0.9, 0.8, 0.7)  # shares of known images for which `calibrate` tells the threshold


@contextmanager
def asking(method: Method) -> Iterator[None]:
    """Spare the bookkeeping for gradients; in inference mode a method that predicts with them could not take any."""
    with torch.inference_mode(not method.predicts_with_gradients), torch.no_grad():
        yield


def answers_to(
    foundation: Foundation,
    model: Model,
    pixels: np.ndarray,
    top_k: int,
    batch_size: int = BATCH,
    threshold: float | None = None,
) -> list[Answer]:
    """Return the answers to images, (images, side, side, 3) uint8, `batch_size` at a time.

    Each names the `top_k` best classes. Below the `threshold` of trust the label is None; without one, never.
    """
    if top_k < 1:
        raise DualPromptError(f"top_k must be at least 1, found {top_k}")
    answers: list[Answer] = []
    for start in range(0, len(pixels), batch_size):
        part = torch.from_numpy(np.ascontiguousarray(pixels[start : start + batch_size])).to(foundation.device)
        with asking(model.method):
            logits, tasks, similarity = model.network(part)
            probability, best = logits.softmax(dim=1).topk(min(top_k, logits.shape[1]), dim=1)
        for values in zip(*(t.tolist() for t in (probability, best, tasks, similarity)), strict=True):
            answer = _answer(model, *values)
            known = threshold is None or answer.trust >= threshold
            answers.append(answer if known else replace(answer, label=None))
    return answers


def _answer(model: Model, probability: list[float], best: list[int], task: int, similarity: float) -> Answer:
    names = model.network.classes
    top = tuple(Score(names[index], value) for index, value in zip(best, probability, strict=True))
    return Answer(None, top[0].label, top[0].probability, model.tasks[task].name, similarity, top)


def evaluate(
    foundation: Foundation,
    model: Model,
    classes: Mapping[str, Sequence[ImageLike]],
    threshold: float | None,
    progress: Progress,
) -> Evaluation:
    """Return how many images of each class get its label, where answers below `threshold` get none."""
    known = model.network.classes
    if strange := [name for name in classes if name not in known]:
        raise DualPromptError(f"class '{strange[0]}' is not known; {nearest(strange[0], known)}")
    view = foundation.view
    owners = {name: {task.name for task in model.tasks if name in task.classes} for name in classes}
    by_class, right, matched, rejected = {}, 0, 0, 0
    total = sum(map(len, classes.values()))
    with progress.bar(Work("evaluating", total, "img")) as bar:
        for name, images in classes.items():
            correct = 0
            for start in range(0, len(images), BATCH):
                pixels = read_all(images[start : start + BATCH], view.side, view.interpolation)
                for answer in answers_to(foundation, model, pixels, 1, threshold=threshold):
                    correct += answer.label == name
                    matched += answer.task in owners[name]
                    rejected += answer.label is None
                bar.advance(len(pixels))
            by_class[name] = 100 * correct / len(images)
            right += correct
    matching = 100 * matched / total if model.method.selections else None
    by_task = {}
    for task in model.tasks:
        counts = {name: len(classes[name]) for name in task.classes if name in classes}
        if counts:
            by_task[task.id] = sum(by_class[name] * n for name, n in counts.items()) / sum(counts.values())
    return Evaluation(total, 100 * right / total, by_class, by_task, matching, 100 * rejected / total)


def accuracy_matrix(tasks: Sequence[TaskInfo]) -> list[list[float | None]]:
    """Return the accuracy on each task (column) after each task (row) in percent, None where it was not measured."""
    return [
        [row.measured.get(task.id, task.accuracy if task is row else None) for task in tasks[: place + 1]]
        + [None] * (len(tasks) - place - 1)
        for place, row in enumerate(tasks)
    ]


def known_scores(trust: Trust, accept: float) -> np.ndarray:
    """Return how sure a model was of all held-out images; refuse what no threshold can be made from."""
    if not 0 < accept <= 1:
        raise DualPromptError(f"accept must be above 0 and at most 1, found {accept}")
    scores = np.array([score for task in trust.values() for own in task.values() for score in own])
    if not len(scores):
        raise DualPromptError(
            f"no images were held out: every class had fewer than {FEWEST}; set threshold yourself (0 to 1)"
        )
    return scores


def calibration(known: np.ndarray, unknown: np.ndarray, accept: float) -> Calibration:
    """Return the threshold above which `accept` of the known images lie, and what it and others do to unknown ones."""
    levels = []
    for level in sorted({float(np.quantile(known, 1 - share, method="lower")) for share in {*ACCEPTED, accept}}):
        refused = 100 * float(np.mean(unknown < level)) if len(unknown) else None
        levels.append(Level(level, 100 * float(np.mean(known >= level)), refused))
    threshold = float(np.quantile(known, 1 - accept, method="lower"))
    return Calibration(threshold, len(known), len(unknown), tuple(levels))
