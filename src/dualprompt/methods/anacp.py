"""AnaCP (Momeni et al., 2025): features are projected towards class means that were moved apart, in closed form."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from dualprompt.backbones.base import BackboneSource
from dualprompt.config import WIDEST
from dualprompt.methods.base import METHODS, Batch, Grid, StreamKind, TaskView, below, numbered
from dualprompt.methods.closed_form import ClosedForm, ClosedFormConfig
from dualprompt.methods.experts import SHARPNESS
from dualprompt.methods.heads import GrowingHead
from dualprompt.methods.ownership import OfTask
from dualprompt.methods.ridge import Moments, add_columns, weights_of
from dualprompt.methods.statistics import Discriminant, TensorList, generator_for, packed, precise, unpacked

JITTER = 1e-4  # added to the variances of the shared covariance, as in the authors' code


class AnaCPConfig(ClosedFormConfig):
    """Options of `anacp`; but for the width, the defaults are the authors'."""

    name: str = "anacp"
    projection: int = Field(
        default=2000,
        ge=1,
        le=WIDEST,
        description="D, random features of each projection and of the head; the state holds `heads` · D²/2 numbers",
    )
    heads: int = Field(default=3, ge=1, le=16, description="projections, whose outputs are averaged")
    strength: float = Field(default=100.0, gt=0, description="λ of every ridge regression")
    samples: int = Field(default=100, ge=1, le=10_000, description="features of a class that the head is solved from")


