"""EASE (Zhou et al., 2024): an adapter a task, and class prototypes in the features of every adapter.

Images of a class are only ever seen with the adapters of its own task and of those before. What its prototype would be
in the features of a later adapter is guessed: as a mixture of classes that were seen with both, weighted by how alike
they are where both have been seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from dualprompt.backbones.base import BackboneSource
from dualprompt.methods.adaptation import Adapters, BottleneckConfig
from dualprompt.methods.base import METHODS, Batch, Defaults, Grid, Phase, TaskView, below, numbered
from dualprompt.methods.heads import SIGMA_LR, CosineTrainingHead
from dualprompt.methods.ownership import OfTask
from dualprompt.methods.prompted import Prompted
from dualprompt.methods.statistics import TensorList, class_means, precise


class EASEConfig(BottleneckConfig):
    """Options of `ease`."""

    name: str = "ease"
    others_weight: float = Field(default=0.1, ge=0, description="α, weight of all adapters but that of a class's task")

    @property
    def learns_one_class(self) -> bool:
        """Yes: prototypes are means, and an adapter that has nothing to tell apart is not trained."""
        return True


@METHODS.register("ease")
class EASE(Prompted[EASEConfig]):
    """The head's rows are prototypes in all adapters' features, side by side; it is made anew after each task."""

    summary = "an adapter a task, and class prototypes in the features of all adapters"
    grid: ClassVar[Grid] = {"train.lr": (0.005, 0.001), "method.others_weight": (0.1, 0.3)}
    defaults: ClassVar[Defaults] = {"train": {"lr": 0.005, "lr_scale": "none", "schedule": "cosine"}}
    needs_borders = "a task has an adapter of its own"
    needs_new_labels = "a class has one prototype in each adapter's features, from images of its own task"
    of_task: ClassVar[OfTask] = {
        **Prompted.of_task,
        **{f"adapters.{part}": None for part in Adapters.parts},
        "prototypes": 0,
    }

    def __init__(self, config: EASEConfig, backbone: BackboneSource) -> None:
        super().__init__(config, backbone)
        self.adapters = Adapters(self.backbone, config.layers, config.bottleneck, config.adapter_scale)
        self.shared_layers = min(self.adapters.at) - 1
        self.prototypes = TensorList()  # a task's, (classes, adapters so far, dim), of images
        self.training_head = CosineTrainingHead(self.backbone.dim)

    @property
    def uses_frozen(self) -> bool:
        """No: every feature is an adapted one."""
        return False

    def phases(self, task: TaskView) -> Sequence[Phase]:
        """Return one; a single class teaches nothing."""
        return () if len(task.labels) == 1 else super().phases(task)

    def own_lr(self, name: str) -> float | None:
        """σ of the cosine classifier has a rate of its own."""
        return SIGMA_LR if name == "training_head.sigma" else super().own_lr(name)

    def begin_task(self, task: TaskView) -> None:
        """Add an adapter and rows to the head; begin anew with the classifier that trains the adapter."""
        self.adapters.grow(task.generator)
        self.training_head.begin_task(task)
        self.head.dim = self.known * self.backbone.dim
        super().begin_task(task)
        self.head.requires_grad_(False)

    @property
    def known(self) -> int:
        """Adapters that the head reads; that of the running task is none of them, unless it is the first."""
        return max(len(self.prototypes), 1)

    def loss(self, batch: Batch) -> Tensor:
        """Return the mean cross-entropy over the task's own classes, with its adapter."""
        features = self.backbone.rest(self.tokens(batch), self.shared_layers, self.adapters.layers())
        return self.training_head.loss(features, batch.labels)

    @torch.no_grad()
    def read(self, batch: Batch) -> Tensor:
        """Return the features under every known adapter, (batch, adapters, dim)."""
        tokens = self.tokens(batch)
        prompts = (self.adapters.layers(which) for which in range(self.known))
        return torch.stack([self.backbone.rest(tokens, self.shared_layers, each).float() for each in prompts], dim=1)

    def features(self, batch: Batch) -> Tensor:
        """Return what the head reads: the directions of all features, side by side."""
        return F.normalize(self.read(batch), dim=2).flatten(1)

    @torch.no_grad()
    def end_task(self, task: TaskView) -> None:
        """Take the prototypes of the task's classes under all adapters, and make the head anew."""
        self.adapters.requires_grad_(False)
        self.training_head.end_task()
        classes, adapters = len(task.labels), len(self.adapters)
        self.prototypes.append(torch.zeros(classes, adapters, self.backbone.dim))
        found = precise(torch.cat([self.read(batch) for batch in task.batches()]).flatten(1))
        means = class_means(found, task.places.to(found.device), classes)
        self.prototypes[-1].copy_(means.unflatten(1, (adapters, -1)))
        self._make_head()

    def _make_head(self) -> None:
        complete = completed(list(self.prototypes))
        weights = []
        for own, prototypes in enumerate(complete):
            others = self.config.others_weight / max(len(complete) - 1, 1)
            share = torch.full((len(complete), 1), others, device=prototypes.device)
            share[own] = 1.0
            weights.append((share * F.normalize(prototypes, dim=2)).flatten(1))
        self.head.restore(weights, [rows.new_zeros(len(rows)) for rows in weights], train_old=False)
        self.head.requires_grad_(False)

    def forget(self, task: int, classes: Sequence[int], places: Sequence[int] | None) -> None:
        """Drop the classes; with a task its adapter goes, and what others had in that adapter's features."""
        super().forget(task, classes, places)
        stay = [which for which in range(len(self.adapters) + 1) if which != task]
        if places is not None or not stay:
            return
        kept = [rows[:, [which for which in stay if which < rows.shape[1]]] for rows in self.prototypes]
        self.prototypes.restore(kept)
        weights = [rows.unflatten(1, (len(stay) + 1, -1))[:, stay].flatten(1) for rows in self.head.weight]
        self.head.restore(weights, list(self.head.bias), train_old=False)
        self.head.requires_grad_(False)

    def additional(self) -> int:
        """Return the number of adapters' parameters."""
        return self.adapters.count

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Take over adapters, prototypes and head."""
        super().load_state(state)
        self.head.requires_grad_(False)
        self.adapters.restore(below("adapters.", state))
        self.prototypes.restore(numbered(state, "prototypes"))
        self.training_head.restore_below("training_head", state)


def completed(prototypes: Sequence[Tensor]) -> list[Tensor]:
    """Return prototypes of all classes under all adapters, (classes, adapters, dim) a task.

    `prototypes` are those of images, a task after another: under the adapters of the task itself and of those before.
    Under a later adapter j, a class of task i is the mixture of all classes that were seen with it, those of task j and
    after, weighted by the softmax over them of cosines under adapter i.
    """
    tasks = len(prototypes)
    found = []
    for own, mine in enumerate(prototypes):
        columns = [mine]
        for later in range(own + 1, tasks):
            there = torch.cat([each[:, later] for each in prototypes[later:]])
            here = torch.cat([each[:, own] for each in prototypes[later:]])
            alike = F.normalize(mine[:, own], dim=1) @ F.normalize(here, dim=1).T
            columns.append((alike.softmax(dim=1) @ there)[:, None])
        found.append(torch.cat(columns, dim=1))
    return found
