"""Linear discriminant analysis on frozen features: a mean a class and one covariance for all."""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor
from typing_extensions import TypeVar

from dualprompt.backbones.base import BackboneSource
from dualprompt.methods.base import METHODS, Batch, Grid, StreamKind, TaskView, below
from dualprompt.methods.closed_form import ClosedForm, ClosedFormConfig
from dualprompt.methods.heads import GrowingHead
from dualprompt.methods.ownership import OfTask
from dualprompt.methods.statistics import Discriminant


class LDAConfig(ClosedFormConfig):
    """Options of `lda`."""

    name: str = "lda"
    shrinkage: float | None = Field(
        default=None, ge=0, le=1, description="share of the identity in the covariance (default: by the samples, OAS)"
    )


L = TypeVar("L", bound=LDAConfig, covariant=True, default=LDAConfig)


@METHODS.register("lda")
class LDA(ClosedForm[L]):
    """Classes are Gaussians of one covariance, all equally likely beforehand. The order of tasks does not matter."""

    Config = LDAConfig
    summary = "linear discriminant analysis of frozen features; no training"
    grid: ClassVar[Grid] = {"method.shrinkage": (None, 0.001, 0.01, 0.1)}
    of_task: ClassVar[OfTask] = {**ClosedForm.of_task, "discriminant.means": 0, "discriminant.counts": 0}

    def __init__(self, config: L, backbone: BackboneSource) -> None:
        super().__init__(config, backbone)
        dim = self.dimensions()
        self.head = GrowingHead(dim)
        self.discriminant = Discriminant(dim, config.shrinkage)

    def accept(self, kind: StreamKind) -> None:
        """Count the samples of each label where labels come back."""
        super().accept(kind)
        if kind.returns:
            self.discriminant.expect_returning()

    def expect_more(self) -> None:
        """Count the samples of each label."""
        self.discriminant.expect_returning()

    @property
    def takes_more(self) -> bool:
        """Yes, where the samples of each label were counted."""
        return self.discriminant.counts is not None

    def dimensions(self) -> int:
        """Return of how many numbers the discriminant is."""
        return self.backbone.dim

    def expand(self, features: Tensor) -> Tensor:
        """Return what is discriminated, (batch, dimensions): the features themselves."""
        return features.float()

    def features(self, batch: Batch) -> Tensor:
        """Return what the head classifies."""
        return self.expand(super().features(batch))

    @torch.no_grad()
    def end_task(self, task: TaskView) -> None:
        """Add the task to the statistics and solve for the head of all classes."""
        self.more(task)

    @torch.no_grad()
    def more(self, task: TaskView) -> None:
        """Do the same: labels that come back move their means."""
        self.discriminant.include_features(self.read_all(task), task, self.expand)
        weight, bias = self.discriminant.solve()
        sizes = [len(means) for means in self.discriminant.means]
        self.set_head(weight.split(sizes), bias.split(sizes))

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Take over the statistics and the head."""
        super().load_state(state)
        self.discriminant.restore(below("discriminant.", state))
