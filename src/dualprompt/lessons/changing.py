"""Changing what a model knows without teaching it new classes: more images of a class, another name, one of several."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from dualprompt.data.folder import one_form, refuse_case
from dualprompt.data.images import Images
from dualprompt.data.looks import Looks
from dualprompt.data.stream import Experience, Subset
from dualprompt.errors import DualPromptError, nearest
from dualprompt.lessons.forgetting import compact
from dualprompt.lessons.task import held_out, tensor_of
from dualprompt.methods.base import METHODS
from dualprompt.model import outcomes
from dualprompt.model.foundation import Foundation, Model
from dualprompt.model.images import ImageLike
from dualprompt.model.names import refuse_unprintable
from dualprompt.model.network import HeadRow
from dualprompt.model.predicting import BATCH, answers_to, asking
from dualprompt.model.results import TaskInfo
from dualprompt.progress import Progress
from dualprompt.training.distributed import launch
from dualprompt.training.feed import Feed
from dualprompt.training.select import task_view


def refuse_unknown(model: Model, labels: Sequence[str]) -> None:
    """Refuse a class that the model does not know."""
    known = model.network.classes
    if strange := [label for label in labels if label not in known]:
        raise DualPromptError(
            f"class '{strange[0]}' is not known; {nearest(strange[0], known)}; new classes are taught with `learn`, "
            "in a folder of their own"
        )


def rename(foundation: Foundation, model: Model, old: str, new: str) -> Model:
    """Return a model in which a class is called otherwise."""
    old, new = one_form(old), one_form(new)
    refuse_unknown(model, [old])
    if new != old and new in model.network.classes:
        raise DualPromptError(f"a class is called '{new}' already; give another name, or make them one with `merge`")
    return _called(foundation, model, [old], new)


def merge(foundation: Foundation, model: Model, classes: Sequence[str], into: str) -> Model:
    """Return a model in which several classes are one, called `into`, which may be one of them or another class.

    Their rows stay, and their probabilities add up: nothing is learned, and no other class is answered otherwise.
    """
    into, known = one_form(into), model.network.classes
    labels = list(dict.fromkeys(map(one_form, classes)))
    refuse_unknown(model, labels)
    if into in known and into not in labels:
        labels.append(into)
    if len(labels) < 2:
        raise DualPromptError(f"'{labels[0]}' alone cannot be merged; name two classes, or `rename` it")
    return _called(foundation, model, labels, into)


def _called(foundation: Foundation, model: Model, labels: Sequence[str], name: str) -> Model:
    """Return a model in which these classes have one name."""
    refuse_unprintable("class", [name])
    refuse_case("the classes", [*(label for label in model.network.classes if label not in labels), name])
    new = dict.fromkeys(labels, name)
    rows = tuple(row and (row[0], new.get(row[1], row[1])) for row in model.rows)
    tasks = tuple(
        replace(task, classes=tuple(dict.fromkeys(new.get(label, label) for label in task.classes)))
        for task in model.tasks
    )
    trust = outcomes.renamed(model.trust, new)
    tasks = tuple(outcomes.remeasured(task, trust) for task in tasks)
    return foundation.model(tasks, rows, model.next_id, trust, state=model.state)


def more(
    foundation: Foundation,
    model: Model,
    classes: Mapping[str, Sequence[ImageLike]],
    pixels: np.ndarray,
    looks: Looks,
    progress: Progress,
) -> tuple[Model, tuple[TaskInfo, ...]]:
    """Return a model that has added images to known classes, and the tasks that these are of; its method takes more.

    `classes` name the images of each class, whose `pixels` follow each other in the same order; `looks` are at these.
    Some are held out, as in a lesson, unless the method leaves one out after the other. An image of a class with
    several rows goes to the row that it fits best.
    """
    config, names = foundation.config, tuple(classes)
    alive: tuple[HeadRow, ...] = tuple(row for row in model.rows if row is not None)
    state = compact(foundation, model.state, model.rows).state()
    before = foundation.model(model.tasks, alive, model.next_id, model.trust, state)
    labels = np.repeat(np.arange(len(names)), [len(own) for own in classes.values()])
    alike = looks.alike(labels)
    held = held_out(labels, names, config.seed, alike) & (not METHODS[foundation.options.name].judges_itself)
    rows = _rows_of(foundation, before, pixels, [names[label] for label in labels])
    method = foundation.method(state)
    feed = Feed(config, foundation.view, foundation.backbones, launch(config), progress)
    method.eval()
    shared = looks.alike(rows)  # copies of one class may fit different rows best
    task = _experience(
        len(model.tasks), alive, pixels[~held], rows[~held], tensor_of(None if shared is None else shared[~held])
    )
    method.more(task_view(task, method, feed, None))
    added = foundation.model(model.tasks, alive, model.next_id, model.trust, method=method)
    return _noted(foundation, added, pixels, rows, held)


def _experience(
    index: int, rows: Sequence[HeadRow], pixels: np.ndarray, labels: np.ndarray, alike: torch.Tensor | None
) -> Experience:
    """Return images of known rows of the head as what a method is shown."""
    trained = Subset(Images.from_array(pixels), torch.arange(len(pixels)), torch.from_numpy(labels), alike=alike)
    none = Subset(trained.images, trained.indices[:0], trained.labels[:0])
    own = tuple(int(label) for label in np.unique(labels))
    names = tuple(rows[label][1] for label in own)
    return Experience(index, "more", own, (), tuple(range(len(rows))), names, trained, none, none)


def _rows_of(foundation: Foundation, model: Model, pixels: np.ndarray, truth: Sequence[str]) -> np.ndarray:
    """Return the row of the head that each image belongs to, of those of its label the likeliest, (images,)."""
    rows = {label: [i for i, row in enumerate(model.rows) if row and row[1] == label] for label in dict.fromkeys(truth)}
    found = np.array([rows[label][0] for label in truth], dtype=np.int64)
    several = np.array([i for i, label in enumerate(truth) if len(rows[label]) > 1], dtype=np.int64)
    for start in range(0, len(several), BATCH):
        part = several[start : start + BATCH]
        with asking(model.method):
            logits = model.method.answer(foundation.batch(pixels[part])).logits.cpu()
        for i, scores in zip(map(int, part), logits, strict=True):
            own = rows[truth[i]]
            found[i] = own[int(scores[own].argmax())]
    return found


def _noted(
    foundation: Foundation, model: Model, pixels: np.ndarray, rows: np.ndarray, held: np.ndarray
) -> tuple[Model, tuple[TaskInfo, ...]]:
    """Return a model that knows of more images, and how it answers those held out; and the tasks that they are of.

    Args:
        foundation: what the model is built on.
        model: it has added them.
        pixels: of the images.
        rows: of the head, one an image.
        held: which images were held out.
    """
    owners = [row for i in rows if (row := model.rows[i]) is not None]
    trust = {number: {label: list(own) for label, own in task.items()} for number, task in model.trust.items()}
    for (number, label), outcome in _judged(foundation, model, pixels[held], rows[held]):
        trust.setdefault(number, {}).setdefault(label, []).append(outcome)
    count = Counter(number for number, _ in owners)
    tasks = tuple(
        outcomes.remeasured(replace(task, images=task.images + count[task.id]), trust) if task.id in count else task
        for task in model.tasks
    )
    return replace(model, tasks=tasks, trust=trust), tuple(task for task in tasks if task.id in count)


def _judged(
    foundation: Foundation, model: Model, pixels: np.ndarray, rows: np.ndarray
) -> list[tuple[HeadRow, outcomes.Outcome]]:
    """Return what is said of images that a model was not made of, with the rows of the head that they are of."""
    verdicts = model.method.verdicts
    if verdicts is not None:
        rows = verdicts.labels.cpu().numpy()
    owners = [row for i in rows if (row := model.rows[i]) is not None]
    if verdicts is not None:
        found = outcomes.of_verdicts(model.network, verdicts, [label for _, label in owners])
    else:
        answers = answers_to(foundation, model, pixels, outcomes.RANKED) if len(pixels) else []
        found = outcomes.of_answers(answers)
    return list(zip(owners, found, strict=True))
