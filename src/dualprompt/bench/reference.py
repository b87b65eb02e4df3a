"""DualPrompt in a straight line, the way it is usually written: the slow twin that `dualprompt bench` measures against.

Two full passes an image, PyTorch's own products, explicit softmax attention, every token in every layer, logits of all
classes with −∞ outside the task, nothing kept between steps. It shares parameters with the method it mirrors, so both
must agree.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dualprompt.backbones.products import plain_products
from dualprompt.backbones.vit import Block, VisionTransformer
from dualprompt.methods.dualprompt import DualPrompt

Prefixes = dict[int, tuple[Tensor, Tensor]]  # layer → (batch, length, dim) for K and for V


@plain_products()
def forward(vit: VisionTransformer, images: Tensor, prefixes: Prefixes) -> Tensor:
    """Return the class token's feature of every image, (batch, dim)."""
    x = vit.embed(images)
    for number, block in enumerate(vit.blocks, start=1):
        assert isinstance(block, Block)
        q, k, v = block.attn.qkv(block.norm1(x)).chunk(3, dim=-1)
        if number in prefixes:
            k = torch.cat([prefixes[number][0], k], dim=1)
            v = torch.cat([prefixes[number][1], v], dim=1)
        q, k, v = (part.unflatten(-1, (block.attn.heads, -1)).transpose(1, 2) for part in (q, k, v))
        weights = (q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5).softmax(dim=-1)
        x = x + block.ls1(block.attn.proj((weights @ v).transpose(1, 2).flatten(2)))
        x = x + block.ls2(block.mlp(block.norm2(x)))
    return vit.norm(x)[:, 0]


def prefixes(method: DualPrompt, e_prompts: Tensor) -> Prefixes:
    """Return what each layer prepends, from (batch, layers, 2, length, dim) E-Prompts; Pre-T after the projections."""
    bank, batch = method.bank, len(e_prompts)
    found: Prefixes = {}
    for layer in sorted({*bank.g_layers, *bank.e_layers}):
        parts = []
        if layer in bank.g_layers:
            parts.append(bank.g_prompt[bank.g_layers.index(layer)].expand(batch, -1, -1, -1))
        if layer in bank.e_layers:
            parts.append(e_prompts[:, bank.e_layers.index(layer)])
        both = torch.cat(parts, dim=2)
        found[layer] = both[:, 0], both[:, 1]
    return found


def loss(method: DualPrompt, vit: VisionTransformer, images: Tensor, labels: Tensor) -> Tensor:
    """Return the objective of the newest task: cross-entropy plus λ times the match loss."""
    with torch.no_grad():
        query = forward(vit, images, {})
    newest = method.bank.e_prompt[-1].expand(len(images), -1, -1, -1, -1)
    logits = method.head.all(forward(vit, images, prefixes(method, newest)))
    seen = torch.arange(logits.shape[1], device=logits.device)
    logits = logits.masked_fill(method.head.current_places(seen) < 0, float("-inf"))
    cosine = F.cosine_similarity(query, method.bank.task_key[-1][None], dim=-1)
    return F.cross_entropy(logits, labels) + method.config.match_weight * (1 - cosine).mean()


@torch.no_grad()
def predict(method: DualPrompt, vit: VisionTransformer, images: Tensor) -> tuple[Tensor, Tensor]:
    """Return the logits of every class seen, and the task that each image matched."""
    query = forward(vit, images, {})
    keys = torch.stack(list(method.bank.task_key))
    selected = F.cosine_similarity(query[:, None], keys[None], dim=-1).argmax(dim=1)
    e_prompts = torch.stack(list(method.bank.e_prompt))[selected]
    return method.head.all(forward(vit, images, prefixes(method, e_prompts))), selected
