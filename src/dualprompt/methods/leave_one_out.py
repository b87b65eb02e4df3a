"""Discriminants chosen by leaving one image out: each image is judged by a classifier made of all others.

With a mean a class and one covariance, leaving an image out moves its own class's mean and takes one outer product from
the scatter. So the classifiers of all images come from one inverse, and no image needs to be set aside.

Copies of an image (a burst of photographs, frames of a video) would answer for it. They are left out with it, as if
each of them were their mean: that is one outer product too.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dualprompt.methods.statistics import precise, shrunk

SHARPNESSES = (0.005, 0.01, 0.02, 0.03, 0.05, 0.07, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0)
"""What squared distances may be multiplied by: with few images a covariance is too sure of itself."""
UNJUDGED = SHARPNESSES.index(0.02)  # where no image can be left out


@dataclass(frozen=True)
class Discriminator:
    """A way to make a classifier of the same sums."""

    name: str
    factor: float = 1.0  # times the shrinkage that the samples call for; infinite: nearest class mean
    scaled: bool = False  # whether it shrinks towards the features' own variances, rather than one for all
    parts: int | None = (
        2  # of a feature that it looks at: class token, last patches, patches of other layers; None: all
    )


CHOICES = (
    Discriminator("lda", parts=None),
    Discriminator("lda, own variances", scaled=True, parts=None),
    Discriminator("lda, own variances, shrunk twice", scaled=True, parts=None, factor=2.0),
    Discriminator("lda, own variances, shrunk 4 times", scaled=True, parts=None, factor=4.0),
    Discriminator("lda, last layer"),
    Discriminator("lda, last layer, own variances", scaled=True),
    Discriminator("lda, last layer, shrunk more", factor=3.0),
    Discriminator("lda, class token", parts=1),
    Discriminator("nearest mean", factor=float("inf")),
)
"""The first is the rule; another one takes its place where images left out speak for it."""
MARGIN = 2.0
"""By how much another one's summed log loss must be smaller: where all answers are right, the rule stays."""


@dataclass(frozen=True)
class Whitening:
    """A covariance as the map after which it is the identity."""

    root: Tensor  # (dim, rank): R with R Rᵀ the inverse covariance
    share: float  # of one outer product of the scatter in the covariance


def whiten(choice: Discriminator, scatter: Tensor, freedom: int, means: Tensor, part_dim: int) -> Whitening:
    """Return the whitening of a choice, in float64.

    Args:
        choice: how the covariance is made.
        scatter: within classes, (dim, dim).
        freedom: samples less classes; 0: no class has two samples, and all directions count alike.
        means: of the classes, (classes, dim).
        part_dim: how many numbers each part of a feature has.
    """
    dim = len(scatter)
    width = dim if choice.parts is None else min(dim, choice.parts * part_dim)
    if freedom < 1 or not bool(scatter.any()):
        spread = float(means[:, :width].var(dim=0, correction=0).mean()) or 1.0
        return Whitening(torch.eye(dim, width, dtype=scatter.dtype, device=scatter.device) / spread**0.5, 0.0)
    part = scatter[:width, :width]
    variances = part.diagonal() / freedom
    scale = (variances + variances.mean() / 10).rsqrt() if choice.scaled else torch.ones_like(variances)
    part = part * scale * scale[:, None]
    shrinkage = min(1.0, choice.factor * _shrinkage(part, freedom))
    root = scale[:, None] * torch.linalg.inv(torch.linalg.cholesky(shrunk(part, freedom, shrinkage))).T
    return Whitening(F.pad(root, (0, 0, 0, dim - width)), (1 - shrinkage) / freedom)


def _shrinkage(scatter: Tensor, count: int) -> float:
    """Return the share of the identity that `count` samples call for: see `shrunk`."""
    trace, square = scatter.trace() / count, scatter.square().sum() / count**2
    spread = (count + 1) * (square - trace**2 / len(scatter))
    return float(((square + trace**2) / spread.clamp_min(1e-30)).clamp(max=1))


