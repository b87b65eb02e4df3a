"""How checkpoints name their tensors, and the way to our names: timm's for ViTs, torchvision's for ResNets."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from dualprompt.errors import DualPromptError

SUPPORTED = (
    "supported are plain Vision Transformers of timm, DeiT, DINO, DINOv2, iBOT and MoCo v3, Hugging Face's ViT, DeiT, "
    "DINOv2 and CLIP, timm's CLIP, and Google's .npz, and plain ResNets of torchvision and timm"
)


@dataclass(frozen=True)
class Layout:
    """The naming of one family of files."""

    title: str
    marker: str  # a tensor that tells the layout; what stands before it is a wrapper's prefix
    names: Mapping[str, str]  # modules and tensors outside the layers, to timm's
    layer: re.Pattern[str]  # what stands before the name inside a layer; its group is the layer's number
    parts: Mapping[str, str]  # modules and tensors inside a layer, to timm's
    unused: tuple[str, ...]  # how heads and training aids begin; they are left out knowingly

    def rename(self, name: str) -> str:
        """Return timm's name; a name that the layout does not know stays as it is."""
        inside = self.layer.match(name)
        if inside is None:
            return _translate(self.names, name)
        return f"blocks.{inside[1]}.{_translate(self.parts, name[inside.end() :])}"


TIMM = Layout(
    title="timm",
    marker="patch_embed.proj.weight",
    names={"register_tokens": "reg_token"},
    layer=re.compile(r"blocks\.(?:\d+\.)?(\d+)\."),  # DINOv2 may put a chunk's number before the layer's
    parts={"mlp.w12": "mlp.fc1", "mlp.w3": "mlp.fc2"},
    # The last three are of iBOT, and of MoCo v3: its second encoder and the head on top of the first.
    unused=(
        "head.", "head_dist.", "pre_logits.", "mask_token", "dino_head.", "ibot_head.", "masked_embed",
        "momentum_encoder.", "predictor.",
    ),
)  # fmt: skip
HUGGING_FACE = Layout(
    title="Hugging Face",
    marker="embeddings.patch_embeddings.projection.weight",
    names={
        "embeddings.cls_token": "cls_token",
        "embeddings.distillation_token": "dist_token",
        "embeddings.register_tokens": "reg_token",
        "embeddings.position_embeddings": "pos_embed",
        "embeddings.patch_embeddings.projection": "patch_embed.proj",
        "layernorm": "norm",
    },
    layer=re.compile(r"(?:encoder\.layer|layers)\.(\d+)\."),
    parts={
        "layernorm_before": "norm1",
        "layernorm_after": "norm2",
        "attention.attention.query": "attn.q",
        "attention.attention.key": "attn.k",
        "attention.attention.value": "attn.v",
        "attention.output.dense": "attn.proj",
        "intermediate.dense": "mlp.fc1",
        "output.dense": "mlp.fc2",
        "layer_scale1.lambda1": "ls1.gamma",
        "layer_scale2.lambda1": "ls2.gamma",
        "mlp.weights_in": "mlp.fc1",
        "mlp.weights_out": "mlp.fc2",
        # transformers 5 names the modules so in memory, though it still writes files with the names above.
        "attention.q_proj": "attn.q",
        "attention.k_proj": "attn.k",
        "attention.v_proj": "attn.v",
        "attention.o_proj": "attn.proj",
        "mlp.gate_proj": "mlp.gate",
        "mlp.up_proj": "mlp.up",
        "mlp.down_proj": "mlp.fc2",
    },
    unused=(
        "pooler.",
        "classifier.",
        "cls_classifier.",
        "distillation_classifier.",
        "decoder.",
        "embeddings.mask_token",
    ),
)
CLIP = Layout(
    title="Hugging Face's CLIP",
    marker="embeddings.patch_embedding.weight",
    names={
        "embeddings.class_embedding": "cls_token",
        "embeddings.patch_embedding": "patch_embed.proj",
        "embeddings.position_embedding.weight": "pos_embed",
        "pre_layrnorm": "norm_pre",  # their spelling
        "post_layernorm": "norm",
    },
    layer=re.compile(r"encoder\.layers\.(\d+)\."),
    parts={
        "layer_norm1": "norm1",
        "layer_norm2": "norm2",
        "self_attn.q_proj": "attn.q",
        "self_attn.k_proj": "attn.k",
        "self_attn.v_proj": "attn.v",
        "self_attn.out_proj": "attn.proj",
    },
    # The tower's feature is what comes before the projection, as for a linear probe.
    unused=("text_model.", "text_projection.", "visual_projection.", "logit_scale", "embeddings.position_ids"),
)
GOOGLE = Layout(
    title="Google .npz",
    marker="Transformer.encoder_norm.weight",
    names={
        "cls": "cls_token",
        "embedding": "patch_embed.proj",
        "Transformer.posembed_input.pos_embedding": "pos_embed",
        "Transformer.encoder_norm": "norm",
    },
    layer=re.compile(r"Transformer\.encoderblock_(\d+)\."),
    parts={
        "LayerNorm_0": "norm1",
        "LayerNorm_2": "norm2",
        "MultiHeadDotProductAttention_1.query": "attn.q",
        "MultiHeadDotProductAttention_1.key": "attn.k",
        "MultiHeadDotProductAttention_1.value": "attn.v",
        "MultiHeadDotProductAttention_1.out": "attn.proj",
        "MlpBlock_3.Dense_0": "mlp.fc1",
        "MlpBlock_3.Dense_1": "mlp.fc2",
    },
    unused=("head.", "pre_logits."),
)
RESNET = Layout(
    title="torchvision",
    marker="layer1.0.conv1.weight",
    names={},
    layer=re.compile(r"(?!)"),  # names stay as they are
    parts={},
    unused=("fc.",),
)

