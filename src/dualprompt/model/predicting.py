"""Asking a model: answers to images, how many of them are right, and from which trust on it is to be believed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from dualprompt.errors import DualPromptError, nearest
from dualprompt.methods.base import Method
from dualprompt.metrics import wilson
from dualprompt.model import outcomes
from dualprompt.model.foundation import Foundation, Model
from dualprompt.model.images import ImageLike, read_all
from dualprompt.model.outcomes import Outcomes
from dualprompt.model.results import NONE, Answer, Calibration, Evaluation, Level, Score, TaskInfo, Threshold
from dualprompt.progress import Progress, Work

BATCH = 64
ACCEPTED = (0.99, 0.98, 0.95, 0.9, 0.8, 0.7)  # shares of known images for which `calibrate` tells the threshold
ACCEPT = 0.99  # share of known images that get a class where lessons set the threshold
FEWEST_JUDGED = 20  # images that it takes for that


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
            answers.append(answer if threshold is None or answer.trust >= threshold else answer.as_none())
    return answers


def _answer(model: Model, probability: list[float], best: list[int], task: int, similarity: float) -> Answer:
    names = model.network.classes
    top = tuple(Score(names[index], value) for index, value in zip(best, probability, strict=True))
    label, matched = top[0].label, model.tasks[task]
    # A task that the image was matched to without teaching the label would contradict it.
    owner = matched if label in matched.classes else next(each for each in model.tasks if label in each.classes)
    return Answer(None, label, top[0].probability, owner.name, similarity, top)


def evaluate(
    foundation: Foundation,
    model: Model,
    classes: Mapping[str, Sequence[ImageLike]],
    threshold: float | None,
    progress: Progress,
) -> Evaluation:
    """Return how many images of each class get which label, where answers below `threshold` get none."""
    known = model.network.classes
    if strange := [name for name in classes if name not in known]:
        raise DualPromptError(f"class '{strange[0]}' is not known; {nearest(strange[0], known)}")
    view, total = foundation.view, sum(map(len, classes.values()))
    owners = {name: {task.name for task in model.tasks if name in task.classes} for name in classes}
    confusion: dict[str, dict[str, int]] = {name: {} for name in classes}
    best = matched = 0
    with progress.bar(Work("evaluating", total, "img")) as bar:
        for name, images in classes.items():
            for start in range(0, len(images), BATCH):
                pixels = read_all(images[start : start + BATCH], view.side, view.interpolation)
                for answer in answers_to(foundation, model, pixels, 1):
                    sure = threshold is None or answer.trust >= threshold
                    said = answer.top[0].label if sure else NONE
                    confusion[name][said] = confusion[name].get(said, 0) + 1
                    best += answer.top[0].label == name
                    matched += answer.task in owners[name]
                bar.advance(len(pixels))
    right = {name: row.get(name, 0) for name, row in confusion.items()}
    by_task = {}
    for task in model.tasks:
        if own := [name for name in task.classes if name in classes]:
            by_task[task.id] = 100 * sum(right[name] for name in own) / sum(len(classes[name]) for name in own)
    return Evaluation(
        images=total,
        accuracy=100 * sum(right.values()) / total,
        by_class={name: 100 * right[name] / len(images) for name, images in classes.items()},
        by_task=by_task,
        matching=100 * matched / total if model.method.selections else None,
        rejected=100 * sum(row.get(NONE, 0) for row in confusion.values()) / total,
        best=100 * best / total,
        confusion=confusion,
    )


def accuracy_matrix(tasks: Sequence[TaskInfo]) -> list[list[float | None]]:
    """Return the accuracy on each task (column) after each task (row) in percent, None where it was not measured."""
    return [
        [row.measured.get(task.id, task.accuracy if task is row else None) for task in tasks[: place + 1]]
        + [None] * (len(tasks) - place - 1)
        for place, row in enumerate(tasks)
    ]


def complete_matrix(tasks: Sequence[TaskInfo]) -> list[list[float | None]] | None:
    """Return the accuracy matrix if every task was measured after every one that came later; else None."""
    found = accuracy_matrix(tasks)
    whole = all(value is not None for place, row in enumerate(found) for value in row[: place + 1])
    return found if found and whole else None


def judged(model: Model) -> dict[str, Any] | None:
    """Return what is known of the accuracy on images held or left out, over all lessons; None: nothing."""
    confusion = outcomes.confusion(model.trust)
    counts = {label: sum(row.values()) for label, row in confusion.items()}
    right = {label: row.get(label, 0) for label, row in confusion.items()}
    held, correct = sum(counts.values()), sum(right.values())
    if not held:
        return None
    return {
        "held": held,
        "correct": correct,
        "accuracy": 100 * correct / held,
        "interval": list(wilson(correct, held)),
        "by_class": {label: {"held": n, "correct": right[label]} for label, n in counts.items()},
        "confusion": confusion,
    }


def known_scores(trust: Outcomes, accept: float) -> np.ndarray:
    """Return how sure a model was of all held-out images; refuse what no threshold can be made from."""
    if not 0 < accept <= 1:
        raise DualPromptError(f"accept must be above 0 and at most 1, found {accept}")
    scores = _scores(trust)[0]
    if not len(scores):
        raise DualPromptError(
            "no images were held out: every class had too few of them; teach more of each (`dualprompt more`), or set "
            "the learner's threshold in Python (0 to 1)"
        )
    return scores


def _scores(trust: Outcomes) -> tuple[np.ndarray, np.ndarray]:
    """Return how sure it was of the images of known classes, and of the same if their class had not been known."""
    found = [each for task in trust.values() for own in task.values() for each in own]
    strange = [each.strange for each in found if each.strange is not None]
    return np.array([each.trust for each in found]), np.array(strange)


def calibration(trust: Outcomes, given: np.ndarray | None, accept: float) -> Calibration:
    """Return the threshold above which `accept` of the known images lie, and what it and others do to unknown ones.

    Those are the images `given`, by their trust, or else those of known classes, as if theirs were not known.
    """
    known = known_scores(trust, accept)
    unknown = _scores(trust)[1] if given is None else given
    levels = []
    for level in sorted({float(np.quantile(known, 1 - share, method="lower")) for share in {*ACCEPTED, accept}}):
        refused = 100 * float(np.mean(unknown < level)) if len(unknown) else None
        levels.append(Level(level, 100 * float(np.mean(known >= level)), refused))
    threshold = float(np.quantile(known, 1 - accept, method="lower"))
    return Calibration(threshold, len(known), len(unknown), given is not None, tuple(levels))


def by_lessons(trust: Outcomes) -> Threshold:
    """Return the threshold that what was learned calls for; none where too few images were judged."""
    enough = sum(len(own) for task in trust.values() for own in task.values()) >= FEWEST_JUDGED
    return Threshold(calibration(trust, None, ACCEPT).threshold if enough else None)


def trade_off(trust: Outcomes, threshold: float | None) -> dict[str, Any] | None:
    """Return how many of the images held or left out a threshold gives a class, and to how many unknown ones none."""
    known, unknown = _scores(trust)
    if threshold is None or not len(known):
        return None
    refused = 100 * float(np.mean(unknown < threshold)) if len(unknown) else None
    accepted = 100 * float(np.mean(known >= threshold))
    return {"known": len(known), "accepted": accepted, "unknown": len(unknown), "rejected": refused}
