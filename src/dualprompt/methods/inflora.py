"""InfLoRA (Liang & Li, 2024): a low-rank change a task, of inputs only that old tasks do not have."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from pydantic import Field, model_validator
from torch import Tensor

from dualprompt.backbones.base import BackboneSource, LayerPrompt, LowRank, Prompts
from dualprompt.methods.adaptation import AttentionLinear, LowRanks
from dualprompt.methods.adapted import LowRankAdapted, MergingConfig
from dualprompt.methods.base import METHODS, Defaults, Grid, TaskView, numbered
from dualprompt.methods.statistics import TensorList, precise

CHANGED: tuple[AttentionLinear, ...] = ("k", "v")  # they read the same inputs


class InfLoRAConfig(MergingConfig):
    """Options of `inflora`; the defaults are the paper's for Split CIFAR-100."""

    name: str = "inflora"
    rank: int = Field(default=10, ge=1, le=1024, description="r, rank of a task's change")
    first_threshold: float = Field(
        default=0.95, gt=0, le=1, description="ε after the first task: share of the inputs that the old space holds"
    )
    last_threshold: float = Field(default=1.0, gt=0, le=1, description="what ε rises towards, but does not reach")
    horizon: int = Field(
        default=10, ge=1, le=10**6, description="tasks in which ε rises, each by one of so many steps; then it stays"
    )

    def threshold(self, task: int) -> float:
        """Return ε after a task, counted from 0.

        At 1 the old space would be all of it: a further task would have no inputs of its own, and A be drawn by chance.
        """
        done = min(task, self.horizon - 1) / self.horizon
        return self.first_threshold + done * (self.last_threshold - self.first_threshold)

    @model_validator(mode="after")
    def _rising(self) -> InfLoRAConfig:
        if self.last_threshold < self.first_threshold:
            raise ValueError("last_threshold is less than first_threshold; the space of old inputs cannot shrink")
        return self


@METHODS.register("inflora")
class InfLoRA(LowRankAdapted[InfLoRAConfig]):
    """W_k and W_v become W + Σ_t B_t A_t. A_t is chosen before a task, and B_t trained.

    The rows of A_t are the main directions of the task's inputs without what lies in the space of old inputs, so that
    training B_t does not change what old tasks' images give.
    """

    summary = "a low-rank change a task, chosen so that it does not reach the inputs of old tasks"
    grid: ClassVar[Grid] = {"train.lr": (0.0005, 0.002), "method.first_threshold": (0.95, 0.98)}
    defaults: ClassVar[Defaults] = {"train": {"lr": 0.0005, "lr_scale": "none", "schedule": "cosine"}}

    def __init__(self, config: InfLoRAConfig, backbone: BackboneSource) -> None:
        super().__init__(config, backbone)
        self.old = TensorList()  # a basis of old inputs of each adapted layer, (dim, directions)

    def new_adaptation(self) -> LowRanks:
        """Return changes of W_k and W_v."""
        return LowRanks(self.backbone, self.config.layers, self.config.rank, CHANGED)

    def changes(self) -> Prompts:
        """Return the sum of all tasks' changes."""
        return self.adaptation.summed()

    @torch.no_grad()
    def begin_task(self, task: TaskView) -> None:
        """Add a change whose A is chosen from the task's inputs; only its B trains."""
        self.adaptation.grow(task.generator)
        down = self.adaptation.sets_of("down")[-1].requires_grad_(False)
        for number, second_moment in enumerate(self._inputs(task)):
            old = precise(self.old[number]) if len(self.old) else None
            chosen = main_directions(second_moment, old, self.config.rank)
            down[number] = (chosen.T / 3**0.5).to(down)  # for k and for v
        super().begin_task(task)

    @torch.no_grad()
    def end_task(self, task: TaskView) -> None:
        """Add to the spaces of old inputs what they lack of the task's."""
        threshold = self.config.threshold(task.index)
        known = [precise(each) for each in self.old] or [None] * len(self.adaptation.at)
        moments = self._inputs(task)
        self.old.restore([extended(old, each, threshold) for old, each in zip(known, moments, strict=True)])

    def _inputs(self, task: TaskView) -> list[Tensor]:
        """Return, in float64, Σ x xᵀ over all tokens x of the task's images that enter each layer's attention."""
        probes = {}
        for layer, prompt in self.changes().items():
            assert prompt.deltas is not None
            change = prompt.deltas["k"]
            total = change.down.new_zeros(self.backbone.dim, self.backbone.dim)
            probes[layer] = Probe(change.down, change.up, change.scale, total=total), prompt.deltas["v"]
        prompts = {layer: LayerPrompt(deltas={"k": k, "v": v}) for layer, (k, v) in probes.items()}
        for batch in task.batches():
            self.backbone.rest(self.tokens(batch), self.shared_layers, prompts)
        return [precise(probe.total) for probe, _ in probes.values()]

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Take over the changes, the spaces of old inputs and the head."""
        super().load_state(state)
        self.old.restore(numbered(state, "old"))


@dataclass(frozen=True)
class Probe(LowRank):
    """A change that also adds up x xᵀ of the tokens x that it is asked for."""

    total: Tensor = field(kw_only=True)

    def __call__(self, x: Tensor) -> Tensor:
        """Return ΔW x."""
        rows = x.flatten(0, 1).float()
        self.total.add_(rows.T @ rows)
        return super().__call__(x)


def main_directions(second_moment: Tensor, old: Tensor | None, count: int) -> Tensor:
    """Return the main directions, (dim, count), of Σ x xᵀ without its part in the space of `old`, (dim, directions)."""
    left = second_moment if old is None else second_moment - old @ (old.T @ second_moment)
    return torch.linalg.svd(left).U[:, :count]


def extended(old: Tensor | None, second_moment: Tensor, threshold: float) -> Tensor:
    """Return a basis of old inputs with as many new directions as make it hold a share of new ones.

    It is the share of the squared singular values of Σ x xᵀ, as in the authors' code.
    """
    total = torch.linalg.matrix_norm(second_moment).square()
    left = second_moment if old is None else second_moment - old @ (old.T @ second_moment)
    found = torch.linalg.svd(left)
    missing = found.S.square()
    # How much the space holds before each direction is added: it is added where that is not enough.
    held = 1 - (missing.sum() - missing.cumsum(0) + missing) / total.clamp_min(1e-30)
    # What is left by rounding alone has no direction of its own; it may lie in the old space.
    real = found.S.square() > total * (len(found.S) * torch.finfo(found.S.dtype).eps) ** 2
    fresh = found.U[:, : min(int((held < threshold).sum()), int(real.sum()))]
    return fresh if old is None else torch.cat([old, fresh], dim=1)