PARALLEL = "module."  # what training on several devices puts before every name
MOCO = "base_encoder."
# Names that betray another architecture, and what to call it.
_FOREIGN = {
    r"relative_position_bias|relative_position_index": "a Swin or BEiT (relative positions)",
    r"(^|\.)ln_pre\.": "a CLIP tower under OpenAI's names",
    r"(^|\.)layer1\.0\.|(^|\.)conv_root\.": "a ResNet of another kind, or a ViT on top of one",
    r"(^|\.)fc_norm\.": "a ViT whose feature is the average of the patches ('fc_norm'), not the class token",
}
_FUSED = {"attn.qkv": ("attn.q", "attn.k", "attn.v"), "mlp.fc1": ("mlp.gate", "mlp.up")}


@dataclass(frozen=True)
class Converted:
    """Tensors under our names, heads left out."""

    layout: Layout
    tensors: dict[str, Tensor]
    sources: dict[str, str]  # our name to the name, or names, in the file
    heads: int | None  # where the file's shapes or names tell (Google's and MoCo v3's do)
    imagenet: bool = False  # whether its images were normalised by ImageNet's mean and std, as its names tell


def convert(raw: Mapping[str, Tensor], where: str) -> Converted:
    """Recognise the layout of `raw` and return it under our names; `where` names the file in errors."""
    dotted = {_dotted(name): name for name in raw}
    if dotted and all(name.startswith(PARALLEL) for name in dotted):
        dotted = {name.removeprefix(PARALLEL): source for name, source in dotted.items()}
    layout, prefix = _recognise(dotted, where)
    tensors: dict[str, Tensor] = {}
    sources: dict[str, str] = {}
    heads = None
    for name, source in dotted.items():
        bare = name.removeprefix(prefix)
        if bare.startswith(layout.unused) or (layout is RESNET and bare.endswith(".num_batches_tracked")):
            continue
        target, tensor = layout.rename(bare), raw[source]
        if target in tensors:
            raise DualPromptError(f"{where}: '{source}' and '{sources[target]}' are the same tensor; remove one")
        if layout is GOOGLE:
            if target.endswith("attn.q.weight") and tensor.ndim == 3:
                heads = tensor.shape[1]
            tensor = _from_google(target, tensor)
        if layout is CLIP and target in ("cls_token", "pos_embed"):
            tensor = tensor.reshape(1, -1, tensor.shape[-1])
        tensors[target], sources[target] = tensor, source
    _fuse(tensors, sources, where)
    moco = layout is TIMM and prefix == MOCO
    if moco and tensors["patch_embed.proj.weight"].shape[0] == 384:
        heads = 12  # its small ViT has heads of 32 channels
    return Converted(layout, tensors, sources, heads, moco or any("masked_embed" in name for name in dotted))