@METHODS.register("anacp")
class AnaCP(ClosedForm[AnaCPConfig]):
    """Ridge regression of each image's feature on the target of its class, then of labels on what that gives.

    The second is solved from samples of the classes' Gaussians, which have one covariance: no image is kept, and what
    the first gives changes with each task.
    """

    summary = "features projected towards class means moved apart, then ridge regression on samples; no training"
    grid: ClassVar[Grid] = {"method.strength": (100.0, 10.0, 1.0, 1000.0)}
    of_task: ClassVar[OfTask] = {
        **ClosedForm.of_task,
        "discriminant.means": 0,
        "discriminant.counts": 0,
        "sums": 2,
    }
    inner: Tensor
    outer: Tensor
    maps: Tensor
    gram: Tensor

    def __init__(self, config: AnaCPConfig, backbone: BackboneSource) -> None:
        super().__init__(config, backbone)
        dim, width, heads = self.backbone.dim, config.projection, config.heads
        self.head = GrowingHead(width)
        self.discriminant = Discriminant(dim)  # means, and what the covariance is made of
        self.register_buffer("inner", torch.zeros(heads, dim, width))  # random
        self.register_buffer("outer", torch.zeros(dim, width))  # random
        self.register_buffer("maps", torch.zeros(heads, width, dim))  # solved for
        self.register_buffer("gram", torch.zeros(heads, width * (width + 1) // 2))  # ZᵀZ of each projection, packed
        self.sums = TensorList()  # ZᵀY, each (heads, width, labels that came together)

    def accept(self, kind: StreamKind) -> None:
        """Count the samples of each label where labels come back."""
        super().accept(kind)
        if kind.returns:
            self.discriminant.expect_returning()

    def features(self, batch: Batch) -> Tensor:
        """Return what the head classifies, (batch, D)."""
        return self.expand(_directions(super().features(batch)))

    def expand(self, features: Tensor) -> Tensor:
        """Return the random features of the projected features, (batch, D)."""
        each = zip(self.inner, self.maps, strict=True)
        projected = [F.normalize(_random(features, inner) @ towards, dim=1) for inner, towards in each]
        return _random(torch.stack(projected).mean(dim=0), self.outer)

    def begin_task(self, task: TaskView) -> None:
        """Draw what is random (first task), and add rows to the head."""
        super().begin_task(task)
        if task.index == 0:
            generator = generator_for(task, "projections")
            for drawn in (self.inner, self.outer):
                drawn.copy_(torch.randn(drawn.shape, generator=generator))

    @torch.no_grad()
    def end_task(self, task: TaskView) -> None:
        """Add the task to all sums, move the means apart, and solve for projections and head."""
        features = self.read_all(task)
        self.discriminant.include_features(features, task, _directions)
        self._add(features, task)
        means, covariance = self._gaussians()
        targets = spread(means, covariance)
        sums = torch.cat([precise(part) for part in self.sums], dim=2)
        for number, (gram, own) in enumerate(zip(self.gram, sums, strict=True)):
            solved = weights_of(unpacked(precise(gram), self.config.projection), own, self.config.strength)
            self.maps[number].copy_(solved @ targets)
        self._solve_head(means, covariance, generator_for(task, "samples"))

    def _add(self, features: Tensor, task: TaskView) -> None:
        labels, classes = task.places.to(features.device), len(task.labels)
        found = [
            Moments.of(features, labels, classes, lambda rows, inner=inner: _random(_directions(rows), inner))
            for inner in self.inner
        ]
        self.gram += torch.stack([packed(each.gram) for each in found]).to(self.gram)
        add_columns(self.sums, torch.stack([each.sums for each in found]), task)

    def _gaussians(self) -> tuple[Tensor, Tensor]:
        """Return all class means, (classes, dim), and the covariance within classes, in float64."""
        kept, dim = self.discriminant, self.backbone.dim
        covariance = unpacked(precise(kept.scatter), dim) / max(int(kept.count), 1)
        covariance.diagonal().add_(JITTER)
        return torch.cat([precise(means) for means in kept.means]), covariance

    def _solve_head(self, means: Tensor, covariance: Tensor, generator: torch.Generator) -> None:
        count, dim = self.config.samples, means.shape[1]
        root = torch.linalg.cholesky(covariance).T
        gram, sums = torch.zeros(()), []
        for mean in means:  # one class after another: samples of all of them at once would be many
            noise = torch.randn(count, dim, generator=generator, dtype=torch.float64).to(means.device)
            drawn = (mean + noise @ root).to(self.outer)
            found = Moments.of(drawn, torch.zeros(count, dtype=torch.int64, device=drawn.device), 1, self.expand)
            gram = gram.to(found.gram) + found.gram
            sums.append(found.sums)
        rows = weights_of(gram, torch.cat(sums, dim=1), self.config.strength).T
        sizes = [len(block) for block in self.head.bias]
        self.set_head((SHARPNESS * rows).split(sizes), list(self.head.bias))

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Take over what was drawn, summed and solved for."""
        super().load_state(state)
        self.discriminant.restore(below("discriminant.", state))
        self.sums.restore(numbered(state, "sums"))
        for name in ("inner", "outer", "maps", "gram"):
            self.get_buffer(name).copy_(state[name])


def _directions(features: Tensor) -> Tensor:
    return F.normalize(features.float(), dim=1)


def _random(features: Tensor, weights: Tensor) -> Tensor:
    return F.gelu(features @ weights)


def spread(means: Tensor, covariance: Tensor) -> Tensor:
    """Return targets of length one: class means, moved apart where they differ at all, (classes, dim).

    The means about their centre are whitened, (M − m) W with W = Σ^(−1/2); each of their singular values grows by 1;
    and they go back by W once more, as discriminants Σ⁻¹ (μ − m) do.
    """
    values, vectors = torch.linalg.eigh(covariance)
    whitening = vectors @ (values.clamp_min(0) + 1e-8).rsqrt().diag() @ vectors.T
    centre = means.mean(dim=0)
    left, sizes, right = torch.linalg.svd((means - centre) @ whitening, full_matrices=False)
    # So many classes differ in one direction fewer: what rounding leaves of the last one must not grow.
    differ = sizes > 1e-9 * sizes.max().clamp_min(1e-30)
    apart = (left * (sizes + 1) * differ) @ right
    return F.normalize(apart @ whitening + centre, dim=1)
