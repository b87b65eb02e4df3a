"""The baseline that always stands beside a result: a frozen backbone and a linear head, no prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from dualprompt.backbones.base import BackboneSource
from dualprompt.methods import ownership
from dualprompt.methods.base import (
    METHODS,
    Batch,
    C,
    Grid,
    Method,
    MethodConfig,
    Prediction,
    Selection,
    TaskView,
    numbered,
)
from dualprompt.methods.heads import GrowingHead
from dualprompt.methods.ownership import OfTask


class FrozenHeadConfig(MethodConfig):
    """Options of `frozen-head`."""

    name: str = "frozen-head"


@METHODS.register("frozen-head")
class FrozenHead(Method[C]):
    """A linear classifier on the frozen class-token feature, trained task after task."""

    Config = FrozenHeadConfig
    summary = "frozen backbone and a linear head, no prompts: the baseline"
    grid: ClassVar[Grid] = {"train.lr": (0.005, 0.0025, 0.001, 0.01)}

    needs_new_labels = None
    needs_borders = None
    # What of its state is each task's alone; what is not named here belongs to all tasks together.
    of_task: ClassVar[OfTask] = {"head.weight": 0, "head.bias": 0}
    head: GrowingHead

    def __init__(self, config: C, backbone: BackboneSource) -> None:
        super().__init__(config, backbone)
        self.head = GrowingHead(self.backbone.dim)

    @property
    def masked(self) -> bool:
        """Whether training logits are limited to the current task's classes."""
        return self.config.training_logits == "masked"

    def begin_task(self, task: TaskView) -> None:
        """Add the rows of the task's new labels to the head."""
        self.head.begin(task.labels, task.new_labels, train_old=not self.masked)

    def features(self, batch: Batch) -> Tensor:
        """Return the features of the batch's own images, which may be known."""
        if batch.frozen is not None:
            return batch.frozen
        with torch.no_grad():
            return self.backbone(batch.images)

    def classification_loss(self, features: Tensor, labels: Tensor) -> Tensor:
        """Return the cross-entropy; masked logits outside the task are −∞, which is to leave them out."""
        if self.masked:
            return F.cross_entropy(self.head.current(features), self.head.current_places(labels))
        return F.cross_entropy(self.head.all(features), labels)

    def loss(self, batch: Batch) -> Tensor:
        """Return the mean cross-entropy."""
        return self.classification_loss(self.features(batch), batch.labels)

    @torch.no_grad()
    def predict(self, batch: Batch, selection: Selection | None = None) -> Prediction:
        """Classify from the feature."""
        self.check_selection(selection)
        return Prediction(self.head.predict(self.features(batch)))

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Take over the head's rows."""
        self.head.restore(numbered(state, "head.weight"), numbered(state, "head.bias"), train_old=not self.masked)

    def owned_by(self, task: int) -> dict[str, Tensor]:
        """Return what `of_task` names."""
        return ownership.owned(self.state(), self.of_task, task)

    @property
    def shares_prompts(self) -> bool:
        """Whether `of_task` names nothing else that is there."""
        return not ownership.has_own_parts(self.state(), self.of_task)

    def forget(self, task: int, classes: Sequence[int], places: Sequence[int] | None) -> None:
        """Drop what is theirs of all that `of_task` names."""
        self.load_state(ownership.without(self.state(), self.of_task, task, classes, places))

    def drop_classes(self, classes: Sequence[int]) -> None:
        """Drop their rows."""
        self.load_state(ownership.compacted(self.state(), classes))

    def refuse_misfits(self, sizes: Sequence[int], columns: int) -> None:
        """Refuse other tensors than `of_task` calls for."""
        ownership.refuse_misfits(self.state(), self.of_task, sizes, columns)
