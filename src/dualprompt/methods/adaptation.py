"""What a method adds to a frozen backbone and trains: prefixes, low-rank changes or adapters, behind one interface."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal, cast

import torch
from pydantic import Field, field_validator
from torch import Tensor, nn

from dualprompt.backbones.base import Adapter, LayerPrompt, LowRank, PromptableBackbone, Prompts
from dualprompt.config import LONGEST
from dualprompt.errors import DualPromptError
from dualprompt.methods.base import MethodConfig, numbered
from dualprompt.prompts.attach import pre_t
from dualprompt.prompts.bank import check_layers, draw, layers_of

Kind = Literal["prompts", "lora", "adapter"]
AttentionLinear = Literal["q", "k", "v", "proj"]
Values = Mapping[str, Tensor]
"""The tensors of one set, by their names; the first dimension of each lists the adapted layers."""


class LayersConfig(MethodConfig):
    """Which layers are adapted."""

    layers: tuple[int, ...] = Field(default=(), description="layers that are adapted, counted from 1 (default: all)")

    _layers_of = field_validator("layers", mode="before")(layers_of)


class LowRankConfig(LayersConfig):
    """Options of low-rank changes (LoRA)."""

    rank: int = Field(default=8, ge=1, le=1024, description="r, rank of a low-rank change")


class LinearsConfig(LowRankConfig):
    """The same, where one may choose what is changed."""

    linears: tuple[AttentionLinear, ...] = Field(
        default=("q", "v"), min_length=1, description="the attention's linear maps that LoRA changes: q, k, v, proj"
    )

    @field_validator("linears")
    @classmethod
    def _each_once(cls, value: tuple[AttentionLinear, ...]) -> tuple[AttentionLinear, ...]:
        if len(set(value)) != len(value):
            raise ValueError("name each linear map once")
        return value


class BottleneckConfig(LayersConfig):
    """Options of adapters; the defaults are those with which APER, EASE and RanPAC were published."""

    bottleneck: int = Field(default=64, ge=1, le=4096, description="width of an adapter")
    adapter_scale: float = Field(default=0.1, gt=0, description="what an adapter gives is multiplied by it")


class AdaptationConfig(LinearsConfig, BottleneckConfig):
    """Options of methods that may adapt in any of the ways."""

    prompt_length: int = Field(default=20, ge=1, le=LONGEST, description="prefixes of K and of V in a layer")


class Adaptation(nn.Module, ABC):
    """Sets of tensors for some layers of a backbone: one that all tasks share, or a further one for each task.

    They are the method's own: its state names them `down.0`, `down.1`, … by set. The newest may train.
    """

    parts: ClassVar[tuple[str, ...]]  # names of the tensors of a set

    def __init__(self, backbone: PromptableBackbone, layers: Sequence[int]) -> None:
        super().__init__()
        check_layers("method.layers", layers, backbone.depth)
        self.at = tuple(layers) or tuple(range(1, backbone.depth + 1))  # layer numbers
        self.dim = backbone.dim
        self.register_buffer("_device", torch.empty(0), persistent=False)
        for part in self.parts:
            self.add_module(part, nn.ParameterList())

    @abstractmethod
    def drawn(self, generator: torch.Generator) -> Values:
        """Return a set that is about to be trained; but for prefixes, it changes nothing yet."""

    @abstractmethod
    def attach(self, values: Values) -> Prompts:
        """Return what the layers receive from a set, whoever holds it."""

    def sets_of(self, part: str) -> nn.ParameterList:
        """Return one part of every set."""
        return cast(nn.ParameterList, self.get_submodule(part))

    def values(self, which: int = -1) -> Values:
        """Return a set."""
        return {part: self.sets_of(part)[which] for part in self.parts}

    def layers(self, which: int = -1) -> Prompts:
        """Return what the layers receive from a set, by default from the newest."""
        return self.attach(self.values(which))

    def grow(self, generator: torch.Generator) -> None:
        """Add a set, which trains; everything older stops, so that it stays bit-identical."""
        self.requires_grad_(False)
        for part, values in self.drawn(generator).items():
            self.sets_of(part).append(nn.Parameter(values.to(self.get_buffer("_device").device)))

    def let_train(self, trains: bool = True) -> None:
        """Let the newest set train, or stop it."""
        self.requires_grad_(False)
        for values in self.values().values():
            values.requires_grad_(trains)

    def restore(self, state: dict[str, Tensor]) -> None:
        """Replace all sets, for instance by those of a checkpoint; none trains before a task says so."""
        device = self.get_buffer("_device").device
        for part in self.parts:
            kept = (values.to(device, copy=True) for values in numbered(state, part))
            self.add_module(part, nn.ParameterList(nn.Parameter(values, requires_grad=False) for values in kept))

    def __len__(self) -> int:
        return len(self.sets_of(self.parts[0]))

    @property
    def count(self) -> int:
        """How many numbers all sets hold."""
        return sum(values.numel() for values in self.parameters())


class Prefixes(Adaptation):
    """Prefix Tuning: rows before the keys and the values of every adapted layer."""

    parts = ("prefix",)  # (layers, 2, length, dim)

    def __init__(self, backbone: PromptableBackbone, layers: Sequence[int], length: int) -> None:
        super().__init__(backbone, layers)
        self.shape = (len(self.at), 2, length, self.dim)

    def drawn(self, generator: torch.Generator) -> Values:
        """Return prefixes from U[0, 0.01)."""
        return {"prefix": draw(self.shape, generator, "uniform")}

    def attach(self, values: Values) -> Prompts:
        """Return the prefixes of each layer."""
        return {layer: pre_t(values["prefix"][i : i + 1]) for i, layer in enumerate(self.at)}


class LowRanks(Adaptation):
    """LoRA (Hu et al., 2022): W becomes W + scale · B A in some linear maps of the attention; B begins at zero."""

    parts = ("down", "up")  # A, (layers, linears, rank, dim), and B, (layers, linears, dim, rank)

    def __init__(
        self,
        backbone: PromptableBackbone,
        layers: Sequence[int],
        rank: int,
        linears: Sequence[AttentionLinear],
        scale: float = 1.0,
    ) -> None:
        super().__init__(backbone, layers)
        if rank > self.dim:
            raise DualPromptError(f"method.rank is {rank}; the backbone's linear maps have {self.dim} dimensions")
        self.linears, self.rank, self.scale = tuple(linears), rank, scale

    def drawn(self, generator: torch.Generator) -> Values:
        """Return A from U(−1/√dim, 1/√dim), as linear maps begin in PyTorch, and B of zeros."""
        shape = (len(self.at), len(self.linears), self.rank, self.dim)
        return {"down": _as_a_linear_map(shape, generator), "up": torch.zeros(*shape[:2], self.dim, self.rank)}

    def attach(self, values: Values) -> Prompts:
        """Return the changes of each layer's maps."""
        pairs = zip(values["down"][:, :, None], values["up"][:, :, None], strict=True)
        return {
            layer: LayerPrompt(
                deltas={linear: LowRank(down[i], up[i], self.scale) for i, linear in enumerate(self.linears)}
            )
            for layer, (down, up) in zip(self.at, pairs, strict=True)
        }

    def summed(self, factors: Sequence[Tensor] | None = None) -> Prompts:
        """Return what the layers receive from all sets at once: the sum of their changes, as one of a higher rank.

        `factors`, one for each set, are what its B is multiplied by; they fit to (layers, linears, dim, rank).
        """
        ups = list(self.sets_of("up"))
        if factors is not None:
            ups = [factor * up for factor, up in zip(factors, ups, strict=True)]
        return self.attach({"down": torch.cat(list(self.sets_of("down")), dim=2), "up": torch.cat(ups, dim=3)})


