"""What a backbone is to everything that uses one, what a layer of it may receive, and where backbones come from."""

from __future__ import annotations

import copy
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from dualprompt.backbones.passes import passed
from dualprompt.registry import Registry

HALF = (0.5, 0.5, 0.5)


class Backbone(nn.Module, ABC):
    """Maps normalised images (batch, 3, side, side) to features (batch, dim).

    A frozen backbone stays in evaluation mode whatever `train()` says: statistics of its BatchNorms never move and its
    dropout stays off. Its weights may be stored rounded; those of one that is trained are fp32.
    """

    name: str = "unnamed"  # what the user called it; errors name it
    mean: tuple[float, float, float] = HALF  # of the pixels, between 0 and 1, that its images are normalised by
    std: tuple[float, float, float] = HALF
    compiled: bool = False  # whether passes go through torch.compile
    frozen: bool = False
    notes_passes: ClassVar[bool] = False  # whether it says itself, by `passed`, how much of it images go through

    @property
    @abstractmethod
    def dim(self) -> int:
        """Numbers in a feature."""

    @property
    @abstractmethod
    def input_size(self) -> int:
        """Pixels a side of the images that it was built for."""

    @property
    @abstractmethod
    def operations(self) -> float:
        """Floating-point operations of one image's forward pass, roughly."""

    @abstractmethod
    def features(self, images: Tensor) -> Tensor:
        """Return one feature an image, (batch, dim)."""

    def forward(self, images: Tensor) -> Tensor:
        """Return one feature an image, (batch, dim)."""
        features = self.features(images)
        return features if self.notes_passes else passed(self, features)

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return next(self.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """The precision of its weights, which its images must have too."""
        return next(self.parameters()).dtype

    def freeze(self) -> Self:
        """Stop everything in it from changing: weights, and statistics of BatchNorms."""
        self.frozen = True
        return self.requires_grad_(False).eval()

    def unfreeze(self) -> Self:
        """Let every weight train again; the statistics of BatchNorms move again once `train()` is called."""
        self.frozen = False
        return self.requires_grad_(True)

    def train(self, mode: bool = True) -> Self:
        """Go to training mode, unless it is frozen."""
        return super().train(mode and not self.frozen)

    def zero_residuals(self) -> None:
        """Let every residual block begin as the identity, where it has blocks that can: for training from scratch."""

    def rounded(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield, by name, the weights that are rounded when it computes in a lower precision: all of them."""
        return self.named_parameters()

    def round_to(self, dtype: torch.dtype) -> Self:
        """Store the weights in a precision, for good."""
        for _, weight in self.rounded():
            weight.data = weight.data.to(dtype)
        return self

    def computed_in(self, dtype: torch.dtype, images: Tensor) -> Tensor:
        """Return features computed with weights rounded to `dtype`; gradients reach the weights as they are.

        All are rounded as one tensor: autocast, which does it one by one, doubles the kernels of a small step.
        """
        if self.dtype == dtype:
            return self(images)
        names, weights = zip(*self.rounded(), strict=True)
        rounded = torch.cat([weight.flatten() for weight in weights]).to(dtype)
        parts = rounded.split([weight.numel() for weight in weights])
        shaped = {name: part.view_as(weight) for name, part, weight in zip(names, parts, weights, strict=True)}
        return functional_call(self, shaped, (images.to(dtype),))


def laid_out(x: Tensor) -> Tensor:
    """Return images as their device convolves them fastest: on a GPU, channels last."""
    return x.contiguous(memory_format=torch.channels_last) if x.is_cuda and x.ndim == 4 else x


class ConvolutionalBackbone(Backbone):
    """A network of convolutions (`nn.Conv2d`, no bias) and BatchNorms (with `running_mean`), in stages."""

    @property
    @abstractmethod
    def widths(self) -> tuple[int, ...]:
        """Channels that leave each stage."""

    @abstractmethod
    def maps(self, images: Tensor) -> list[Tensor]:
        """Return what leaves each stage, (batch, channels, height, width)."""


Linear = Literal["q", "k", "v", "proj", "fc1", "fc2"]
"""The linear maps of a layer: queries, keys, values and output of the attention, and the two of the MLP."""


@dataclass(frozen=True)
class LowRank:
    """A change of a linear map's weight, ΔW = scale · up · down, as in LoRA (Hu et al., 2022).

    A first dimension of 1 serves every image of the batch.
    """

    down: Tensor  # (batch or 1, rank, inputs)
    up: Tensor  # (batch or 1, outputs, rank)
    scale: float = 1.0

    def __call__(self, x: Tensor) -> Tensor:
        """Return ΔW x for tokens (batch, length, inputs)."""
        return self.scale * _each(_each(x, self.down), self.up)

    def weight(self) -> Tensor:
        """Return ΔW itself, (batch or 1, outputs, inputs), in fp32."""
        return self.scale * (self.up.float() @ self.down.float())


@dataclass(frozen=True)
class Adapter:
    """A bottleneck, scale · (up · relu(down · x + down_bias) + up_bias), that is added to what the MLP gives.

    It reads the MLP's output (Houlsby et al., 2019) or, `beside` it, what enters the MLP's half of the layer, before
    the LayerNorm (AdaptFormer, Chen et al., 2022). A first dimension of 1 serves every image of the batch.
    """

    down: Tensor  # (batch or 1, width, dim)
    up: Tensor  # (batch or 1, dim, width)
    down_bias: Tensor | None = None  # (batch or 1, width)
    up_bias: Tensor | None = None  # (batch or 1, dim)
    scale: float = 1.0
    beside: bool = False

    def __call__(self, x: Tensor) -> Tensor:
        """Return what is added, for tokens (batch, length, dim)."""
        hidden = _shifted(_each(x, self.down), self.down_bias).relu()
        return self.scale * _shifted(_each(hidden, self.up), self.up_bias)


def _each(x: Tensor, weight: Tensor) -> Tensor:
    """Map tokens (batch, length, inputs) by (batch or 1, outputs, inputs) weights."""
    weight = weight.to(x.dtype)
    if weight.shape[0] > 1:
        return x @ weight.mT
    # As one matrix: for three dimensions PyTorch chooses a kernel, and so the last bits, by what requires a gradient.
    return F.linear(x.flatten(0, 1), weight[0]).unflatten(0, x.shape[:2])


def _shifted(x: Tensor, bias: Tensor | None) -> Tensor:
    return x if bias is None else x + bias.to(x.dtype)[:, None]


@dataclass(frozen=True)
class LayerPrompt:
    """What one layer receives. A first dimension of 1 serves every image of the batch."""

    prefix: Tensor | None = None  # (batch or 1, 2, length, dim): prepended to K and to V
    prefix_at_input: bool = False  # prepend before W_K and W_V instead of after
    tokens: Tensor | None = None  # (batch or 1, length, dim): prepended to the sequence, and stay in it
    deltas: Mapping[Linear, LowRank] | None = None  # low-rank changes of the layer's linear maps
    adapter: Adapter | None = None

    def delta(self, linear: Linear) -> LowRank | None:
        """Return the change of one of the layer's linear maps, if there is one."""
        return self.deltas.get(linear) if self.deltas else None

    @property
    def mergeable(self) -> bool:
        """Whether it is nothing but changes of weights that are the same for every image."""
        others = self.prefix is not None or self.tokens is not None or self.adapter is not None
        return not others and all(len(delta.down) == 1 for delta in (self.deltas or {}).values())


Prompts = Mapping[int, LayerPrompt]
"""Layer number, counted from 1 as in the paper, to what that layer receives."""

Outputs = Literal["class", "prompts", "class+patches", "class+layers"]


def sampled_layers(depth: int) -> tuple[int, ...]:
    """Return the layers at a quarter, a half and three quarters of a depth, as far as they come before the last two."""
    return tuple(dict.fromkeys(layer for part in (1, 2, 3) if 0 < (layer := round(part * depth / 4)) < depth - 1))


class PromptableBackbone(Backbone):
    """A transformer whose layers take prompts, low-rank changes and adapters; these belong to whoever gives them.

    `stem` and `rest` split the pass in two, so that the query and the prompted pass of one image share what comes
    before the first prompted layer.
    """

    @property
    @abstractmethod
    def depth(self) -> int:
        """The number of layers."""

    @property
    @abstractmethod
    def heads(self) -> int:
        """Attention heads of a layer."""

    @abstractmethod
    def stem(self, images: Tensor, layers: int = 0) -> Tensor:
        """Return the tokens after the first `layers` layers, without prompts, (batch, length, dim)."""

    @abstractmethod
    def rest(self, x: Tensor, layers: int = 0, prompts: Prompts | None = None, outputs: Outputs = "class") -> Tensor:
        """Return (batch, dim) features from the tokens that left layer number `layers`.

        They are those of the class token, or the mean of those of the tokens that the prompts have added. With the
        patches, (batch, 2 dim), the mean of the patches' comes second. With layers, the means of the patches that
        left each of `sampled_layers` come after these; `layers` must not be beyond the first of them.
        """

    @abstractmethod
    def merged(self, changes: Prompts) -> Self:
        """Return a frozen copy that has the low-rank changes in its weights: as fast as itself, at its memory.

        They must be the same for every image; of prompts and adapters, which no weight can hold, there may be none.
        """

    def features(self, images: Tensor) -> Tensor:
        """Return the class token's feature, (batch, dim)."""
        return self.rest(self.stem(images))

    def forward(self, images: Tensor, prompts: Prompts | None = None) -> Tensor:
        """Return the class token's feature, (batch, dim)."""
        return self.rest(self.stem(images), 0, prompts)


class NamedBackbone(Backbone):
    """A backbone that one file adds under a name of `BACKBONES`; a run's seed draws its weights.

    It is made with the number of pixels a side of its images, and says how they are normalised by `mean` and `std`.
    """

    title: ClassVar[str]  # what `dualprompt list backbones` says of it
    licence: ClassVar[str] = "unknown"
    usual_size: ClassVar[int] = 224  # pixels a side, unless a run says otherwise

    def __init__(self, input_size: int) -> None:
        super().__init__()
        self.pixels = input_size

    @property
    def input_size(self) -> int:
        """Pixels a side of the images that it was built for."""
        return self.pixels

    @abstractmethod
    def draw(self, generator: torch.Generator) -> None:
        """Fill every weight and buffer with what all runs of the generator's seed begin with."""


BACKBONES: Registry[type[NamedBackbone]] = Registry(
    "backbone", "dualprompt.backbones", group="dualprompt.backbones", needs=("title", "draw")
)


class BackboneFactory:
    """Where methods get their backbones: one that is frozen and shared, and any number of their own.

    What is asked for is built, and the shared one once. `build` makes a frozen one in fp32 on the CPU, the same each
    time; `outline` one without memory, on PyTorch's meta device.
    """

    def __init__(self, build: Callable[[], Backbone], outline: Callable[[], Backbone]) -> None:
        self._build, self._outline = build, outline
        self._shared: Backbone | None = None
        self.device, self.dtype = torch.device("cpu"), torch.float32  # dtype: of the shared one

    def place(self, device: torch.device, dtype: torch.dtype) -> None:
        """Move what is shared to a device and a precision, now or when it is built."""
        self.device, self.dtype = device, dtype
        if self._shared is not None:
            self._shared.to(device).round_to(dtype)

    def frozen(self) -> Backbone:
        """Return the one that all share."""
        if self._shared is None:
            self._shared = self._build().freeze().to(self.device).round_to(self.dtype)
        return self._shared

    def new(self) -> Backbone:
        """Return one of the caller's own, in fp32, with the weights that all begin with; it may be trained."""
        return self._build().unfreeze().to(self.device)

    def outline(self) -> Backbone:
        """Return one that has shapes but no weights: enough to see whether a method fits it."""
        return self._outline()


BackboneSource = Backbone | BackboneFactory


def factory_of(source: BackboneSource) -> BackboneFactory:
    """Return the factory itself, or one whose shared backbone is the given one, and whose others are copies of it."""
    if isinstance(source, BackboneFactory):
        return source
    factory = BackboneFactory(
        lambda: copy.deepcopy(source).float(), lambda: copy.deepcopy(source).to_empty(device="meta")
    )
    factory.device, factory.dtype = source.device, source.dtype
    factory._shared = source
    return factory


@functools.cache
def compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return the compiled form of a pass or of half of one; what has the same shapes shares one compilation."""
    return torch.compile(function, dynamic=False)
