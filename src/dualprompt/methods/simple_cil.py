"""SimpleCIL (Zhou et al., 2023): each class is the mean of its features, frozen or adapted by the first task."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import TypeVar

from dualprompt.backbones.base import BackboneSource
from dualprompt.methods.base import METHODS, Batch, Grid, StreamKind, TaskView, below
from dualprompt.methods.closed_form import ClosedForm, ClosedFormConfig
from dualprompt.methods.heads import CosineTrainingHead, GrowingHead, TrainingHead
from dualprompt.methods.statistics import RunningMeans, class_means, precise


class SimpleCILConfig(ClosedFormConfig):
    """Options of `simple-cil`: there is nothing to choose but a first session."""

    name: str = "simple-cil"


C = TypeVar("C", bound=SimpleCILConfig, covariant=True, default=SimpleCILConfig)


@METHODS.register("simple-cil")
class SimpleCIL(ClosedForm[C]):
    """A cosine classifier whose rows are class means; none of them is trained."""

    Config = SimpleCILConfig
    summary = "class means of frozen features, compared by cosine; no training"
    grid: ClassVar[Grid] = {}

    def __init__(self, config: C, backbone: BackboneSource) -> None:
        super().__init__(config, backbone)
        self.head = GrowingHead(self.width)
        self.means: RunningMeans | None = None  # where labels come back: a row has lost its length

    def accept(self, kind: StreamKind) -> None:
        """Keep the means themselves where labels come back."""
        super().accept(kind)
        if kind.returns:
            self.means = RunningMeans(self.width)

    @property
    def width(self) -> int:
        """Return the numbers in a feature."""
        return self.backbone.dim

    def new_training_head(self) -> TrainingHead:
        """Return a cosine classifier, which a first session is trained with as images are then classified."""
        return CosineTrainingHead(self.backbone.dim)

    def features(self, batch: Batch) -> Tensor:
        """Return the normalised features, so that the head's products are cosines."""
        return F.normalize(super().features(batch).float(), dim=1)

    @torch.no_grad()
    def end_task(self, task: TaskView) -> None:
        """Set the rows of the task's classes."""
        features = precise(self.read_all(task))
        means = class_means(features, task.places.to(features.device), len(task.labels))
        if self.means is None:
            rows = [*list(self.head.weight)[:-1], F.normalize(means, dim=1)]
        else:
            sizes = [len(block) for block in self.head.bias]
            rows = F.normalize(self.means.include(means, task), dim=1).split(sizes)
        self.set_head(rows, list(self.head.bias))

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Take over the head, and the means where labels come back."""
        super().load_state(state)
        if self.means is not None:
            self.means.restore(below("means.", state))
