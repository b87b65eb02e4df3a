"""What methods share that train prompts for some tasks and solve for a projected head in closed form.

Prompts that are trained once and then stay make features that never change again, so sums over them stay exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

import torch
from pydantic import Field, field_validator
from torch import Tensor, nn
from typing_extensions import TypeVar

from dualprompt.backbones.base import BackboneSource, Prompts
from dualprompt.config import LONGEST, WIDEST
from dualprompt.methods.base import Batch, Defaults, MethodConfig, Phase, TaskView, below, numbered
from dualprompt.methods.heads import GrowingHead, TrainingHead
from dualprompt.methods.prompted import Prompted
from dualprompt.methods.ridge import Ridge
from dualprompt.prompts.attach import PrefixAt, Prompting
from dualprompt.prompts.bank import Init, PromptBank, check_layers, layers_of


class ExpertsConfig(MethodConfig):
    """Options of prompts and projected heads."""

    projection: int = Field(
        default=2000,
        ge=1,
        le=WIDEST,
        description="M; a head keeps M²/2 numbers, so the paper's 10000 weighs 200 MB and 2000 weighs 8 MB",
    )
    reads: Literal["class", "class+patches"] = Field(
        default="class", description="what the projection reads: the class token, or the patches' mean as well"
    )
    g_layers: tuple[int, ...] = Field(default=(1, 2), description="layers with a G-Prompt, counted from 1")
    e_layers: tuple[int, ...] = Field(default=tuple(range(3, 13)), description="layers with an E-Prompt")
    g_length: int = Field(default=5, ge=0, le=LONGEST, description="L_g")
    e_length: int = Field(default=20, ge=0, le=LONGEST, description="L_e")
    prompting: Prompting = Field(default="pre-t", description="Prefix Tuning or Prompt Tuning")
    prefix_at: PrefixAt = Field(default="projected", description="Pre-T after W_K, W_V (official) or before (paper)")
    init: Init = Field(default="uniform", description="prompts from U[0, 0.01), or wide: U(−1, 1)")
    first_factor: int = Field(
        default=4, ge=1, le=1000, description="the first task trains so many times the recipe's epochs"
    )

    _layers_of = field_validator("g_layers", "e_layers", mode="before")(layers_of)

    @property
    def learns_one_class(self) -> bool:
        """Yes: the heads are solved for, and prompts are not trained where there is nothing to tell apart."""
        return True


class Projected(nn.Module):
    """Ridge regression on M random ReLU features, after RanPAC."""

    projection: Tensor

    def __init__(self, dim: int, width: int, counted: bool = False) -> None:
        super().__init__()
        self.register_buffer("projection", torch.zeros(dim, width))
        self.ridge = Ridge(width, self.expand, counted)

    def draw(self, generator: torch.Generator) -> None:
        """Draw the projection, before the first task."""
        self.projection.copy_(torch.randn(self.projection.shape, generator=generator))

    def expand(self, features: Tensor) -> Tensor:
        """Return the projected features, (batch, M)."""
        return (features.float() @ self.projection).relu()

    def restore(self, state: dict[str, Tensor]) -> None:
        """Take over projection and sums of a checkpoint."""
        self.projection.copy_(state["projection"])
        self.ridge.restore(below("ridge.", state))


SHARPNESS = 10.0
"""What regression scores, about 0 to 1, are multiplied by: as logits of 0 to 1 they would leave every class likely."""


def settle(head: GrowingHead, weights: Sequence[Tensor]) -> None:
    """Give a head rows that were solved for, a tensor a task; they are not trained."""
    head.restore(weights, [rows.new_zeros(len(rows)) for rows in weights], train_old=False)
    head.requires_grad_(False)


E = TypeVar("E", bound=ExpertsConfig, covariant=True, default=ExpertsConfig)


class Experts(Prompted[E]):
    """A prompt bank without keys, whose prompts are trained with a linear head that only training needs."""

    defaults: ClassVar[Defaults] = {"train": {"lr": 0.01, "lr_scale": "none", "schedule": "cosine"}}
    bank: PromptBank

    def __init__(self, config: E, backbone: BackboneSource, prompted: bool = True) -> None:
        super().__init__(config, backbone)
        dim = self.backbone.dim
        g_layers, e_layers = (config.g_layers, config.e_layers) if prompted else ((), ())
        if prompted:
            check_layers("method.g_layers", g_layers, self.backbone.depth)
            check_layers("method.e_layers", e_layers, self.backbone.depth)
        self.bank = PromptBank(
            dim=dim,
            g_layers=g_layers,
            e_layers=e_layers,
            g_length=config.g_length,
            e_length=config.e_length,
            prompting=config.prompting,
            prefix_at=config.prefix_at,
            keys=False,
        )
        self.bank.requires_grad_(False)  # a task begins by saying what trains
        self.shared_layers = min((*g_layers, *e_layers), default=1) - 1
        self.head = GrowingHead(config.projection)  # of all classes
        self.training_head = TrainingHead(dim)  # of the classes whose prompts are being trained
        self.width = dim if config.reads == "class" else 2 * dim  # of what the projection reads

    @property
    def uses_frozen(self) -> bool:
        """No: every feature is a prompted one."""
        return False

    def phases(self, task: TaskView) -> Sequence[Phase]:
        """Return one for a task that has prompts to train; a single class, masked, teaches nothing."""
        if len(task.labels) == 1:
            return ()
        return (Phase(epochs_factor=self.config.first_factor if task.index == 0 else 1),)

    def add_expert(self, task: TaskView) -> None:
        """Add an E-Prompt, which starts from the one before; the G-Prompt is trained by the first task only."""
        if task.index == 0:
            self.bank.begin(task.generator, self.config.init)
        self.bank.grow(task.generator, self.config.init, from_previous=True)
        self.bank.e_prompt[-1].requires_grad_(self.bank.e_prompt[-1].numel() > 0)
        self.bank.g_prompt.requires_grad_(task.index == 0 and self.bank.g_prompt.numel() > 0)

    def training_prompts(self) -> Prompts | None:
        """Return what the layers receive while a task is learned."""
        return self.bank.training_prompts()

    def loss(self, batch: Batch) -> Tensor:
        """Return the mean cross-entropy over the task's own classes, of the prompted class token."""
        features = self.backbone.rest(self.tokens(batch), self.shared_layers, self.training_prompts())
        return self.training_head.loss(features, batch.labels)

    def read(self, tokens: Tensor, prompts: Prompts | None) -> Tensor:
        """Return the features that the projection reads, (batch, width)."""
        return self.backbone.rest(tokens, self.shared_layers, prompts, self.config.reads)

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
        """Take over prompts and heads."""
        settle(self.head, numbered(state, "head.weight"))
        self.training_head.restore_below("training_head", state)
        self.bank.g_prompt.data.copy_(state["bank.g_prompt"])
        trains = bool(self.bank.tasks) and self.bank.e_prompt[-1].requires_grad
        self.bank.restore(numbered(state, "bank.e_prompt"), [])
        if self.bank.tasks:
            self.bank.e_prompt[-1].requires_grad_(trains)
