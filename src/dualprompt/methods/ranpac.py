"""RanPAC (McDonnell et al., 2023): frozen features, a random projection, and class prototypes by ridge regression.

The original first adapts the backbone on the first task with adapters; that phase is left out here: what is compared
is the projection and the closed-form classifier on the same frozen features as every other method.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from dualprompt.backbones.vit import VisionTransformer
from dualprompt.methods.base import METHODS, Batch, Grid, MethodConfig, Phase, TaskView, below
from dualprompt.methods.frozen_head import FrozenHead
from dualprompt.methods.heads import GrowingHead
from dualprompt.methods.ridge import Ridge
from dualprompt.methods.statistics import generator_for


class RanPACConfig(MethodConfig):
    """Options of `ranpac`. No logits are trained, so a task may have one class."""

    name: str = "ranpac"
    training_logits: Literal["masked", "unmasked"] = "unmasked"
    projection: int = Field(
        default=2000,
        ge=1,
        description="M; the state holds M² numbers, so the paper's 10000 weighs 400 MB and 2000 weighs 16 MB",
    )
    strength: float | None = Field(default=None, gt=0, description="λ (default: chosen on a fifth of each task)")


@METHODS.register("ranpac")
class RanPAC(FrozenHead):
    """Ridge regression on randomly projected frozen features: the order of tasks does not matter to its sums."""

    Config = RanPACConfig
    summary = "random projection of frozen features and ridge regression; no training"
    grid: ClassVar[Grid] = {"method.projection": (2000, 1000, 500, 4000)}
    of_task: ClassVar[Mapping[str, int | None]] = {**FrozenHead.of_task, "ridge.sums": 1}
    config: RanPACConfig
    projection: Tensor

    def __init__(self, config: MethodConfig, backbone: VisionTransformer) -> None:
        assert isinstance(config, RanPACConfig)
        super().__init__(config, backbone)
        self.head = GrowingHead(config.projection)
        self.register_buffer("projection", torch.zeros(backbone.config.dim, config.projection))
        self.ridge = Ridge(config.projection, self._expand)

    def phases(self, task: TaskView) -> Sequence[Phase]:
        """Return none: there are no gradient steps."""
        return ()

    def begin_task(self, task: TaskView) -> None:
        """Draw the projection (first task), add the task's rows to the head."""
        if task.index == 0:
            self.projection.copy_(torch.randn(self.projection.shape, generator=task.generator))
        super().begin_task(task)

    def _expand(self, features: Tensor) -> Tensor:
        return (features.float() @ self.projection).relu()

    def features(self, batch: Batch) -> Tensor:
        """Return the projected features, (batch, M)."""
        return self._expand(super().features(batch))

    @torch.no_grad()
    def end_task(self, task: TaskView) -> None:
        """Add the task to the sums and solve for the head of all classes."""
        labels = task.labels - task.first_class
        generator = generator_for(task, "ridge")
        weights = self.ridge.add(task.queries(), labels, task.classes, self.config.strength, generator)
        self.head.restore(weights, list(self.head.bias), train_old=False)

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Take over the projection, the sums and the head."""
        super().load_state(state)
        self.projection.copy_(state["projection"])
        self.ridge.restore(below("ridge.", state))