def _translate(table: Mapping[str, str], name: str) -> str:
    if name in table:
        return table[name]
    module, _, leaf = name.rpartition(".")
    return f"{table[module]}.{leaf}" if module in table else name


def _dotted(name: str) -> str:
    """Write Google's `a/b/kernel` as `a.b.weight`."""
    if "/" not in name:
        return name
    return re.sub(r"\.(kernel|scale)$", ".weight", name.replace("/", "."))


def _recognise(names: Mapping[str, str], where: str) -> tuple[Layout, str]:
    found = _layout_of(names)
    for pattern, what in _FOREIGN.items() if found is None or found[0] is not RESNET else ():
        for name, source in names.items():
            if re.search(pattern, name):
                raise DualPromptError(f"{where} holds {what}: '{source}'; {SUPPORTED}")
    if found is None:
        some = ", ".join(f"'{source}'" for source in list(names.values())[:3]) or "none at all"
        raise DualPromptError(f"{where} holds no network that is known here: its tensors are {some} …; {SUPPORTED}")
    return found


def _layout_of(names: Mapping[str, str]) -> tuple[Layout, str] | None:
    """Return the layout and what stands before all of its names, if one of its names is there."""
    for layout in (TIMM, HUGGING_FACE, CLIP, GOOGLE, RESNET):
        for name in sorted(names, key=lambda name: not name.startswith(MOCO)):  # which has a second network beside it
            if name == layout.marker or name.endswith("." + layout.marker):
                return layout, name.removesuffix(layout.marker)
    return None


def _from_google(target: str, tensor: Tensor) -> Tensor:
    """Turn a JAX array round: inputs first and heads apart there, outputs first and heads together here."""
    split_heads = re.search(r"attn\.[qkv]\.", target) is not None
    if target.endswith(".bias"):
        return tensor.flatten() if split_heads else tensor
    if tensor.ndim < 2 or not target.endswith(".weight"):
        return tensor
    if tensor.ndim == 4:
        return tensor.permute(3, 2, 0, 1)
    inputs = tensor.shape[0] if split_heads else tensor.shape[:-1].numel()
    return tensor.reshape(inputs, -1).T


def _fuse(tensors: dict[str, Tensor], sources: dict[str, str], where: str) -> None:
    """Join what timm keeps in one tensor: Q, K and V; the gate and the value of a SwiGLU."""
    for whole, parts in _FUSED.items():
        pattern = re.compile(rf"(blocks\.\d+)\.(?:{'|'.join(map(re.escape, parts))})\.(weight|bias)")
        groups = dict.fromkeys(found.groups() for found in map(pattern.fullmatch, tensors) if found)
        for block, leaf in groups:
            names = [f"{block}.{part}.{leaf}" for part in parts]
            present = [name for name in names if name in tensors]
            for name in names:
                if name not in tensors:
                    raise DualPromptError(
                        f"{where}: missing tensor '{name}' (timm-like name), the companion of '{sources[present[0]]}'"
                    )
                if tensors[name].shape != tensors[names[0]].shape:
                    raise DualPromptError(
                        f"{where}: tensor '{sources[name]}' has shape {list(tensors[name].shape)}, expected "
                        f"{list(tensors[names[0]].shape)} as '{sources[names[0]]}'"
                    )
            target = f"{block}.{whole}.{leaf}"
            sources[target] = "' + '".join(sources.pop(name) for name in names)
            tensors[target] = torch.cat([tensors.pop(name) for name in names])
