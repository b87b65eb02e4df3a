"""DynaER (DER, Yan et al., 2021): every task adds a backbone; all that came before are frozen, and all are read."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from dualprompt.backbones.base import Backbone, BackboneSource
from dualprompt.backbones.known import drawn_by_seed
from dualprompt.methods.base import (
    METHODS,
    OLD_CLASSES,
    Batch,
    BufferPlan,
    Defaults,
    Grid,
    Method,
    MethodConfig,
    Phase,
    Prediction,
    Selection,
    TaskView,
    below,
    logits_always,
)
from dualprompt.seeds import derive

WARM_UP, CLASSIFIER = "warm-up", "classifier"


class DynaERConfig(MethodConfig):
    """Options of `dynaer`."""

    name: str = "dynaer"
    training_logits: Literal["masked", "unmasked"] = "unmasked"
    buffer_size: int = Field(default=2000, ge=1, le=10**8, description="images of old tasks that are kept")
    auxiliary_weight: float = Field(default=1.0, ge=0, description="λ_a of the auxiliary loss, from the second task on")
    warmup_epochs: int = Field(
        default=10, ge=0, le=10**6, description="epochs before the recipe's in which the rate rises from 0"
    )
    second_stage: Literal["balanced", "align", "none"] = Field(
        default="balanced",
        description="a new classifier, trained on as many images of every class; or new rows as long as old ones",
    )
    classifier_epochs: int = Field(default=30, ge=1, le=10**6, description="epochs of the balanced classifier")
    classifier_lr: float = Field(default=0.1, gt=0, description="learning rate of the balanced classifier")
    classifier_temperature: float = Field(default=5.0, gt=0, description="what its logits are divided by")
    zero_residuals: bool = Field(default=True, description="blocks of a network that is drawn begin as the identity")
    reset: Literal["normal", "uniform"] = Field(
        default="normal", description="how heads are drawn again; uniform: narrower than at first, as released"
    )

    _all_classes = logits_always("unmasked", OLD_CLASSES)


@METHODS.register("dynaer")
class DynaER(Method[DynaERConfig]):
    """The classifier reads the features of every task's backbone side by side: the super-feature.

    A task trains its own backbone, which starts as a copy of the one before. An auxiliary head makes it tell the new
    classes from each other and from all old ones, taken as one. Then the classifier alone is trained anew on a
    balanced part of the images. The original's masks, which prune channels, were never released and are not here.
    """

    summary = "a new backbone for every task beside frozen old ones; herded buffer, balanced classifier"
    grid: ClassVar[Grid] = {"train.lr": (0.1, 0.03), "method.auxiliary_weight": (1.0, 0.5)}
    defaults: ClassVar[Defaults] = {
        "train": {"optimiser": "sgd", "lr": 0.1, "lr_scale": "none", "weight_decay": 5e-4, "schedule": "cosine"}
    }
    needs_new_labels = "a task's backbone learns to tell its new classes from all old ones"
    needs_borders = "a task has a backbone of its own"
    first_newest = 0  # the newest task's first class

    def __init__(self, config: DynaERConfig, backbone: BackboneSource) -> None:
        super().__init__(config, backbone)
        if self.config.zero_residuals and drawn_by_seed(self.backbone.name):
            self.backbone.zero_residuals()
        self.added = nn.ModuleList()  # the backbones of all tasks but the first
        self.head = self._rows(torch.empty(0, self.backbone.dim))
        self.auxiliary: nn.Parameter | None = None  # (1 + new classes, dim); while its task is learned
        self.old: list[Backbone] = []  # frozen, and rounded to what is computed in; no part of the state

    @property
    def trains_backbone(self) -> bool:
        """The first task trains it."""
        return True

    @property
    def networks(self) -> list[Backbone]:
        """One backbone a task."""
        return [self.backbone, *(each for each in self.added if isinstance(each, Backbone))]

    @property
    def buffer(self) -> BufferPlan:
        """Herded by the super-feature."""
        return BufferPlan(self.config.buffer_size, "herding")

    def _rows(self, weight: Tensor) -> nn.Parameter:
        return nn.Parameter(weight.clone().to(self.backbone.device))

    def begin_task(self, task: TaskView) -> None:
        """Freeze what is there and, after the first task, add a copy of the newest backbone."""
        if task.index:
            newest = self.networks[-1]
            self.added.append(copy.deepcopy(newest).unfreeze())
            newest.freeze()
            rounded = [self.compute_dtype != each.dtype for each in self.networks[:-1]]
            self.old = [
                copy.deepcopy(each).round_to(self.compute_dtype) if wanted else each
                for each, wanted in zip(self.networks[:-1], rounded, strict=True)
            ]
        self.first_newest = task.new_labels[0]
        self._draw_heads(task, "begin", "normal")

    def _draw_heads(self, task: TaskView, moment: str, form: Literal["normal", "uniform"]) -> None:
        """Draw classifier and auxiliary head with variance 1/inputs, or a third of it (uniform, as PyTorch does)."""
        generator = torch.Generator().manual_seed(derive(task.generator.initial_seed(), "heads", moment))

        def drawn(classes: int, inputs: int) -> nn.Parameter:
            shape = classes, inputs
            if form == "normal":
                return self._rows(torch.randn(shape, generator=generator) * inputs**-0.5)
            return self._rows((2 * torch.rand(shape, generator=generator) - 1) * inputs**-0.5)

        self.head = drawn(len(task.seen), self.backbone.dim * len(self.networks))
        self.auxiliary = drawn(1 + len(task.new_labels), self.backbone.dim) if task.index else None

    def phases(self, task: TaskView) -> Sequence[Phase]:
        """Return warm-up and training, on new and kept images as they come, and the balanced classifier's."""
        c, data = self.config, "task+buffer"
        rising = {"schedule": "constant", "warmup_epochs": c.warmup_epochs}
        first = (Phase(WARM_UP, data, epochs=c.warmup_epochs, recipe=rising),) if c.warmup_epochs else ()
        falling = {"schedule": "steps", "milestones": (max(1, c.classifier_epochs // 2),), "gamma": 0.1}
        last = Phase(CLASSIFIER, data, cut=True, epochs=c.classifier_epochs, lr=c.classifier_lr, recipe=falling)
        return *first, Phase(data=data), *((last,) if task.index and c.second_stage == "balanced" else ())

    def begin_phase(self, phase: Phase, task: TaskView) -> None:
        """Draw the heads anew, but for the first phase; in the last one the backbones rest."""
        if phase.name != WARM_UP:
            self._draw_heads(task, phase.name, self.config.reset)
        if phase.name == CLASSIFIER:
            self.auxiliary = None
            self.networks[-1].freeze()

    def features(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the super-feature, (batch, dim · tasks), and the newest backbone's part of it; both in fp32."""
        *older, newest = self.networks
        with torch.no_grad():
            old = [each.computed_in(self.compute_dtype, batch.images).float() for each in self.old or older]
        with torch.set_grad_enabled(torch.is_grad_enabled() and not newest.frozen):
            own = newest.computed_in(self.compute_dtype, batch.images).float()
        return torch.cat([*old, own], dim=1), own

    def loss(self, batch: Batch) -> Tensor:
        """Return the cross-entropy of the super-feature, and λ_a times that of the auxiliary head."""
        together, own = self.features(batch)
        logits = F.linear(together, self.head)
        if self.networks[-1].frozen:
            return F.cross_entropy(logits / self.config.classifier_temperature, batch.labels)
        loss = F.cross_entropy(logits, batch.labels)
        if self.auxiliary is None:
            return loss
        coarse = (batch.labels - self.first_newest + 1).clamp_min(0)  # 0: any old class
        return loss + self.config.auxiliary_weight * F.cross_entropy(F.linear(own, self.auxiliary), coarse)

    @torch.no_grad()
    def end_task(self, task: TaskView) -> None:
        """Leave out the auxiliary head; align the new rows where that is the second stage."""
        self.auxiliary = None
        self.networks[-1].freeze()
        if task.index and self.config.second_stage == "align":
            old, new = self.head[: self.first_newest], self.head[self.first_newest :]
            new *= old.norm(dim=1).mean() / new.norm(dim=1).mean()

    def represent(self, batch: Batch) -> Tensor:
        """Return the super-feature."""
        return self.features(batch)[0]

    @torch.no_grad()
    def predict(self, batch: Batch, selection: Selection | None = None) -> Prediction:
        """Classify by the super-feature."""
        self.check_selection(selection)
        return Prediction(F.linear(self.features(batch)[0], self.head))

    def additional(self) -> int:
        """Return the size of all backbones but the first."""
        return sum(parameter.numel() for parameter in self.added.parameters())

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Take over every backbone and the classifier; backbones that are here already stay trained or frozen."""
        count = len({name.split(".")[1] for name in state if name.startswith("added.")})
        if not len(self.head) or len(self.added) != count:  # of another moment than this
            self.backbone.freeze()
            self.added = nn.ModuleList(copy.deepcopy(self.backbone) for _ in range(count))
            self.old = []
        for network, prefix in zip(self.networks, ("backbone.", *(f"added.{n}." for n in range(count))), strict=True):
            network.load_state_dict(below(prefix, state))
        self.head = self._rows(state["head"])
        self.auxiliary = self._rows(state["auxiliary"]) if "auxiliary" in state else None
