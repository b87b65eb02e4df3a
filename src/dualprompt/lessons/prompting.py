"""Whether a lesson's prompts are trained: where they win on its held-out images, and within the time there is."""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Literal

from dualprompt.config import RunConfig
from dualprompt.errors import DualPromptError
from dualprompt.lessons.teaching import Lesson, train
from dualprompt.methods.base import METHODS
from dualprompt.methods.contract import Trial
from dualprompt.model.foundation import Foundation, Model
from dualprompt.model.results import PromptChoice, TaskInfo
from dualprompt.progress import Event, Progress, counted

Prompting = Literal["auto", "always", "never"]
MINUTES = 2.0  # for training prompts, unless the user says otherwise
FEWEST_HELD, FEWEST_WRONG = 20, 4  # images held out, and answered wrongly, below which nobody could tell who wins
STEP_COST = 3.0  # of training on an image, in passes over it


class OutOfTimeError(Exception):
    """The time for training prompts is over."""


class Deadline(Progress):
    """Passes events on, and raises once when the time is over."""

    def __init__(self, listener: Progress, seconds: float) -> None:
        self.listener, self.ends = listener, time.monotonic() + seconds

    def receive(self, event: Event) -> None:
        """Pass an event on."""
        self.listener.receive(event)
        if time.monotonic() > self.ends:
            self.ends = float("inf")
            raise OutOfTimeError


def teach(
    foundation: Foundation,
    model: Model,
    config: RunConfig,
    lesson: Lesson,
    work: Path,
    progress: Progress,
    prompts: Prompting,
    minutes: float | None,
) -> Model:
    """Return the model that has learned a lesson: in closed form, and with prompts where they are worth it.

    Args:
        foundation: what the model is built on.
        model: what it knows.
        config: of training.
        lesson: what it is to learn.
        work: the folder of checkpoints.
        progress: who is told how far it is.
        prompts: `auto`: where they win on held-out images; `always`; `never`.
        minutes: that training them may take; None: 2 for `auto`, no limit for `always`.
    """
    _refuse(foundation, prompts, minutes)
    if not _chooses(foundation):
        return train(foundation, model, config, lesson, work, progress)
    began = time.monotonic()
    plain = train(*_with(foundation, config, "never", model), lesson, work, progress)
    seconds = time.monotonic() - began
    if why := _why_not(config, lesson, plain, prompts, minutes, seconds):
        return _noting(plain, PromptChoice(False, why))
    limit = minutes if minutes is not None else MINUTES if prompts == "auto" else None
    watched = progress if limit is None else Deadline(progress, 60 * limit)
    try:
        tried = train(*_with(foundation, config, prompts, model), lesson, work, watched)
    except OutOfTimeError:
        return _noting(plain, PromptChoice(False, f"training them took longer than {limit:g} min; see --minutes"))
    choice = _said(tried.method.trial)
    return _noting(tried if choice.used else plain, choice)


def _refuse(foundation: Foundation, prompts: Prompting, minutes: float | None) -> None:
    if prompts not in ("auto", "always", "never"):
        raise DualPromptError(f"prompts are trained auto, always or never, found {prompts!r}")
    if minutes is not None and not 0 < minutes < 1e6:
        raise DualPromptError(f"minutes must be above 0, found {minutes}")
    if prompts != "auto" and not _chooses(foundation):
        raise DualPromptError(
            f"method '{foundation.options.name}' has no choice of prompts; leave prompts out, or make a new model with "
            "dualprompt-lda"
        )


def _chooses(foundation: Foundation) -> bool:
    return METHODS[foundation.options.name].judges_itself


def _with(
    foundation: Foundation, config: RunConfig, prompts: Prompting, model: Model
) -> tuple[Foundation, Model, RunConfig]:
    """Return what `train` begins with, where prompts are trained so."""
    options = foundation.options.model_copy(update={"prompts": prompts})
    chosen = config.model_copy(update={"method": options.model_dump(mode="json")})
    return replace(foundation, options=options), model, chosen


def _why_not(
    config: RunConfig,
    lesson: Lesson,
    plain: Model,
    prompts: Prompting,
    minutes: float | None,
    seconds: float,
) -> str | None:
    """Return why prompts are not tried, or None; `seconds` is what one pass over the images took."""
    sizes = Counter(lesson.labels.tolist())
    if prompts == "never":
        return "none were asked for"
    if not plain.method.can_train_prompts:
        return "the backbone takes none"
    if len(sizes) < 2:
        return "one class has nothing to be told from"
    if prompts == "always":
        return None
    held = sum(max(1, n // 5) for n in sizes.values() if n > 1)
    if held < FEWEST_HELD:
        return f"too few images: {held} held out could not tell whether they win"
    task = plain.tasks[-1]
    wrong = (task.held - task.correct) * held / max(task.held, 1)
    if wrong < FEWEST_WRONG:
        return f"{task.correct} of {task.held} images are right without, which leaves too little to win"
    needed = seconds * (0.8 * STEP_COST * config.train.epochs + 2) / 60
    limit = MINUTES if minutes is None else minutes
    return f"training them would take about {needed:.0f} min; see --minutes" if needed > limit else None


def _said(trial: Trial | None) -> PromptChoice:
    if trial is None:
        return PromptChoice(False, "no image could be held out")
    gain = 100 * (trial.with_prompts - trial.without) / max(trial.held, 1)
    why = f"{gain:+.1f} points on {counted(trial.held, 'held-out image')}"
    why += "" if trial.kept else ", no more than chance" if gain > 0 else ", so they were left out"
    return PromptChoice(trial.kept, why, trial.held, trial.without, trial.with_prompts)


def _noting(model: Model, choice: PromptChoice) -> Model:
    newest: TaskInfo = replace(model.tasks[-1], prompts=choice)
    return replace(model, tasks=(*model.tasks[:-1], newest))


def learned_once(foundation: Foundation, lesson: Lesson, progress: Progress) -> Model:
    """Return a new model that has learned a lesson in closed form, of which nothing is kept on disk."""
    with tempfile.TemporaryDirectory(prefix="dualprompt-") as work:
        return train(foundation, foundation.model(), foundation.config, lesson, Path(work), progress)