def copies_of(features: Tensor, alike: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the mean of each image and its copies, (images, dim), and how many they are, (images,).

    `alike` are numbers that images share with their copies; None: there are none.
    """
    if alike is None:
        return features, torch.ones_like(features[:, 0])
    numbers, place, sizes = alike.unique(return_inverse=True, return_counts=True)
    sums = features.new_zeros(len(numbers), features.shape[1]).index_add(0, place, features)
    sizes = sizes.to(features)
    return (sums / sizes[:, None])[place], sizes[place]


def distances(
    features: Tensor, labels: Tensor, means: Tensor, counts: Tensor, whitening: Whitening, alike: Tensor | None = None
) -> Tensor:
    """Return squared distances to all class means, (images, classes), each image left out of means and covariance.

    Args:
        features: (images, dim); every image's class must have another sample, which is no copy of it.
        labels: (images,) the class of each among the means.
        means: (classes, dim), made with these images.
        counts: (classes,) samples behind each mean.
        whitening: of the covariance that was made with these images.
        alike: (images,) numbers that images of a class share with their copies, which are left out together.
    """
    points, centres = features @ whitening.root, means @ whitening.root
    middles, sizes = copies_of(points, alike)
    off = middles - centres[labels]  # of the image and its copies, from the class's mean
    length = off.square().sum(dim=1)
    without = counts[labels] / (counts[labels] - sizes)  # so many times as far from the mean of the others
    gone = whitening.share * sizes * without
    gain = gone / (1 - gone * length).clamp_min(1e-3)  # Sherman and Morrison
    found = torch.cdist(points, centres).square()
    along = (points * off).sum(dim=1, keepdim=True) - off @ centres.T
    found = found + gain[:, None] * along.square()
    own = without.square() * length * (1 + gain * length)
    rest = points - middles  # nothing, but for copies
    beside = (rest * off).sum(dim=1)
    own = own + rest.square().sum(dim=1) + 2 * without * beside * (1 + gain * length) + gain * beside.square()
    return found.scatter(1, labels[:, None], own[:, None])


def cosines(features: Tensor, labels: Tensor, means: Tensor, counts: Tensor, alike: Tensor | None = None) -> Tensor:
    """Return the cosine of each image with all class means, (images, classes), it and its copies left out of its own.

    `labels`, `means`, `counts` and `alike` are those of `distances`.
    """
    found = F.normalize(features, dim=1) @ F.normalize(means, dim=1).T
    middles, sizes = copies_of(features, alike)
    others = counts[labels, None] * means[labels] - sizes[:, None] * middles
    return found.scatter(1, labels[:, None], F.cosine_similarity(features, others, dim=1)[:, None])


def linear(means: Tensor, whitening: Whitening, sharpness: float) -> tuple[Tensor, Tensor]:
    """Return weights (classes, dim) and biases of −½ · sharpness · squared distance, less what all classes share."""
    centres = means @ whitening.root
    weight, bias = sharpness * centres @ whitening.root.T, -sharpness * centres.square().sum(dim=1) / 2
    return weight - weight.mean(dim=0), bias - bias.mean()


def log_losses(found: Tensor, labels: Tensor) -> Tensor:
    """Return the summed log loss of squared distances under each of `SHARPNESSES`."""
    return torch.stack([F.cross_entropy(-found * sharp / 2, labels, reduction="sum") for sharp in SHARPNESSES])


class Evidence(nn.Module):
    """Which discriminant, and how sharp, has done best on images left out, over all tasks.

    Best is the smallest log loss: it tells more of an image than right or wrong, and so needs fewer images.
    """

    losses: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("losses", torch.zeros(len(CHOICES), len(SHARPNESSES)))  # summed log losses

    def add(self, choice: int, found: Tensor, labels: Tensor) -> None:
        """Take in the distances of images under a choice."""
        self.losses[choice] += log_losses(found, labels).to(self.losses)

    def choice(self, among: int = len(CHOICES)) -> int:
        """Return the best of the first choices; the very first unless another one is better by the margin."""
        losses = precise(self.losses[:among]).amin(dim=1)
        best = int(losses.argmin())
        return best if float(losses[best]) < float(losses[0]) - MARGIN else 0

    def sharpness(self, choice: int) -> float:
        """Return what its squared distances are to be multiplied by."""
        losses = precise(self.losses[choice])
        return SHARPNESSES[int(losses.argmin()) if bool(losses.any()) else UNJUDGED]

    def restore(self, state: dict[str, Tensor]) -> None:
        """Take over what a checkpoint holds."""
        if state["losses"].shape == self.losses.shape:  # else they are of other choices: nothing is known of these
            self.losses.copy_(state["losses"])
