"""SimpleCIL (Zhou et al., 2023): each class is the mean of its frozen features."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from dualprompt.methods.base import METHODS, Batch, Grid, MethodConfig, Phase, TaskView
from dualprompt.methods.frozen_head import FrozenHead
from dualprompt.methods.statistics import class_means, precise


class SimpleCILConfig(MethodConfig):
    """Options of `simple-cil`: there is nothing to choose. No logits are trained, so a task may have one class."""

    name: str = "simple-cil"
    training_logits: Literal["masked", "unmasked"] = "unmasked"


@METHODS.register("simple-cil")
class SimpleCIL(FrozenHead):
    """A cosine classifier whose rows are class means; nothing is trained."""

    Config = SimpleCILConfig
    summary = "class means of frozen features, compared by cosine; no training"
    grid: ClassVar[Grid] = {}

    def phases(self, task: TaskView) -> Sequence[Phase]:
        """Return none: there are no gradient steps."""
        return ()

    def features(self, batch: Batch) -> Tensor:
        """Return the normalised frozen features, so that the head's products are cosines."""
        return F.normalize(super().features(batch).float(), dim=1)

    @torch.no_grad()
    def end_task(self, task: TaskView) -> None:
        """Set the rows of the task's classes."""
        queries = precise(task.queries())
        means = class_means(queries, task.labels.to(queries.device) - task.first_class, task.classes)
        weights = [*list(self.head.weight)[:-1], F.normalize(means, dim=1).float()]
        self.head.restore(weights, list(self.head.bias), train_old=False)
