"""What training takes: what a step of a phase works with, and the time and images that went into a task."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn
from torch.optim import Optimizer

from dualprompt.config import TrainConfig
from dualprompt.methods.base import Method, Step, TaskView
from dualprompt.training.distributed import distribute
from dualprompt.training.loader import Loader
from dualprompt.training.optimise import ReadyStep, carry_over, make_optimisers, recipe_of

if TYPE_CHECKING:
    from lightning_fabric import Fabric


@dataclass
class Trained:
    """What a task's training took."""

    seconds: float = 0.0
    images: int = 0  # of this process

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Add the seconds that something takes."""
        began = time.monotonic()
        yield
        self.seconds += time.monotonic() - began


@dataclass(frozen=True)
class PhaseWork:
    """A phase that is being trained: what a step works with."""

    task: TaskView
    recipe: TrainConfig
    epochs: int
    loader: Loader
    steps: list[ReadyStep]  # of each batch, in order
    optimisers: dict[str, Optimizer]  # by the name that steps which share one have in common
    parameters: list[nn.Parameter]  # all that train


def prepared(method: Method, view: TaskView, loader: Loader, epochs: int, before: PhaseWork | None = None) -> PhaseWork:
    """Return what a step of a phase works with, with optimisers for what the method now trains.

    Args:
        method: who trains.
        view: what it knows of the task.
        loader: what makes the phase's batches.
        epochs: how long the phase is.
        before: the same phase before more parameters came, whose optimisers' state is taken over.
    """
    phase, fabric = loader.phase, loader.feed.fabric
    recipe, steps = recipe_of(phase, loader.feed.config.train), method.steps(phase)
    optimisers = make_optimisers(method, steps, recipe, phase.lr, fabric.device)
    if before is not None:
        carry_over(before.optimisers, optimisers)
    ready, parameters = _ready(method, steps, optimisers, recipe, fabric), list(method.trainable().values())
    return PhaseWork(view, recipe, epochs, loader, ready, optimisers, parameters)


def _ready(
    method: Method, steps: Sequence[Step], optimisers: dict[str, Optimizer], recipe: TrainConfig, fabric: Fabric
) -> list[ReadyStep]:
    """Return a method's steps with all that carrying them out takes."""
    losses = distribute(fabric, method, [step.loss for step in steps])
    trainable = method.trainable()
    return [
        ReadyStep(
            loss_of,
            optimisers[step.name],
            [parameter for name, parameter in trainable.items() if step.moves(name)],
            recipe.clip if step.clip is None else step.clip,
            step.after,
        )
        for step, loss_of in zip(steps, losses, strict=True)
    ]
