"""Changes of images that are cut already, each with draws of its own, for a whole batch at once on its device.

Images are (batch, 3, side, side) in [0, 1]. Draws are made on the CPU, so that every device sees the same.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

SSL_DRAWS = 11  # numbers that a view of `ssl_view` takes


def random_shifts(count: int, most: int, generator: torch.Generator) -> Tensor:
    """Return (count, 2) whole pixels, down and to the right, each evenly from −most to most."""
    return torch.randint(-most, most + 1, (count, 2), generator=generator)


def random_angles(count: int, most: float, generator: torch.Generator) -> Tensor:
    """Return (count,) degrees, evenly from −most to most."""
    return most * (2 * torch.rand(count, generator=generator) - 1)


def jitter_of(chances: Tensor, most: tuple[float, float, float, float]) -> Tensor:
    """Turn (count, 4) numbers, even in [0, 1), into factors of brightness, contrast and saturation, and a turn of hue.

    A factor lies between 1 − most, or 0, and 1 + most. The hue turns by at most that share of a circle.
    """
    low = (*(max(0.0, 1 - limit) for limit in most[:3]), -most[3])
    high = (*(1 + limit for limit in most[:3]), most[3])
    columns = zip(chances.unbind(dim=1), low, high, strict=True)
    return torch.stack([least + chance * (largest - least) for chance, least, largest in columns], dim=1)


def shift(images: Tensor, shifts: Tensor) -> Tensor:
    """Move images; what comes in from outside is black. It is padding, then cutting the old size out."""
    side, most = images.shape[-1], images.shape[-1] // 8
    padded = F.pad(images, (most,) * 4)
    start = most - shifts.to(images.device)  # (batch, 2)
    rows, columns = (start[:, axis, None] + torch.arange(side, device=images.device) for axis in (0, 1))
    batch = torch.arange(len(images), device=images.device)[:, None, None, None]
    channel = torch.arange(images.shape[1], device=images.device)[:, None, None]
    return padded[batch, channel, rows[:, None, :, None], columns[:, None, None, :]]


def rotate(images: Tensor, angles: Tensor) -> Tensor:
    """Turn images counter-clockwise about their centres; each pixel is the nearest one, black beyond the edge."""
    radians = angles.to(images) * (math.pi / 180)
    cos, sin = radians.cos(), radians.sin()
    none = torch.zeros_like(cos)
    # Where a pixel of the output comes from; y points down.
    back = torch.stack([torch.stack([cos, -sin, none], dim=1), torch.stack([sin, cos, none], dim=1)], dim=1)
    grid = F.affine_grid(back, list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, mode="nearest", padding_mode="zeros", align_corners=False)


def jitter(images: Tensor, factors: Tensor) -> Tensor:
    """Change brightness, contrast, saturation and hue, in this order; `factors` (batch, 4) as of `jitter_of`."""
    brightness, contrast, saturation, hue = factors.to(images)[:, :, None, None, None].unbind(dim=1)
    images = (images * brightness).clamp(0, 1)
    mean = grey(images).mean(dim=(1, 2, 3), keepdim=True)
    images = torch.lerp(mean, images, contrast).clamp(0, 1)
    images = torch.lerp(grey(images), images, saturation).clamp(0, 1)
    return _turn_hue(images, hue[:, 0])


def grey(images: Tensor) -> Tensor:
    """Return the brightness of each pixel, (batch, 1, side, side)."""
    red, green, blue = images.unbind(dim=1)
    return (0.299 * red + 0.587 * green + 0.114 * blue)[:, None]


def blur(images: Tensor, sigma: Tensor) -> Tensor:
    """Blur each image by a Gaussian of its own width (batch,), in pixels; at an edge the weights inside count."""
    place = torch.arange(images.shape[-1], device=images.device)
    squared = (place[:, None] - place).square() / (2 * sigma.to(images)[:, None, None].square())
    weights = (-squared).softmax(dim=2)[:, None]
    return weights @ images @ weights.mT


def ssl_view(images: Tensor, chances: Tensor, blur_chance: float) -> Tensor:
    """Return a view for self-supervision: shifted and mirrored; often jittered, at times grey or blurred.

    `chances` (batch, SSL_DRAWS) are even in [0, 1).
    """
    side, most = images.shape[-1], images.shape[-1] // 8
    place, flip, change, factors, fade, soften, width = chances.float().split([2, 1, 1, 4, 1, 1, 1], dim=1)

    def where(chance: Tensor, below: float, changed: Tensor, images: Tensor) -> Tensor:
        return torch.where((chance < below)[:, :, None, None], changed, images)

    images = shift(images, (place * (2 * most + 1)).long() - most)
    images = where(flip, 0.5, images.flip(3), images)
    images = where(change, 0.8, jitter(images, jitter_of(factors, (0.4, 0.4, 0.2, 0.1))), images)
    images = where(fade, 0.2, grey(images).expand(-1, 3, side, side), images)
    return where(soften, blur_chance, blur(images, 0.1 + 1.9 * width[:, 0]), images)


def _turn_hue(images: Tensor, turn: Tensor) -> Tensor:
    """Turn the hue by a share of the circle, (batch, 1, 1); value and saturation stay."""
    value, brightest = images.max(dim=1)
    chroma = value - images.amin(dim=1)
    red, green, blue = images.unbind(dim=1)
    span = torch.where(chroma == 0, 1.0, chroma)
    sixth = torch.stack([(green - blue) / span, 2 + (blue - red) / span, 4 + (red - green) / span], dim=1)
    hue = sixth.gather(1, brightest[:, None])[:, 0] / 6 + turn
    # Each channel falls from the value to value − chroma over two sixths of the circle.
    offsets = torch.arange(5, 0, -2, device=images.device)[:, None, None]
    position = (offsets + 6 * hue[:, None]) % 6
    fall = torch.minimum(position, 4 - position).clamp(0, 1)
    turned = value[:, None] - chroma[:, None] * fall
    return torch.where(turn[:, None] == 0, images, turned)
