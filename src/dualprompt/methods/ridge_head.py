"""Ridge regression of one-hot labels on the frozen features themselves: RanPAC without its projection."""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from dualprompt.backbones.base import BackboneSource
from dualprompt.methods.base import METHODS, Grid, TaskView, below
from dualprompt.methods.closed_form import ClosedForm, ClosedFormConfig
from dualprompt.methods.heads import with_one
from dualprompt.methods.ownership import OfTask
from dualprompt.methods.ridge import Ridge
from dualprompt.methods.statistics import generator_for


class RidgeHeadConfig(ClosedFormConfig):
    """Options of `ridge`."""

    name: str = "ridge"
    strength: float | None = Field(default=None, gt=0, description="λ (default: chosen on a fifth of each task)")


@METHODS.register("ridge")
class RidgeHead(ClosedForm[RidgeHeadConfig]):
    """A linear head with a bias, by least squares over everything seen so far."""

    summary = "ridge regression on frozen features; no training"
    grid: ClassVar[Grid] = {}
    of_task: ClassVar[OfTask] = {**ClosedForm.of_task, "ridge.sums": 1}

    def __init__(self, config: RidgeHeadConfig, backbone: BackboneSource) -> None:
        super().__init__(config, backbone)
        self.ridge = Ridge(self.backbone.dim + 1, with_one)

    @torch.no_grad()
    def end_task(self, task: TaskView) -> None:
        """Add the task to the sums and solve for the head of all classes."""
        self._include(task, self.config.strength)

    @property
    def takes_more(self) -> bool:
        """Yes: sums do not care in which portions they are made."""
        return True

    @torch.no_grad()
    def more(self, task: TaskView) -> None:
        """Add the images to the sums, and solve again with the λ of before."""
        rows = [torch.cat([w, b[:, None]], dim=1) for w, b in zip(self.head.weight, self.head.bias, strict=True)]
        self._include(task, self.config.strength or self.ridge.strength_of(rows))

    def _include(self, task: TaskView, strength: float | None) -> None:
        solved = self.ridge.add(self.read_all(task).float(), task, strength, generator_for(task, "ridge"))
        self.set_head([rows[:, :-1] for rows in solved], [rows[:, -1] for rows in solved])

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Take over the sums and the head."""
        super().load_state(state)
        self.ridge.restore(below("ridge.", state))
