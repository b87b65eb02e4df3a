"""DualPrompt: a shared G-Prompt, an E-Prompt and key for each task, and a linear head on a frozen backbone."""

from __future__ import annotations

from typing import Any, Literal

import torch
from pydantic import Field, field_validator
from torch import Tensor

from dualprompt.backbones.vit import VisionTransformer
from dualprompt.methods.base import METHODS, Batch, MethodConfig, Prediction, Selection, TaskView, numbered
from dualprompt.methods.frozen_head import FrozenHead
from dualprompt.prompts.attach import LengthCounts, PrefixAt, Prompting
from dualprompt.prompts.bank import Init, PromptBank, check_layers, match_loss, mean_key, paper_count, vote


class DualPromptConfig(MethodConfig):
    """Options of `dualprompt`; the defaults are the paper's."""

    name: str = "dualprompt"
    g_layers: tuple[int, ...] = Field(default=(1, 2), description="layers with a G-Prompt, counted from 1")
    e_layers: tuple[int, ...] = Field(default=(3, 4, 5), description="layers with an E-Prompt, counted from 1")
    g_length: int = Field(default=5, ge=0, description="L_g")
    e_length: int = Field(default=20, ge=0, description="L_e")
    prompting: Prompting = Field(default="pre-t", description="Prefix Tuning or Prompt Tuning")
    prefix_at: PrefixAt = Field(default="projected", description="Pre-T after W_K, W_V (official) or before (paper)")
    length_counts: LengthCounts = Field(default="each", description="length rows for K and V each, or both together")
    init: Init = Field(default="uniform", description="prompts and keys from U[0, 0.01), or wide: U(−1, 1)")
    e_init: Literal["previous", "fresh"] = Field(default="previous", description="e_{t+1} starts from e_t or fresh")
    keys: Literal["learned", "mean"] = Field(default="learned", description="by the match loss, or its closed form")
    match_weight: float = Field(default=1.0, ge=0, description="λ")
    selection: Selection = Field(default="query", description="how test images pick an E-Prompt")

    @field_validator("g_layers", "e_layers", mode="before")
    @classmethod
    def _one_layer(cls, value: Any) -> Any:
        return (value,) if type(value) is int else () if value is None else value


@METHODS.register("dualprompt")
class DualPrompt(FrozenHead):
    """The paper's method. Its classifier and that of the baseline are one and the same."""

    Config = DualPromptConfig
    summary = "G-Prompt, E-Prompts and task keys on a frozen backbone (the paper's method)"
    selections = ("query", "batch_vote", "oracle")
    config: DualPromptConfig
    bank: PromptBank

    def __init__(self, config: MethodConfig, backbone: VisionTransformer) -> None:
        assert isinstance(config, DualPromptConfig)
        super().__init__(config, backbone)
        check_layers("method.g_layers", config.g_layers, backbone.config.depth)
        check_layers("method.e_layers", config.e_layers, backbone.config.depth)
        self.bank = PromptBank(
            dim=backbone.config.dim,
            g_layers=config.g_layers,
            e_layers=config.e_layers,
            g_length=config.g_length,
            e_length=config.e_length,
            prompting=config.prompting,
            prefix_at=config.prefix_at,
            length_counts=config.length_counts,
        )
        # Layers before the first prompted one give the same tokens to the query and to the prompted pass.
        self.shared_layers = min((*config.g_layers, *config.e_layers), default=1) - 1

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
        with torch.no_grad():
            tokens = self.backbone.stem(batch.images, self.shared_layers)
        features = self.backbone.rest(tokens, self.shared_layers, self.bank.training_prompts())
        loss = self.classification_loss(features, batch.labels)
        key = self.bank.task_key[-1]
        if not key.requires_grad:
            return loss
        query = batch.query if batch.query is not None else self._query(tokens)
        return loss + self.config.match_weight * match_loss(query.float(), key)

    @torch.no_grad()
    def _query(self, tokens: Tensor) -> Tensor:
        return self.backbone.rest(tokens, self.shared_layers)

    def end_task(self, task: TaskView) -> None:
        """Set the key in closed form, if asked to."""
        if self.config.keys == "mean":
            self.bank.set_key(mean_key(task.queries().float()))

    @torch.no_grad()
    def predict(self, batch: Batch, selection: Selection | None = None) -> Prediction:
        """Pick an E-Prompt for each image, then classify; images with different picks share one pass."""
        self.check_selection(selection)
        tokens = self.backbone.stem(batch.images, self.shared_layers)
        selected = self._select(selection or self.config.selection, batch, tokens)
        features = self.backbone.rest(tokens, self.shared_layers, self.bank.prompts_for(selected))
        return Prediction(self.head.predict(features), selected)

    def _select(self, selection: Selection, batch: Batch, tokens: Tensor) -> Tensor:
        if selection == "oracle":
            if batch.task is None:
                raise ValueError("selection 'oracle' needs the true task of each image")
            return batch.task
        query = batch.query if batch.query is not None else self._query(tokens)
        selected = self.bank.similarities(query.float()).argmax(dim=1)
        return vote(selected) if selection == "batch_vote" else selected

    def additional(self) -> int:
        """Return the number of prompt and key parameters."""
        return sum(parameter.numel() for parameter in self.bank.parameters())

    def parameters_report(self) -> dict[str, Any]:
        """Add what the paper's formula gives, which counts `length` rows a layer."""
        c, dim = self.config, self.backbone.config.dim
        count = paper_count(len(c.g_layers), len(c.e_layers), c.g_length, c.e_length, dim, self.bank.tasks)
        return {**super().parameters_report(), "paper_formula": count}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Take over G-Prompt, E-Prompts, keys and head."""
        super().load_state(state)
        self.bank.g_prompt.data.copy_(state["bank.g_prompt"])
        self.bank.restore(numbered(state, "bank.e_prompt"), numbered(state, "bank.task_key"))
        self._choose_trainable()
