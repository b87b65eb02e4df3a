"""From stored pixels to what the backbone sees: the fixed view of evaluation and the augmented one of training."""

from __future__ import annotations

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
        boxes = whole_boxes(canvas.shapes) if self.test == "resize" else centre_boxes(canvas.shapes)
        return self._show(canvas, boxes, None)

    def training(self, canvas: Canvas, draws: tuple[Tensor, Tensor] | None) -> Tensor:
        """Return the view of training; `draws` are the boxes and flips that `draw` made for these images."""
        return self.fixed(canvas) if draws is None else self._show(canvas, *draws)

    def draw(self, shapes: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor] | None:
        """Draw the boxes and flips of a whole batch, or None when training is not augmented."""
        if self.training_is_fixed:
            return None
        return random_boxes(shapes, generator), random_flips(len(shapes), generator)

    def _show(self, canvas: Canvas, boxes: Tensor, flips: Tensor | None) -> Tensor:
        images = resample(canvas, boxes, self.side, flips, self.interpolation)
        mean, std = (torch.tensor(values, device=images.device) for values in (self.mean, self.std))
        return normalise(images, mean, std)
