"""CODA-Prompt (Smith et al., 2023): prompts as sums of components, weighted by attention; each task adds components."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field, field_validator
from torch import Tensor, nn

from dualprompt.backbones.base import BackboneSource, Prompts
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
from dualprompt.methods.prompted import Prompted
from dualprompt.prompts.attach import PrefixAt, pre_t, prompt_shape
from dualprompt.prompts.bank import check_layers, layers_of


class CodaPromptConfig(MethodConfig):
    """Options of `coda-prompt`; the defaults are its paper's for ten tasks."""

    name: str = "coda-prompt"
    layers: tuple[int, ...] = Field(
        default=(1, 2, 3, 4, 5), min_length=1, description="layers with a prompt, counted from 1"
    )
    components: int = Field(default=10, ge=1, le=10_000, description="that a task adds; without borders, all")
    length: int = Field(default=8, ge=2, le=LONGEST, description="L_p, rows of a prompt: half for K, half for V")
    prefix_at: PrefixAt = Field(default="projected", description="Pre-T after W_K, W_V or before")
    ortho_weight: float = Field(default=0.1, ge=0, description="λ of the orthogonality loss")

    _layers_of = field_validator("layers", mode="before")(layers_of)


@METHODS.register("coda-prompt")
class CodaPrompt(Prompted[CodaPromptConfig]):
    """At each prompted layer p = Σ_m γ(q(x) ⊙ A_m, K_m) P_m, over the components of all tasks seen."""

    summary = "attention-weighted prompt components, new ones orthogonal to the old"
    grid: ClassVar[Grid] = {"train.lr": (0.001, 0.005), "method.ortho_weight": (0.1, 0.0)}
    defaults: ClassVar[Defaults] = {"train": {"lr": 0.001, "lr_scale": "none", "schedule": "cosine"}}

    def __init__(self, config: CodaPromptConfig, backbone: BackboneSource) -> None:
        super().__init__(config, backbone)
        check_layers("method.layers", config.layers, self.backbone.depth)
        self.shared_layers = min(config.layers) - 1
        self.shape = prompt_shape(len(config.layers), config.length, self.backbone.dim, "pre-t", "split")
        self.prompt = nn.ParameterList()  # P, each (layers, components, 2, rows, dim)
        self.key = nn.ParameterList()  # K, each (layers, components, dim)
        self.attention = nn.ParameterList()  # A, each (layers, components, dim)
        self.adds = True  # whether each task does, because it is told where it begins

    @property
    def _parts(self) -> dict[str, nn.ParameterList]:
        return {"prompt": self.prompt, "key": self.key, "attention": self.attention}

    def accept(self, kind: StreamKind) -> None:
        """Without borders, all components are there from the start, and train as long as images come."""
        super().accept(replace(kind, bordered=True))
        self.adds = kind.bordered

    def begin_task(self, task: TaskView) -> None:
        """Add components; everything older stops training."""
        if self.adds or task.index == 0:
            self._add_components(task)
        super().begin_task(task)

    def _add_components(self, task: TaskView) -> None:
        layers, *of_one = self.shape
        for part, shape in zip(self._parts.values(), (of_one, of_one[-1:], of_one[-1:]), strict=True):
            old = torch.cat([rows.detach().flatten(2) for rows in part], dim=1) if len(part) else [None] * layers
            size = torch.Size(shape).numel()
            new = [orthogonal(rows, self.config.components, size, task.generator) for rows in old]
            self._append(part, torch.stack(new).unflatten(2, shape))

    def _append(self, part: nn.ParameterList, rows: Tensor) -> None:
        if len(part):
            part[-1].requires_grad_(False)
        part.append(nn.Parameter(rows.to(self.backbone.device)))
        self.drop_derived()

    def _components(self) -> list[Tensor]:
        return [torch.cat(list(part), dim=1) for part in self._parts.values()]

    def _prompts(self, query: Tensor, prompt: Tensor, key: Tensor, attention: Tensor) -> Prompts:
        weights = component_weights(query, key, attention)
        mixed = torch.einsum("lbm,lmprd->lbprd", weights, prompt)
        return {layer: pre_t(mixed[i], self.config.prefix_at) for i, layer in enumerate(self.config.layers)}

    def loss(self, batch: Batch) -> Tensor:
        """Return the cross-entropy plus λ times how far the components are from orthonormal."""
        tokens, parts = self.tokens(batch), self._components()
        prompts = self._prompts(self.query(batch, tokens), *parts)
        loss = self.classification_loss(self.backbone.rest(tokens, self.shared_layers, prompts), batch.labels)
        if not self.config.ortho_weight:
            return loss
        return loss + self.config.ortho_weight * torch.stack([ortho_loss(part) for part in parts]).sum()

    @torch.no_grad()
    def predict(self, batch: Batch, selection: Selection | None = None) -> Prediction:
        """Mix a prompt for each image, then classify."""
        self.check_selection(selection)
        tokens = self.tokens(batch)
        prompts = self._prompts(self.query(batch, tokens), *self.derived("components", self._components))
        return Prediction(self.head.predict(self.backbone.rest(tokens, self.shared_layers, prompts)))

    def additional(self) -> int:
        """Return the number of parameters in all components."""
        return sum(p.numel() for part in self._parts.values() for p in part)

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Take over the components and the head."""
        super().load_state(state)
        self.prompt, self.key, self.attention = nn.ParameterList(), nn.ParameterList(), nn.ParameterList()
        for name, part in self._parts.items():
            for rows in numbered(state, name):
                self._append(part, rows.clone())


def component_weights(query: Tensor, key: Tensor, attention: Tensor) -> Tensor:
    """Return γ(q ⊙ A_m, K_m), (layers, batch, components), of (batch, dim) queries.

    The products q ⊙ A_m are never made: (q ⊙ A)·K = q·(A ⊙ K), and |q ⊙ A|² = q²·A².
    """
    aligned = query @ (attention * F.normalize(key, dim=-1)).mT
    length = (query.square() @ attention.square().mT).clamp_min(1e-16).sqrt()
    return aligned / length


def ortho_loss(rows: Tensor) -> Tensor:
    """Return the mean square of the entries of B Bᵀ − I, summed over layers; B has a component a row.

    A mean, as in the authors' code, so that λ means the same for any number of components.
    """
    flat = rows.flatten(2)
    products = flat @ flat.mT
    return (products - torch.eye(flat.shape[1], device=flat.device)).square().mean(dim=(1, 2)).sum()


def orthogonal(old: Tensor | None, count: int, size: int, generator: torch.Generator) -> Tensor:
    """Return `count` random unit vectors, (count, size), orthogonal to the old rows and to each other: Gram–Schmidt.

    More vectors than dimensions cannot be orthogonal; those that are too many are only random.
    """
    found = torch.empty(size, 0) if old is None else torch.linalg.qr(old.cpu().double().T).Q
    found = found.double()
    for _ in range(count):
        row = torch.randn(size, generator=generator, dtype=torch.float64)
        if found.shape[1] < size:
            for _ in range(2):  # the second time takes away what rounding left
                row = row - found @ (found.T @ row)
        found = torch.cat([found, F.normalize(row, dim=0)[:, None]], dim=1)
    return found[:, -count:].T.float()
