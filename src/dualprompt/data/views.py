"""From stored pixels to what the backbone sees: the fixed view of evaluation and the augmented one of training."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

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


@dataclass(frozen=True)
class View:
    """Input size, normalisation and the two ways to look at an image."""

    side: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    interpolation: str
    test: Literal["resize", "centre_crop"]
    augment: Literal["none", "random_resized_crop"]

    @property
    def store(self) -> Store:
        """How large images are kept: as small as these views allow."""
        if self.test == "resize" and self.augment == "none":
            return Store(self.side, keep_aspect=False, interpolation=self.interpolation)
        return Store(round(self.side / CENTRE), keep_aspect=True, interpolation=self.interpolation)

    @property
    def training_is_fixed(self) -> bool:
        """Whether training sees each image in one and the same view."""
        return self.augment == "none"

    def fixed(self, canvas: Canvas) -> Tensor:
        """Return the view of evaluation, normalised."""
        return self.show(canvas, self.fixed_boxes(canvas.shapes))

    def training(self, canvas: Canvas, draws: tuple[Tensor, Tensor] | None) -> Tensor:
        """Return the view of training; `draws` are the boxes and flips that `draw` made for these images."""
        return self.fixed(canvas) if draws is None else self.show(canvas, *draws)

    def fixed_boxes(self, shapes: Tensor) -> Tensor | None:
        """Return the boxes of the view of evaluation; None if the pixels are taken as they are."""
        boxes = whole_boxes(shapes) if self.test == "resize" else centre_boxes(shapes)
        return None if untouched(boxes, self.side) else boxes

    def draw(self, shapes: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor] | None:
        """Draw the boxes and flips of a whole batch, or None when training is not augmented."""
        if self.training_is_fixed:
            return None
        return random_boxes(shapes, generator), random_flips(len(shapes), generator)

    def show(self, canvas: Canvas, boxes: Tensor | None, flips: Tensor | None = None) -> Tensor:
        """Return the boxes of images, normalised; on a GPU this only queues work."""
        images = resample(canvas, boxes, self.side, flips, self.interpolation)
        return normalise(images, *_normalisation(self.mean, self.std, images.device))


@functools.cache
def _normalisation(mean: tuple[float, ...], std: tuple[float, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    return torch.tensor(mean, device=device), torch.tensor(std, device=device)
