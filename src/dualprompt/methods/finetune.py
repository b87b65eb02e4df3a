"""What every method has that trains the whole backbone, and the plainest of them: FT-seq and FT++."""

from __future__ import annotations

import copy
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor
from typing_extensions import TypeVar

from dualprompt.methods.base import METHODS, Batch, Defaults, Grid, Method, MethodConfig, below, logits_always
from dualprompt.methods.frozen_head import FrozenHead


class FineTuneConfig(MethodConfig):
    """Options of methods that fine-tune; with `train_backbone: false` only the head is trained."""

    name: str = "ft-seq"
    training_logits: Literal["masked", "unmasked"] = "unmasked"
    train_backbone: bool = Field(default=True, description="train every weight, or only the head")
    # A head that starts at zero has far to go, a pre-trained backbone must not go far.
    head_lr: float | None = Field(
        default=None, gt=0, description="learning rate of the head, also beside a frozen backbone (default: train.lr)"
    )


T = TypeVar("T", bound=FineTuneConfig, covariant=True, default=FineTuneConfig)


class FineTune(FrozenHead[T]):
    """A backbone and a growing linear head, both trained."""

    needs_borders = Method.needs_borders
    # The rate of prompts would wreck a pre-trained backbone; at the backbone's, a head that starts at zero stays there.
    defaults: ClassVar[Defaults] = {
        "head_lr": 0.005,
        "train": {"lr": 5e-5, "lr_scale": "none", "schedule": "cosine"},
    }

    @property
    def trains_backbone(self) -> bool:
        """As configured."""
        return self.config.train_backbone

    def own_lr(self, name: str) -> float | None:
        """The head has a rate of its own, if one is configured."""
        return self.config.head_lr if name.startswith("head.") else None

    def features(self, batch: Batch) -> Tensor:
        """Return the features of the batch's own images: known ones where the backbone is frozen."""
        if not self.trains_backbone:
            return super().features(batch)
        return self.backbone.computed_in(self.compute_dtype, batch.images)

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Take over the head's rows, and the backbone where it is trained."""
        super().load_state(state)
        if self.trains_backbone:
            self.backbone.load_state_dict(below("backbone.", state))

    def snapshot(self) -> Snapshot:
        """Return a frozen copy of the model as it is now."""
        return Snapshot(self)


class Snapshot:
    """A model as it was. It is no part of the method's state: it is made anew from the state before the task."""

    def __init__(self, method: FineTune) -> None:
        self.frozen_features = method.features
        self.backbone = (
            copy.deepcopy(method.backbone).freeze().round_to(method.compute_dtype) if method.trains_backbone else None
        )
        self.head = copy.deepcopy(method.head).requires_grad_(False).eval()

    @torch.no_grad()
    def features(self, batch: Batch) -> Tensor:
        """Return the features that the model gave, (batch, dim)."""
        return self.frozen_features(batch) if self.backbone is None else self.backbone(batch.images)

    @torch.no_grad()
    def logits(self, batch: Batch) -> Tensor:
        """Return the logits that the model gave, over the classes it knew."""
        return self.head.predict(self.features(batch))


def distillation(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """Return the mean KL divergence between softened distributions, times T².

    The square keeps the gradients' size independent of T (Hinton et al., 2015).
    """
    log_student = F.log_softmax(student.float() / temperature, dim=1)
    log_teacher = F.log_softmax(teacher.float() / temperature, dim=1)
    return temperature**2 * F.kl_div(log_student, log_teacher, reduction="batchmean", log_target=True)


@METHODS.register("ft-seq")
class FineTuneSequential(FineTune[FineTuneConfig]):
    """Fine-tuning task after task without any measure against forgetting: the lower bound."""

    summary = "fine-tunes everything, task after task: the lower bound"
    needs_borders = None
    grid: ClassVar[Grid] = {"train.lr": (5e-5, 2e-4), "method.head_lr": (0.005, 0.001)}


class FineTunePlusPlusConfig(FineTuneConfig):
    """Options of `ft++`."""

    name: str = "ft++"
    training_logits: Literal["masked", "unmasked"] = "masked"

    _masked = logits_always("masked", "ft++ is fine-tuning with masked logits; for unmasked ones use ft-seq")


@METHODS.register("ft++")
class FineTunePlusPlus(FineTune[FineTunePlusPlusConfig]):
    """FT-seq with the cross-entropy over the current task's classes only.

    No gradient pushes the logits of old classes down. It stands beside EWC and LwF, which train with that mask too:
    what they have above FT-seq may be the mask's, what they have above FT++ is their own.
    """

    summary = "fine-tunes everything with the logits of old classes left out: FT-seq's masked sibling"
    needs_borders = None
    grid: ClassVar[Grid] = {"train.lr": (5e-5, 2e-4), "method.head_lr": (0.005, 0.001)}
