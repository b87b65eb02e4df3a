"""Pre-T and Pro-T as pure functions: prompt tensors in, what the backbone's layers receive out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from dualprompt.backbones.base import LayerPrompt, Prompts
from dualprompt.errors import DualPromptError

Prompting = Literal["pre-t", "pro-t"]
PrefixAt = Literal["projected", "input"]
LengthCounts = Literal["each", "split"]


def prompt_shape(
    layers: int, length: int, dim: int, prompting: Prompting, length_counts: LengthCounts
) -> tuple[int, int, int, int]:
    """Return (layers, parts, rows, dim) of a prompt; Pre-T has two parts (K and V), Pro-T one.

    `length_counts` says what `length` means for Pre-T: that many prefixes for K and as many for V ("each", as in
    the official code), or both together ("split", as in the paper's text).
    """
    if prompting == "pro-t":
        return layers, 1, length, dim
    if length_counts == "each":
        return layers, 2, length, dim
    if length % 2:
        raise DualPromptError(
            f"prompt length {length} is odd and cannot be split into K and V halves; "
            "use an even length or method.length_counts: each"
        )
    return layers, 2, length // 2, dim


def pre_t(prompt: Tensor, at: PrefixAt = "projected") -> LayerPrompt:
    """Prefix Tuning: (batch or 1, 2, rows, dim) is prepended to K and V; the sequence keeps its length."""
    assert prompt.shape[1:2] == (2,), prompt.shape
    return LayerPrompt(prefix=prompt, prefix_at_input=at == "input")


def pro_t(prompt: Tensor) -> LayerPrompt:
    """Prompt Tuning: (batch or 1, 1, rows, dim) is prepended to the tokens; the sequence grows."""
    assert prompt.shape[1:2] == (1,), prompt.shape
    return LayerPrompt(tokens=prompt[:, 0])


def join(g: Tensor, e: Tensor) -> Tensor:
    """Concatenate the G- and E-Prompt of one layer, [G; E], along the rows; the smaller batch is expanded."""
    batch = max(g.shape[0], e.shape[0])
    return torch.cat([g.expand(batch, -1, -1, -1), e.expand(batch, -1, -1, -1)], dim=2)


def attach(
    g_prompt: Mapping[int, Tensor],
    e_prompt: Mapping[int, Tensor],
    prompting: Prompting = "pre-t",
    prefix_at: PrefixAt = "projected",
) -> Prompts:
    """Return what each layer receives, from G- and E-Prompts by layer number (batch or 1, parts, rows, dim)."""
    prompts: dict[int, LayerPrompt] = {}
    for layer in sorted({*g_prompt, *e_prompt}):
        g, e = g_prompt.get(layer), e_prompt.get(layer)
        prompt = join(g, e) if g is not None and e is not None else g if g is not None else e
        assert prompt is not None
        if prompt.shape[2]:  # a prompt of length 0 is no prompt
            prompts[layer] = pre_t(prompt, prefix_at) if prompting == "pre-t" else pro_t(prompt)
    return prompts
