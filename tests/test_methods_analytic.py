"""FeCAM and AnaCP, each against a plain computation over all features at once."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from blobs import DIM, blobs, in_portions, known, taught, whole
from dualprompt.methods.anacp import AnaCP, AnaCPConfig, spread
from dualprompt.methods.base import METHODS, StreamKind, method_config
from dualprompt.methods.experts import SHARPNESS
from dualprompt.methods.fecam import FeCAM, FeCAMConfig
from helpers import tiny_vit

TASKS = [blobs(0, [30, 12, 20]), blobs(1, [9]), blobs(2, [40, 25])]


def directions(rows: np.ndarray) -> np.ndarray:
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


# FeCAM


def distances_by_hand(features: np.ndarray, labels: np.ndarray, asked: np.ndarray, shrinkage: float) -> np.ndarray:
    found = []
    for label in range(int(labels.max()) + 1):
        own = directions(features[labels == label])
        covariance = np.cov(own.T)
        covariance += shrinkage * np.diag(covariance).mean() * np.eye(DIM)
        deviation = np.sqrt(np.diag(covariance))
        inverse = np.linalg.pinv(covariance / np.outer(deviation, deviation))
        off = directions(asked) - own.mean(axis=0)
        found.append(np.einsum("nd,de,ne->n", off, inverse, off))
    return np.stack(found, axis=1)


@pytest.mark.parametrize("shrinkage", [0.1, 1.0, 10.0])
def test_fecam_measures_the_distance_to_each_class_by_its_own_correlations(shrinkage: float) -> None:
    method = taught(FeCAM(FeCAMConfig(shrinkage=shrinkage), tiny_vit()), TASKS)
    asked = torch.cat([blobs(task, [4, 4], spread=2.0)[0] for task in range(4)])
    expected = distances_by_hand(*whole(TASKS), asked.double().numpy(), shrinkage)
    found = -method.predict(known(asked)).logits.numpy() / SHARPNESS
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4)
    assert (found > 0).all()
    assert len(set(expected.argmin(axis=1))) > 2
    euclidean = distances_by_hand(*whole(TASKS), asked.double().numpy(), 1e9)
    assert not np.allclose(expected, euclidean, rtol=0.01)


def test_fecam_of_a_class_with_one_image_is_the_distance_to_it() -> None:
    method = taught(FeCAM(FeCAMConfig(), tiny_vit()), [blobs(0, [1, 5])])
    (features, labels), asked = blobs(0, [1, 5]), blobs(1, [3])[0]
    off = directions(asked.numpy()) - directions(features[labels == 0].numpy())
    found = -method.predict(known(asked)).logits.numpy()[:, 0] / SHARPNESS
    np.testing.assert_allclose(found, (off**2).sum(axis=1), rtol=1e-3, atol=1e-5)


def test_fecam_keeps_nothing_but_its_rows_unless_labels_come_back() -> None:
    method = taught(FeCAM(FeCAMConfig(), tiny_vit()), TASKS)
    assert {name.split(".")[0] for name in method.state()} == {"head"}
    assert not method.takes_more


# AnaCP


def gelu(values: np.ndarray) -> np.ndarray:
    return values * (1 + np.vectorize(math.erf)(values / math.sqrt(2))) / 2


def targets_by_hand(means: np.ndarray, covariance: np.ndarray) -> np.ndarray:
    values, vectors = np.linalg.eigh(covariance)
    whitening = vectors @ np.diag(1 / np.sqrt(values + 1e-8)) @ vectors.T
    left, sizes, right = np.linalg.svd((means - means.mean(axis=0)) @ whitening, full_matrices=False)
    rank = len(means) - 1  # about their centre
    apart = left[:, :rank] @ np.diag(sizes[:rank] + 1) @ right[:rank]
    return directions(apart @ whitening + means.mean(axis=0))


def test_anacp_is_two_regressions_over_all_that_was_seen() -> None:
    """Many samples, so that which are drawn hardly matters; its own draws are taken over."""
    config = AnaCPConfig(projection=48, heads=2, strength=3.0, samples=4000)
    method = taught(AnaCP(config, tiny_vit()), TASKS)
    state = {name: value.double().numpy() for name, value in method.state().items()}
    features, labels = whole(TASKS)
    rows, classes = directions(features), int(labels.max()) + 1
    means = np.stack([rows[labels == c].mean(axis=0) for c in range(classes)])
    off = rows - means[labels]
    covariance = off.T @ off / len(rows) + 1e-4 * np.eye(DIM)
    targets = targets_by_hand(means, covariance)

    def solved(inputs: np.ndarray, outputs: np.ndarray) -> np.ndarray:
        return np.linalg.solve(inputs.T @ inputs + 3.0 * np.eye(inputs.shape[1]), inputs.T @ outputs)

    maps = [solved(gelu(rows @ inner), targets[labels]) for inner in state["inner"]]
    np.testing.assert_allclose(state["maps"], np.stack(maps), rtol=1e-3, atol=1e-4)

    def expanded(points: np.ndarray) -> np.ndarray:
        each = [directions(gelu(points @ inner) @ to) for inner, to in zip(state["inner"], maps, strict=True)]
        return gelu(np.mean(each, axis=0) @ state["outer"])

    rng = np.random.default_rng(0)
    names = np.repeat(np.arange(classes), 4000)
    drawn = means[names] + rng.multivariate_normal(np.zeros(DIM), covariance, len(names))
    head = solved(expanded(drawn), np.eye(classes)[names])
    asked = torch.cat([own for own, _ in TASKS])
    expected = expanded(directions(asked.double().numpy())) @ head
    found = method.predict(known(asked)).logits.numpy() / SHARPNESS
    np.testing.assert_allclose(found, expected, atol=0.05)
    assert expected.std() > 0.1
    assert (found.argmax(axis=1) == labels).mean() > 0.95


def test_anacp_draws_the_samples_of_one_class_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """All at once they would be classes × samples × dim numbers, of which most are never needed together."""
    drawn, randn = [], torch.randn

    def noted(*sizes: Any, **options: Any) -> torch.Tensor:
        found = randn(*sizes, **options)
        drawn.append(found.shape)
        return found

    monkeypatch.setattr(torch, "randn", noted)
    taught(AnaCP(AnaCPConfig(projection=20, heads=2, samples=50), tiny_vit()), TASKS)
    assert drawn.count((50, DIM)) == 3 + 4 + 6  # of every class so far, after every task
    assert all((50 * classes, DIM) not in drawn for classes in (3, 4, 6))


def test_targets_are_further_apart_than_means_in_what_tells_classes_apart() -> None:
    generator = torch.Generator().manual_seed(3)
    means = 1 + 0.1 * torch.randn(5, DIM, generator=generator, dtype=torch.float64)
    covariance = torch.eye(DIM, dtype=torch.float64)
    covariance[0, 0] = 100.0  # within classes the first number varies most, so it tells little
    targets = spread(means, covariance)
    np.testing.assert_allclose(targets.norm(dim=1).numpy(), 1.0)
    shares = [each.var(dim=0)[0] / each.var(dim=0).sum() for each in (targets, means)]
    assert shares[0] < 0.1 * shares[1]
    cosines = [torch.corrcoef(each).mean() for each in (targets, means)]
    assert cosines[0] < cosines[1]
    alone = spread(means[:1], covariance)
    np.testing.assert_allclose(alone.numpy(), directions(means[:1].numpy()))


@pytest.mark.parametrize(("name", "options"), [("fecam", {}), ("anacp", {"projection": 20, "strength": 2})])
def test_a_label_that_comes_back_adds_to_what_is_kept(name: str, options: dict[str, int]) -> None:
    features, labels = blobs(3, [9, 8, 7, 6, 5])
    first = torch.isin(labels, torch.tensor([0, 1, 2])) & (torch.arange(35) % 2 == 0)
    parts = [(features[first], labels[first]), (features[~first], labels[~first])]
    method, once = (METHODS[name](method_config({"name": name, **options}), tiny_vit()) for _ in range(2))
    method.accept(StreamKind(returns=True))
    for view in in_portions(parts, 5):
        method.begin_task(view)
        method.end_task(view)
    [view] = in_portions([(features, labels)], 5)
    once.begin_task(view)
    once.end_task(view)
    if name == "anacp":  # whose head is solved from samples, drawn task by task
        torch.testing.assert_close(method.state()["maps"], once.state()["maps"], rtol=1e-3, atol=1e-4)
    else:
        expected = once.predict(known(features)).logits
        torch.testing.assert_close(method.predict(known(features)).logits, expected, rtol=1e-3, atol=1e-4)
    again = METHODS[name](method_config({"name": name, **options}), tiny_vit())
    again.accept(StreamKind(returns=True))
    again.load_state(method.state())
    assert torch.equal(again.predict(known(features)).logits, method.predict(known(features)).logits)
