"""What methods share that train prompts for some tasks and solve for a projected head in closed form.

Prompts that are trained once and then stay make features that never change again, so sums over them stay exact.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field, field_validator
from torch import Tensor, nn

from dualprompt.backbones.vit import Prompts, VisionTransformer
from dualprompt.methods.base import Batch, Defaults, MethodConfig, Phase, TaskView, below, numbered
from dualprompt.methods.heads import GrowingHead
from dualprompt.methods.prompted import Prompted
from dualprompt.methods.ridge import Ridge
from dualprompt.prompts.attach import PrefixAt, Prompting
from dualprompt.prompts.bank import Init, PromptBank, check_layers, one_layer


class ExpertsConfig(MethodConfig):
    """Options of prompts and projected heads."""

    projection: int = Field(
        default=2000,
        ge=1,
        description="M; a head keeps M²/2 numbers, so the paper's 10000 weighs 200 MB and 2000 weighs 8 MB",
    )
    reads: Literal["class", "class+patches"] = Field(
        default="class", description="what the projection reads: the class token, or the patches' mean as well"
    )
    g_layers: tuple[int, ...] = Field(default=(1, 2), description="layers with a G-Prompt, counted from 1")
    e_layers: tuple[int, ...] = Field(default=tuple(range(3, 13)), description="layers with an E-Prompt")
    g_length: int = Field(default=5, ge=0, description="L_g")
    e_length: int = Field(default=20, ge=0, description="L_e")
    prompting: Prompting = Field(default="pre-t", description="Prefix Tuning or Prompt Tuning")
    prefix_at: PrefixAt = Field(default="projected", description="Pre-T after W_K, W_V (official) or before (paper)")
    init: Init = Field(default="uniform", description="prompts from U[0, 0.01), or wide: U(−1, 1)")
    first_factor: int = Field(default=4, ge=1, description="the first task trains so many times the recipe's epochs")

    _one_layer = field_validator("g_layers", "e_layers", mode="before")(one_layer)


class Projected(nn.Module):
    """A classifier by ridge regression on M random ReLU features, after RanPAC."""

    projection: Tensor

    def __init__(self, dim: int, width: int) -> None:
        super().__init__()
        self.register_buffer("projection", torch.zeros(dim, width))
        self.ridge = Ridge(width, self.expand)
        self.head = GrowingHead(width)

    def draw(self, generator: torch.Generator) -> None:
        """Draw the projection, before the first task."""
        self.projection.copy_(torch.randn(self.projection.shape, generator=generator))

    def expand(self, features: Tensor) -> Tensor:
        """Return the projected features, (batch, M)."""
        return (features.float() @ self.projection).relu()

    def add(
        self,
        features: Tensor,
        labels: Tensor,
        classes: int,
        strength: float | None,
        generator: torch.Generator,
        share: float | None = None,
    ) -> None:
        """Take in a task's features, whose labels count from 0, and solve for the head of all classes."""
        weights = self.ridge.add(features, labels, classes, strength, generator, share)
        self.head.restore(weights, [rows.new_zeros(len(rows)) for rows in weights], train_old=False)
        self.head.requires_grad_(False)

    def scores(self, features: Tensor) -> Tensor:
        """Return what the regression gives each class seen so far, (batch, classes)."""
        return self.head.predict(self.expand(features))

    def restore(self, state: dict[str, Tensor]) -> None:
        """Take over projection, sums and head of a checkpoint."""
        self.projection.copy_(state["projection"])
        self.ridge.restore(below("ridge.", state))
        self.head.restore(numbered(state, "head.weight"), numbered(state, "head.bias"), train_old=False)
        self.head.requires_grad_(False)


def of_projected(name: str) -> dict[str, int | None]:
    """Return which tensors of a projected head come one a task, and along which dimension they list its classes."""
    return {f"{name}.head.weight": 0, f"{name}.head.bias": 0, f"{name}.ridge.sums": 1}


