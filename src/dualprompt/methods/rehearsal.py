"""What the methods share that see images of old tasks again."""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field
from torch import nn
from typing_extensions import TypeVar

from dualprompt.methods.base import OLD_CLASSES, Batch, BufferPlan, TaskView, logits_always
from dualprompt.methods.contract import Policy
from dualprompt.methods.finetune import FineTune, FineTuneConfig


class RehearsalConfig(FineTuneConfig):
    """Options of methods that fine-tune with a buffer."""

    buffer_size: int = Field(default=1000, ge=1, le=10**8, description="images of old tasks that are kept")

    _all_classes = logits_always("unmasked", OLD_CLASSES)


R = TypeVar("R", bound=RehearsalConfig, covariant=True, default=RehearsalConfig)


class Rehearsal(FineTune[R]):
    """Fine-tuning with a buffer of old images."""

    policy: ClassVar[Policy] = "reservoir"

    @property
    def buffer(self) -> BufferPlan:
        """As many images as configured."""
        return BufferPlan(self.config.buffer_size, self.policy)

    def end_task(self, task: TaskView) -> None:
        """Leave the backbone as a loaded one is: a prediction's last bits depend on what asks for gradients."""
        self.freeze_backbone(not self.trains_backbone)

    def forget_head(self) -> None:
        """Set the rows of every class to zero, as those of a new class are."""
        for parameter in self.head.parameters():
            nn.init.zeros_(parameter)


def join(*batches: Batch) -> Batch:
    """Return the images of all batches as one, so that they share a pass."""
    known = [batch.frozen for batch in batches if batch.frozen is not None]
    return Batch(
        make_images=lambda: torch.cat([batch.images for batch in batches]),
        labels=torch.cat([batch.labels for batch in batches]),
        frozen=torch.cat(known) if len(known) == len(batches) else None,
    )
