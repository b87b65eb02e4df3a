"""Views of images, for a whole batch at once: choose a box in each image, then resample all boxes to one size."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dualprompt.data.images import Canvas

CENTRE = 224 / 256  # the official test view: short side 256, centre 224
TRIES = 10  # draws of a random box


def whole_boxes(shapes: Tensor) -> Tensor:
    """Return (batch, 4) boxes (top, left, height, width) that hold each whole image."""
    return torch.cat([torch.zeros_like(shapes), shapes], dim=1).float()


def centre_boxes(shapes: Tensor) -> Tensor:
    """Return the square at each image's centre whose side is `CENTRE` of the short side.

    It is made of whole pixels: half a pixel's offset would blur an image that needs no resampling.
    """
    side = (shapes.amin(dim=1, keepdim=True) * CENTRE).round()
    return torch.cat([((shapes - side) / 2).floor(), side, side], dim=1)


def random_boxes(
    shapes: Tensor,
    generator: torch.Generator,
    area: tuple[float, float] = (0.05, 1.0),
    aspect: tuple[float, float] = (3 / 4, 4 / 3),
) -> Tensor:
    """Return a random box for each image: fraction of its area and aspect ratio (log-uniform) drawn from the ranges.

    A draw that does not fit is drawn again, up to `TRIES` times; then the largest centred box whose aspect ratio
    lies in the range is taken. `shapes` is on the CPU, so that every device draws the same boxes.
    """
    count = len(shapes)
    height, width = shapes.float().unbind(dim=1)
    low, high = math.log(aspect[0]), math.log(aspect[1])
    # (TRIES, batch): the first fitting draw of each image is used.
    target = (height * width) * torch.empty(TRIES, count).uniform_(*area, generator=generator)
    ratio = torch.empty(TRIES, count).uniform_(low, high, generator=generator).exp()
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


def untouched(boxes: Tensor, side: int) -> bool:
    """Return whether every box is the top left `side` × `side` pixels, which need no resampling."""
    return bool((boxes == boxes.new_tensor([0, 0, side, side])).all())


def resample(
    canvas: Canvas, boxes: Tensor | None, side: int, flips: Tensor | None = None, interpolation: str = "bilinear"
) -> Tensor:
    """Return (batch, 3, side, side) floats in [0, 1]: each image's box, resampled to the output.

    It is what cutting the box out and resizing it with Pillow gives ("bilinear" or "bicubic", antialiased where it
    shrinks), but for its rounding to bytes. A box that ends inside a pixel has the whole pixel, and no pixel that
    the box does not touch is used. Without boxes the top left pixels are taken as they are, see `untouched`.
    """
    pixels, device = canvas.pixels, canvas.pixels.device
    batch, height, width, channels = pixels.shape
    if boxes is None:
        images = pixels[:, :side, :side].permute(0, 3, 1, 2).float() / 255
        return images if flips is None else torch.where(flips.to(device)[:, None, None, None], images.flip(3), images)
    boxes, shapes = boxes.to(device), canvas.shapes.to(device)
    down = _weights(boxes[:, 0:1], boxes[:, 2:3], shapes[:, 0:1], side, height, interpolation)
    across = _weights(boxes[:, 1:2], boxes[:, 3:4], shapes[:, 1:2], side, width, interpolation)
    if flips is not None:
        across = torch.where(flips.to(device)[:, None, None], across.flip(1), across)
    rows = down @ (pixels.float() / 255).view(batch, height, width * channels)
    rows = rows.view(batch, side, width, channels).permute(0, 3, 1, 2).reshape(batch, channels * side, width)
    return (rows @ across.mT).view(batch, channels, side, side).clamp(0, 1)


def _weights(start: Tensor, length: Tensor, size: Tensor, side: int, pixels: int, interpolation: str) -> Tensor:
    """Return (batch, side, pixels): what each pixel along one axis of the canvas adds to each pixel of the output.

    `start`, `length` and the image's `size` are (batch, 1). A dense matrix costs little beside a backbone, and
    works for boxes of different sizes at once.
    """
    scale = length / side
    centre = start + scale * (torch.arange(side, device=start.device) + 0.5)
    pixel = torch.arange(pixels, device=start.device) + 0.5
    distance = (pixel - centre[:, :, None]) / scale.clamp(min=1)[:, :, None]
    inside = (pixel > start.floor()) & (pixel < torch.minimum((start + length).ceil(), size))
    weights = _kernel(distance.abs(), interpolation) * inside[:, None, :]
    return weights / weights.sum(dim=2, keepdim=True)


def _kernel(distance: Tensor, interpolation: str) -> Tensor:
    """Return Pillow's filters: the triangle, or Keys' cubic with a = −1/2."""
    if interpolation == "bilinear":
        return (1 - distance).clamp(min=0)
    near = (1.5 * distance - 2.5) * distance**2 + 1
    far = ((2.5 - 0.5 * distance) * distance - 4) * distance + 2
    return torch.where(distance < 1, near, torch.where(distance < 2, far, 0.0))


def normalise(images: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Shift and scale each channel as the checkpoint asks."""
    return (images - mean[:, None, None]) / std[:, None, None]
