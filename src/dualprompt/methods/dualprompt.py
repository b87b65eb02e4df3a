"""DualPrompt: a shared G-Prompt, an E-Prompt and key for each task, and a linear head on a frozen backbone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field, field_validator
from torch import Tensor

from dualprompt.backbones.base import BackboneSource
from dualprompt.config import LONGEST
from dualprompt.methods.base import (
    METHODS,
    Batch,
    Grid,
    MethodConfig,
    Phase,
    Prediction,
    Selection,
    StreamKind,
    TaskView,
    below,
    numbered,
)
from dualprompt.methods.heads import with_one
from dualprompt.methods.ownership import OfTask
from dualprompt.methods.prompted import Prompted
from dualprompt.methods.ridge import Ridge
from dualprompt.methods.statistics import ClassGaussians, GaussianMatching, KeyMatching, generator_for, realign
from dualprompt.prompts.attach import LengthCounts, PrefixAt, Prompting
from dualprompt.prompts.bank import Init, PromptBank, check_layers, layers_of, match_loss, mean_key, paper_count


class DualPromptConfig(MethodConfig):
    """Options of `dualprompt`; the defaults are the paper's."""

    name: str = "dualprompt"
    g_layers: tuple[int, ...] = Field(default=(1, 2), description="layers with a G-Prompt, counted from 1")
    e_layers: tuple[int, ...] = Field(default=(3, 4, 5), description="layers with an E-Prompt, counted from 1")
    g_length: int = Field(default=5, ge=0, le=LONGEST, description="L_g")
    e_length: int = Field(default=20, ge=0, le=LONGEST, description="L_e")
    prompting: Prompting = Field(default="pre-t", description="Prefix Tuning or Prompt Tuning")
    prefix_at: PrefixAt = Field(default="projected", description="Pre-T after W_K, W_V (official) or before (paper)")
    length_counts: LengthCounts = Field(default="each", description="length rows for K and V each, or both together")
    init: Init = Field(default="uniform", description="prompts and keys from U[0, 0.01), or wide: U(−1, 1)")
    e_init: Literal["previous", "fresh"] = Field(default="previous", description="e_{t+1} starts from e_t or fresh")
    keys: Literal["learned", "mean"] = Field(default="learned", description="by the match loss, or its closed form")
    match_weight: float = Field(default=1.0, ge=0, description="λ")
    selection: Selection = Field(default="query", description="how test images pick an E-Prompt")

    head: Literal["linear", "ridge", "gaussian"] = Field(
        default="linear",
        description="classifier as trained, or after each task solved by ridge regression, or re-aligned on Gaussians",
    )
    ridge_strength: float | None = Field(
        default=None, gt=0, description="λ of head: ridge (default: chosen on a fifth of each task)"
    )
    align_steps: int = Field(default=300, ge=1, le=10**6, description="Adam steps of head: gaussian after each task")
    align_lr: float = Field(default=0.01, gt=0, description="their learning rate")
    matching: Literal["key", "keys", "gaussian"] = Field(
        default="key", description="test images find their task by its key, several keys, or its classes' statistics"
    )
    keys_per_task: int = Field(default=5, ge=1, le=1000, description="number of keys of matching: keys")

    _layers_of = field_validator("g_layers", "e_layers", mode="before")(layers_of)

    @property
    def learns_one_class(self) -> bool:
        """Whether a task may have one class: where the head is solved for or re-aligned, it needs no training."""
        return self.head != "linear" or self.training_logits == "unmasked"


