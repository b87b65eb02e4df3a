"""L2P (Wang et al., 2022): a pool of prompts, of which each image takes those with the nearest keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from dualprompt.backbones.base import BackboneSource, LayerPrompt
from dualprompt.config import LONGEST
from dualprompt.methods.base import (
    METHODS,
    Batch,
    Defaults,
    Grid,
    MethodConfig,
    Prediction,
    Selection,
    StreamKind,
    TaskView,
    numbered,
)
from dualprompt.methods.ownership import OfTask
from dualprompt.methods.prompted import Prompted
from dualprompt.prompts.bank import Init, cosine, draw, rows_at


class L2PConfig(MethodConfig):
    """Options of `l2p`; the sizes are those with which DualPrompt's paper compares."""

    name: str = "l2p"
    pool: Literal["shared", "by_task"] = Field(
        default="shared",
        description="one pool that all tasks train (official for CIFAR-100), or each task adds and trains N prompts, "
        "which begin where its predecessor's ended (official for 5-datasets)",
    )
    pool_size: int = Field(
        default=30, ge=1, le=10_000, description="M, prompts in a shared pool; by task it grows by N a task"
    )
    length: int = Field(default=20, ge=1, le=LONGEST, description="L_p, tokens of a prompt")
    top_n: int = Field(default=5, ge=1, le=1000, description="N, prompts that an image takes")
    match_weight: float = Field(default=0.5, ge=0, description="λ")
    init: Init = Field(default="uniform", description="prompts and keys from U[0, 0.01), or wide: U(−1, 1)")
    feature: Literal["prompts", "class"] = Field(
        default="prompts", description="classify from the mean output of the prompts (official) or the class token's"
    )

    @model_validator(mode="after")
    def _enough(self) -> L2PConfig:
        if self.pool == "shared" and self.top_n > self.pool_size:
            raise ValueError(f"top_n is {self.top_n}, but pool_size only {self.pool_size}; take fewer or pool more")
        return self


@METHODS.register("l2p")
class L2P(Prompted[L2PConfig]):
    """Each image picks its own prompts, in prediction and with a shared pool in training; no vote over a batch."""

    summary = "a pool of prompts, shared or grown by each task, picked by nearest keys"
    grid: ClassVar[Grid] = {"train.lr": (0.015, 0.005), "method.init": ("uniform", "wide")}
    defaults: ClassVar[Defaults] = {"train": {"lr": 0.005, "lr_scale": "none", "clip": 1.0}}
    of_task: ClassVar[OfTask] = {**Prompted.of_task, "prompts": None, "keys": None}
    prompt: nn.Parameter  # of a shared pool, (M, L_p, dim)
    key: nn.Parameter  # (M, dim)
    prompts: nn.ParameterList  # by task, each (N, L_p, dim)
    keys: nn.ParameterList  # each (N, dim)

    def __init__(self, config: L2PConfig, backbone: BackboneSource) -> None:
        super().__init__(config, backbone)
        # Keys train by the match loss alone: which keys are nearest has no gradient.
        self.trains_keys = config.match_weight > 0
        if config.pool == "by_task":
            self._restore([], [])
            return
        dim = self.backbone.dim
        self.prompt = nn.Parameter(torch.zeros(config.pool_size, config.length, dim))
        self.key = nn.Parameter(torch.zeros(config.pool_size, dim), requires_grad=self.trains_keys)

    def accept(self, kind: StreamKind) -> None:
        """A pool that all tasks share needs no borders."""
        super().accept(kind if self.by_task else replace(kind, bordered=True))

    @property
    def by_task(self) -> bool:
        """Whether each task has prompts of its own."""
        return self.config.pool == "by_task"

    def begin_task(self, task: TaskView) -> None:
        """Draw the pool (first task) or grow it, and add the task's rows to the head."""
        if self.by_task:
            shape = self.config.top_n, self.config.length, self.backbone.dim
            key = draw((shape[0], shape[2]), task.generator, self.config.init)
            prompt = self.prompts[-1] if len(self.prompts) else draw(shape, task.generator, self.config.init)
            self._restore([*self.prompts, prompt], [*self.keys, key])
        elif task.index == 0:
            for values in (self.prompt, self.key):
                values.data.copy_(draw(tuple(values.shape), task.generator, self.config.init))
        super().begin_task(task)

    def _restore(self, prompts: Sequence[Tensor], keys: Sequence[Tensor]) -> None:
        """Replace the prompts and keys of all tasks; only the newest train, so that older ones stay bit-identical."""
        device, newest = self.backbone.device, len(prompts) - 1

        def listed(values: Sequence[Tensor], trained: bool) -> nn.ParameterList:
            copies = [value.detach().clone().to(device) for value in values]
            return nn.ParameterList([nn.Parameter(v, trained and i == newest) for i, v in enumerate(copies)])

        self.prompts, self.keys = listed(prompts, True), listed(keys, self.trains_keys)

    def pool(self) -> tuple[Tensor, Tensor]:
        """Return all prompts and all keys."""
        return (torch.cat([*self.prompts]), torch.cat([*self.keys])) if self.by_task else (self.prompt, self.key)

    def pick(self, query: Tensor) -> tuple[Tensor, Tensor]:
        """Return the similarities and the numbers of the N nearest keys, each (batch, N)."""
        return cosine(query, self.pool()[1]).topk(self.config.top_n, dim=1)

    def prompted(self, tokens: Tensor, chosen: Tensor) -> Tensor:
        """Return the features of images with their chosen prompts, (batch, N, L_p, dim), before the first layer."""
        prompts = {1: LayerPrompt(tokens=chosen.flatten(1, 2))}
        return self.backbone.rest(tokens, 0, prompts, outputs=self.config.feature)

    def loss(self, batch: Batch) -> Tensor:
        """Return the cross-entropy plus λ times the sum of 1 − γ over an image's keys, mean over images."""
        tokens = self.tokens(batch)
        query = self.query(batch, tokens)
        if self.by_task:
            similarity = cosine(query, self.keys[-1])
            chosen = self.prompts[-1].expand(len(query), -1, -1, -1)
        else:
            similarity, picked = self.pick(query)
            chosen = rows_at(self.prompt, picked)
        loss = self.classification_loss(self.prompted(tokens, chosen), batch.labels)
        return loss + self.config.match_weight * (1 - similarity).sum(dim=1).mean() if self.trains_keys else loss

    @torch.no_grad()
    def predict(self, batch: Batch, selection: Selection | None = None) -> Prediction:
        """Pick prompts for each image, then classify."""
        self.check_selection(selection)
        tokens = self.tokens(batch)
        _, picked = self.pick(self.query(batch, tokens))
        return Prediction(self.head.predict(self.prompted(tokens, self.pool()[0][picked])))

    def additional(self) -> int:
        """Return the number of prompt and key parameters."""
        values = (*self.prompts, *self.keys) if self.by_task else (self.prompt, self.key)
        return sum(value.numel() for value in values)

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Take over the pool and the head."""
        super().load_state(state)
        if self.by_task:
            self._restore(numbered(state, "prompts"), numbered(state, "keys"))
            return
        self.prompt.data.copy_(state["prompt"])
        self.key.data.copy_(state["key"])
