"""DualPrompt where nobody says where a task begins: a pool of E-Prompts, of which each image takes the nearest."""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field, field_validator
from torch import Tensor, nn

from dualprompt.backbones.base import BackboneSource
from dualprompt.config import LONGEST
from dualprompt.methods.base import METHODS, Batch, Defaults, Grid, MethodConfig, Prediction, Selection, TaskView
from dualprompt.methods.prompted import Prompted
from dualprompt.prompts.attach import PrefixAt, Prompting, attach, prompt_shape
from dualprompt.prompts.bank import Init, check_layers, cosine, draw, layers_of, rows_at


class DualPromptPoolConfig(MethodConfig):
    """Options of `dualprompt-pool`: DualPrompt's, without those that need tasks."""

    name: str = "dualprompt-pool"
    g_layers: tuple[int, ...] = Field(default=(1, 2), description="layers with a G-Prompt, counted from 1")
    e_layers: tuple[int, ...] = Field(default=(3, 4, 5), description="layers with an E-Prompt, counted from 1")
    g_length: int = Field(default=5, ge=1, le=LONGEST, description="L_g")
    e_length: int = Field(default=20, ge=1, le=LONGEST, description="L_e")
    pool_size: int = Field(default=10, ge=1, le=10_000, description="E-Prompts, each with a key")
    prompting: Prompting = Field(default="pre-t", description="Prefix Tuning or Prompt Tuning")
    prefix_at: PrefixAt = Field(default="projected", description="Pre-T after W_K, W_V or before")
    init: Init = Field(default="wide", description="prompts and keys from U(−1, 1), or uniform: U[0, 0.01)")
    match_weight: float = Field(default=1.0, ge=0, description="λ")

    _layers_of = field_validator("g_layers", "e_layers", mode="before")(layers_of)


@METHODS.register("dualprompt-pool")
class DualPromptPool(Prompted[DualPromptPoolConfig]):
    """How Si-Blurry's authors run DualPrompt: each image picks its E-Prompt by the nearest key, in training too."""

    summary = "G-Prompt and a pool of E-Prompts picked by nearest keys: DualPrompt without task borders"
    grid: ClassVar[Grid] = {"train.lr": (0.005, 0.001), "method.pool_size": (10, 5)}
    defaults: ClassVar[Defaults] = {"train": {"lr": 0.005, "lr_scale": "none"}}
    needs_borders = None

    def __init__(self, config: DualPromptPoolConfig, backbone: BackboneSource) -> None:
        super().__init__(config, backbone)
        check_layers("method.g_layers", config.g_layers, self.backbone.depth)
        check_layers("method.e_layers", config.e_layers, self.backbone.depth)
        self.shared_layers = min((*config.g_layers, *config.e_layers), default=1) - 1
        dim, prompting = self.backbone.dim, config.prompting
        g_shape = prompt_shape(len(config.g_layers), config.g_length, dim, prompting, "each")
        e_shape = prompt_shape(len(config.e_layers), config.e_length, dim, prompting, "each")
        self.g_prompt = nn.Parameter(torch.zeros(g_shape))  # (layers, parts, rows, dim)
        self.e_prompt = nn.Parameter(torch.zeros(config.pool_size, *e_shape))
        # Keys train by the match loss alone: which key is nearest has no gradient.
        self.key = nn.Parameter(torch.zeros(config.pool_size, dim), requires_grad=config.match_weight > 0)

    def begin_task(self, task: TaskView) -> None:
        """Draw prompts and keys (first time), and add rows of new labels to the head."""
        if task.index == 0:
            for values in (self.g_prompt, self.e_prompt, self.key):
                values.data.copy_(draw(tuple(values.shape), task.generator, self.config.init))
        super().begin_task(task)

    def prompted(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the features of images with the E-Prompts they pick, and how near the picked keys are, (batch,)."""
        tokens = self.tokens(batch)
        similarity, picked = cosine(self.query(batch, tokens), self.key).max(dim=1)
        g = {layer: self.g_prompt[i : i + 1] for i, layer in enumerate(self.config.g_layers)}
        e_prompt = rows_at(self.e_prompt, picked)
        e = {layer: e_prompt[:, i] for i, layer in enumerate(self.config.e_layers)}
        prompts = attach(g, e, self.config.prompting, self.config.prefix_at)
        return self.backbone.rest(tokens, self.shared_layers, prompts), similarity

    def loss(self, batch: Batch) -> Tensor:
        """Return the cross-entropy plus λ times the mean of 1 − γ(q, k) over the picked keys."""
        features, similarity = self.prompted(batch)
        loss = self.classification_loss(features, batch.labels)
        return loss + self.config.match_weight * (1 - similarity).mean() if self.config.match_weight else loss

    @torch.no_grad()
    def predict(self, batch: Batch, selection: Selection | None = None) -> Prediction:
        """Pick an E-Prompt for each image, then classify."""
        self.check_selection(selection)
        return Prediction(self.head.predict(self.prompted(batch)[0]))

    def additional(self) -> int:
        """Return the number of prompt and key parameters."""
        return self.g_prompt.numel() + self.e_prompt.numel() + self.key.numel()

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Take over prompts, keys and the head."""
        super().load_state(state)
        for name in ("g_prompt", "e_prompt", "key"):
            self.get_parameter(name).data.copy_(state[name])
