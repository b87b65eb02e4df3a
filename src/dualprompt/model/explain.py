"""Where a model looks: a heat map of what the class token attends to, drawn over the image.

The map is attention rollout (Abnar and Zuidema, 2020): the attention of each layer, averaged over heads and with the
residual connection added, multiplied over all layers of the pass that the answer comes from. The last layer's alone is
no good: its class token collects much from patches at the corners, which have become stores of what all others said.
Prompts are left out. It says where the network looked, not why it is this class.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from dualprompt.backbones.base import PromptableBackbone
from dualprompt.errors import DualPromptError
from dualprompt.model.images import ImageLike, upright

LARGEST = 1024  # pixels of the longer side of what is drawn
STRENGTH = 0.6  # of the colours, beside the greys of the image
CLIPPED = 0.99  # quantile of the map that is shown as its brightest: single patches would dim all others


class Seeing(Protocol):
    """What a learner must have to be explained."""

    def network(self) -> nn.Module:
        """Return what maps pixels to answers, and has the `method`."""
        ...

    def pixels(self, image: ImageLike) -> np.ndarray:
        """Return an image as the network takes it."""
        ...


class Attending(TorchFunctionMode):
    """While it is entered, attention in this thread is computed step by step, and its weights are kept in `layers`."""

    def __init__(self) -> None:
        super().__init__()
        self.layers: list[Tensor] = []  # (batch, heads, queries, keys)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Do what was asked; of attention keep the weights."""
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        q, k, v = args
        weights = (q.float() @ k.float().mT * q.shape[-1] ** -0.5).softmax(dim=-1)
        self.layers.append(weights)
        return (weights @ v.float()).to(v.dtype)


def heat(learner: Seeing, image: ImageLike) -> np.ndarray:
    """Return how much each patch counts for the answer, (grid, grid), summing to 1."""
    network: Any = learner.network()
    backbone = network.method.backbone
    if not isinstance(backbone, PromptableBackbone):
        raise DualPromptError(f"a heat map shows attention, and backbone '{backbone.name}' has none; take a ViT")
    pixels = torch.from_numpy(learner.pixels(image))[None].to(backbone.device)
    attending = Attending()
    with torch.no_grad(), attending:
        network(pixels)
    with torch.no_grad():
        tokens = backbone.stem(torch.zeros(1, 3, *pixels.shape[1:3], device=backbone.device, dtype=backbone.dtype))
    layers = _last_pass(attending.layers, backbone.depth)
    grid = math.isqrt(tokens.shape[1] - 1)  # besides patches there are a class token and few others
    patches = _rollout(layers, tokens.shape[1])[-(grid**2) :].reshape(grid, grid)
    return (patches / patches.sum()).cpu().numpy()


def _last_pass(layers: Sequence[Tensor], depth: int) -> list[Tensor]:
    """Return the layers of the last of one or two passes, which may share their first layers."""
    shared = 2 * depth - len(layers)
    if not 0 <= shared <= depth:
        raise DualPromptError("a heat map needs one or two passes through a ViT; this method makes others")
    return [*layers[:shared], *layers[len(layers) - (depth - shared) :]]


def _rollout(layers: Sequence[Tensor], tokens: int) -> Tensor:
    """Return how much each of the image's own tokens, the last of all, counts for what leaves the last layer."""
    *earlier, last = (weights[0].mean(dim=0)[:, -tokens:] for weights in layers)
    # Alone, the class token; else, where the feature is read from prompts, these: they come before the others.
    found = last[: max(1, len(last) - tokens)].mean(dim=0)
    for weights in reversed(earlier):
        own = weights[-tokens:]
        own = own / own.sum(dim=1, keepdim=True)
        found = (found @ own + found) / 2
    return found


def heat_map(learner: Seeing, image: ImageLike) -> Image.Image:
    """Return an image with what the model looks at drawn over it: bright where it counts, dark where it does not.

    A backbone without attention is refused.
    """
    found = heat(learner, image)
    shown = upright(image)
    shown.thumbnail((LARGEST, LARGEST))
    low, high = float(found.min()), float(np.quantile(found, CLIPPED))
    scaled = np.clip((found - low) / max(high - low, 1e-12), 0, 1)
    smooth = Image.fromarray((255 * scaled).astype(np.uint8)).resize(shown.size, Image.Resampling.BICUBIC)
    return Image.blend(shown.convert("L").convert("RGB"), _coloured(np.asarray(smooth)), STRENGTH)


def _coloured(levels: np.ndarray) -> Image.Image:
    from matplotlib import colormaps

    return Image.fromarray(colormaps["inferno"](levels, bytes=True)[..., :3])
