"""Co²L (Cha et al., 2021): contrastive features that keep their relations, then a balanced linear head."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from dualprompt.backbones.base import BackboneSource
from dualprompt.methods.base import METHODS, Batch, Grid, Phase, TaskView, below
from dualprompt.methods.rehearsal import Rehearsal, RehearsalConfig

HEAD = "head"


class Co2LConfig(RehearsalConfig):
    """Options of `co2l`."""

    name: str = "co2l"
    temperature: float = Field(default=0.5, gt=0, description="T, temperature of the contrastive loss")
    base_temperature: float = Field(default=0.07, gt=0, description="the contrastive loss is multiplied by T over this")
    current_temperature: float = Field(default=0.2, gt=0, description="κ of the relations now")
    past_temperature: float = Field(default=0.01, gt=0, description="κ* of the relations before the task")
    distillation_weight: float = Field(default=1.0, ge=0, description="weight of the relation distillation")
    projection: int = Field(default=128, ge=1, le=10_000, description="dimensions that images are compared in")
    projector_lr: float | None = Field(
        default=0.001, gt=0, description="learning rate of the projector, which starts at random (null: the backbone's)"
    )
    head_epochs: int | None = Field(
        default=None, ge=1, le=10**6, description="epochs of the linear head (default: the recipe's)"
    )
    head_lr: float | None = Field(
        default=0.005, gt=0, description="learning rate of the linear head (null: that of the backbone)"
    )


@METHODS.register("co2l")
class Co2L(Rehearsal[Co2LConfig]):
    """Asymmetric supervised contrast and instance-wise relation distillation (IRD) on a reservoir buffer."""

    summary = "contrastive features, their relations distilled, and a head trained last; reservoir buffer"
    grid: ClassVar[Grid] = {"train.lr": (5e-5, 2e-4), "method.projector_lr": (0.001, 0.005)}
    past: Past | None = None
    training_head = False

    def __init__(self, config: Co2LConfig, backbone: BackboneSource) -> None:
        super().__init__(config, backbone)
        dim = self.backbone.dim
        self.projector = nn.Sequential(nn.Linear(dim, dim), nn.ReLU(), nn.Linear(dim, config.projection))

    def begin_task(self, task: TaskView) -> None:
        """Draw the projector (first task) or keep a copy of the old model; the head starts at zero again."""
        if task.index:
            self.past = Past(self)
        else:
            _draw(self.projector, self.backbone.dim, task.generator)
        super().begin_task(task)
        self.forget_head()  # here, as a run may be resumed inside the phase that trains it

    def phases(self, task: TaskView) -> Sequence[Phase]:
        """Return the features' phase, on new and old images as they come and in two views, and the head's."""
        return (
            Phase(data="task+buffer", views=2, augment="random_resized_crop"),
            Phase(name=HEAD, data="task+buffer", balanced=True, epochs=self.config.head_epochs),
        )

    def begin_phase(self, phase: Phase, task: TaskView) -> None:
        """Train either backbone and projector or the head."""
        self.training_head = phase.name == HEAD
        self.freeze_backbone(not self.trains_backbone or self.training_head)
        self.projector.requires_grad_(not self.training_head)
        self.head.requires_grad_(self.training_head)

    def loss(self, batch: Batch) -> Tensor:
        """Return the contrastive loss plus IRD once there is a past, or the head's cross-entropy."""
        if self.training_head:
            return super().loss(batch)
        views = Batch(
            make_images=lambda: torch.cat([batch.images, batch.second]),
            labels=torch.cat([batch.labels, batch.labels]),
        )
        similarity = _similarity(self.projector, self.features(views))
        new = self.head.current_places(views.labels) >= 0
        loss = asymmetric_contrast(similarity, views.labels, new, self.config.temperature, self.config.base_temperature)
        if self.past is None:
            return loss
        kappas = self.config.current_temperature, self.config.past_temperature
        distilled = relation_distillation(similarity, self.past.similarity(views), *kappas)
        return loss + self.config.distillation_weight * distilled

    def own_lr(self, name: str) -> float | None:
        """Head and projector have rates of their own, if they are configured."""
        return self.config.projector_lr if name.startswith("projector.") else super().own_lr(name)

    def additional(self) -> int:
        """Return the size of the projector, which prediction does not need."""
        return sum(parameter.numel() for parameter in self.projector.parameters())

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Take over backbone, head and projector."""
        super().load_state(state)
        self.projector.load_state_dict(below("projector.", state))


class Past:
    """Backbone and projector before the task. No part of the state, so no module of the method."""

    def __init__(self, method: Co2L) -> None:
        self.model = method.snapshot()
        self.projector = copy.deepcopy(method.projector).requires_grad_(False)

    def similarity(self, views: Batch) -> Tensor:
        """Return the similarities that the images had then."""
        return _similarity(self.projector, self.model.features(views))


@torch.no_grad()
def _draw(projector: nn.Module, dim: int, generator: torch.Generator) -> None:
    """Draw every number from U(−1/√dim, 1/√dim), torch's own initialisation, but from the generator."""
    for parameter in projector.parameters():
        parameter.copy_((2 * torch.rand(parameter.shape, generator=generator) - 1) * dim**-0.5)


def _similarity(projector: nn.Module, features: Tensor) -> Tensor:
    """Return the cosines between all projected images, (images, images), in fp32."""
    directions = F.normalize(projector(features.float()), dim=1)
    return directions @ directions.T


def asymmetric_contrast(similarity: Tensor, labels: Tensor, anchors: Tensor, temperature: float, base: float) -> Tensor:
    """Return the supervised contrastive loss, times T over `base`, of images that are anchors, (images,) booleans.

    The others, which are old, are compared with but never drawn together: their features keep what they learned. Still
    the mean is over all images, as in the authors' code: the fewer are new, the more distillation weighs.
    """
    same = _others(labels[:, None] == labels)
    log_chance = (_others(similarity) / temperature).log_softmax(dim=1)
    loss = -(log_chance * same).sum(dim=1) / same.sum(dim=1).clamp_min(1)
    return temperature / base * (loss * anchors).mean()


def relation_distillation(current: Tensor, past: Tensor, kappa: float, past_kappa: float) -> Tensor:
    """Return the mean cross-entropy of each image's softmax over its similarities to all others, to the past one."""
    target = (_others(past) / past_kappa).softmax(dim=1)
    return -(target * (_others(current) / kappa).log_softmax(dim=1)).sum(dim=1).mean()


def _others(square: Tensor) -> Tensor:
    """Return a square matrix without its diagonal, (n, n − 1)."""
    n = len(square)
    return square.flatten()[1:].view(n - 1, n + 1)[:, :-1].reshape(n, n - 1)
