"""Teaching a model: new classes become a task of the training loop."""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from dualprompt.config import RunConfig, parse
from dualprompt.data.folder import refuse_case
from dualprompt.data.looks import Looks
from dualprompt.data.stream import Stream
from dualprompt.data.views import View
from dualprompt.errors import DualPromptError
from dualprompt.files import digest, disk_errors
from dualprompt.lessons.forgetting import bytes_of, compact
from dualprompt.lessons.task import fingerprint, held_out, state_digest, task_of
from dualprompt.methods.base import METHODS, Method, MethodConfig
from dualprompt.model.foundation import Foundation, Model
from dualprompt.model.images import ImageLike, complaint, read_some
from dualprompt.model.names import few, refuse_unprintable
from dualprompt.model.outcomes import RANKED, Outcome, measured, of_answers, of_verdicts
from dualprompt.model.predicting import answers_to
from dualprompt.model.results import TaskInfo
from dualprompt.progress import Progress
from dualprompt.run.checkpoint import State
from dualprompt.run.folder import Run
from dualprompt.run.identity import config_digest
from dualprompt.training.distributed import launch
from dualprompt.training.feed import Feed
from dualprompt.training.loop import extend
from dualprompt.training.setup import Setup

SKIP_BAD = "--skip-bad leaves them out; `dualprompt check` names all"


def trained_for(config: RunConfig, epochs: int | None) -> RunConfig:
    """Return a config with so many epochs, or its own."""
    train = config.train if epochs is None else {**config.train.model_dump(), "epochs": epochs}
    return parse(RunConfig, {**config.model_dump(), "train": train})


def refuse_known(model: Model, classes: Mapping[str, Any], again: bool) -> None:
    """Refuse names that nobody could read, and classes that are known unless they are meant to be learned `again`."""
    refuse_unprintable("class", classes)
    owner = {label: task.name for task in model.tasks for label in task.classes}
    refuse_case("the classes to learn and those known", [*owner, *classes])
    if again:
        return
    if known := [name for name in classes if name in owner]:
        listed = [f"class '{known[0]}' is", f"classes {few(known)} are"][len(known) > 1]
        apart = "" if len(known) == len(classes) else " in a folder of their own" if len(known) > 1 else " on its own"
        raise DualPromptError(
            f"{listed} known already, from task '{owner[known[0]]}', whose images are gone; add further images with "
            f"`more`{apart}, or learn them as a further expert for the same label with again=True (--again)"
        )


def refuse_alone(options: MethodConfig, classes: Mapping[str, Any]) -> None:
    """Refuse one class alone where there is nothing to tell it from."""
    if len(classes) == 1 and not options.learns_one_class:
        remedies = ["teach it with others", *options.one_class_remedies()]
        raise DualPromptError(
            f"one class alone cannot be learned by '{options.name}' with masked logits; {' or '.join(remedies)}"
        )


def read_classes(
    view: View, classes: dict[str, list[ImageLike]], skip_bad: bool, progress: Progress
) -> tuple[dict[str, list[ImageLike]], np.ndarray]:
    """Return the classes with the images that can be read, and their pixels, (images, side, side, 3) uint8.

    An image that cannot be read is refused, or with `skip_bad` left out and noted in `progress`.
    """
    labelled = [(name, image) for name, own in classes.items() for image in own]
    pixels, faults = read_some([image for _, image in labelled], view.side, view.interpolation, progress)
    left = leave_out(labelled, faults, skip_bad, progress)
    return left, pixels[[row for row in range(len(pixels)) if row not in faults]] if faults else pixels


def leave_out(
    labelled: Sequence[tuple[str, ImageLike]], faults: Mapping[int, str], skip_bad: bool, progress: Progress
) -> dict[str, list[ImageLike]]:
    """Return the images of each class without those that cannot be read.

    Args:
        labelled: all images, each with its class.
        faults: what is wrong with some, by their place.
        skip_bad: leave these out and name each, rather than refuse them all.
        progress: who is told of them.
    """
    if faults and not skip_bad:
        told = complaint(faults.values(), len(labelled))
        raise DualPromptError(f"{told} ({SKIP_BAD})")
    for reason in faults.values():
        progress.note(f"left out: {reason}")
    left: dict[str, list[ImageLike]] = {name: [] for name, _ in labelled}
    for row, (name, image) in enumerate(labelled):
        if row not in faults:
            left[name].append(image)
    if empty := [name for name, own in left.items() if not own]:
        raise DualPromptError(f"class '{empty[0]}' has no image that can be read; give some or leave it out")
    return left


