"""Batches for training and evaluation, and the frozen features that are computed once an image."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dualprompt.backbones.vit import VisionTransformer
from dualprompt.config import RunConfig
from dualprompt.data.images import Canvas
from dualprompt.data.stream import Subset
from dualprompt.data.views import View
from dualprompt.methods.base import Batch
from dualprompt.progress import SILENT, Progress
from dualprompt.seeds import derive
from dualprompt.training.distributed import share, total

if TYPE_CHECKING:
    from lightning_fabric import Fabric


@dataclass(frozen=True)
class Share:
    """This process's part of one global training batch."""

    batch: Batch
    weight: float  # what its mean loss counts in the average over processes


class Feed:
    """Turns subsets of images into batches on the device. Each process gets its own part of every batch."""

    def __init__(
        self,
        config: RunConfig,
        view: View,
        backbone: VisionTransformer,
        fabric: Fabric,
        progress: Progress = SILENT,
    ) -> None:
        self.config, self.view, self.backbone, self.fabric = config, view, backbone, fabric
        self.progress = progress
        self.dtype = backbone.cls_token.dtype
        self._features: dict[tuple[int, int], tuple[Subset, Tensor]] = {}

    def steps(self, subset: Subset) -> int:
        """Return the number of batches in an epoch, the remainder included."""
        return -(-len(subset) // self.config.train.batch_size)

    def training(self, subset: Subset, task: int, epoch: int, start: int = 0, frozen: bool = True) -> Iterator[Share]:
        """Yield the batches of one epoch from step `start` on.

        The order derives from (seed, task, epoch) and each step's augmentation from (seed, task, epoch, step), for
        the whole batch, so that neither a resumed run nor the number of processes changes what is seen. With
        `frozen`, known frozen features come with the batch.
        """
        seed, size = self.config.seed, self.config.train.batch_size
        shuffle = torch.Generator().manual_seed(derive(seed, "order", task, epoch))
        order = torch.randperm(len(subset), generator=shuffle)
        known = self.features(subset) if frozen and self._features_serve_training else None
        for step in range(start, self.steps(subset)):
            rows = order[step * size : (step + 1) * size]
            draws = self.view.draw(
                subset.images.shapes[subset.indices[rows]],
                torch.Generator().manual_seed(derive(seed, "augment", task, epoch, step)),
            )
            part = share(len(rows), self.fabric.global_rank, self.fabric.world_size)
            mine = rows[part]
            weight = len(mine) * self.fabric.world_size / len(rows)
            if not len(mine):  # fewer images than processes: any one image, counted as nothing
                part, mine = slice(0, 1), rows[:1]
            if draws is not None:
                draws = draws[0][part], draws[1][part]
            features = None if known is None else known[mine.to(known.device)]
            yield Share(
                Batch(
                    make_images=lambda mine=mine, draws=draws: self._cast(
                        self.view.training(self._gather(subset, mine), draws)
                    ),
                    labels=subset.labels[mine].to(self.fabric.device),
                    frozen=features if self.view.training_is_fixed else None,
                    query=features,
                ),
                weight,
            )

    @property
    def _features_serve_training(self) -> bool:
        return self.view.training_is_fixed or self.config.train.query_view == "fixed"

    def judging(self, subset: Subset, task: int, oracle: bool, frozen: bool = True) -> Iterator[Batch]:
        """Yield this process's batches of an evaluation; the true task is given only to the oracle."""
        known = self.features(subset) if frozen else None
        size = self.config.evaluate.batch_size
        starts = range(0, len(subset), size)
        for start in starts[self.fabric.global_rank :: self.fabric.world_size]:
            rows = torch.arange(start, min(start + size, len(subset)))
            features = None if known is None else known[start : start + size]
            labels = subset.labels[rows].to(self.fabric.device)
            yield Batch(
                make_images=lambda rows=rows: self.fixed_view(subset, rows),
                labels=labels,
                frozen=features,
                query=features,
                task=torch.full_like(labels, task) if oracle else None,
            )

    def fixed_view(self, subset: Subset, rows: Tensor) -> Tensor:
        """Return images of a subset as evaluation sees them, ready for the backbone."""
        return self._cast(self.view.fixed(self._gather(subset, rows)))

    @torch.no_grad()
    def features(self, subset: Subset) -> Tensor:
        """Return the frozen features of the fixed view, (images, dim), computed once for each subset."""
        key = (id(subset.images), id(subset.indices))
        if key not in self._features:
            size = self.config.evaluate.batch_size
            out = torch.zeros(len(subset), self.backbone.config.dim, dtype=self.dtype, device=self.fabric.device)
            starts = range(0, len(subset), size)
            with self.progress.bar("frozen features", len(subset), "img") as bar:
                for start in starts[self.fabric.global_rank :: self.fabric.world_size]:
                    rows = torch.arange(start, min(start + size, len(subset)))
                    out[start : start + size] = self.backbone(self.fixed_view(subset, rows))
                    bar.advance(len(rows) * self.fabric.world_size)
            # The subset is kept too: its id must not be given to another one.
            self._features[key] = (subset, total(self.fabric, out))
        return self._features[key][1]

    def for_run(self, config: RunConfig) -> Feed:
        """Return a feed for another run on the same images; frozen features are shared."""
        other = copy.copy(self)
        other.config = config
        return other

    def _gather(self, subset: Subset, rows: Tensor) -> Canvas:
        canvas = subset.images.gather(subset.indices[rows])
        return Canvas(canvas.pixels.to(self.fabric.device), canvas.shapes)

    def _cast(self, images: Tensor) -> Tensor:
        return images.to(self.dtype)
