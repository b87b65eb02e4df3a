"""Sequential LoRA (Hu et al., 2022): low-rank changes of the attention that all tasks train, and a head that grows."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from dualprompt.methods.adaptation import LinearsConfig, LowRanks
from dualprompt.methods.adapted import LowRankAdapted, MergingConfig
from dualprompt.methods.base import METHODS, Defaults, Grid, TaskView


class LoRAConfig(LinearsConfig, MergingConfig):
    """Options of `lora`."""

    name: str = "lora"
    alpha: float = Field(default=8.0, gt=0, description="α: changes are multiplied by α/r")


@METHODS.register("lora")
class LoRA(LowRankAdapted[LoRAConfig]):
    """The baseline of its family: nothing keeps a task from changing what the one before has learned, but the mask.

    A task owns rows of the head only.
    """

    summary = "low-rank changes of the attention that all tasks train, and a linear head: the baseline of LoRA methods"
    grid: ClassVar[Grid] = {"train.lr": (0.001, 0.0005, 0.002, 0.005)}
    defaults: ClassVar[Defaults] = {"train": {"lr": 0.001, "lr_scale": "none", "schedule": "cosine"}}
    needs_borders = None

    def new_adaptation(self) -> LowRanks:
        """Return changes of the configured maps."""
        config = self.config
        return LowRanks(self.backbone, config.layers, config.rank, config.linears, config.alpha / config.rank)

    def begin_task(self, task: TaskView) -> None:
        """Draw the changes (first task), let them train, and add rows to the head."""
        if task.index == 0:
            self.adaptation.restore({})
            self.adaptation.grow(task.generator)
        self.adaptation.let_train()
        super().begin_task(task)