class Experts(Prompted):
    """A prompt bank without keys, whose prompts are trained with a linear head that only training needs."""

    of_task: ClassVar[Mapping[str, int | None]] = {"bank.e_prompt": None}
    defaults: ClassVar[Defaults] = {"train": {"lr": 0.01, "lr_scale": "none", "schedule": "cosine"}}
    bank: PromptBank

    def __init__(self, config: MethodConfig, backbone: VisionTransformer) -> None:
        assert isinstance(config, ExpertsConfig)
        super().__init__(config, backbone)
        depth, dim = backbone.config.depth, backbone.config.dim
        check_layers("method.g_layers", config.g_layers, depth)
        check_layers("method.e_layers", config.e_layers, depth)
        self.bank = PromptBank(
            dim=dim,
            g_layers=config.g_layers,
            e_layers=config.e_layers,
            g_length=config.g_length,
            e_length=config.e_length,
            prompting=config.prompting,
            prefix_at=config.prefix_at,
            keys=False,
        )
        self.shared_layers = min((*config.g_layers, *config.e_layers), default=1) - 1
        self.options = config
        self.width = dim if config.reads == "class" else 2 * dim  # of what the projection reads
        self._first = 0  # class of the task that is being learned

    @property
    def uses_frozen(self) -> bool:
        """No: every feature is a prompted one."""
        return False

    def phases(self, task: TaskView) -> Sequence[Phase]:
        """Return one for a task that has prompts to train; a single class, masked, teaches nothing."""
        if task.classes == 1:
            return ()
        return (Phase(epochs_factor=self.options.first_factor if task.index == 0 else 1),)

    def add_expert(self, task: TaskView) -> None:
        """Add an E-Prompt, which starts from the one before; the G-Prompt is trained by the first task only."""
        if task.index == 0:
            self.bank.begin(task.generator, self.options.init)
        self.bank.grow(task.generator, self.options.init, from_previous=True)
        self._choose_trainable()

    def _choose_trainable(self) -> None:
        if self.bank.tasks:
            self.bank.e_prompt[-1].requires_grad_(self.bank.e_prompt[-1].numel() > 0)
        self.bank.g_prompt.requires_grad_(self.bank.tasks <= 1 and self.bank.g_prompt.numel() > 0)

    def begin_training_head(self, task: TaskView) -> None:
        """Begin anew, at zero, with the classifier that trains the task's prompts."""
        self.head.restore([torch.zeros(task.classes, self.head.dim)], [torch.zeros(task.classes)], train_old=False)
        self._first = task.first_class

    def loss(self, batch: Batch) -> Tensor:
        """Return the mean cross-entropy over the task's own classes, of the prompted class token."""
        features = self.backbone.rest(self.tokens(batch), self.shared_layers, self.bank.training_prompts())
        return F.cross_entropy(self.head.newest(features), batch.labels - self._first)

    def read(self, tokens: Tensor, prompts: Prompts | None) -> Tensor:
        """Return the features that the projection reads, (batch, width)."""
        return self.backbone.rest(tokens, self.shared_layers, prompts, self.options.reads)

    def read_all(self, task: TaskView, *prompts: Prompts | None) -> list[Tensor]:
        """Return the features of all training images of a task under each of the prompts."""
        found = []
        for batch in task.batches():
            tokens = self.tokens(batch)
            found.append([self.read(tokens, each).float() for each in prompts])
        return [torch.cat(parts) for parts in zip(*found, strict=True)]

    def additional(self) -> int:
        """Return the number of prompt parameters."""
        return sum(parameter.numel() for parameter in self.bank.parameters())

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Take over prompts and training head."""
        super().load_state(state)
        self.bank.g_prompt.data.copy_(state["bank.g_prompt"])
        self.bank.restore(numbered(state, "bank.e_prompt"), [])
        self._choose_trainable()
