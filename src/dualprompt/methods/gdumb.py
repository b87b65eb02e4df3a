"""GDumb (Prabhu et al., 2020): keep a balanced buffer, and learn from nothing else, each time from the start."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from dualprompt.backbones.base import BackboneSource
from dualprompt.methods.base import METHODS, Batch, BufferPlan, Defaults, Grid, Phase, TaskView
from dualprompt.methods.rehearsal import Rehearsal, RehearsalConfig


class GDumbConfig(RehearsalConfig):
    """Options of `gdumb`."""

    name: str = "gdumb"
    cutmix: float = Field(default=0.5, ge=0, le=1, description="probability that an image is mixed with another one")
    lr: float | None = Field(default=None, gt=0, description="learning rate on the buffer (default: the recipe's)")
    # The original trains for 256 passes.
    cycles: int = Field(default=8, ge=1, le=12, description="cosines of 1, 2, 4, … epochs: 2^cycles − 1 passes in all")


@METHODS.register("gdumb")
class GDumb(Rehearsal[GDumbConfig]):
    """At every task a new model is trained on the greedily balanced buffer, from the pre-trained weights.

    It is trained to convergence, whatever the recipe's epochs: in the few passes that do for a task little is learned
    from a buffer, which is small. Converged means that the buffer is known by heart: all its images are classified
    right, and more passes lower the loss no further than CutMix leaves it. Rates follow SGDR as in the original:
    cosines of 1, 2, 4, … epochs.
    """

    summary = "trained anew at every task, on a greedily balanced buffer only"
    grid: ClassVar[Grid] = {"train.lr": (1e-4, 5e-4), "method.head_lr": (0.005, None)}
    defaults: ClassVar[Defaults] = {
        "head_lr": 0.005,
        "train": {"lr": 1e-4, "lr_scale": "none", "schedule": "cosine"},
    }

    def __init__(self, config: GDumbConfig, backbone: BackboneSource) -> None:
        super().__init__(config, backbone)
        # No part of the state: whoever builds the method brings the pre-trained weights again.
        kept = self.backbone.state_dict() if self.trains_backbone else {}
        self.pretrained = {name: value.clone() for name, value in kept.items()}

    @property
    def buffer(self) -> BufferPlan:
        """Balanced, and filled before training, which sees nothing else."""
        return BufferPlan(self.config.buffer_size, "balanced", fill="before")

    def phases(self, task: TaskView) -> Sequence[Phase]:
        """Return one phase on the buffer."""
        c = self.config
        passes, noise = 2**c.cycles - 1, 4 if c.cutmix else 0
        return (Phase(data="buffer", epochs=passes, cycles=c.cycles, lr=c.lr, noise=noise),)

    def begin_task(self, task: TaskView) -> None:
        """Forget everything but how many classes there are."""
        super().begin_task(task)
        self.forget_head()
        if self.trains_backbone:
            self.backbone.load_state_dict(self.pretrained)

    def loss(self, batch: Batch) -> Tensor:
        """Return the cross-entropy; that of a mixed image is to both labels, by the area each has."""
        if not self.config.cutmix:
            return super().loss(batch)
        assert batch.noise is not None
        images, share = cutmix(batch.images, batch.noise, self.config.cutmix)
        logits = self.head.all(self.features(Batch(lambda: images, batch.labels)))
        own = F.cross_entropy(logits, batch.labels, reduction="none")
        other = F.cross_entropy(logits, batch.labels.roll(1), reduction="none")
        return (share * own + (1 - share) * other).mean()


def cutmix(images: Tensor, noise: Tensor, probability: float) -> tuple[Tensor, Tensor]:
    """Return images with a box of the image before them in the batch, and the share of each that is still its own.

    Batches come in random order, so the one before is any other. `noise` (batch, 4) is uniform in [0, 1): whether
    to mix, λ, and the box's centre. The box has 1 − λ of the area, less what lies outside the image.
    """
    mix, lam, *centre = noise.float().unbind(dim=1)
    half = (1 - lam).sqrt() / 2
    inside = []  # (batch, pixels) along each axis
    for middle, pixels in zip(centre, images.shape[2:], strict=True):
        pixel = (torch.arange(pixels, device=images.device) + 0.5) / pixels
        inside.append((pixel - middle[:, None]).abs() < half[:, None])
    box = inside[0][:, :, None] & inside[1][:, None, :] & (mix < probability)[:, None, None]
    return torch.where(box[:, None], images.roll(1, dims=0), images), 1 - box.float().mean(dim=(1, 2))
