"""A plain Vision Transformer with timm's parameter names, into which prompts go through one argument."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call


@dataclass(frozen=True)
class ViTConfig:
    """The architecture, as read from a checkpoint."""

    image_size: int
    patch_size: int
    dim: int
    depth: int
    heads: int
    mlp_dim: int
    registers: int = 0
    distilled: bool = False  # a distillation token after the class token, as in DeiT
    layer_scale: bool = False
    qkv_bias: bool = True
    positions_cover_prefix: bool = True  # the class token (and distillation token) has a position of its own
    mlp: Literal["gelu", "swiglu"] = "gelu"
    gelu: Literal["exact", "tanh"] = "exact"
    eps: float = 1e-6

    @property
    def grid(self) -> int:
        """Patches a side."""
        return self.image_size // self.patch_size

    @property
    def head_dim(self) -> int:
        """Channels of one attention head."""
        return self.dim // self.heads


@dataclass(frozen=True)
class LayerPrompt:
    """What one layer receives. A first dimension of 1 serves every image of the batch."""

    prefix: Tensor | None = None  # (batch or 1, 2, length, dim): prepended to K and to V
    prefix_at_input: bool = False  # prepend before W_K and W_V instead of after
    tokens: Tensor | None = None  # (batch or 1, length, dim): prepended to the sequence, and stay in it


Prompts = Mapping[int, LayerPrompt]
"""Layer number, counted from 1 as in the paper, to what that layer receives."""

Outputs = Literal["class", "prompts", "class+patches"]


class Attention(nn.Module):
    """Multi-head self-attention whose keys and values may be preceded by a prefix."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.dim, 3 * config.dim, bias=config.qkv_bias)
        self.proj = nn.Linear(config.dim, config.dim)

    def forward(self, x: Tensor, prompt: LayerPrompt | None = None, only: int | None = None) -> Tensor:
        """Attend from every token, or from the token at position `only`, to all of them."""
        batch, _, dim = x.shape
        prefixed = prompt is not None and prompt.prefix is not None
        if only is None and not prefixed:
            q, k, v = self.qkv(x).chunk(3, dim=-1)
        else:  # apart, so that what autograd keeps of q does not keep the k and v that a prefix replaces
            asking = x if only is None else x[:, only : only + 1]
            weight, bias = self.qkv.weight, self.qkv.bias
            q = F.linear(asking, weight[:dim], None if bias is None else bias[:dim])
            k, v = F.linear(x, weight[dim:], None if bias is None else bias[dim:]).chunk(2, dim=-1)
        if prefixed:
            prefix_k, prefix_v = self._prefix(prompt, x.dtype).expand(batch, -1, -1, -1).unbind(dim=1)
            k = torch.cat([prefix_k, k], dim=1)
            v = torch.cat([prefix_v, v], dim=1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v)  # (batch, heads, queries, head_dim)
        return self.proj(out.transpose(1, 2).flatten(2))

    def _prefix(self, prompt: LayerPrompt | None, dtype: torch.dtype) -> Tensor:
        assert prompt is not None
        assert prompt.prefix is not None
        prefix = prompt.prefix.to(dtype)
        if not prompt.prefix_at_input:
            return prefix
        dim = prefix.shape[-1]
        weight, bias = self.qkv.weight, self.qkv.bias
        parts = []
        for part, start in ((prefix[:, 0], dim), (prefix[:, 1], 2 * dim)):
            rows = slice(start, start + dim)
            parts.append(F.linear(part, weight[rows], None if bias is None else bias[rows]))
        return torch.stack(parts, dim=1)


class Mlp(nn.Module):
    """The feed-forward half of a layer."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.swiglu = config.mlp == "swiglu"
        self.approximate = "tanh" if config.gelu == "tanh" else "none"
        self.fc1 = nn.Linear(config.dim, 2 * config.mlp_dim if self.swiglu else config.mlp_dim)
        self.fc2 = nn.Linear(config.mlp_dim, config.dim)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the two linear maps and the non-linearity between them."""
        hidden = self.fc1(x)
        if self.swiglu:
            gate, value = hidden.chunk(2, dim=-1)
            return self.fc2(F.silu(gate) * value)
        return self.fc2(F.gelu(hidden, approximate=self.approximate))


