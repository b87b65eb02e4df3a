"""A plain Vision Transformer with timm's parameter names, into which prompts go through one argument."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Literal, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dualprompt.backbones import products
from dualprompt.backbones.base import (
    LayerPrompt,
    Linear,
    Outputs,
    PromptableBackbone,
    Prompts,
    compiled,
    sampled_layers,
)
from dualprompt.backbones.passes import passed


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
    pre_norm: bool = False  # a LayerNorm before the first layer, as in CLIP
    patch_bias: bool = True
    mlp: Literal["gelu", "swiglu"] = "gelu"
    gelu: Literal["exact", "tanh", "quick"] = "exact"  # quick: x · sigmoid(1.702 x), as in CLIP
    eps: float = 1e-6

    @property
    def grid(self) -> int:
        """Patches a side."""
        return self.image_size // self.patch_size


class Attention(nn.Module):
    """Multi-head self-attention whose keys and values may be preceded by a prefix."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = products.Linear(config.dim, 3 * config.dim, bias=config.qkv_bias)
        self.proj = products.Linear(config.dim, config.dim)

    def forward(self, x: Tensor, prompt: LayerPrompt | None = None, only: int | None = None) -> Tensor:
        """Attend from every token, or from the token at position `only`, to all of them."""
        batch, _, dim = x.shape
        prefixed = prompt is not None and prompt.prefix is not None
        if only is None and not prefixed:
            q, k, v = self.qkv(x).chunk(3, dim=-1)
        else:  # apart, so that what autograd keeps of q does not keep the k and v that a prefix replaces
            asking = x if only is None else x[:, only : only + 1]
            weight, bias = self.qkv.weight, self.qkv.bias
            q = products.linear(asking, weight[:dim], None if bias is None else bias[:dim])
            k, v = products.linear(x, weight[dim:], None if bias is None else bias[dim:]).chunk(2, dim=-1)
        if prompt is not None and prompt.deltas:
            asking = x if only is None else x[:, only : only + 1]
            q, k, v = _changed(q, asking, prompt, "q"), _changed(k, x, prompt, "k"), _changed(v, x, prompt, "v")
        if prefixed:
            prefix_k, prefix_v = self._prefix(prompt, x.dtype).expand(batch, -1, -1, -1).unbind(dim=1)
            k = torch.cat([prefix_k, k], dim=1)
            v = torch.cat([prefix_v, v], dim=1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v)  # (batch, heads, queries, head_dim)
        mixed = out.transpose(1, 2).flatten(2)
        return _changed(self.proj(mixed), mixed, prompt, "proj")

    def _prefix(self, prompt: LayerPrompt | None, dtype: torch.dtype) -> Tensor:
        assert prompt is not None
        assert prompt.prefix is not None
        prefix = prompt.prefix.to(dtype)
        if not prompt.prefix_at_input:
            return prefix
        dim = prefix.shape[-1]
        weight, bias = self.qkv.weight, self.qkv.bias
        parts = []
        linears: tuple[Linear, ...] = ("k", "v")
        for number, linear in enumerate(linears):
            part, rows = prefix[:, number], slice((number + 1) * dim, (number + 2) * dim)
            projected = products.linear(part, weight[rows], None if bias is None else bias[rows])
            parts.append(_changed(projected, part, prompt, linear))
        return torch.stack(parts, dim=1)


class Mlp(nn.Module):
    """The feed-forward half of a layer."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.swiglu = config.mlp == "swiglu"
        self.quick = config.gelu == "quick"
        self.approximate = "tanh" if config.gelu == "tanh" else "none"
        self.fc1 = products.Linear(config.dim, 2 * config.mlp_dim if self.swiglu else config.mlp_dim)
        self.fc2 = products.Linear(config.mlp_dim, config.dim)

    def forward(self, x: Tensor, prompt: LayerPrompt | None = None) -> Tensor:
        """Apply the two linear maps and the non-linearity between them."""
        hidden = _changed(self.fc1(x), x, prompt, "fc1")
        if self.swiglu:
            gate, value = hidden.chunk(2, dim=-1)
            active = F.silu(gate) * value
        elif self.quick:
            active = hidden * torch.sigmoid(1.702 * hidden)
        else:
            active = F.gelu(hidden, approximate=self.approximate)
        return _changed(self.fc2(active), active, prompt, "fc2")


def _changed(out: Tensor, x: Tensor, prompt: LayerPrompt | None, linear: Linear) -> Tensor:
    """Return what a linear map gave for `x`, plus what its low-rank change gives, if it has one."""
    delta = None if prompt is None else prompt.delta(linear)
    return out if delta is None else out + delta(x)


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

    def weight_of(self, linear: Linear) -> Tensor:
        """Return the weight of one of the linear maps, as a view."""
        if linear in ("q", "k", "v"):
            return self.attn.qkv.weight.chunk(3)["qkv".index(linear)]
        return {"proj": self.attn.proj, "fc1": self.mlp.fc1, "fc2": self.mlp.fc2}[linear].weight

    def forward(self, x: Tensor, prompt: LayerPrompt | None = None, only: int | None = None) -> Tensor:
        """Return the layer's output for all tokens, or for the one at position `only`."""
        kept = x if only is None else x[:, only : only + 1]
        x = kept + self.ls1(self.attn(self.norm1(x), prompt, only))
        changed = self.mlp(self.norm2(x), prompt)
        if prompt is not None and prompt.adapter is not None:
            changed = changed + prompt.adapter(x if prompt.adapter.beside else changed)
        return x + self.ls2(changed)


