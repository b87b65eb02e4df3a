"""FeCAM (Goswami et al., 2023): a mean and a covariance for each class, and the Mahalanobis distance to each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from dualprompt.backbones.base import BackboneSource
from dualprompt.methods.base import METHODS, Batch, Grid, StreamKind, TaskView, below, numbered
from dualprompt.methods.closed_form import ClosedForm, ClosedFormConfig
from dualprompt.methods.experts import SHARPNESS
from dualprompt.methods.heads import GrowingHead
from dualprompt.methods.ownership import OfTask
from dualprompt.methods.statistics import TensorList, packed, precise, unpacked

TINY = 1e-12  # variance where a class has one image: its covariance is then a multiple of the identity


class FeCAMConfig(ClosedFormConfig):
    """Options of `fecam`; the default is that of the authors' scripts for ViTs."""

    name: str = "fecam"
    shrinkage: float = Field(default=1.0, gt=0, description="γ: so many of a class's mean variance are added to each")


@dataclass(frozen=True)
class ClassMoments:
    """Of a class's features, in float64."""

    count: float
    mean: Tensor  # (dim,)
    scatter: Tensor  # Σ (f − mean)(f − mean)ᵀ, (dim, dim)

    def joined(self, other: ClassMoments) -> ClassMoments:
        """Return those of both together."""
        count, shift = self.count + other.count, other.mean - self.mean
        between = shift[:, None] * shift * (self.count * other.count / count)
        return ClassMoments(count, self.mean + shift * (other.count / count), self.scatter + other.scatter + between)


class KeptMoments(nn.Module):
    """The moments of every label, where one may come back: dim (dim + 3) / 2 + 1 numbers each."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim
        self.counts, self.means, self.scatters = (TensorList() for _ in range(3))  # of labels that came together

    def include(self, found: Mapping[int, ClassMoments], task: TaskView) -> dict[int, ClassMoments]:
        """Take in what came of each label; return the moments of all their features so far."""
        new = [found[label] for label in task.new_labels]
        if new:
            self.counts.append(torch.tensor([each.count for each in new]))
            self.means.append(torch.stack([each.mean for each in new]))
            self.scatters.append(torch.stack([packed(each.scatter) for each in new]))
        return {n: own if n in task.new_labels else self._join(n, own) for n, own in found.items()}

    def _join(self, label: int, came: ClassMoments) -> ClassMoments:
        for counts, means, scatters in zip(self.counts, self.means, self.scatters, strict=True):
            if label < len(counts):
                scatter = unpacked(precise(scatters[label]), self.dim)
                together = ClassMoments(float(counts[label]), precise(means[label]), scatter).joined(came)
                counts[label], means[label] = together.count, together.mean.to(means)
                scatters[label] = packed(together.scatter).to(scatters)
                return together
            label -= len(counts)
        raise ValueError("a label that comes back was never here")

    def restore(self, state: dict[str, Tensor]) -> None:
        """Take over the moments of a checkpoint."""
        for part in ("counts", "means", "scatters"):
            getattr(self, part).restore(numbered(state, part))


@METHODS.register("fecam")
class FeCAM(ClosedForm[FeCAMConfig]):
    """Classes are ellipsoids of their own. A logit is minus the squared distance to the mean, times `SHARPNESS`.

    That is a quadratic function of the feature, so it is linear in the feature's products: the head has a row of
    dim (dim + 1) / 2 + dim numbers a class.
    """

    summary = "the Mahalanobis distance to each class, by a covariance of its own; no training"
    grid: ClassVar[Grid] = {"method.shrinkage": (1.0, 0.3, 3.0, 10.0)}
    of_task: ClassVar[OfTask] = {
        **ClosedForm.of_task,
        **{f"moments.{part}": 0 for part in ("counts", "means", "scatters")},
    }

    def __init__(self, config: FeCAMConfig, backbone: BackboneSource) -> None:
        super().__init__(config, backbone)
        dim = self.backbone.dim
        self.head = GrowingHead(dim * (dim + 1) // 2 + dim)
        self.moments: KeptMoments | None = None  # where labels come back: a row does not tell them

    def accept(self, kind: StreamKind) -> None:
        """Keep moments where labels come back."""
        super().accept(kind)
        if kind.returns:
            self.expect_more()

    def expect_more(self) -> None:
        """Keep the moments of each label."""
        self.moments = KeptMoments(self.backbone.dim).to(self.backbone.device)

    @property
    def takes_more(self) -> bool:
        """Yes, where moments are kept."""
        return self.moments is not None

    def features(self, batch: Batch) -> Tensor:
        """Return the products of the feature's numbers, and these, (batch, dim (dim + 1) / 2 + dim)."""
        feature = F.normalize(super().features(batch).float(), dim=1)
        one, other = torch.triu_indices(self.backbone.dim, self.backbone.dim, device=feature.device)
        return torch.cat([feature[:, one] * feature[:, other], feature], dim=1)

    @torch.no_grad()
    def end_task(self, task: TaskView) -> None:
        """Set the rows of the task's labels."""
        self.more(task)

    @torch.no_grad()
    def more(self, task: TaskView) -> None:
        """Do the same; a label that comes back has the moments of all its images."""
        features = F.normalize(precise(self.read_all(task)), dim=1)
        places = task.places.to(features.device)
        here = {label: places == place for place, label in enumerate(task.labels)}
        found = {label: moments_of(features[own]) for label, own in here.items() if own.any()}
        if self.moments is not None:
            found = self.moments.include(found, task)
        weight, bias = torch.cat(list(self.head.weight)), torch.cat(list(self.head.bias))
        for label, own in found.items():
            row, constant = quadratic(own, self.config.shrinkage)
            weight[label], bias[label] = SHARPNESS * row.to(weight), SHARPNESS * constant.to(bias)
        sizes = [len(rows) for rows in self.head.bias]
        self.set_head(weight.split(sizes), bias.split(sizes))

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Take over the head, and the moments where they are kept."""
        super().load_state(state)
        if self.moments is not None:
            self.moments.restore(below("moments.", state))


def moments_of(rows: Tensor) -> ClassMoments:
    """Return the moments of features (images, dim)."""
    mean = rows.mean(dim=0)
    return ClassMoments(float(len(rows)), mean, (rows - mean).T @ (rows - mean))


def quadratic(moments: ClassMoments, shrinkage: float) -> tuple[Tensor, Tensor]:
    """Return the row and the bias that give −(f − μ)ᵀ R⁻¹ (f − μ) from the products of f and f itself.

    R are the correlations of the class's covariance, to whose variances `shrinkage` times their mean was added.
    """
    covariance = moments.scatter.clone()  # times the images, which correlations do not see
    variance = covariance.diagonal()
    variance.add_(shrinkage * variance.mean() + TINY)
    deviation = variance.sqrt()
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(covariance / (deviation[:, None] * deviation)))
    towards = inverse @ moments.mean
    row = torch.cat([-packed(2 * inverse - inverse.diagonal().diag()), 2 * towards])
    return row, -(moments.mean @ towards)
