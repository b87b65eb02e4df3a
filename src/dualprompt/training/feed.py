"""Batches for training and evaluation, and the frozen features that are computed once an image.

What a batch looks at is drawn on the CPU as a few small tensors, its spec; everything else (gathering pixels, cutting,
resizing, normalising) is a function of it that only queues work on the device.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from dualprompt.backbones.base import Backbone, BackboneSource, factory_of
from dualprompt.backbones.passes import Passes, counted
from dualprompt.config import RunConfig
from dualprompt.data.images import Canvas, Images
from dualprompt.data.specs import Crop, ImageSpec, Look
from dualprompt.data.stream import Subset
from dualprompt.data.views import View
from dualprompt.features import Compute, Table
from dualprompt.methods.base import Batch
from dualprompt.methods.buffer import part
from dualprompt.progress import SILENT, Bar, Progress, Work
from dualprompt.training.distributed import total
from dualprompt.training.steps import carried_out

if TYPE_CHECKING:
    from lightning_fabric import Fabric

RESIDENT_SHARE = 0.4  # of the GPU memory that is free


class Feed:
    """Turns subsets of images into batches on the device. Each process gets its own part of every batch."""

    def __init__(
        self,
        config: RunConfig,
        view: View,
        backbone: BackboneSource,
        fabric: Fabric,
        progress: Progress = SILENT,
    ) -> None:
        self.config, self.view, self.fabric = config, view, fabric
        self.backbones = factory_of(backbone)
        self.progress = progress
        self.dtype = self.backbones.dtype  # of the images
        # Kept as long as the images are: those of a stream for the whole run, those made for a phase until its end.
        self.tables: dict[Images, Table] = {}  # of the frozen features of a benchmark's images
        self._features: WeakKeyDictionary[Subset, Tensor] = WeakKeyDictionary()  # of others
        self._resident: WeakKeyDictionary[Images, Tensor | None] = WeakKeyDictionary()
        self.pause: Callable[[], None] = lambda: None  # called between batches of a pass; it may raise
        self.asked = False  # for features, since whoever wants to know has set it back

    @property
    def backbone(self) -> Backbone:
        """The frozen backbone, which is built when its features are first asked for."""
        return self.backbones.frozen()

    def for_run(self, config: RunConfig) -> Feed:
        """Return a feed for another run on the same images; frozen features and pixels are shared."""
        other = copy.copy(self)
        other.config = config
        return other

    def resident(self, images: Images) -> Tensor | None:
        """Return all pixels on the device, (images, height, width, 3), or None where they do not fit."""
        if images not in self._resident:
            device, canvas = self.fabric.device, None
            if device.type != "cuda":
                canvas = images.uniform
            elif images.canvas_bytes <= min(2 * len(images.flat), RESIDENT_SHARE * torch.cuda.mem_get_info()[0]):
                canvas = images.gather(torch.arange(len(images))).pixels.to(device)
            self._resident[images] = canvas
        return self._resident[images]

    def some(self, subset: Subset, rows: Tensor, frozen: bool) -> Subset:
        """Return the images at some rows of a subset; if `frozen`, with features that are known of the whole."""
        chosen = part(subset, rows)
        if frozen:
            self._features[chosen] = self.features(subset)[rows.to(self.fabric.device)]
        return chosen

    def evaluation(self, subset: Subset, frozen: bool = True, shared: bool = True) -> Iterator[ImageSpec]:
        """Yield the batches of an evaluation, with their rows: this process's, or all of them."""
        known = self.features(subset) if frozen else None
        for rows in self._rows(subset, shared):
            yield self.fixed(subset, rows, None if known is None else known[rows[0] : rows[-1] + 1])

    def _rows(self, subset: Subset, shared: bool) -> Iterator[Tensor]:
        size = self.config.evaluate.batch_size
        starts = range(0, len(subset), size)
        for start in starts[self.fabric.global_rank :: self.fabric.world_size] if shared else starts:
            self.pause()
            yield torch.arange(start, min(start + size, len(subset)))

    def fixed(self, subset: Subset, rows: Tensor, known: Tensor | None = None) -> ImageSpec:
        """Return a batch that shows images of a subset as evaluation sees them."""
        index = subset.indices[rows]
        shapes = subset.images.shapes[index]
        look = Look(index, shapes, (Crop(self.view.fixed_boxes(shapes)),))
        return self.shown(subset.images, ImageSpec(subset.labels[rows], look, frozen=known, query=known, rows=rows))

    def batch(self, images: Images, spec: ImageSpec) -> Batch:
        """Return the batch of a spec, which is on the device; its views are made when they are asked for."""
        views = len(spec.look.crops) if spec.look is not None else len(spec.views)
        return Batch(
            make_images=partial(self._view, images, spec, 0),
            labels=spec.labels,
            frozen=spec.frozen,
            query=spec.query,
            task=spec.task,
            make_second=partial(self._view, images, spec, 1) if views == 2 else None,
            noted=spec.noted,
            noise=spec.noise,
            together=spec.together,
        )

    def question(self, images: Images, spec: ImageSpec) -> Batch:
        """Return the batch of a spec as it is asked about: every label is −1, for no answer may depend on it."""
        return self.batch(images, replace(spec, labels=torch.full_like(spec.labels, -1)))

    def _view(self, images: Images, spec: ImageSpec, which: int) -> Tensor:
        if spec.look is None:
            return spec.views[which]
        index, pixels = spec.look.index, self.resident(images)
        found = images.gather(index.cpu()).pixels.to(index.device) if pixels is None else pixels[index]
        return self._show(Canvas(found, spec.look.shapes), spec.look.crops[which])

    @torch.no_grad()
    def features(self, subset: Subset) -> Tensor:
        """Return the frozen features of the fixed view, (images, dim), computed once for each image or subset."""
        self.asked = True
        table = self.tables.get(subset.images)
        if subset not in self._features and table is not None and table.holds(subset.indices):
            return table.look_up(subset.indices, self)
        if subset not in self._features:
            with self.progress.bar(Work("features", len(subset), "img")) as bar:
                self._features[subset] = self.computing(subset.images, len(subset), bar)(subset.indices)
        return self._features[subset]

    def computing(self, images: Images, most: int, bar: Bar) -> Compute:
        """Return what computes frozen features of images, all processes together, of at most so many at a time."""
        out = torch.zeros(most, self.backbone.dim, dtype=self.dtype, device=self.fabric.device)
        step = carried_out(partial(self._note_features, images, out), self.fabric, self.config.evaluate.batch_size)

        def compute(indices: Tensor) -> Tensor:
            subset = Subset(images, indices, torch.zeros_like(indices))
            out.zero_()
            with counted():  # what it takes is counted by whoever asks, for others may have asked before
                for rows in self._rows(subset, shared=True):
                    step(self.fixed(subset, rows))
                    bar.advance(len(rows) * self.fabric.world_size)
            return total(self.fabric, out)[: len(indices)].clone()

        return compute

    def known_features_cost(self, subset: Subset) -> Passes:
        """Return what the features of a subset take if any were asked for: a pass, whoever made it and when."""
        return Passes(1, self.backbone.operations) * len(subset) if self.asked else Passes()

    def _note_features(self, images: Images, out: Tensor, spec: ImageSpec) -> None:
        out[spec.rows] = self.backbone(self.batch(images, spec).images)

    def shown(self, images: Images, spec: ImageSpec) -> ImageSpec:
        """Replace what describes views by the views themselves, where pixels were gathered or a GPU cannot reach them.

        Elsewhere a view is made when a method asks for it, which one that knows the features does not.
        """
        if spec.look is None:
            return spec
        pixels = spec.look.pixels
        if pixels is None:
            if self.fabric.device.type != "cuda" or self.resident(images) is not None:
                return spec
            pixels = images.gather(spec.look.index).pixels.pin_memory()
        look = replace(spec.look, pixels=pixels).to(self.fabric.device)
        assert look.pixels is not None
        canvas = Canvas(look.pixels, look.shapes)
        return replace(spec, look=None, views=tuple(self._show(canvas, crop) for crop in look.crops))

    def _show(self, canvas: Canvas, crop: Crop) -> Tensor:
        drawn = crop.boxes, crop.flips, crop.shifts, crop.angles, crop.jitter
        return self.view.show(canvas, *drawn).to(self.dtype)