class LayerScale(nn.Module):
    """A learned factor for each channel of a residual branch."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        """Scale each channel."""
        return x * self.gamma


class Block(nn.Module):
    """One layer: attention and MLP, each after a LayerNorm and around a residual."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.dim, eps=config.eps)
        self.attn = Attention(config)
        self.ls1 = LayerScale(config.dim) if config.layer_scale else nn.Identity()
        self.norm2 = nn.LayerNorm(config.dim, eps=config.eps)
        self.mlp = Mlp(config)
        self.ls2 = LayerScale(config.dim) if config.layer_scale else nn.Identity()

    def forward(self, x: Tensor, prompt: LayerPrompt | None = None, only: int | None = None) -> Tensor:
        """Return the layer's output for all tokens, or for the one at position `only`."""
        kept = x if only is None else x[:, only : only + 1]
        x = kept + self.ls1(self.attn(self.norm1(x), prompt, only))
        return x + self.ls2(self.mlp(self.norm2(x)))


class PatchEmbed(nn.Module):
    """Cuts the image into patches and maps each to a token."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, config.dim, kernel_size=config.patch_size, stride=config.patch_size)

    def forward(self, images: Tensor) -> Tensor:
        """Map (batch, 3, height, width) to (batch, patches, dim)."""
        # One matrix product: a convolution library takes ten times as long for patches that do not overlap.
        batch, channels, height, width = images.shape
        size = self.proj.kernel_size[0]
        cut = images.view(batch, channels, height // size, size, width // size, size).permute(0, 2, 4, 1, 3, 5)
        return F.linear(cut.flatten(3).flatten(1, 2), self.proj.weight.flatten(1), self.proj.bias)


class VisionTransformer(nn.Module):
    """Images to the class token's feature after the final LayerNorm.

    The tokens are [class, distillation?, registers…, patches…]. `stem` and `rest` split the pass in two, so that
    the query and the prompted pass of one image share what comes before the first prompted layer.
    """

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.config = config
        self.compiled = False  # whether passes go through torch.compile
        self.patch_embed = PatchEmbed(config)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, config.dim))
        if config.distilled:
            self.dist_token = nn.Parameter(torch.zeros(1, 1, config.dim))
        if config.registers:
            self.reg_token = nn.Parameter(torch.zeros(1, config.registers, config.dim))
        positions = config.grid**2 + (self._special_tokens if config.positions_cover_prefix else 0)
        self.pos_embed = nn.Parameter(torch.zeros(1, positions, config.dim))
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.depth))
        self.norm = nn.LayerNorm(config.dim, eps=config.eps)

    @property
    def _special_tokens(self) -> int:
        return 2 if self.config.distilled else 1

    def freeze(self) -> VisionTransformer:
        """Stop every parameter from training."""
        return self.requires_grad_(False).eval()

    def embed(self, images: Tensor) -> Tensor:
        """Return the token sequence that enters the first layer."""
        side = self.config.image_size
        if images.shape[-2:] != (side, side):
            raise ValueError(f"the backbone was built for {side}×{side} images, found {tuple(images.shape[-2:])}")
        patches = self.patch_embed(images)
        special: list[Tensor] = [self.cls_token, self.dist_token] if self.config.distilled else [self.cls_token]
        specials = torch.cat(special, dim=1).expand(images.shape[0], -1, -1)
        if self.config.positions_cover_prefix:
            x = torch.cat([specials, patches], dim=1) + self.pos_embed
            specials, patches = x.split([self._special_tokens, patches.shape[1]], dim=1)
        else:
            patches = patches + self.pos_embed
        registers = [self.reg_token.expand(images.shape[0], -1, -1)] if self.config.registers else []
        return torch.cat([specials, *registers, patches], dim=1)

    def stem(self, images: Tensor, layers: int = 0) -> Tensor:
        """Return the tokens after the first `layers` layers, without prompts."""
        return (_compiled(VisionTransformer._stem) if self.compiled else VisionTransformer._stem)(self, images, layers)

    def _stem(self, images: Tensor, layers: int) -> Tensor:
        x = self.embed(images)
        for block in self.blocks[:layers]:
            x = block(x)
        return x

    def rest(self, x: Tensor, layers: int = 0, prompts: Prompts | None = None, outputs: Outputs = "class") -> Tensor:
        """Return (batch, dim) features from the tokens that left layer number `layers`.

        They are what the final LayerNorm makes of the class token, or the mean of what it makes of the tokens that
        the prompts have added. With the patches, (batch, 2 dim), the mean of what it makes of the patches' tokens
        before the last layer comes second: only the class token is computed in that one.
        """
        run = _compiled(VisionTransformer._rest) if self.compiled else VisionTransformer._rest
        return run(self, x, layers, prompts, outputs)

    def _rest(self, x: Tensor, layers: int, prompts: Prompts | None, outputs: Outputs) -> Tensor:
        class_at = 0
        pooled: list[Tensor] = []
        for number, block in enumerate(self.blocks[layers:], start=layers + 1):
            prompt = prompts.get(number) if prompts else None
            if prompt is not None and prompt.tokens is not None:
                tokens = prompt.tokens.to(x.dtype).expand(x.shape[0], -1, -1)
                x = torch.cat([tokens, x], dim=1)
                class_at += tokens.shape[1]
            # Where only the class token leaves the last layer, only it is computed there.
            last = outputs != "prompts" and number == len(self.blocks)
            if last and outputs == "class+patches":
                pooled.append(self.norm(x[:, -(self.config.grid**2) :]).mean(dim=1))
            x = block(x, prompt, class_at if last else None)
        if outputs == "prompts":
            return self.norm(x[:, :class_at]).mean(dim=1)
        feature = self.norm(x[:, 0])
        return torch.cat([feature, *pooled], dim=1) if pooled else feature

    def forward(self, images: Tensor, prompts: Prompts | None = None) -> Tensor:
        """Map normalised images (batch, 3, side, side) to features (batch, dim)."""
        return self.rest(self.stem(images), 0, prompts)

    def computed_in(self, dtype: torch.dtype, images: Tensor) -> Tensor:
        """Return features computed with all weights rounded to `dtype`; gradients reach the weights as they are.

        All are rounded as one tensor: autocast, which does it one by one, doubles the kernels of a small step.
        """
        if self.cls_token.dtype == dtype:
            return self(images)
        names, weights = zip(*self.named_parameters(), strict=True)
        rounded = torch.cat([weight.flatten() for weight in weights]).to(dtype)
        parts = rounded.split([weight.numel() for weight in weights])
        shaped = {name: part.view_as(weight) for name, part, weight in zip(names, parts, weights, strict=True)}
        return functional_call(self, shaped, (images.to(dtype),))


@functools.cache
def _compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return the compiled form of one half of a pass; what has the same shapes shares one compilation."""
    return torch.compile(function, dynamic=False)


def resize_positions(pos_embed: Tensor, special: int, grid: int) -> Tensor:
    """Interpolate (1, special + patches, dim) position embeddings to `grid` × `grid` patches.

    Bicubic with antialiasing, as timm does. transformers leaves the antialiasing out for DINOv2: there, features agree
    with its own only at the size that the checkpoint's positions are for.
    """
    prefix, patches = pos_embed[:, :special], pos_embed[:, special:]
    side = round(patches.shape[1] ** 0.5)
    if side == grid:
        return pos_embed
    square = patches.reshape(1, side, side, -1).permute(0, 3, 1, 2).float()
    resized = F.interpolate(square, size=(grid, grid), mode="bicubic", antialias=True, align_corners=False)
    return torch.cat([prefix, resized.permute(0, 2, 3, 1).flatten(1, 2).to(pos_embed.dtype)], dim=1)
