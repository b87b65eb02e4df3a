"""LwF (Li & Hoiem, 2016): on the new task's images, the old classes' logits stay what the old model says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

from pydantic import Field
from torch import Tensor

from dualprompt.methods.base import METHODS, Batch, Grid, Phase, TaskView
from dualprompt.methods.finetune import FineTune, FineTuneConfig, Snapshot, distillation


class LwFConfig(FineTuneConfig):
    """Options of `lwf`."""

    name: str = "lwf"
    training_logits: Literal["masked", "unmasked"] = "masked"
    temperature: float = Field(default=2.0, gt=0, description="T of the distillation")
    distillation_weight: float = Field(default=1.0, ge=0, description="weight of the distillation")
    warmup_epochs: int = Field(
        default=0, ge=0, le=10**6, description="epochs that train only the new rows of the head, first"
    )


WARM_UP = "warm up the head"


@METHODS.register("lwf")
class LwF(FineTune[LwFConfig]):
    """Fine-tuning that distils the model as it was before the task."""

    summary = "fine-tuning that distils the previous model on the new images"
    grid: ClassVar[Grid] = {"method.distillation_weight": (1.0, 3.0), "train.lr": (5e-5, 2e-4)}
    old: Snapshot | None = None
    warming_up = False

    def begin_task(self, task: TaskView) -> None:
        """Keep a copy of the old model, then add the task's rows to the head."""
        self.old = self.snapshot() if self.head.classes else None
        super().begin_task(task)

    def phases(self, task: TaskView) -> Sequence[Phase]:
        """Return joint training, after the original's warm-up of the new rows where it is configured."""
        epochs = self.config.warmup_epochs
        return (*((Phase(name=WARM_UP, epochs=epochs),) if epochs else ()), Phase())

    def begin_phase(self, phase: Phase, task: TaskView) -> None:
        """Let the old rows train on: they follow the features, so that their logits stay. Not while it warms up."""
        self.warming_up = phase.name == WARM_UP
        self.freeze_backbone(not self.trains_backbone or self.warming_up)
        self.head.choose_trainable(train_old=not self.warming_up)

    def loss(self, batch: Batch) -> Tensor:
        """Return the cross-entropy plus the distillation of the old classes, whose logits stay during a warm-up."""
        features = self.features(batch)
        loss = self.classification_loss(features, batch.labels)
        if self.old is None or self.warming_up:
            return loss
        logits = self.head.all(features)[:, : self.old.head.classes]
        return loss + self.config.distillation_weight * distillation(
            logits, self.old.logits(batch), self.config.temperature
        )
