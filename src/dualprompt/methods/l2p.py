"""L2P (Wang et al., 2022): one pool of prompts for all tasks; each image takes those with the nearest keys."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from dualprompt.backbones.vit import LayerPrompt, VisionTransformer
from dualprompt.methods.base import METHODS, Batch, Grid, MethodConfig, Prediction, Selection, TaskView
from dualprompt.methods.prompted import Prompted
from dualprompt.prompts.bank import Init, cosine, draw


class L2PConfig(MethodConfig):
    """Options of `l2p`; the sizes are those with which DualPrompt's paper compares."""

    name: str = "l2p"
    pool_size: int = Field(default=30, ge=1, description="M, prompts in the pool")
    length: int = Field(default=20, ge=1, description="L_p, tokens of a prompt")
    top_n: int = Field(default=5, ge=1, description="N, prompts that an image takes")
    match_weight: float = Field(default=0.5, ge=0, description="λ")
    init: Init = Field(default="uniform", description="prompts and keys from U[0, 0.01), or wide: U(−1, 1)")
    feature: Literal["prompts", "class"] = Field(
        default="prompts", description="classify from the mean output of the prompts (official) or the class token's"
    )

    @model_validator(mode="after")
    def _enough(self) -> L2PConfig:
        if self.top_n > self.pool_size:
            raise ValueError(f"top_n is {self.top_n}, but pool_size only {self.pool_size}; take fewer or pool more")
        return self


@METHODS.register("l2p")
class L2P(Prompted):
    """Each image picks its own prompts, in training and in prediction; there is no vote over a batch."""

    Config = L2PConfig
    summary = "a pool of prompts shared by all tasks, picked by nearest keys"
    grid: ClassVar[Grid] = {"train.lr": (0.015, 0.005), "method.init": ("uniform", "wide")}
    config: L2PConfig

    def __init__(self, config: MethodConfig, backbone: VisionTransformer) -> None:
        assert isinstance(config, L2PConfig)
        super().__init__(config, backbone)
        dim = backbone.config.dim
        self.prompt = nn.Parameter(torch.zeros(config.pool_size, config.length, dim))
        # Keys train by the match loss alone: which keys are nearest has no gradient.
        self.key = nn.Parameter(torch.zeros(config.pool_size, dim), requires_grad=config.match_weight > 0)

    def begin_task(self, task: TaskView) -> None:
        """Draw the pool (first task) and add the task's rows to the head."""
        if task.index == 0:
            for values in (self.prompt, self.key):
                values.data.copy_(draw(tuple(values.shape), task.generator, self.config.init))
        super().begin_task(task)

    def pick(self, query: Tensor) -> tuple[Tensor, Tensor]:
        """Return the similarities and the numbers of the N nearest keys, each (batch, N)."""
        return cosine(query, self.key).topk(self.config.top_n, dim=1)

    def prompted(self, tokens: Tensor, picked: Tensor) -> Tensor:
        """Return the features that the images have with their picked prompts before the first layer's tokens."""
        prompts = {1: LayerPrompt(tokens=self.prompt[picked].flatten(1, 2))}
        return self.backbone.rest(tokens, 0, prompts, outputs=self.config.feature)

    def loss(self, batch: Batch) -> Tensor:
        """Return the cross-entropy plus λ times the sum of 1 − γ over an image's picked keys, mean over images."""
        tokens = self.tokens(batch)
        similarity, picked = self.pick(self.query(batch, tokens))
        loss = self.classification_loss(self.prompted(tokens, picked), batch.labels)
        if not self.key.requires_grad:
            return loss
        return loss + self.config.match_weight * (1 - similarity).sum(dim=1).mean()

    @torch.no_grad()
    def predict(self, batch: Batch, selection: Selection | None = None) -> Prediction:
        """Pick prompts for each image, then classify."""
        self.check_selection(selection)
        tokens = self.tokens(batch)
        _, picked = self.pick(self.query(batch, tokens))
        return Prediction(self.head.predict(self.prompted(tokens, picked)))

    def additional(self) -> int:
        """Return the number of prompt and key parameters."""
        return self.prompt.numel() + self.key.numel()

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Take over the pool and the head."""
        super().load_state(state)
        self.prompt.data.copy_(state["prompt"])
        self.key.data.copy_(state["key"])
