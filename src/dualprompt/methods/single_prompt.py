"""SinglePrompt (Park et al., 2026): one prefix for all images, and a cosine classifier of the classes at hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field, field_validator
from torch import Tensor, nn

from dualprompt.backbones.base import BackboneSource
from dualprompt.config import LONGEST
from dualprompt.derived import Deriving
from dualprompt.methods.base import (
    METHODS,
    Batch,
    Defaults,
    Grid,
    MethodConfig,
    Prediction,
    Selection,
    TaskView,
    numbered,
)
from dualprompt.methods.ownership import OfTask
from dualprompt.methods.prompted import Prompted
from dualprompt.prompts.attach import PrefixAt, pre_t, prompt_shape
from dualprompt.prompts.bank import Init, check_layers, draw, layers_of


class SinglePromptConfig(MethodConfig):
    """Options of `single-prompt`; `training_logits: masked` are those of the classes in the minibatch."""

    name: str = "single-prompt"
    layers: tuple[int, ...] | None = Field(
        default=None, description="layers with a prefix, counted from 1 (default: every one; released scripts: 1-5)"
    )
    length: int = Field(default=20, ge=1, le=LONGEST, description="prefixes of K, and of V")
    prefix_at: PrefixAt = Field(default="projected", description="Pre-T after W_K, W_V or before")
    temperature: float = Field(default=0.1, gt=0, description="τ: logits are cosines / τ")
    init: Init = Field(default="wide", description="prefixes from U(−1, 1), or uniform: U[0, 0.01)")

    @field_validator("layers", mode="before")
    @classmethod
    def _layers_of(cls, value: object) -> object:
        return value if value is None else layers_of(value)


class CosineHead(Deriving):
    """A classifier by cosines, without a bias. Rows of labels that came together are one block, as in GrowingHead."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim
        self.weight = nn.ParameterList()  # each (labels that came together, dim)

    def grow(self, labels: int, generator: torch.Generator, device: torch.device) -> None:
        """Add rows of new labels, drawn as those of a linear layer are."""
        rows = (2 * torch.rand(labels, self.dim, generator=generator) - 1) / self.dim**0.5
        self.restore([*self.weight, rows], device)

    def restore(self, weights: Sequence[Tensor], device: torch.device) -> None:
        """Replace all rows; parameters that are among them stay the same ones."""
        kept = [rows if isinstance(rows, nn.Parameter) else nn.Parameter(rows.clone().to(device)) for rows in weights]
        self.weight = nn.ParameterList(kept)
        self.drop_derived()

    def forward(self, features: Tensor) -> Tensor:
        """Return the cosines with every row, in fp32, (batch, classes)."""
        rows = self.derived("rows", lambda: F.normalize(torch.cat(list(self.weight)), dim=1))
        return F.normalize(features.float(), dim=1) @ rows.T


@METHODS.register("single-prompt")
class SinglePrompt(Prompted[SinglePromptConfig]):
    """No prompt is selected. A step moves only rows of classes in its minibatch, so that absent ones are not unlearned.

    It needs no borders, and takes every stream.
    """

    summary = "one prefix in every layer and a cosine classifier; no prompt is selected"
    grid: ClassVar[Grid] = {"train.lr": (0.005, 0.001), "method.length": (20, 10)}
    defaults: ClassVar[Defaults] = {"train": {"lr": 0.005, "lr_scale": "none"}}
    needs_borders = None
    of_task: ClassVar[OfTask] = {"head.weight": 0}
    head: CosineHead  # pyright: ignore[reportIncompatibleVariableOverride] — it is asked for nothing but its rows

    def __init__(self, config: SinglePromptConfig, backbone: BackboneSource) -> None:
        super().__init__(config, backbone)
        self.layers = tuple(range(1, self.backbone.depth + 1)) if config.layers is None else config.layers
        check_layers("method.layers", self.layers, self.backbone.depth)
        self.shared_layers = min(self.layers, default=1) - 1
        shape = prompt_shape(len(self.layers), config.length, self.backbone.dim, "pre-t", "each")
        self.prompt = nn.Parameter(torch.zeros(shape))  # (layers, 2, length, dim)
        self.head = CosineHead(self.backbone.dim)  # pyright: ignore[reportIncompatibleVariableOverride]

    @property
    def uses_frozen(self) -> bool:
        """No: every feature is a prompted one."""
        return False

    def begin_task(self, task: TaskView) -> None:
        """Draw the prefix (first time), and rows of new labels."""
        if task.index == 0:
            self.prompt.data.copy_(draw(tuple(self.prompt.shape), task.generator, self.config.init))
        if task.new_labels:
            self.head.grow(len(task.new_labels), task.generator, self.backbone.device)

    def features(self, batch: Batch) -> Tensor:
        """Return the features of the prefixed pass, (batch, dim)."""
        prompts = {layer: pre_t(self.prompt[i : i + 1], self.config.prefix_at) for i, layer in enumerate(self.layers)}
        return self.backbone.rest(self.tokens(batch), self.shared_layers, prompts)

    def logits(self, batch: Batch) -> Tensor:
        """Return cosines / τ with the rows of all classes seen, (batch, classes)."""
        return self.head(self.features(batch)) / self.config.temperature

    def loss(self, batch: Batch) -> Tensor:
        """Return the mean cross-entropy over the classes that the minibatch has, or over all seen if unmasked."""
        logits = self.logits(batch)
        if self.masked:
            here = batch.labels if batch.together is None else batch.together
            absent = torch.ones_like(logits[0], dtype=torch.bool).index_fill(0, here, False)
            logits = logits.masked_fill(absent, -torch.inf)
        return F.cross_entropy(logits, batch.labels)

    @torch.no_grad()
    def predict(self, batch: Batch, selection: Selection | None = None) -> Prediction:
        """Classify among all classes seen."""
        self.check_selection(selection)
        return Prediction(self.logits(batch))

    def additional(self) -> int:
        """Return the number of parameters in the prefix."""
        return self.prompt.numel()

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Take over the prefix and the rows."""
        self.head.restore(numbered(state, "head.weight"), self.backbone.device)
        self.prompt.data.copy_(state["prompt"])
