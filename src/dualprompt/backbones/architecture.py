"""From tensors to the architecture they belong to, and the check that they are all there."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mode

import torch
from torch import Tensor

from dualprompt.backbones.base import Backbone, NamedBackbone
from dualprompt.backbones.facts import Facts
from dualprompt.backbones.layouts import CLIP, RESNET, SUPPORTED, Converted
from dualprompt.backbones.resnet import ResNet, ResNetConfig
from dualprompt.backbones.vit import VisionTransformer, ViTConfig
from dualprompt.errors import DualPromptError

_SIXTEEN_HEADS = (1280, 1408, 1664)  # ViT-H, ViT-g and ViT-G, whose heads are wider than 64 channels


@dataclass(frozen=True)
class NamedConfig:
    """The architecture of a backbone that another file has added."""

    kind: type[NamedBackbone]
    image_size: int


Architecture = ViTConfig | ResNetConfig | NamedConfig


def network(config: Architecture) -> Backbone:
    """Return the network of an architecture, on the device that is current."""
    if isinstance(config, NamedConfig):
        return config.kind(config.image_size)
    return VisionTransformer(config) if isinstance(config, ViTConfig) else ResNet(config)


def infer(converted: Converted, facts: Facts, where: str) -> ViTConfig | ResNetConfig:
    """Read the architecture off the shapes; heads, epsilon and activation of a ViT are what the files say."""
    for name, tensor in converted.tensors.items():
        if not tensor.numel():
            raise DualPromptError(f"{where}: tensor '{converted.sources[name]}' is empty; use an undamaged file")
    return _resnet(converted, where) if converted.layout is RESNET else _vit(converted, facts, where)


def _resnet(converted: Converted, where: str) -> ResNetConfig:
    """Read off width, blocks and stem; the shapes do not show pooling, which an ImageNet stem always has."""
    tensors = converted.tensors
    first = _present(converted, "conv1.weight", 4, where)
    stem = {3: "cifar", 7: "imagenet"}.get(first.shape[-1])
    if stem is None:
        raise DualPromptError(
            f"{where}: tensor '{converted.sources['conv1.weight']}' has shape {list(first.shape)}, expected a "
            f"convolution of 3×3 (small images) or 7×7; {SUPPORTED}"
        )
    blocks = []
    for stage in (1, 2, 3, 4):
        found = (re.match(rf"layer{stage}\.(\d+)\.", name) for name in tensors)
        numbers = {int(match[1]) for match in found if match}
        absent = sorted(set(range(len(numbers) or 1)) - numbers)
        if absent:
            raise DualPromptError(f"{where}: missing tensor 'layer{stage}.{absent[0]}.conv1.weight', and its block")
        blocks.append(len(numbers))
    one, two, three, four = blocks
    return ResNetConfig(
        image_size=32 if stem == "cifar" else 224,
        blocks=(one, two, three, four),
        width=first.shape[0],
        bottleneck="layer1.0.conv3.weight" in tensors,
        stem="cifar" if stem == "cifar" else "imagenet",
        pool=stem == "imagenet",
    )


def _present(converted: Converted, name: str, dimensions: int, where: str) -> Tensor:
    """Return a tensor; refuse a file without it, or where it has another number of dimensions."""
    if name not in converted.tensors:
        raise DualPromptError(f"{where}: missing tensor '{name}'{_whose(converted)}; {SUPPORTED}")
    tensor = converted.tensors[name]
    if tensor.ndim != dimensions:
        raise DualPromptError(
            f"{where}: tensor '{converted.sources[name]}' has shape {list(tensor.shape)}, "
            f"expected {dimensions} dimensions"
        )
    return tensor


def _whose(converted: Converted) -> str:
    """Say whose name it is that a missing tensor is called by, where that is not the file's own naming."""
    return "" if converted.layout.title in ("timm", "torchvision") else " (timm's name)"


