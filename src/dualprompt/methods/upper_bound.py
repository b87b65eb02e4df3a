"""Upper bound: i.i.d. training on all tasks seen so far at once, which continual learners are measured against."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from pydantic import Field

from dualprompt.backbones.base import BackboneSource
from dualprompt.backbones.known import drawn_by_seed
from dualprompt.methods.base import METHODS, Grid, Phase, TaskView, logits_always
from dualprompt.methods.finetune import FineTune, FineTuneConfig


class UpperBoundConfig(FineTuneConfig):
    """Options of `upper-bound`."""

    name: str = "upper-bound"
    epochs_factor: int = Field(default=1, ge=1, le=1000, description="how many times the recipe's epochs it trains for")
    zero_residuals: bool = Field(default=False, description="blocks of a network that is drawn begin as the identity")

    _unmasked = logits_always("unmasked", "joint training tells all classes apart; use unmasked")


@METHODS.register("upper-bound")
class UpperBound(FineTune[UpperBoundConfig]):
    """Each task is an occasion to train anew, from the pre-trained weights, on everything up to it.

    So every row of the accuracy matrix is a bound for what a continual learner may have reached by then. With the
    recipe's epochs it sees each image as often as a learner that goes task by task: "joint, same budget". That is a
    bound for learners of this budget; with a larger `epochs_factor` it is "joint, longer".
    """

    summary = "joint training on all tasks seen so far: the upper bound"
    grid: ClassVar[Grid] = {"train.lr": (5e-5, 2e-4), "method.head_lr": (0.005, 0.001)}
    joint = True

    def __init__(self, config: UpperBoundConfig, backbone: BackboneSource) -> None:
        super().__init__(config, backbone)
        if self.trains_backbone and config.zero_residuals and drawn_by_seed(self.backbone.name):
            self.backbone.zero_residuals()
        weights = self.backbone.state_dict() if self.trains_backbone else {}
        self.pretrained = {name: value.clone() for name, value in weights.items()}

    def phases(self, task: TaskView) -> Sequence[Phase]:
        """One, on the training images of every task seen so far."""
        return (Phase(data="everything", epochs_factor=self.config.epochs_factor),)

    @torch.no_grad()
    def begin_task(self, task: TaskView) -> None:
        """Go back to the pre-trained weights and a head of zeros."""
        if self.pretrained:
            self.backbone.load_state_dict(self.pretrained)
        super().begin_task(task)
        for rows in self.head.parameters():
            rows.zero_()
