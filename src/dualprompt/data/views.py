"""From stored pixels to what the backbone sees: the fixed view of evaluation and the augmented one of training."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from dualprompt.data import distort
from dualprompt.data.augment import (
    CENTRE,
    centre_boxes,
    normalise,
    random_boxes,
    random_flips,
    resample,
    untouched,
    whole_boxes,
)
from dualprompt.data.cache import Store
from dualprompt.data.images import Canvas
from dualprompt.recipe import Augment, Jitter


class Draws(NamedTuple):
    """How each image of a batch is seen; None: not changed in this way."""

    boxes: Tensor | None = None  # (batch, 4) what is cut out
    flips: Tensor | None = None  # (batch,) whether it is mirrored
    shifts: Tensor | None = None  # (batch, 2) pixels down and to the right
    angles: Tensor | None = None  # (batch,) degrees, counter-clockwise
    jitter: Tensor | None = None  # (batch, 4) factors of brightness, contrast and saturation, turn of hue


@dataclass(frozen=True)
class View:
    """Input size, normalisation and the two ways to look at an image."""

    side: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    interpolation: str
    test: Literal["resize", "centre_crop"]
    augment: Augment
    rotation: float = 0.0  # degrees, at most
    jitter: Jitter = (0.0, 0.0, 0.0, 0.0)  # of brightness, contrast, saturation and hue, at most

    @property
    def store(self) -> Store:
        """How large images are kept: as small as these views allow."""
        if self.test == "resize" and self.augment != "random_resized_crop":
            return Store(self.side, keep_aspect=False, interpolation=self.interpolation)
        return Store(round(self.side / CENTRE), keep_aspect=True, interpolation=self.interpolation)

    @property
    def training_is_fixed(self) -> bool:
        """Whether training sees each image in one and the same view."""
        return self.augment == "none" and not self.rotation and not any(self.jitter)

    def fixed(self, canvas: Canvas) -> Tensor:
        """Return the view of evaluation, normalised."""
        return self.show(canvas, self.fixed_boxes(canvas.shapes))

    def training(self, canvas: Canvas, draws: Draws | None) -> Tensor:
        """Return the view of training; `draws` are those that `draw` made for these images."""
        return self.fixed(canvas) if draws is None else self.show(canvas, *draws)

    def fixed_boxes(self, shapes: Tensor) -> Tensor | None:
        """Return the boxes of the view of evaluation; None if the pixels are taken as they are."""
        boxes = whole_boxes(shapes) if self.test == "resize" else centre_boxes(shapes)
        return None if untouched(boxes, self.side) else boxes

    def draw(self, shapes: Tensor, generator: torch.Generator) -> Draws | None:
        """Draw how a whole batch is seen, or None when training is not augmented."""
        if self.training_is_fixed:
            return None
        count, flips, shifts, angles, factors = len(shapes), None, None, None, None
        cuts = self.augment == "random_resized_crop"
        boxes = random_boxes(shapes, generator) if cuts else self.fixed_boxes(shapes)
        if self.augment != "none":
            flips = random_flips(count, generator)
        if self.augment == "pad_crop":
            shifts = distort.random_shifts(count, self.side // 8, generator)
        if self.rotation:
            angles = distort.random_angles(count, self.rotation, generator)
        if any(self.jitter):
            factors = distort.jitter_of(torch.rand(count, 4, generator=generator), self.jitter)
        return Draws(boxes, flips, shifts, angles, factors)

    def show(
        self,
        canvas: Canvas,
        boxes: Tensor | None,
        flips: Tensor | None = None,
        shifts: Tensor | None = None,
        angles: Tensor | None = None,
        jitter: Tensor | None = None,
    ) -> Tensor:
        """Return images as they were drawn, normalised; on a GPU this only queues work. See `Draws`."""
        images = resample(canvas, boxes, self.side, flips, self.interpolation)
        if shifts is not None:
            images = distort.shift(images, shifts)
        if angles is not None:
            images = distort.rotate(images, angles)
        if jitter is not None:
            images = distort.jitter(images, jitter)
        return normalise(images, *_normalisation(self.mean, self.std, images.device))


@functools.cache
def _normalisation(mean: tuple[float, ...], std: tuple[float, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    return torch.tensor(mean, device=device), torch.tensor(std, device=device)