class Adapters(Adaptation):
    """AdaptFormer (Chen et al., 2022): a bottleneck with a ReLU beside the MLP of every adapted layer."""

    parts = ("down", "down_bias", "up", "up_bias")

    def __init__(self, backbone: PromptableBackbone, layers: Sequence[int], width: int, scale: float) -> None:
        super().__init__(backbone, layers)
        self.width, self.scale = width, scale

    def drawn(self, generator: torch.Generator) -> Values:
        """Return a first map as linear maps begin in PyTorch, and all else of zeros."""
        layers = len(self.at)
        return {
            "down": _as_a_linear_map((layers, self.width, self.dim), generator),
            "down_bias": torch.zeros(layers, self.width),
            "up": torch.zeros(layers, self.dim, self.width),
            "up_bias": torch.zeros(layers, self.dim),
        }

    def attach(self, values: Values) -> Prompts:
        """Return the adapter of each layer."""
        made = {}
        for i, layer in enumerate(self.at):
            down, down_bias, up, up_bias = (values[part][i : i + 1] for part in self.parts)
            made[layer] = LayerPrompt(adapter=Adapter(down, up, down_bias, up_bias, self.scale, beside=True))
        return made


def make_adaptation(kind: Kind, backbone: PromptableBackbone, config: AdaptationConfig) -> Adaptation:
    """Return what a config asks for, without any set yet."""
    if kind == "prompts":
        return Prefixes(backbone, config.layers, config.prompt_length)
    if kind == "lora":
        return LowRanks(backbone, config.layers, config.rank, config.linears)
    return Adapters(backbone, config.layers, config.bottleneck, config.adapter_scale)


def _as_a_linear_map(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return (2 * torch.rand(shape, generator=generator) - 1) / shape[-1] ** 0.5
