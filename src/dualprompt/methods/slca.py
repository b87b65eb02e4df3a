"""SLCA (Zhang et al., 2023): a backbone that learns slowly, and a classifier aligned on Gaussians of all classes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from dualprompt.backbones.base import BackboneSource
from dualprompt.methods.alignment import ClassStatistics, align
from dualprompt.methods.base import METHODS, Grid, Phase, StreamKind, TaskView, below, numbered
from dualprompt.methods.finetune import FineTune, FineTuneConfig
from dualprompt.methods.ownership import OfTask
from dualprompt.methods.statistics import TensorList, generator_for


class SLCAConfig(FineTuneConfig):
    """Options of `slca`; the defaults are the paper's."""

    name: str = "slca"
    training_logits: Literal["masked", "unmasked"] = "masked"
    statistics: Literal["covariance", "variance"] = Field(
        default="covariance", description="what is kept of a class's features: dim²/2 numbers, or dim"
    )
    align_epochs: int = Field(default=5, ge=0, le=10**4, description="epochs of the alignment after a task; 0: none")
    align_lr: float = Field(default=0.01, gt=0, description="their learning rate")
    align_samples: int = Field(default=256, ge=1, le=10**5, description="samples of a class in such an epoch")
    logit_norm: float | None = Field(
        default=0.1,
        gt=0,
        description="τ: in the alignment, logits are divided by τ times their mean length (null: not)",
    )

    @property
    def learns_one_class(self) -> bool:
        """Whether a task may have one class: the alignment tells it from the others."""
        return self.align_epochs > 0 or self.training_logits == "unmasked"


@METHODS.register("slca")
class SLCA(FineTune[SLCAConfig]):
    """Fine-tuning at a hundredth of the head's rate, on masked logits; then the head is trained on samples.

    The aligned rows answer; the next task goes on from the rows that were trained on images.
    """

    summary = "slow fine-tuning, and a classifier aligned on samples of all classes' Gaussians"
    grid: ClassVar[Grid] = {"train.lr": (5e-5, 2e-4), "method.align_lr": (0.01, 0.05)}
    of_task: ClassVar[OfTask] = {
        **FineTune.of_task,
        "trained_weight": 0,
        "trained_bias": 0,
        "statistics.means": 0,
        "statistics.spreads": 0,
        "statistics.labels": 0,
    }

    def __init__(self, config: SLCAConfig, backbone: BackboneSource) -> None:
        super().__init__(config, backbone)
        self.statistics = ClassStatistics(config.statistics)
        self.trained_weight, self.trained_bias = TensorList(), TensorList()  # the head's rows before the alignment

    def accept(self, kind: StreamKind) -> None:
        """Note the label of each Gaussian where labels come back."""
        super().accept(kind)
        if kind.returns:
            self.statistics.expect_returning()

    def begin_task(self, task: TaskView) -> None:
        """Go back to the rows that were trained on images, and add the task's."""
        if len(self.trained_bias):
            self.head.restore(list(self.trained_weight), list(self.trained_bias), train_old=not self.masked)
        super().begin_task(task)

    def phases(self, task: TaskView) -> Sequence[Phase]:
        """Return one, or none where a single class's logits are masked: they are always right, and teach nothing."""
        return () if len(task.labels) == 1 and self.masked else super().phases(task)

    @torch.no_grad()
    def end_task(self, task: TaskView) -> None:
        """Keep the trained rows and the classes' statistics; from the second task on, align."""
        self.trained_weight.restore(list(self.head.weight))
        self.trained_bias.restore(list(self.head.bias))
        generator = generator_for(task, "alignment")
        features = torch.cat([self.features(batch).float() for batch in task.batches()])
        self.statistics.add(features, task, generator)
        if task.index == 0 or not self.config.align_epochs:
            return
        rows = align(
            list(self.head.weight),
            list(self.head.bias),
            self.statistics,
            generator,
            self.config.align_epochs,
            self.config.align_lr,
            self.config.align_samples,
            shares_of_means(len(self.statistics.means)),
            self.config.logit_norm,
        )
        self.head.restore(*rows, train_old=not self.masked)

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Take over the backbone, both kinds of rows and the statistics."""
        super().load_state(state)
        self.trained_weight.restore(numbered(state, "trained_weight"))
        self.trained_bias.restore(numbered(state, "trained_bias"))
        self.statistics.restore(below("statistics.", state))


def shares_of_means(tasks: int) -> list[float]:
    """Return what each task's means are multiplied by: features drift, old ones more, by up to a tenth."""
    return [0.9 + 0.1 * (number + 1) / tasks for number in range(tasks)]
