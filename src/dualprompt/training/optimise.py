"""Optimisers and learning rates."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dualprompt.config import TrainConfig
from dualprompt.methods.base import Batch, Method, Phase, Step
from dualprompt.methods.contract import checked_loss


@dataclass(frozen=True)
class ReadyStep:
    """A step of a method that is ready to be carried out."""

    loss_of: Callable[[Batch], Tensor]  # its gradients are averaged over all processes
    optimiser: Optimizer
    parameters: list[nn.Parameter]  # those that it moves
    clip: float | None  # largest norm of their gradient
    after: Callable[[], None] | None

    def loss(self, batch: Batch) -> Tensor:
        """Return the loss of a batch; what cannot be lowered is refused."""
        return checked_loss(self.loss_of(batch))


def effective_lr(config: TrainConfig) -> float:
    """Return the learning rate after scaling."""
    return config.lr * config.batch_size / 256 if config.lr_scale == "batch/256" else config.lr


def make_optimisers(
    method: Method,
    steps: Sequence[Step],
    config: TrainConfig,
    lr: float | None = None,
    device: torch.device | None = None,
) -> dict[str, Optimizer]:
    """Return a fresh optimiser for each name among a method's steps; see `make_optimiser`."""
    made: dict[str, Optimizer] = {}
    for name in dict.fromkeys(step.name for step in steps):
        first, *others = (step for step in steps if step.name == name)
        if any((each.parameters, each.own) != (first.parameters, first.own) for each in others):
            raise ValueError(f"steps named '{name}' share an optimiser, so they move the same parameters the same way")
        made[name] = make_optimiser(method, config, lr, device, first)
    return made


def make_optimiser(
    method: Method,
    config: TrainConfig,
    lr: float | None = None,
    device: torch.device | None = None,
    step: Step | None = None,
) -> Optimizer:
    """Return a fresh optimiser; each phase has its own, so that no momentum of old tasks moves new ones.

    Parameters that start at the same rate make a group.

    Args:
        method: whose parameters are moved.
        config: the recipe.
        lr: the phase's own learning rate, if it has one.
        device: where the parameters lie.
        step: which of them, and what differs from the recipe; None: all that train.
    """
    step = step or Step(method.loss)
    start = step.lr or lr or effective_lr(config)
    config = config.model_copy(update=step.own)
    alike: dict[float, list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in method.trainable().items():
        if not step.moves(name):
            continue
        own = method.own_lr(name)
        alike.setdefault(start if own is None else own, []).append((name, parameter))
    on_gpu = device is not None and device.type == "cuda"
    groups: list[dict[str, Any]] = [
        # On a GPU the learning rate and the step count live there, so that a recorded step can read them.
        {"params": named, "lr": torch.tensor(rate, device=device) if on_gpu else rate, "initial_lr": rate}
        for rate, named in alike.items()
    ]
    if config.optimiser == "sgd":
        return torch.optim.SGD(
            groups,
            momentum=config.momentum,
            nesterov=config.nesterov,
            weight_decay=config.weight_decay,
            fused=on_gpu,
        )
    kind = torch.optim.AdamW if config.weight_decay and config.decay == "decoupled" else torch.optim.Adam
    return kind(groups, betas=config.betas, weight_decay=config.weight_decay, fused=on_gpu, capturable=on_gpu)


def carry_over(before: Mapping[str, Optimizer], after: Mapping[str, Optimizer]) -> None:
    """Give optimisers the state of those before them, by the names of parameters, of which there may be more now."""
    for own, optimiser in after.items():
        known = {name: before[own].state[parameter] for name, parameter in _named(before[own])}
        optimiser.state.update({parameter: known[name] for name, parameter in _named(optimiser) if known.get(name)})


def _named(optimiser: Optimizer) -> Iterator[tuple[str, nn.Parameter]]:
    for group in optimiser.param_groups:
        yield from zip(group["param_names"], group["params"], strict=True)


def set_rates(optimiser: Optimizer, config: TrainConfig, done: float, cycles: int = 1, epochs: int = 1) -> None:
    """Set the learning rates for a step, `done` of the `epochs` of the phase being behind it.

    A cosine is run through `cycles` times, each time twice as long as before (SGDR, Loshchilov & Hutter, 2017).
    """
    if config.schedule == "constant" and not config.warmup_epochs:
        return
    factor = _factor(config, done, cycles, epochs)
    for group in optimiser.param_groups:
        rate = group["initial_lr"] * factor
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(rate)  # in place: a recorded step reads this tensor
        else:
            group["lr"] = rate


def _factor(config: TrainConfig, done: float, cycles: int, epochs: int) -> float:
    """Return what the learning rates are multiplied by."""
    epoch, warmup = done * epochs, config.warmup_epochs
    if epoch < warmup:
        return epoch / warmup
    if config.schedule == "constant":
        return 1.0
    if config.schedule == "steps":
        # A fraction of epochs may miss a whole number by a rounding.
        return config.gamma ** sum(epoch + 1e-9 >= milestone for milestone in config.milestones)
    if warmup:
        done = (epoch - warmup) / (epochs - warmup)
    if cycles > 1:
        at = 1 + done * (2**cycles - 1)  # the cosines begin at 1, 2, 4, …
        done = at / 2 ** math.floor(math.log2(at)) - 1
    return (1 + math.cos(math.pi * done)) / 2


def recipe_of(phase: Phase, config: TrainConfig) -> TrainConfig:
    """Return the recipe with what a phase says of optimiser and schedule above it."""
    return TrainConfig.model_validate(config.model_dump() | dict(phase.recipe)) if phase.recipe else config
