"""Decoded images, all of them in one flat uint8 tensor, gathered by index into batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from dualprompt.data.origin import Origin


class Canvas(NamedTuple):
    """A batch of images, each in the top left corner of an equally large canvas; the rest is zero."""

    pixels: Tensor  # (batch, height, width, 3) uint8
    shapes: Tensor  # (batch, 2) int64: height and width of each image


class Images:
    """Images of equal or different sizes. RGB, uint8, rows first, one after another in `flat`."""

    origin: Origin | None = None  # of those of a benchmark: which they are

    def __init__(self, flat: Tensor, shapes: Tensor) -> None:
        if flat.dtype != torch.uint8 or flat.ndim != 1:
            raise ValueError(f"flat must be a 1-D uint8 tensor, found {flat.dtype} with {flat.ndim} dimensions")
        if shapes.dtype != torch.int64 or shapes.ndim != 2 or shapes.shape[1] != 2:
            raise ValueError(f"shapes must be int64 (images, 2), found {shapes.dtype} {tuple(shapes.shape)}")
        bytes_each = shapes.prod(dim=1) * 3
        if int(bytes_each.sum()) != len(flat):
            raise ValueError(f"shapes ask for {int(bytes_each.sum())} bytes, flat has {len(flat)}")
        self.flat = flat
        self.shapes = shapes
        self.offsets = torch.cumsum(bytes_each, dim=0) - bytes_each
        first = shapes[0] if len(shapes) else shapes.new_zeros(2)
        self._uniform: Tensor | None = None  # (images, height, width, 3) view of `flat` when all sizes agree
        if len(shapes) and bool((shapes == first).all()):
            self._uniform = flat.view(len(shapes), int(first[0]), int(first[1]), 3)

    @classmethod
    def from_array(cls, pixels: np.ndarray) -> Images:
        """Wrap an array of equally large images: (images, height, width, 3) uint8."""
        count, height, width, _ = pixels.shape
        shapes = torch.tensor([[height, width]]).expand(count, 2).contiguous()
        return cls(torch.from_numpy(np.ascontiguousarray(pixels)).reshape(-1), shapes)

    @classmethod
    def concat(cls, parts: Sequence[Images]) -> Images:
        """Return copies of the images of all parts, one part after another."""
        flat = torch.cat([torch.empty(0, dtype=torch.uint8), *(part.flat for part in parts)])
        return cls(flat, torch.cat([torch.empty(0, 2, dtype=torch.int64), *(part.shapes for part in parts)]))

    def __len__(self) -> int:
        return len(self.shapes)

    def select(self, indices: Tensor) -> Images:
        """Return copies of the images at `indices`, in that order."""
        shapes = self.shapes[indices]
        if self._uniform is not None:
            return Images(self._uniform[indices].reshape(-1), shapes)
        starts, sizes = self.offsets[indices].tolist(), (shapes.prod(dim=1) * 3).tolist()
        pieces = [self.flat[start : start + size] for start, size in zip(starts, sizes, strict=True)]
        return Images(torch.cat([self.flat[:0], *pieces]), shapes)

    @property
    def uniform(self) -> Tensor | None:
        """All pixels, (images, height, width, 3), if all sizes agree."""
        return self._uniform

    @property
    def canvas_bytes(self) -> int:
        """How much all images would take on canvases of equal size."""
        return len(self) * 3 * int(self.shapes.amax(dim=0).prod()) if len(self) else 0

    def gather(self, indices: Tensor) -> Canvas:
        """Return the images at `indices`, in that order."""
        shapes = self.shapes[indices]
        if self._uniform is not None:
            return Canvas(self._uniform[indices], shapes)
        height, width = (int(side) for side in shapes.amax(dim=0))
        pixels = torch.zeros(len(indices), height, width, 3, dtype=torch.uint8)
        for row, index in enumerate(indices.tolist()):
            h, w = (int(side) for side in self.shapes[index])
            start = int(self.offsets[index])
            pixels[row, :h, :w] = self.flat[start : start + h * w * 3].view(h, w, 3)
        return Canvas(pixels, shapes)

    def image(self, index: int) -> np.ndarray:
        """Return one image, (height, width, 3) uint8."""
        h, w = (int(side) for side in self.shapes[index])
        start = int(self.offsets[index])
        return self.flat[start : start + h * w * 3].view(h, w, 3).numpy()
