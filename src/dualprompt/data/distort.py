"""Changes of images that are cut already, each with draws of its own, for a whole batch at once on its device.

Images are (batch, 3, side, side) in [0, 1]. Draws are made on the CPU, so that every device sees the same.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

LUMA = (0.299, 0.587, 0.114)  # what red, green and blue add to brightness


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
    limits = torch.tensor(most, device=chances.device)
    low = torch.cat([(1 - limits[:3]).clamp(min=0), -limits[3:]])
    high = torch.cat([1 + limits[:3], limits[3:]])
    return low + chances * (high - low)


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
    return (images * images.new_tensor(LUMA)[:, None, None]).sum(dim=1, keepdim=True)


def blur(images: Tensor, sigma: Tensor) -> Tensor:
    """Blur each image by a Gaussian of its own width (batch,), in pixels; at an edge the weights inside count."""
    place = torch.arange(images.shape[-1], device=images.device)
    squared = (place[:, None] - place).square() / (2 * sigma.to(images)[:, None, None].square())
    weights = (-squared).softmax(dim=2)[:, None]
    return weights @ images @ weights.mT


def _turn_hue(images: Tensor, turn: Tensor) -> Tensor:
    """Turn the hue by a share of the circle, (batch, 1, 1); value and saturation stay."""
    value, brightest = images.max(dim=1)
    chroma = value - images.amin(dim=1)
    red, green, blue = images.unbind(dim=1)
    span = torch.where(chroma == 0, 1.0, chroma)
    sixth = torch.stack([(green - blue) / span, 2 + (blue - red) / span, 4 + (red - green) / span], dim=1)
    hue = sixth.gather(1, brightest[:, None])[:, 0] / 6 + turn
    # Each channel falls from the value to value − chroma over two sixths of the circle.
    offsets = images.new_tensor([5.0, 3.0, 1.0])[:, None, None]
    position = (offsets + 6 * hue[:, None]) % 6
    fall = torch.minimum(position, 4 - position).clamp(0, 1)
    turned = value[:, None] - chroma[:, None] * fall
    return torch.where(turn[:, None] == 0, images, turned)
