"""ER (Chaudhry et al., 2019): every step also learns from as many images of a reservoir."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor

from dualprompt.methods.base import METHODS, Batch, Grid, Phase, TaskView
from dualprompt.methods.rehearsal import Rehearsal, RehearsalConfig, join


class ERConfig(RehearsalConfig):
    """Options of `er`."""

    name: str = "er"


@METHODS.register("er")
class ER(Rehearsal[ERConfig]):
    """Experience replay: cross-entropy over all seen classes, of new and of old images alike."""

    summary = "fine-tuning on new images and as many from a reservoir buffer"
    grid: ClassVar[Grid] = {"train.lr": (5e-5, 2e-4), "method.head_lr": (0.005, 0.001)}
    needs_borders = None

    def phases(self, task: TaskView) -> Sequence[Phase]:
        """Return one phase, with a replay batch at every step."""
        return (Phase(replay=1),)

    def loss(self, batch: Batch) -> Tensor:
        """Return the mean cross-entropy of the batch and its replay together."""
        both = join(batch, *batch.replay)
        return self.classification_loss(self.features(both), both.labels)
