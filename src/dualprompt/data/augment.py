"""Views of images, for a whole batch at once: choose a box in each image, then resample all boxes to one size."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from dualprompt.data.images import Canvas

CENTRE = 224 / 256  # the official test view: short side 256, centre 224


def whole_boxes(shapes: Tensor) -> Tensor:
    """Return (batch, 4) boxes (top, left, height, width) that hold each whole image."""
    return torch.cat([torch.zeros_like(shapes), shapes], dim=1).float()


def centre_boxes(shapes: Tensor, share: float = CENTRE) -> Tensor:
    """Return the square at each image's centre whose side is `share` of the short side."""
    side = shapes.amin(dim=1, keepdim=True).float() * share
    return torch.cat([(shapes - side) / 2, side, side], dim=1)


def random_boxes(
    shapes: Tensor,
    generator: torch.Generator,
    area: tuple[float, float] = (0.05, 1.0),
    aspect: tuple[float, float] = (3 / 4, 4 / 3),
    tries: int = 10,
) -> Tensor:
    """Return a random box for each image: share of its area and aspect ratio (log-uniform) drawn from the ranges.

    A draw that does not fit is drawn again, up to `tries` times; then the largest centred box whose aspect ratio
    lies in the range is taken. `shapes` is on the CPU, so that every device draws the same boxes.
    """
    count = len(shapes)
    height, width = shapes.float().unbind(dim=1)
    low, high = math.log(aspect[0]), math.log(aspect[1])
    # (tries, batch): the first fitting draw of each image is used.
    target = (height * width) * torch.empty(tries, count).uniform_(*area, generator=generator)
    ratio = torch.empty(tries, count).uniform_(low, high, generator=generator).exp()
    w, h = (target * ratio).sqrt(), (target / ratio).sqrt()
    fits = (w <= width) & (h <= height)
    first = fits.float().argmax(dim=0)
    h, w = (side.gather(0, first[None])[0] for side in (h, w))
    clamped = (width / height).clamp(*aspect)
    fallback_w, fallback_h = torch.minimum(width, height * clamped), torch.minimum(height, width / clamped)
    found = fits.any(dim=0)
    h, w = torch.where(found, h, fallback_h), torch.where(found, w, fallback_w)
    place = torch.rand(2, count, generator=generator)
    place = torch.where(found, place, torch.full_like(place, 0.5))
    return torch.stack([place[0] * (height - h), place[1] * (width - w), h, w], dim=1)


def random_flips(count: int, generator: torch.Generator) -> Tensor:
    """Return for each image whether it is mirrored, with probability one half."""
    return torch.rand(count, generator=generator) < 0.5


def resample(
    canvas: Canvas, boxes: Tensor, side: int, flips: Tensor | None = None, interpolation: str = "bilinear"
) -> Tensor:
    """Return (batch, 3, side, side) floats in [0, 1]: each image's box, resampled to the output.

    No pixel from outside the box is used: sampling points are clamped to the centres of the box's outermost
    pixels. There is no antialiasing, so images much larger than the output must be shrunk before (see `Store`).
    """
    pixels, device = canvas.pixels, canvas.pixels.device
    height, width = pixels.shape[1:3]
    image = pixels.permute(0, 3, 1, 2).float() / 255
    if flips is None and bool((boxes == boxes.new_tensor([0, 0, height, width])).all()):
        if (height, width) == (side, side):
            return image
        if height <= side and width <= side:
            return F.interpolate(image, size=(side, side), mode=interpolation, align_corners=False).clamp(0, 1)
    boxes = boxes.to(device)
    step = (torch.arange(side, device=device) + 0.5) / side
    across = step.expand(len(boxes), side)
    if flips is not None:
        across = torch.where(flips.to(device)[:, None], across.flip(1), across)
    y = _points(boxes[:, 0:1], boxes[:, 2:3], step.expand(len(boxes), side))
    x = _points(boxes[:, 1:2], boxes[:, 3:4], across)
    # Pixel i has its centre at i + 0.5; grid_sample wants the canvas mapped to [−1, 1].
    y, x = 2 * y / height - 1, 2 * x / width - 1
    grid = torch.stack([x[:, None, :].expand(-1, side, -1), y[:, :, None].expand(-1, -1, side)], dim=-1)
    sampled = F.grid_sample(image, grid, mode=interpolation, padding_mode="border", align_corners=False)
    return sampled.clamp(0, 1)


def _points(start: Tensor, length: Tensor, step: Tensor) -> Tensor:
    """Return sampling positions in pixels, at least half a pixel inside the box."""
    points = start + length * step
    low, high = start.floor() + 0.5, (start + length).ceil() - 0.5
    return torch.minimum(torch.maximum(points, low), torch.maximum(low, high))


def normalise(images: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Shift and scale each channel as the checkpoint asks."""
    return (images - mean[:, None, None]) / std[:, None, None]
