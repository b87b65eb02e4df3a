"""RPSNet (Rajasegaran et al., 2019): random paths through parallel modules, old ones frozen, and distillation."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from dualprompt.backbones.base import Backbone, BackboneSource
from dualprompt.derived import predicting
from dualprompt.methods.base import (
    METHODS,
    OLD_CLASSES,
    Batch,
    BufferPlan,
    Defaults,
    Grid,
    MethodConfig,
    Phase,
    TaskView,
    below,
    logits_always,
)
from dualprompt.methods.frozen_head import FrozenHead
from dualprompt.methods.heads import GrowingHead
from dualprompt.methods.paths import LAYERS, PathNetwork, draw
from dualprompt.seeds import derive

BEST, ACCURACY = "best.", "accuracy"  # what the names of the best choice's tensors begin with, and its score


class RPSNetConfig(MethodConfig):
    """Options of `rpsnet`."""

    name: str = "rpsnet"
    training_logits: Literal["masked", "unmasked"] = "unmasked"
    buffer_size: int = Field(default=2000, ge=1, le=10**8, description="images of old tasks that are kept")
    width: int = Field(default=64, ge=1, le=1024, description="channels of the first layers; the last have eight times")
    modules: int = Field(default=8, ge=1, le=64, description="M, modules a layer at most")
    tasks_per_path: int = Field(default=2, ge=1, le=10**6, description="J, tasks that train one path")
    candidates: int = Field(
        default=1, ge=1, le=64, description="P, paths that are trained; a tenth of the task's images chooses among them"
    )
    temperature: float = Field(default=2.0, gt=0, description="T of the distillation")
    controller: float = Field(default=2.5, ge=0, description="φ = controller · (t − 2) from task t = 3 on, 1 before")
    parity: bool = Field(
        default=False,
        description="as released: the teacher has the untrained modules too, statistics of frozen ones drift, "
        "and epoch and path are CHOSEN BY TEST ACCURACY",
    )

    _all_classes = logits_always("unmasked", OLD_CLASSES)


@METHODS.register("rpsnet")
class RPSNet(FrozenHead[RPSNetConfig]):
    """A network of its own: the backbone gives the input's size, and what its additions are measured by.

    The first tasks train one module a layer. Every J tasks a path draws one module a layer, old ones among them; those
    that are new train, with the shortcuts and the head, and all that paths have ever taken are added up.
    """

    summary = "random paths through parallel modules, distillation; balanced buffer; a network of its own"
    grid: ClassVar[Grid] = {"train.lr": (0.001, 0.0003), "method.controller": (2.5, 1.0)}
    defaults: ClassVar[Defaults] = {
        "train": {"optimiser": "adam", "lr": 0.001, "lr_scale": "none", "schedule": "cosine"}
    }
    needs_new_labels = "how much it distils is decided by the tasks that brought classes"
    needs_borders = "tasks have paths of their own"
    backbone: PathNetwork
    teacher: tuple[PathNetwork, GrowingHead] | None = None  # the model before the task
    generation: int | None = None  # of the modules that are trained; None: between tasks

    def __init__(self, config: RPSNetConfig, backbone: BackboneSource) -> None:
        super().__init__(config, backbone)
        self.reference, given = [self.backbones.outline()], self.backbone  # a list, so that it is no part of the method
        self.backbone = PathNetwork(self.config.width, self.config.modules, given.input_size).to(given.device)
        self.head = GrowingHead(self.backbone.dim).to(given.device)
        self.before: dict[str, Tensor] = {}  # the state before the task
        self.best: dict[str, Tensor] = {}  # that of the best choice so far, and its accuracy

    @property
    def trains_backbone(self) -> bool:
        """All of it that is not frozen."""
        return True

    def measure(self) -> Backbone:
        """Return the backbone that this network takes the place of."""
        return self.reference[0]

    @property
    def buffer(self) -> BufferPlan:
        """As many images of every class, drawn at random."""
        return BufferPlan(self.config.buffer_size, "balanced")

    @property
    def hold_out(self) -> float:
        """A tenth, where there is something to choose."""
        return 0.1 if self.config.candidates > 1 and not self.config.parity else 0.0

    @property
    def peeks(self) -> bool:
        """As the released code, for parity with it."""
        return self.config.parity

    def begin_task(self, task: TaskView) -> None:
        """Keep the model as it is; the first task makes the first module of every layer."""
        if task.index:
            self.before = {name: value.clone() for name, value in self.state().items()}
            self.teacher = self._frozen()
        else:
            draw(self.backbone.shortcuts, task.generator)
            self.backbone.take(torch.zeros(LAYERS, dtype=torch.int64), 0, task.generator)
        super().begin_task(task)

    def _frozen(self) -> tuple[PathNetwork, GrowingHead]:
        network, head = copy.deepcopy(self.backbone), copy.deepcopy(self.head)
        return network.freeze().round_to(self.compute_dtype), head.requires_grad_(False).eval()

    def _draws(self, task: TaskView) -> bool:
        """Return whether paths are drawn for a task; before that the first module of every layer is all there is."""
        return task.index > 0 and task.index % self.config.tasks_per_path == 0

    def phases(self, task: TaskView) -> Sequence[Phase]:
        """Return one, on new and kept images; or one for each candidate."""
        if not self._draws(task) or self.config.candidates == 1:
            return (Phase(data="task+buffer"),)
        return tuple(Phase(f"path {number + 1}", "task+buffer") for number in range(self.config.candidates))

    def begin_phase(self, phase: Phase, task: TaskView) -> None:
        """Take a path, from where the task began, if this is a task for that; train what is newest."""
        self.generation = task.index // self.config.tasks_per_path
        if self._draws(task):
            self._take_path(self.phases(task).index(phase), task)
        if self.teacher is not None and self.config.parity:
            self.teacher = copy.deepcopy(self.backbone).freeze().round_to(self.compute_dtype), self.teacher[1]
        self.backbone.train_generation(self.generation, drift=self.config.parity)

    def _take_path(self, number: int, task: TaskView) -> None:
        if number:
            self._end_candidate(task)
            self._restore(self.before)
            self.head.begin(task.labels, task.new_labels, train_old=True)
        generator = torch.Generator().manual_seed(derive(task.generator.initial_seed(), "path", number))
        path = torch.randint(self.config.modules, (LAYERS,), generator=generator)
        self.backbone.take(path, task.index // self.config.tasks_per_path, generator)

    def features(self, batch: Batch) -> Tensor:
        """Return the features of all paths together."""
        return self.backbone.computed_in(self.compute_dtype, batch.images)

    def loss(self, batch: Batch) -> Tensor:
        """Return the cross-entropy over seen classes, and φ times the distillation."""
        logits = self.head.all(self.features(batch))
        loss = F.cross_entropy(logits, batch.labels)
        if self.teacher is None:
            return loss
        network, head = self.teacher
        with torch.no_grad():
            old = head.predict(network(batch.images))
        tasks = len(self.head.bias) - 1
        phi = 1.0 if tasks <= 2 else self.config.controller * (tasks - 2)
        return loss + phi * mixed_distillation(logits, old, batch.labels, self.config.temperature)

    def end_epoch(self, task: TaskView) -> None:
        """Remember the best epoch by test accuracy, for parity alone."""
        if self.config.parity:
            self._consider(task.judged())

    def _end_candidate(self, task: TaskView) -> None:
        if self.hold_out:
            self._consider(task.held_out())

    @torch.no_grad()
    def _consider(self, batches: Iterable[Batch]) -> None:
        """Remember the model as it is now if no other of this task has classified so many images right."""
        with predicting(self):
            found = [self.predict(batch).logits.argmax(dim=1) == batch.labels for batch in batches]
        right = torch.cat(found).float().mean() if found else torch.zeros((), device=self.backbone.device)
        if not self.best or right > self.best[ACCURACY]:
            now = {name: value.clone() for name, value in super().state().items()}
            self.best = now | {ACCURACY: right}

    def end_task(self, task: TaskView) -> None:
        """Go back to the best choice, where there was one; nothing trains from here on."""
        if self._draws(task):
            self._end_candidate(task)
        if self.best:
            self._restore(self.best)
        self.best, self.before, self.generation = {}, {}, None
        self.backbone.train_generation(None, drift=False)

    def additional(self) -> int:
        """Return how many more numbers there are than in the backbone that this network takes the place of."""
        own, given = (sum(p.numel() for p in each.parameters()) for each in (self.backbone, self.measure()))
        return max(0, own - given)

    def state(self) -> dict[str, Tensor]:
        """Return modules, shortcuts and head, and the best choice of a task that is being learned."""
        return super().state() | {f"{BEST}{name}": value for name, value in self.best.items()}

    def _restore(self, state: dict[str, Tensor]) -> None:
        self.backbone.load(below("backbone.", state))
        super().load_state(state)

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Take over modules, shortcuts and head, and what was the best choice so far."""
        self._restore(state)
        self.best = below(BEST, state)
        self.backbone.train_generation(self.generation, drift=self.config.parity and self.generation is not None)


def mixed_distillation(logits: Tensor, old: Tensor, labels: Tensor, temperature: float) -> Tensor:
    """Return Σ max(0, p·log(p/q)) over classes, averaged over images, as the released code has it.

    q is the softmax of logits/T over all seen classes. p is that of the teacher's `old` logits, (batch, old classes),
    beside a 0 or 1 for each new class: whether the image is of it.
    """
    new = labels[:, None] == torch.arange(old.shape[1], logits.shape[1], device=labels.device)
    target = (torch.cat([old, new.to(old.dtype)], dim=1) / temperature).log_softmax(dim=1)
    terms = target.exp() * (target - (logits / temperature).log_softmax(dim=1))
    return terms.clamp_min(0).sum() / len(labels)