@dataclass(frozen=True)
class Lesson:
    """What is to be learned: images of classes, whose `pixels` follow each other in the same order."""

    name: str
    classes: Mapping[str, Sequence[ImageLike]]
    pixels: np.ndarray
    looks: Looks | None = None  # at these images; None: nobody looks for copies

    @property
    def alike(self) -> np.ndarray | None:
        """Numbers that images share with their copies; None: no copies are known."""
        return None if self.looks is None else self.looks.alike(self.labels)

    @property
    def labels(self) -> np.ndarray:
        """The class of each image, counted from 0."""
        return np.repeat(np.arange(len(self.classes)), [len(own) for own in self.classes.values()])


def train(
    foundation: Foundation, model: Model, config: RunConfig, lesson: Lesson, work: Path, progress: Progress
) -> Model:
    """Return the model that has learned one more task by the training loop, and how well it does on images of it.

    Checkpoints go below the folder `work`, under a name made from all that decides the result, so that interrupted
    learning goes on there.
    """
    known = tuple(row for row in model.rows if row is not None)
    state = compact(foundation, model.state, model.rows).state() if model.tasks else {}
    names, labels, alone = tuple(lesson.classes), lesson.labels, METHODS[foundation.options.name].judges_itself
    alike = lesson.alike
    held = held_out(labels, names, config.seed, alike) & (not alone)
    task = task_of(len(model.tasks), lesson.name, names, len(known), lesson.pixels, labels, held, alike)
    method = _taught(foundation, config, Stream((task,), fingerprint(task), ()), state, work, progress)
    return concluded(foundation, model, lesson, method, held)


def concluded(foundation: Foundation, model: Model, lesson: Lesson, method: Method, held: np.ndarray) -> Model:
    """Return the model whose method has learned a lesson, and how well it does on images of it.

    Args:
        foundation: what the model is built on.
        model: what it knew before.
        lesson: what it has learned.
        method: that has learned it.
        held: which images were held out.
    """
    known = tuple(row for row in model.rows if row is not None)
    names = tuple(lesson.classes)
    rows = (*known, *((model.next_id, label) for label in names))
    learned = foundation.model(model.tasks, rows, model.next_id + 1, model.trust, method=method)
    info = TaskInfo(
        id=model.next_id,
        name=lesson.name,
        classes=names,
        images=len(lesson.pixels),
        learned=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        bytes=bytes_of(method, len(model.tasks)),
        accuracy=None,
        left_one_out=method.verdicts is not None and method.verdicts.left_one_out,
    )
    learned = replace(learned, tasks=(*model.tasks, info))
    found: dict[str, list[Outcome]] = {}
    for label, outcome in _judged(foundation, learned, lesson, held, len(known)):
        found.setdefault(label, []).append(outcome)
    if len(learned.network.classes) > 1:  # one class is always right
        info = measured(info, found)
    return replace(learned, tasks=(*model.tasks, info), trust={**model.trust, info.id: found})


def _taught(
    foundation: Foundation, config: RunConfig, stream: Stream, state: State, work: Path, progress: Progress
) -> Method:
    """Return a method that has learned a stream on top of a state; see `train` for the others."""
    folder = work / digest([config_digest(config), stream.fingerprint, foundation.weights.sha256, state_digest(state)])
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    fabric = launch(config)
    feed = Feed(config, foundation.view, foundation.backbones, fabric, progress)
    setup = Setup(
        config, fabric, foundation.method(), stream, feed, foundation.weights, foundation.dtype, foundation.backbones
    )
    extend(setup, Run(folder, stream.experiences[0].index, state), progress)
    if setup.method.judges_itself and setup.method.verdicts is None:  # it was learned before, by one who was killed
        shutil.rmtree(folder)
        return _taught(foundation, config, stream, state, work, progress)
    return setup.method


def _judged(
    foundation: Foundation, model: Model, lesson: Lesson, held: np.ndarray, known: int
) -> list[tuple[str, Outcome]]:
    """Return what the model says of images of its newest task that it was not made of, with their labels.

    Args:
        foundation: what the model is built on.
        model: it has learned them.
        lesson: the images.
        held: which of them were held out, where the method has not judged them itself.
        known: the number of rows of the head that were there before.
    """
    names, verdicts = tuple(lesson.classes), model.method.verdicts
    if verdicts is not None:
        truth = [names[int(label) - known] for label in verdicts.labels]
        return list(zip(truth, of_verdicts(model.network, verdicts, truth), strict=True))
    if not held.any():
        return []
    truth = [names[label] for label in lesson.labels[held]]
    return list(zip(truth, of_answers(answers_to(foundation, model, lesson.pixels[held], RANKED)), strict=True))
