"""Classifier alignment: Gaussians of every class, from which the head of all classes is trained without any image."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dualprompt.methods.base import TaskView, numbered
from dualprompt.methods.statistics import TensorList, packed, precise, unpacked

Kept = Literal["covariance", "variance", "centroids"]
JITTER = 1e-4  # added to variances, as in the code of SLCA and HiDe-Prompt
MOMENTUM, DECAY = 0.9, 5e-4  # of the alignment's steps, as there


class ClassStatistics(nn.Module):
    """What stands for the features of each class: a Gaussian of its own, or one around each of several centroids.

    Covariances are dim (dim + 1) / 2 numbers a class; variances dim, or dim a centroid. A label that comes back has
    statistics of each task that it was in.
    """

    def __init__(self, kept: Kept, centroids: int = 1) -> None:
        super().__init__()
        self.kept, self.centroids = kept, centroids if kept == "centroids" else 1
        self.means = TensorList()  # a task's, (classes, centroids, dim)
        self.spreads = TensorList()  # (classes, centroids, dim) standard deviations, or (classes, triangle) roots
        self.labels: TensorList | None = None  # of the means, where labels come back; else each has one, in order

    def expect_returning(self) -> None:
        """Note the label of each mean from now on, so that one may come back."""
        self.labels = TensorList()

    def add(self, features: Tensor, task: TaskView, generator: torch.Generator) -> None:
        """Take in a task's features."""
        rows = precise(features)
        places = task.places.to(rows.device)
        of_each = [rows[places == place] for place in range(len(task.labels))]
        # As many centroids for every class as the smallest has images.
        count = max(1, min([self.centroids, *map(len, of_each)]))
        means, spreads = zip(*(self._of_class(own, count, generator) for own in of_each), strict=True)
        self.means.append(torch.stack(means))
        self.spreads.append(torch.stack(spreads))
        if self.labels is not None:
            self.labels.append(torch.tensor(task.labels))

    def _of_class(self, rows: Tensor, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        if self.kept == "covariance":
            mean = rows.mean(dim=0)
            off = rows - mean
            covariance = off.T @ off / max(len(rows) - 1, 1)
            covariance.diagonal().add_(JITTER)
            return mean[None], packed(torch.linalg.cholesky(covariance).T)
        centres, members = nearest_centroids(rows, count, generator)
        square = (rows - centres[members]).square()
        ones = F.one_hot(members, count).to(rows)
        # A class that has one Gaussian has an estimate without bias, clusters one that never divides by nought.
        free = ones.sum(dim=0).clamp_min(1) if self.kept == "centroids" else ones.sum(dim=0).sub(1).clamp_min(1)
        return centres, (ones.T @ square / free[:, None] + JITTER).sqrt()

    def sample(
        self, a_class: int, generator: torch.Generator, scales: Sequence[float] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Draw `a_class` features of every class of every task; return them with their labels.

        `scales`, one for each task, are what its means are multiplied by.
        """
        drawn = []
        for number, (means, spreads) in enumerate(zip(self.means, self.spreads, strict=True)):
            classes, count, dim = means.shape
            noise = torch.randn(classes, a_class, dim, generator=generator).to(means.device)
            which = torch.randint(count, (classes, a_class), generator=generator).to(means.device)
            each = torch.arange(classes, device=means.device)[:, None]
            if self.kept == "covariance":
                roots = torch.stack([unpacked(triangle, dim).tril() for triangle in spreads])
                noise = noise @ roots.mT
            else:
                noise = noise * spreads[each, which]
            scale = 1.0 if scales is None else scales[number]
            drawn.append((scale * means[each, which] + noise).flatten(0, 1))
        features = torch.cat(drawn)
        if self.labels is None:
            labels = torch.arange(len(features) // a_class, device=features.device)
        else:
            labels = torch.cat(list(self.labels)).long()
        return features, labels.repeat_interleave(a_class)

    def restore(self, state: dict[str, Tensor]) -> None:
        """Take over the statistics of a checkpoint."""
        self.means.restore(numbered(state, "means"))
        self.spreads.restore(numbered(state, "spreads"))
        if self.labels is not None:
            self.labels.restore(numbered(state, "labels"))


def nearest_centroids(
    rows: Tensor, count: int, generator: torch.Generator, rounds: int = 50, least: float = 1e-9
) -> tuple[Tensor, Tensor]:
    """Return `count` centroids of rows, (count, dim), and the nearest of each row: k-means, from k-means++ seeds.

    `rounds` is the most that are made; `least` stands for a squared distance of 0 where seeds are drawn.
    """
    centres = rows[torch.randint(len(rows), (1,), generator=generator)]
    for _ in range(count - 1):
        far = torch.cdist(rows, centres).amin(dim=1).square().clamp_min(least).cpu()  # never all zero
        centres = torch.cat([centres, rows[torch.multinomial(far, 1, generator=generator)]])
    members = torch.cdist(rows, centres).argmin(dim=1)
    for _ in range(rounds):
        ones = F.one_hot(members, count).to(rows)
        alone = ones.sum(dim=0) == 0  # nobody's nearest: it stays where it is
        centres = torch.where(alone[:, None], centres, ones.T @ rows / ones.sum(dim=0).clamp_min(1)[:, None])
        before, members = members, torch.cdist(rows, centres).argmin(dim=1)
        if torch.equal(before, members):
            break
    return centres, members


def align(
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    statistics: ClassStatistics,
    generator: torch.Generator,
    epochs: int,
    lr: float,
    a_class: int = 256,
    scales: Sequence[float] | None = None,
    logit_norm: float | None = None,
) -> tuple[list[Tensor], list[Tensor]]:
    """Return a linear classifier's rows, trained on with samples of all classes: SGD, a cosine over the epochs.

    Args:
        weights: its rows, a tensor for the classes that came together.
        biases: theirs.
        statistics: what is drawn from, anew in every epoch; a batch is as large as a class's samples.
        generator: draws them.
        epochs: passes over as many samples of every class as `a_class` says.
        lr: learning rate of the first.
        a_class: samples of a class, and in a batch.
        scales: what each task's means are multiplied by.
        logit_norm: τ of `normed`; None: logits as they are.
    """
    sizes = [len(bias) for bias in biases]
    weight, bias = (torch.cat(list(rows)).detach().requires_grad_() for rows in (weights, biases))
    optimiser = torch.optim.SGD([weight, bias], lr=lr, momentum=MOMENTUM, weight_decay=DECAY)
    with torch.enable_grad():
        for epoch in range(epochs):
            optimiser.param_groups[0]["lr"] = lr * (1 + math.cos(math.pi * epoch / epochs)) / 2
            features, labels = statistics.sample(a_class, generator, scales)
            order = torch.randperm(len(features), generator=generator).to(features.device)
            for rows in order.split(a_class):
                logits = F.linear(features[rows], weight, bias)
                if logit_norm is not None:
                    logits = normed(logits, sizes, logit_norm)
                optimiser.zero_grad()
                F.cross_entropy(logits, labels[rows]).backward()
                optimiser.step()
    return list(weight.detach().split(sizes)), list(bias.detach().split(sizes))


def normed(logits: Tensor, sizes: Sequence[int], temperature: float) -> Tensor:
    """Return logits by τ times the mean length of their parts, each of the classes that came together (SLCA)."""
    lengths = [part.norm(dim=1, keepdim=True) + 1e-7 for part in logits.split(list(sizes), dim=1)]
    return logits / torch.cat(lengths, dim=1).mean(dim=1, keepdim=True) / temperature