def _vit(converted: Converted, facts: Facts, where: str) -> ViTConfig:
    """Read off a ViT.

    What does not show is as the files say. Where they are silent, attention heads are the usual dim / 64, or the 16 of
    the huge published ViTs, epsilon is timm's or CLIP's, and the activation GELU or, in Hugging Face's CLIP, its quick
    form. Where layers disagree on a size, the majority counts and `verify` names the others.
    """
    tensors = converted.tensors
    for name, dimensions in (("patch_embed.proj.weight", 4), ("cls_token", 3), ("pos_embed", 3)):
        _present(converted, name, dimensions, where)
    numbers = {int(found[1]) for found in map(re.compile(r"blocks\.(\d+)\.").match, tensors) if found}
    absent = sorted(set(range(len(numbers) or 1)) - numbers)
    if absent:
        raise DualPromptError(f"{where}: missing tensor 'blocks.{absent[0]}.norm1.weight', and the rest of that layer")
    dim = _usual(tensors, "norm1.weight", 0, where)
    mlp_dim = _usual(tensors, "mlp.fc2.weight", 1, where)
    distilled = "dist_token" in tensors
    positions = tensors["pos_embed"].shape[1]
    patch = tensors["patch_embed.proj.weight"].shape[-1]
    for special in (2 if distilled else 1, 0):
        grid = round(max(positions - special, 0) ** 0.5)
        if grid and grid**2 == positions - special:
            break
    else:
        raise DualPromptError(
            f"{where}: tensor '{converted.sources['pos_embed']}' holds {positions} positions, which are no "
            f"square of patches, with or without a class token; {SUPPORTED}"
        )
    registers, pre_norm = tensors.get("reg_token"), "norm_pre.weight" in tensors
    return ViTConfig(
        image_size=grid * patch,
        patch_size=patch,
        dim=dim,
        depth=len(numbers),
        heads=_heads(dim, facts.heads, where),
        mlp_dim=mlp_dim,
        registers=0 if registers is None or registers.ndim != 3 else registers.shape[1],
        distilled=distilled,
        layer_scale=any(name.endswith(".ls1.gamma") for name in tensors),
        qkv_bias=any(name.endswith(".attn.qkv.bias") for name in tensors),
        positions_cover_prefix=special > 0,
        pre_norm=pre_norm,
        patch_bias=not pre_norm or "patch_embed.proj.bias" in tensors,  # CLIP has none
        mlp="swiglu" if _usual(tensors, "mlp.fc1.weight", 0, where) == 2 * mlp_dim else "gelu",
        gelu=facts.gelu or ("quick" if converted.layout is CLIP else "exact"),
        eps=facts.eps or (1e-5 if pre_norm else 1e-6),
    )


def _usual(tensors: Mapping[str, Tensor], part: str, axis: int, where: str) -> int:
    shapes = [
        tensor.shape for name, tensor in tensors.items() if re.fullmatch(rf"blocks\.\d+\.{re.escape(part)}", name)
    ]
    sizes = [shape[axis] for shape in shapes if len(shape) > axis]
    if not sizes:
        raise DualPromptError(f"{where}: missing tensor 'blocks.0.{part}' (timm's name); {SUPPORTED}")
    return mode(sizes)


def _heads(dim: int, said: int | None, where: str) -> int:
    if said is None and dim % 64:
        raise DualPromptError(
            f"{where}: the number of attention heads is not written down and {dim} channels are no multiple "
            "of 64; add num_heads to a .safetensors header, or a config.json beside model.safetensors"
        )
    heads = said or (16 if dim in _SIXTEEN_HEADS else dim // 64)
    if dim % heads:
        raise DualPromptError(f"{where}: {heads} attention heads do not divide {dim} channels; correct the metadata")
    return heads


def verify(converted: Converted, config: Architecture, where: str) -> dict[str, Tensor]:
    """Return the tensors in fp32; refuse one that is missing, surplus, of another shape or not finite."""
    with torch.device("meta"):
        expected = {name: tensor.shape for name, tensor in network(config).state_dict().items()}
    tensors, sources = converted.tensors, converted.sources
    faults = []
    if surplus := [sources[name] for name in tensors if name not in expected]:
        faults.append(f"surplus tensor {_first(surplus)}")
    if missing := [name for name in expected if name not in tensors]:
        faults.append(f"missing tensor {_first(missing)}{_whose(converted)}")
    if faults:
        raise DualPromptError(f"{where}: {'; '.join(faults)}; {SUPPORTED}")
    verified = {}
    for name, shape in expected.items():
        tensor = tensors[name]
        if tensor.shape != shape:
            renamed = "" if sources[name] == name else f" (from '{sources[name]}')"
            raise DualPromptError(
                f"{where}: tensor '{name}'{renamed} has shape {list(tensor.shape)}, expected {list(shape)}"
            )
        verified[name] = tensor.float().contiguous()
        if not bool(torch.isfinite(verified[name]).all()):
            raise DualPromptError(f"{where}: tensor '{sources[name]}' holds NaN or infinity; use an undamaged file")
    return verified


def _first(names: Sequence[str]) -> str:
    first, *others = names
    return f"'{first}'" + (f" and {len(others)} more" if others else "")
