"""SimpleCIL (Zhou et al., 2023): each class is the mean of its frozen features."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from dualprompt.methods.base import METHODS, Batch, Grid, TaskView
from dualprompt.methods.closed_form import ClosedForm, ClosedFormConfig
from dualprompt.methods.statistics import class_means, precise


class SimpleCILConfig(ClosedFormConfig):
    """Options of `simple-cil`: there is nothing to choose."""

    name: str = "simple-cil"


@METHODS.register("simple-cil")
class SimpleCIL(ClosedForm[SimpleCILConfig]):
    """A cosine classifier whose rows are class means; nothing is trained."""

    summary = "class means of frozen features, compared by cosine; no training"
    grid: ClassVar[Grid] = {}

    def features(self, batch: Batch) -> Tensor:
        """Return the normalised frozen features, so that the head's products are cosines."""
        return F.normalize(super().features(batch).float(), dim=1)

    @torch.no_grad()
    def end_task(self, task: TaskView) -> None:
        """Set the rows of the task's classes."""
        queries = precise(task.queries())
        means = class_means(queries, task.labels.to(queries.device) - task.first_class, task.classes)
        self.set_head([*list(self.head.weight)[:-1], F.normalize(means, dim=1)], list(self.head.bias))
