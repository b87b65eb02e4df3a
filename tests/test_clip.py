"""Gradient clipping in the real loop: the norm over all parameters together is what was asked for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dualprompt.config import compose
from dualprompt.methods.base import Batch, TaskView
from dualprompt.methods.finetune import FineTuneConfig, FineTuneSequential
from dualprompt.run.folder import Run
from dualprompt.training import group
from dualprompt.training.loop import train
from dualprompt.training.setup import prepare
from sandbox import World

LR, HEAD_LR = 0.5, 0.125  # powers of two: the step tells the gradient


class Watched(FineTuneSequential):
    """Keeps the weights that each task's only step began with, and those it led to."""

    def begin_task(self, task: TaskView) -> None:
        super().begin_task(task)
        with torch.no_grad():  # a head of zeros would leave the backbone without a gradient
            for parameter in self.head.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=task.generator))
        self.taken = 0

    def loss(self, batch: Batch) -> Tensor:
        self.taken += 1
        self.before = {name: value.detach().clone() for name, value in self.trainable().items()}
        return super().loss(batch)

    def end_task(self, task: TaskView) -> None:
        assert self.taken == 1
        if task.index == 0:
            self.moved = {name: self.before[name] - value.detach() for name, value in self.trainable().items()}
        super().end_task(task)


def gradients(world: World, folder: Path, clip: float | None, head_lr: float | None) -> dict[str, Tensor]:
    """Return the gradient that the optimiser was given in the first step, from how far it went: lr times that."""
    overrides: dict[str, Any] = {"method.name": "ft-seq", "method.head_lr": head_lr, "train.clip": clip}
    overrides |= {"train.optimiser": "sgd", "train.lr": LR, "train.lr_scale": "none", "train.schedule": "constant"}
    overrides |= {"train.weight_decay": 0.0, "train.epochs": 1, "train.batch_size": 13, "benchmark.tasks": 3}
    config = group.plan([compose(str(world.preset), None, overrides)], baseline=False)[0].config
    setup = prepare(config)
    method = Watched(FineTuneConfig.model_validate(config.method), setup.method.backbone)
    run = Run.create(folder, config, setup.stream, setup.weights, setup.precision)
    train(replace(setup, method=method), run)
    rates = {name: head_lr if head_lr is not None and name.startswith("head.") else LR for name in method.moved}
    return {name: moved / rates[name] for name, moved in method.moved.items()}


def norm(gradients: dict[str, Tensor]) -> float:
    return float(torch.cat([value.flatten() for value in gradients.values()]).double().norm())


@pytest.mark.parametrize("head_lr", [None, HEAD_LR], ids=["one group", "two groups"])
def test_the_global_norm_is_what_was_asked_for(head_lr: float | None, world: World, tmp_path: Path) -> None:
    plain = gradients(world, tmp_path / "plain", None, head_lr)
    whole = norm(plain)
    parts = [norm({n: g for n, g in plain.items() if n.startswith("head.") == head}) for head in (True, False)]
    assert min(parts) > 0.05 * whole, "if one group had all of the norm, clipping each apart would look the same"
    asked = whole / 4
    clipped = gradients(world, tmp_path / "clipped", asked, head_lr)
    assert norm(clipped) == pytest.approx(asked, rel=1e-4)
    for name, gradient in plain.items():  # shorter, in the same direction
        torch.testing.assert_close(clipped[name], gradient / 4, rtol=1e-3, atol=2e-5 * whole, msg=name)
    loose = gradients(world, tmp_path / "loose", 2 * whole, head_lr)
    assert all(torch.equal(loose[name], gradient) for name, gradient in plain.items())


def test_a_tiny_norm_all_but_stops_learning(world: World, tmp_path: Path) -> None:
    assert norm(gradients(world, tmp_path / "run", 1e-3, HEAD_LR)) == pytest.approx(1e-3, rel=0.05)
