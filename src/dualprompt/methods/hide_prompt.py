"""HiDe-Prompt (Wang et al., 2023): within-task prediction, task inference and task-adaptive prediction, each its own.

A task trains a prompt. Statistics of every class, of features without prompts and with those of its task, let two heads
of all classes be trained without images: one finds the task of an image, the other names its class. The authors' code
lets the images of a test batch share their prompts; here each image is judged alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field, field_validator
from torch import Tensor, nn

from dualprompt.backbones.base import BackboneSource
from dualprompt.config import LONGEST
from dualprompt.methods.alignment import ClassStatistics, Kept, align
from dualprompt.methods.base import (
    METHODS,
    Batch,
    Defaults,
    Grid,
    MethodConfig,
    Phase,
    Prediction,
    Selection,
    TaskView,
    below,
    numbered,
)
from dualprompt.methods.heads import GrowingHead
from dualprompt.methods.ownership import OfTask
from dualprompt.methods.prompted import Prompted
from dualprompt.methods.statistics import generator_for
from dualprompt.prompts.bank import Init, PromptBank, check_layers, layers_of

CONTRAST_TEMPERATURE = 0.8


class HiDePromptConfig(MethodConfig):
    """Options of `hide-prompt`; the defaults are those of its code for Split CIFAR-100."""

    name: str = "hide-prompt"
    e_layers: tuple[int, ...] = Field(
        default=(1, 2, 3, 4, 5), min_length=1, description="layers with a task's prompt, counted from 1"
    )
    e_length: int = Field(default=5, ge=1, le=LONGEST, description="prefixes of K and of V in a layer")
    init: Init = Field(default="wide", description="the first prompt from U[0, 0.01), or wide: U(−1, 1)")
    momentum: float = Field(
        default=0.01, ge=0, lt=1, description="share of the mean of old tasks' prompts in that of a new one"
    )
    contrast_weight: float = Field(
        default=0.1, ge=0, description="weight of the loss that keeps features apart from each other and from old means"
    )
    statistics: Kept = Field(default="centroids", description="what is kept of a class's features")
    centroids: int = Field(default=10, ge=1, le=1000, description="of a class, with statistics: centroids")
    align_epochs: int = Field(default=30, ge=1, le=10**4, description="epochs in which both heads are aligned")
    align_lr: float = Field(default=0.005, gt=0, description="their learning rate")
    align_samples: int = Field(default=120, ge=1, le=10**5, description="samples of a class in such an epoch")
    selection: Selection = Field(default="query", description="how test images pick a task's prompt")

    _layers_of = field_validator("e_layers", mode="before")(layers_of)

    @property
    def learns_one_class(self) -> bool:
        """Yes: the alignment tells it from the others."""
        return True


@METHODS.register("hide-prompt")
class HiDePrompt(Prompted[HiDePromptConfig]):
    """A prompt a task; the task of an image is that of the class which its feature without prompts is likeliest of."""

    summary = "a prompt a task, the task found and the class named by heads aligned on class statistics; image by image"
    grid: ClassVar[Grid] = {"train.lr": (0.01, 0.003), "method.init": ("wide", "uniform")}
    defaults: ClassVar[Defaults] = {"train": {"lr": 0.01, "lr_scale": "none", "schedule": "cosine"}}
    selections = ("query", "batch_vote", "oracle")
    needs_new_labels = "it finds an image's task by its class, which would be of several tasks"
    of_task: ClassVar[OfTask] = {
        **Prompted.of_task,
        "bank.e_prompt": None,
        **{f"task_head.{part}": 0 for part in ("weight", "bias")},
        **{f"{which}.{part}": 0 for which in ("plain", "prompted") for part in ("means", "spreads")},
    }

    def __init__(self, config: HiDePromptConfig, backbone: BackboneSource) -> None:
        super().__init__(config, backbone)
        check_layers("method.e_layers", config.e_layers, self.backbone.depth)
        dim = self.backbone.dim
        self.bank = PromptBank(
            dim=dim, g_layers=(), e_layers=config.e_layers, g_length=0, e_length=config.e_length, keys=False
        )
        self.bank.requires_grad_(False)
        self.shared_layers = min(config.e_layers) - 1
        self.task_head = GrowingHead(dim)  # of features without prompts; finds the task
        self.plain = ClassStatistics(config.statistics, config.centroids)  # of those features
        self.prompted = ClassStatistics(config.statistics, config.centroids)
        self.task_of = nn.Buffer(torch.empty(0, dtype=torch.int64), persistent=False)  # each class of that head

    def phases(self, task: TaskView) -> Sequence[Phase]:
        """Return one, or none where a single class's logits are masked: they are always right, and teach nothing."""
        return () if len(task.labels) == 1 and self.masked else super().phases(task)

    def begin_task(self, task: TaskView) -> None:
        """Add a prompt, which starts from the one before, and rows to both heads."""
        self.bank.grow(task.generator, self.config.init, from_previous=True)
        super().begin_task(task)
        rows = range(self.task_head.classes, self.task_head.classes + len(task.labels))
        self.task_head.begin(rows, rows, train_old=False)
        self.task_of = self.task_head.blocks()

    def training_prompt(self) -> Tensor:
        """Return the newest prompt with a little of the mean of all others, (layers, 2, length, dim)."""
        *old, newest = self.bank.e_prompt
        if not old or not self.config.momentum:
            return newest
        return torch.lerp(newest, torch.stack(old).mean(dim=0), self.config.momentum)

    def loss(self, batch: Batch) -> Tensor:
        """Return the cross-entropies of both heads over the task's classes, and the contrast of prompted features."""
        tokens = self.tokens(batch)
        prompts = self.bank.shared_prompts(self.training_prompt())
        features = self.backbone.rest(tokens, self.shared_layers, prompts).float()
        loss = self.classification_loss(features, batch.labels)
        tasks = self.task_head.current(self.query(batch, tokens))
        loss = loss + F.cross_entropy(tasks, self.head.current_places(batch.labels))
        if not self.config.contrast_weight:
            return loss
        means = [each.flatten(0, 1) for each in self.prompted.means]
        return loss + self.config.contrast_weight * contrast(torch.cat([*means, features]))

    @torch.no_grad()
    def end_task(self, task: TaskView) -> None:
        """Let the mixed prompt be the task's; keep the statistics of its classes, and align both heads."""
        self.bank.e_prompt[-1].copy_(self.training_prompt())
        self.bank.requires_grad_(False)
        self.bank.drop_derived()
        prompts, generator = self.bank.training_prompts(), generator_for(task, "alignment")
        passes = [self.backbone.rest(self.tokens(each), self.shared_layers, prompts) for each in task.batches()]
        for head, statistics, features in (
            (self.task_head, self.plain, task.queries().float()),
            (self.head, self.prompted, torch.cat(passes).float()),
        ):
            statistics.add(features, task, generator)
            if task.index:
                options = self.config.align_epochs, self.config.align_lr, self.config.align_samples
                rows = align(list(head.weight), list(head.bias), statistics, generator, *options)
                head.restore(*rows, train_old=False)

    @torch.no_grad()
    def predict(self, batch: Batch, selection: Selection | None = None) -> Prediction:
        """Find each image's task without prompts, then classify with that task's."""
        self.check_selection(selection)
        tokens = self.tokens(batch)
        found = self.task_of[self.task_head.predict(self.query(batch, tokens)).argmax(dim=1)]
        selected = self.selected_task(selection or self.config.selection, batch, found)
        features = self.backbone.rest(tokens, self.shared_layers, self.bank.prompts_for(selected, tokens.dtype))
        return Prediction(self.head.predict(features), selected)

    def additional(self) -> int:
        """Return the number of prompt parameters, and of the head that finds the task."""
        return sum(each.numel() for part in (self.bank, self.task_head) for each in part.parameters())

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Take over prompts, statistics and heads."""
        super().load_state(state)
        self.bank.restore(numbered(state, "bank.e_prompt"), [])
        self.bank.requires_grad_(False)
        rows = numbered(state, "task_head.weight"), numbered(state, "task_head.bias")
        self.task_head.restore(*rows, train_old=False)
        for which in ("plain", "prompted"):
            getattr(self, which).restore(below(f"{which}.", state))
        self.task_of = self.task_head.blocks()


def contrast(rows: Tensor) -> Tensor:
    """Return the cross-entropy of telling each row by its products with all rows from the others."""
    return F.cross_entropy(rows @ rows.T / CONTRAST_TEMPERATURE, torch.arange(len(rows), device=rows.device))
