"""Classifier alignment: what stands for the features of a class, and the head that is trained on samples of it."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dualprompt.methods.alignment import DECAY, MOMENTUM, ClassStatistics, align, nearest_centroids, normed
from helpers import numbers, of_labels, seeded, task_view


def clouds(classes: int = 3, each: int = 40, dim: int = 4) -> tuple[Tensor, Tensor]:
    labels = torch.arange(classes * each) % classes
    mixing = torch.randn(classes, dim, dim, generator=seeded(1))
    noise = torch.randn(len(labels), dim, generator=seeded(2))
    means = 4 * torch.randn(classes, dim, generator=seeded(3))
    return means[labels] + torch.einsum("nd,nde->ne", noise, mixing[labels]), labels


def test_samples_have_the_means_and_covariances_of_their_classes() -> None:
    features, labels = clouds()
    view = task_view(0, 3, features, labels=labels)
    for kept in ("covariance", "variance"):
        statistics = ClassStatistics(kept)
        statistics.add(features, view, seeded(5))
        drawn, of_class = statistics.sample(60_000, seeded(6), scales=[0.9])
        for label in range(3):
            own, mine = numbers(features[labels == label]), numbers(drawn[of_class == label])
            np.testing.assert_allclose(mine.mean(axis=0), 0.9 * own.mean(axis=0), atol=0.05)
            covariance = np.cov(own.T) + 1e-4 * np.eye(4)
            if kept == "variance":
                covariance = np.diag(np.diag(covariance))
            np.testing.assert_allclose(np.cov(mine.T), covariance, atol=0.03 * covariance.max())
        assert (statistics.spreads[0].numel(), statistics.means[0].numel()) == (30 if kept == "covariance" else 12, 12)


def test_centroids_are_the_means_of_what_is_nearest_to_them() -> None:
    rows = torch.cat([torch.randn(20, 4, generator=seeded(i)) + 8 * i for i in range(3)]).double()
    centres, members = nearest_centroids(rows, 3, seeded(1))
    assert sorted(members.bincount().tolist()) == [20, 20, 20]
    for which in range(3):
        torch.testing.assert_close(centres[which], rows[members == which].mean(dim=0))
    statistics = ClassStatistics("centroids", 3)
    statistics.add(rows.float(), task_view(0, 1, rows, labels=torch.zeros(60, dtype=torch.int64)), seeded(1))
    drawn, _ = statistics.sample(9000, seeded(2))
    shares = torch.cdist(drawn.double(), centres).argmin(dim=1).bincount() / 9000
    torch.testing.assert_close(shares, torch.full((3,), 1 / 3), atol=0.02, rtol=0)
    spread = rows[members == 0].var(dim=0, correction=0) + 1e-4
    torch.testing.assert_close(statistics.spreads[0][0, 0].double().square(), spread, rtol=1e-4, atol=1e-5)
    few = ClassStatistics("centroids", 10)
    few.add(rows.float(), of_labels(task_view(0, 2, rows, labels=(torch.arange(60) > 2).long()), 0, 2), seeded(1))
    assert few.means[0].shape == (2, 3, 4), "no more centroids than the smallest class has images"


def test_logits_are_normed_as_by_the_code_of_slca() -> None:
    logits = torch.randn(3, 5, generator=seeded(1)).double()
    for row, found in zip(numbers(logits), numbers(normed(logits, [2, 3], 0.1)), strict=True):
        lengths = [math.sqrt((row[:2] ** 2).sum()) + 1e-7, math.sqrt((row[2:] ** 2).sum()) + 1e-7]
        np.testing.assert_allclose(found, row / np.mean(lengths) / 0.1)


@pytest.mark.parametrize("logit_norm", [None, 0.1])
def test_the_alignment_is_sgd_on_samples(logit_norm: float | None) -> None:
    features, labels = clouds()
    statistics = ClassStatistics("covariance")
    statistics.add(features, task_view(0, 3, features, labels=labels), seeded(5))
    weights, biases = [torch.randn(2, 4), torch.randn(1, 4)], [torch.zeros(2), torch.zeros(1)]
    found = align(weights, biases, statistics, seeded(7), 3, 0.05, 20, logit_norm=logit_norm)
    generator, speed = seeded(7), [torch.zeros(3, 4), torch.zeros(3)]
    values = [torch.cat(weights), torch.cat(biases)]
    for epoch in range(3):
        rate = 0.05 * (1 + math.cos(math.pi * epoch / 3)) / 2
        drawn, of_class = statistics.sample(20, generator)
        order = torch.randperm(60, generator=generator)
        for start in range(0, 60, 20):
            rows = order[start : start + 20]
            given = [value.clone().requires_grad_() for value in values]
            logits = drawn[rows] @ given[0].T + given[1]
            if logit_norm is not None:
                logits = normed(logits, [2, 1], logit_norm)
            loss = F.cross_entropy(logits, of_class[rows])
            for place, gradient in enumerate(torch.autograd.grad(loss, given)):
                speed[place] = MOMENTUM * speed[place] + gradient + DECAY * values[place]
                values[place] = values[place] - rate * speed[place]
    torch.testing.assert_close(torch.cat(found[0]), values[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(torch.cat(found[1]), values[1], rtol=1e-4, atol=1e-5)
    assert [len(rows) for rows in found[1]] == [2, 1]