class PatchEmbed(nn.Module):
    """Cuts the image into patches and maps each to a token."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        size = config.patch_size
        self.proj = nn.Conv2d(3, config.dim, kernel_size=size, stride=size, bias=config.patch_bias)

    def forward(self, images: Tensor) -> Tensor:
        """Map (batch, 3, height, width) to (batch, patches, dim)."""
        # One matrix product: a convolution library takes ten times as long for patches that do not overlap.
        batch, channels, height, width = images.shape
        size = self.proj.kernel_size[0]
        cut = images.view(batch, channels, height // size, size, width // size, size).permute(0, 2, 4, 1, 3, 5)
        return products.linear(cut.flatten(3).flatten(1, 2), self.proj.weight.flatten(1), self.proj.bias)


class VisionTransformer(PromptableBackbone):
    """Images to the class token's feature after the final LayerNorm.

    The tokens are [class, distillation?, registers…, patches…].
    """

    notes_passes = True

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.config = config
        self.patch_embed = PatchEmbed(config)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, config.dim))
        if config.distilled:
            self.dist_token = nn.Parameter(torch.zeros(1, 1, config.dim))
        if config.registers:
            self.reg_token = nn.Parameter(torch.zeros(1, config.registers, config.dim))
        positions = config.grid**2 + (self._special_tokens if config.positions_cover_prefix else 0)
        self.pos_embed = nn.Parameter(torch.zeros(1, positions, config.dim))
        self.norm_pre = nn.LayerNorm(config.dim, eps=config.eps) if config.pre_norm else nn.Identity()
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.depth))
        self.norm = nn.LayerNorm(config.dim, eps=config.eps)

    @property
    def _special_tokens(self) -> int:
        return 2 if self.config.distilled else 1

    @property
    def dim(self) -> int:
        """Channels of a token."""
        return self.config.dim

    @property
    def input_size(self) -> int:
        """Pixels a side, as many as the position embeddings are for."""
        return self.config.image_size

    @property
    def depth(self) -> int:
        """The number of layers."""
        return self.config.depth

    @property
    def heads(self) -> int:
        """Attention heads of a layer."""
        return self.config.heads

    @property
    def operations(self) -> float:
        """Two for each weight and token."""
        return 2.0 * (self.config.grid**2 + 1) * sum(parameter.numel() for parameter in self.parameters())

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
        return self.norm_pre(torch.cat([specials, *registers, patches], dim=1))

    def stem(self, images: Tensor, layers: int = 0) -> Tensor:
        """Return the tokens after the first `layers` layers, without prompts."""
        run = compiled(VisionTransformer._stem) if self.compiled else VisionTransformer._stem
        return passed(self, run(self, images, layers), layers / self.depth)

    def _stem(self, images: Tensor, layers: int) -> Tensor:
        x = self.embed(images)
        for block in self.blocks[:layers]:
            x = block(x)
        return x

    def rest(self, x: Tensor, layers: int = 0, prompts: Prompts | None = None, outputs: Outputs = "class") -> Tensor:
        """Return (batch, dim) features from the tokens that left layer number `layers`.

        They are what the final LayerNorm makes of the class token, or the mean of what it makes of the tokens that
        the prompts have added. With the patches, (batch, 2 dim), the mean of what it makes of the patches' tokens
        before the last layer comes second: only the class token is computed in that one. With layers, the same of
        `sampled_layers` comes after that.
        """
        run = compiled(VisionTransformer._rest) if self.compiled else VisionTransformer._rest
        return passed(self, run(self, x, layers, prompts, outputs), 1 - layers / self.depth)

    @torch.no_grad()
    def merged(self, changes: Prompts) -> Self:
        """Return a frozen copy that has the low-rank changes in its weights; sums are made in fp32, then rounded."""
        if not all(layer.mergeable for layer in changes.values()):
            raise ValueError("only low-rank changes that all images share can be merged into weights")
        own = copy.deepcopy(self).freeze()
        for number, layer in changes.items():
            for linear, delta in (layer.deltas or {}).items():
                block = own.blocks[number - 1]
                assert isinstance(block, Block)
                weight = block.weight_of(linear)
                weight.copy_(weight.float() + delta.weight()[0])
        return own

    def _rest(self, x: Tensor, layers: int, prompts: Prompts | None, outputs: Outputs) -> Tensor:
        class_at = 0
        patches = outputs in ("class+patches", "class+layers")
        sampled = sampled_layers(self.depth) if outputs == "class+layers" else ()
        read = (*sampled, self.depth - 1) if patches else ()
        assert all(layer >= layers for layer in read), "these layers are passed already"
        pooled: list[Tensor] = []
        for number, block in enumerate(self.blocks[layers:], start=layers + 1):
            prompt = prompts.get(number) if prompts else None
            if prompt is not None and prompt.tokens is not None:
                tokens = prompt.tokens.to(x.dtype).expand(x.shape[0], -1, -1)
                x = torch.cat([tokens, x], dim=1)
                class_at += tokens.shape[1]
            # Where only the class token leaves the last layer, only it is computed there.
            last = outputs != "prompts" and number == len(self.blocks)
            if number - 1 in read:
                pooled.append(self.norm(x[:, -(self.config.grid**2) :]).mean(dim=1))
            x = block(x, prompt, class_at if last else None)
        if outputs == "prompts":
            return self.norm(x[:, :class_at]).mean(dim=1)
        feature = self.norm(x[:, 0])
        return torch.cat([feature, *pooled[-1:], *pooled[:-1]], dim=1) if pooled else feature


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