@METHODS.register("dualprompt")
class DualPrompt(Prompted[DualPromptConfig]):
    """The paper's method. Its classifier and that of the baseline are one and the same."""

    summary = "G-Prompt, E-Prompts and task keys on a frozen backbone (the paper's method)"
    grid: ClassVar[Grid] = {"train.lr": (0.005, 0.0025), "method.init": ("uniform", "wide")}
    selections = ("query", "batch_vote", "oracle")
    needs_borders = "a task has an E-Prompt of its own; dualprompt-pool has a pool for all images"
    of_task: ClassVar[OfTask] = {
        **Prompted.of_task,
        "bank.e_prompt": None,
        "bank.task_key": None,
        "gaussians.means": 0,
        "gaussians.roots": None,
        "matching.means": 0,
        "matching.keys": None,
        "ridge.sums": 1,
    }
    # What is kept of old classes lets every task re-align the whole classifier. Its gentler rate left accuracy as it is
    # and took a fifth to a third off the log loss (12 photo classes, another small ViT).
    learner_defaults: ClassVar[Mapping[str, Any]] = {
        "head": "gaussian",
        "matching": "gaussian",
        "keys": "mean",
        "align_lr": 0.001,
    }
    bank: PromptBank

    def __init__(self, config: DualPromptConfig, backbone: BackboneSource) -> None:
        super().__init__(config, backbone)
        check_layers("method.g_layers", config.g_layers, self.backbone.depth)
        check_layers("method.e_layers", config.e_layers, self.backbone.depth)
        self.bank = PromptBank(
            dim=self.backbone.dim,
            g_layers=config.g_layers,
            e_layers=config.e_layers,
            g_length=config.g_length,
            e_length=config.e_length,
            prompting=config.prompting,
            prefix_at=config.prefix_at,
            length_counts=config.length_counts,
        )
        self.shared_layers = min((*config.g_layers, *config.e_layers), default=1) - 1
        dim = self.backbone.dim
        if config.head == "ridge":
            self.ridge = Ridge(dim + 1, with_one)
        elif config.head == "gaussian":
            self.gaussians = ClassGaussians()
        self.matching = None
        if config.matching != "key":
            several = config.matching == "keys"
            self.matching = KeyMatching(dim, config.keys_per_task) if several else GaussianMatching(dim)

    def accept(self, kind: StreamKind) -> None:
        """Note the label of each Gaussian where labels come back."""
        super().accept(kind)
        if kind.returns and self.config.head == "gaussian":
            self.gaussians.expect_returning()

    def phases(self, task: TaskView) -> Sequence[Phase]:
        """Return one, or none where a single class's logits are masked: they are always right, and teach nothing."""
        return () if len(task.labels) == 1 and self.masked else super().phases(task)

    def begin_task(self, task: TaskView) -> None:
        """Draw the G-Prompt (first task), grow the bank and the head by one task."""
        if task.index == 0:
            self.bank.begin(task.generator, self.config.init)
        self.bank.grow(task.generator, self.config.init, self.config.e_init == "previous")
        self._choose_trainable()
        super().begin_task(task)

    def _choose_trainable(self) -> None:
        self.bank.g_prompt.requires_grad_(self.bank.g_prompt.numel() > 0)
        if self.bank.tasks:
            self.bank.e_prompt[-1].requires_grad_(self.bank.e_prompt[-1].numel() > 0)
            self.bank.task_key[-1].requires_grad_(self.config.keys == "learned" and self.config.match_weight > 0)

    def loss(self, batch: Batch) -> Tensor:
        """Return the cross-entropy of the prompted pass plus λ times the match loss of the current key."""
        tokens = self.tokens(batch)
        features = self.backbone.rest(tokens, self.shared_layers, self.bank.training_prompts())
        loss = self.classification_loss(features, batch.labels)
        key = self.bank.task_key[-1]
        if not key.requires_grad:
            return loss
        return loss + self.config.match_weight * match_loss(self.query(batch, tokens), key)

    @torch.no_grad()
    def end_task(self, task: TaskView) -> None:
        """Make what comes after the last step in closed form or from statistics: key, matching, head; as configured."""
        if self.config.keys == "mean":
            self.bank.set_key(mean_key(task.queries().float()))
        if self.matching is not None:
            places, labels = task.places, len(task.labels)
            self.matching.add(task.queries().float(), places, labels, generator_for(task, "matching"))
        if self.config.head != "linear":
            self._settle_head(self._own_features(task), task)

    def _own_features(self, task: TaskView) -> Tensor:
        """Return the features of the newest task's images with its own E-Prompt, (images, dim)."""
        prompts = self.bank.training_prompts()
        return torch.cat(
            [self.backbone.rest(self.tokens(batch), self.shared_layers, prompts).float() for batch in task.batches()]
        )

    def _settle_head(self, features: Tensor, task: TaskView) -> None:
        generator = generator_for(task, "head")
        if self.config.head == "ridge":
            solved = self.ridge.add(features, task, self.config.ridge_strength, generator)
            weights, biases = [rows[:, :-1] for rows in solved], [rows[:, -1] for rows in solved]
        else:
            self.gaussians.add(features, task)
            weights, biases = realign(
                list(self.head.weight),
                list(self.head.bias),
                self.gaussians,
                generator,
                self.config.align_steps,
                self.config.align_lr,
            )
        self.head.restore(weights, biases, train_old=not self.masked)

    @torch.no_grad()
    def predict(self, batch: Batch, selection: Selection | None = None) -> Prediction:
        """Pick an E-Prompt for each image, then classify; images with different picks share one pass."""
        self.check_selection(selection)
        tokens = self.tokens(batch)
        selected, similarity = self._select(selection or self.config.selection, batch, tokens)
        features = self.backbone.rest(tokens, self.shared_layers, self.bank.prompts_for(selected, tokens.dtype))
        return Prediction(self.head.predict(features), selected, similarity)

    def _select(self, selection: Selection, batch: Batch, tokens: Tensor) -> tuple[Tensor, Tensor | None]:
        if selection == "oracle":
            return batch.told_task, None  # without the pass that a query takes
        query = self.query(batch, tokens)
        if self.matching is None:
            similarity, selected = self.bank.similarities(query).max(dim=1)
        else:
            selected, similarity = self.matching.match(query)
        return self.selected_task(selection, batch, selected), similarity

    def additional(self) -> int:
        """Return the number of prompt and key parameters."""
        return sum(parameter.numel() for parameter in self.bank.parameters())

    def parameters_report(self) -> dict[str, Any]:
        """Add what the paper's formula gives, which counts `length` rows a layer."""
        c, dim = self.config, self.backbone.dim
        count = paper_count(len(c.g_layers), len(c.e_layers), c.g_length, c.e_length, dim, self.bank.tasks)
        return {**super().parameters_report(), "paper_formula": count}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Take over G-Prompt, E-Prompts, keys and head."""
        super().load_state(state)
        self.bank.g_prompt.data.copy_(state["bank.g_prompt"])
        self.bank.restore(numbered(state, "bank.e_prompt"), numbered(state, "bank.task_key"))
        self._choose_trainable()
        for name in ("ridge", "gaussians", "matching"):
            if (statistics := getattr(self, name, None)) is not None:
                statistics.restore(below(f"{name}.", state))
