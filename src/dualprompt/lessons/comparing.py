"""Which backbone suits someone's own images: each learns them, and is judged on images left out; nothing is kept."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dualprompt.backbones import weights
from dualprompt.backbones.known import EMBEDDED, KNOWN
from dualprompt.data.looks import Looks
from dualprompt.errors import DualPromptError
from dualprompt.lessons.prompting import learned_once
from dualprompt.lessons.teaching import Lesson, read_classes
from dualprompt.methods.base import METHODS
from dualprompt.model import foundation
from dualprompt.model.images import Data, gather
from dualprompt.model.predicting import answers_to
from dualprompt.progress import Progress

TIMED = 32  # images


@dataclass(frozen=True)
class Candidate:
    """How a backbone does on someone's images."""

    backbone: str
    parameters: int
    side: int  # pixels
    images_per_second: float  # answered, on this machine
    held: int  # images, each judged by all others
    correct: int
    interval: tuple[float, float] | None  # percent, 95 %
    accuracy: float | None  # percent; None: no class has two images, or there is one class

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return asdict(self)


def at_hand() -> list[str]:
    """Return the pretrained backbones that need no download."""
    cached = [each.name for each in KNOWN.values() if each.needs_network and weights.is_here(each.name)]
    return [EMBEDDED.name, *cached]


def compare(data: Data, backbones: Sequence[str], device: str, progress: Progress) -> list[Candidate]:
    """Return how each backbone does on labelled images, best first.

    Args:
        data: what `learn` takes.
        backbones: their names; none: those at hand.
        device: where they compute.
        progress: who is told how far it is.
    """
    classes = gather(data)
    found = [_judged(classes, name, device, progress) for name in backbones or at_hand()]
    return sorted(found, key=lambda each: (-(each.accuracy or 0.0), -each.images_per_second))


def _judged(classes: dict[str, Any], name: str, device: str, progress: Progress) -> Candidate:
    progress.note(f"backbone {name}")
    defaults = METHODS["dualprompt-lda"].learner_defaults
    values = {"method": {"name": "dualprompt-lda", **defaults, "prompts": "never"}, "train": {"epochs": 1}}
    base = foundation.build(values, name, None, device, 0)
    read, pixels = read_classes(base.view, classes, False, progress)
    lesson = Lesson("compared", read, pixels, Looks.at(pixels))
    model = learned_once(base, lesson, progress)
    some = lesson.pixels[:TIMED]
    answers_to(base, model, some[:1], 1)
    began = time.perf_counter()
    answers_to(base, model, some, 1)
    speed = len(some) / max(time.perf_counter() - began, 1e-9)
    task = model.tasks[-1]
    side, size = base.view.side, base.weights.parameters
    return Candidate(name, size, side, round(speed, 1), task.held, task.correct, task.interval, task.accuracy)


def names(given: str) -> list[str]:
    """Return the backbones that a list with commas names; a name that is given twice is refused."""
    found = [name.strip() for name in given.split(",") if name.strip()]
    if len(set(found)) < len(found):
        raise DualPromptError(f"a backbone is named twice in {given}; name each once")
    return found
