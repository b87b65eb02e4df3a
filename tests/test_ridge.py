"""Ridge regression from sums over all tasks: what it solves, how λ is chosen, and RanPAC, which is little more."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from blobs import DIM, blobs, known, ridge_solution, task_of, taught, whole
from dualprompt.errors import DualPromptError
from dualprompt.methods.base import TaskView
from dualprompt.methods.experts import SHARPNESS
from dualprompt.methods.ranpac import RanPAC, RanPACConfig
from dualprompt.methods.ridge import (
    HALF_POWERS,
    STRENGTHS,
    Moments,
    Ridge,
    choose_strength,
    choose_strength_by_samples,
    fit_by_sums,
)
from dualprompt.methods.ridge_head import RidgeHead, RidgeHeadConfig
from dualprompt.methods.statistics import (
    unpacked,
)
from helpers import of_labels, seeded, task_view, tiny_vit


def learn_ranpac(order: list[int], **options: Any) -> RanPAC:
    """RanPAC after the tasks in `order`; all have three classes, of unequal size."""
    method = RanPAC(RanPACConfig(**{"projection": 50, **options}), tiny_vit())
    for index, data in enumerate(order):
        features, labels = blobs(data, [30, 20 + data, 11])
        view = task_view(index, 3, features, labels=labels + 3 * index)
        method.begin_task(view)
        method.end_task(view)
    return method


@pytest.mark.parametrize("strength", [1.0, 1000.0])
def test_ranpac_is_ridge_regression_over_all_data_seen(strength: float) -> None:
    method = learn_ranpac([0, 1, 2], strength=strength)
    features, labels = zip(*(blobs(task, [30, 20 + task, 11]) for task in range(3)), strict=True)
    stacked = torch.cat(features).double().numpy()
    projection = torch.randn(DIM, 50, generator=seeded(100)).double().numpy()  # the first task's generator
    inputs = np.maximum(stacked @ projection, 0)
    solution = ridge_solution(inputs, np.concatenate([y + 3 * t for t, y in enumerate(labels)]), 9, strength)
    logits = method.predict(known(torch.cat(features))).logits
    np.testing.assert_allclose(logits.numpy() / SHARPNESS, inputs @ solution, atol=2e-3)
    assert np.std(inputs @ solution) > 0.05


def test_ranpac_keeps_no_more_for_more_tasks_but_a_column_a_class() -> None:
    def sizes(tasks: int) -> dict[str, int]:
        return {name: value.numel() for name, value in learn_ranpac(list(range(tasks))).state().items()}

    one, two = sizes(1), sizes(2)
    assert two.items() >= one.items()
    assert {name: two[name] for name in two.keys() - one.keys()} == {
        "projected.ridge.sums.1": 50 * 3,
        "head.weight.1": 3 * 50,
        "head.bias.1": 3,
    }


def test_sums_that_hold_both_triangles_are_read() -> None:
    one, other = learn_ranpac([0, 1], strength=10.0), learn_ranpac([0, 1], strength=10.0)
    name, state = "projected.ridge.gram", {key: value.clone() for key, value in one.state().items()}
    other.state()[name].zero_()
    other.load_state(state | {name: unpacked(state[name], 50)})
    assert torch.equal(other.state()[name], state[name])
    assert float(state[name].abs().max()) > 0


def test_ranpac_does_not_depend_on_the_order_of_tasks() -> None:
    one, other = learn_ranpac([0, 1], strength=10.0), learn_ranpac([1, 0], strength=10.0)
    tests = blobs(0, [5, 5, 5])[0]
    logits, swapped = one.predict(known(tests)).logits, other.predict(known(tests)).logits
    torch.testing.assert_close(logits, swapped.roll(3, dims=1), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("count", [0, 1, 2, 7])
def test_the_error_from_sums_is_the_mean_over_the_samples(count: int) -> None:
    features, labels = torch.randn(count, 4, generator=seeded(1)), torch.arange(count) % 3
    weight = torch.randn(4, 3, generator=seeded(2)).double()
    residual = features.double() @ weight - torch.nn.functional.one_hot(labels, 3)
    expected = float(residual.square().sum()) / count if count else 0.0
    assert Moments.of(features, labels, 3, lambda rows: rows).error(weight) == pytest.approx(expected)


def test_strength_is_the_one_that_errs_least_on_what_was_held_out() -> None:
    features, labels = blobs(0, [20, 30, 25], spread=8.0)
    fit, held_out = (Moments.of(features[part], labels[part], 3, lambda x: x) for part in (slice(35), slice(35, None)))
    errors = []
    for strength in STRENGTHS:
        solution = ridge_solution(features[:35].double().numpy(), labels[:35].numpy(), 3, strength)
        residual = features[35:].double().numpy() @ solution - np.eye(3)[labels[35:].numpy()]
        errors.append((residual**2).sum() / 40)
        assert held_out.error(torch.from_numpy(solution)) == pytest.approx(errors[-1], rel=1e-6)
    chosen = choose_strength(fit, held_out)
    assert chosen == STRENGTHS[int(np.argmin(errors))]
    assert 1e-8 < chosen < 1e8, "the best should lie inside"


def test_fewer_samples_than_dimensions_choose_by_samples_what_they_would_choose_anywhere() -> None:
    features, labels = blobs(0, [9, 8, 8], spread=8.0)
    held, fitted = torch.randperm(25, generator=seeded(7)).split([5, 20])
    fit, held_out = (Moments.of(features[rows], labels[rows], 3, lambda x: x) for rows in (fitted, held))
    chosen = choose_strength(fit, held_out)
    assert 1e-2 < chosen < 1e8
    own = torch.nn.functional.one_hot(labels, 3).double()
    rows = features.double()
    assert choose_strength_by_samples(rows[fitted], own[fitted], rows[held], own[held]) == chosen
    by_choice = Ridge(DIM, lambda x: x).add(features, task_of(0, labels, 3), None, seeded(7))
    by_hand = Ridge(DIM, lambda x: x).add(features, task_of(0, labels, 3), chosen, seeded(0))
    torch.testing.assert_close(by_choice[0], by_hand[0], rtol=1e-4, atol=1e-6)


def generalised_error(features: np.ndarray, targets: np.ndarray, strength: float) -> float:
    """By the samples: the residuals of the hat matrix, each over the mean share that a sample has in its own answer."""
    hat = features @ np.linalg.solve(features.T @ features + strength * np.eye(features.shape[1]), features.T)
    residuals = targets - hat @ targets
    return float(len(features) * (residuals**2).sum() / (len(features) - np.trace(hat)) ** 2)


@pytest.mark.parametrize("sizes", [[9, 8, 8], [2, 2, 1], [60, 70, 80]])
@pytest.mark.parametrize("spread", [0.5, 8.0])
def test_sums_alone_choose_the_strength_of_least_generalised_error(sizes: list[int], spread: float) -> None:
    features, labels = blobs(0, sizes, spread=spread)
    rows, targets = features.double(), torch.nn.functional.one_hot(labels, 3).double()
    gram, sums = rows.T @ rows, rows.T @ targets
    mean = float(gram.diagonal().mean())
    candidates = [mean * 10 ** (step / 2) for step in HALF_POWERS]
    errors = [generalised_error(rows.numpy(), targets.numpy(), strength) for strength in candidates]
    fit = fit_by_sums(gram, sums, len(rows), len(rows))
    at = int(np.argmin(np.abs(np.array(candidates) - fit.strength)))
    neighbours = errors[max(at - 1, 0) : at + 2]
    assert errors[at] == min(neighbours)
    assert errors[at] <= 1.02 * min(errors)
    assert fit.error == pytest.approx(errors[at], rel=1e-6)


def test_sums_tell_about_what_samples_left_out_would_be_answered() -> None:
    features, labels = blobs(0, [40, 40, 40], spread=6.0)
    rows, targets = features.double().numpy(), np.eye(3)[labels.numpy()]
    fit = fit_by_sums(torch.from_numpy(rows.T @ rows), torch.from_numpy(rows.T @ targets), 120, 120)
    answers = np.stack(
        [
            row @ ridge_solution(np.delete(rows, i, 0), np.delete(labels.numpy(), i), 3, fit.strength)
            for i, row in enumerate(rows)
        ]
    )
    assert fit.true == pytest.approx(float((answers * targets).sum(axis=1).mean()), abs=0.02)
    assert fit.other == pytest.approx(float((answers * (1 - targets)).sum(axis=1).mean()) / 2, abs=0.02)
    assert fit.error == pytest.approx(float(((answers - targets) ** 2).sum(axis=1).mean()), rel=0.05)


@pytest.mark.parametrize("images", [[1] * 20, [2] + [1] * 19, [2] * 20], ids=["one", "one of two", "two"])
def test_classes_of_one_image_are_told_apart_where_sums_choose_the_strength(images: list[int]) -> None:
    """Such a class is gone when its image is left out; the sums alone would have answers of 0."""
    drawn = np.random.default_rng(3)
    means, labels = drawn.normal(size=(20, 200)), torch.arange(20).repeat_interleave(torch.tensor(images))
    rows = torch.from_numpy(1 + means[labels] + drawn.normal(size=(len(labels), 200))).float()
    unseen = torch.from_numpy(1 + means + drawn.normal(size=(20, 20, 200))).float()

    def outputs(share: float | None) -> torch.Tensor:
        ridge = Ridge(200, lambda x: x, counted=True)
        [rows_of] = ridge.add(rows, task_of(0, labels, 20), None, seeded(0), share)
        return (10.0 if ridge.fit is None else ridge.fit.sharpness(10.0)) * unseen @ rows_of.T

    def accuracy(found: torch.Tensor) -> float:
        return float((found.argmax(dim=2) == torch.arange(20)).float().mean())

    assert accuracy(outputs(None)) > accuracy(outputs(0.003)) - 0.03
    assert outputs(None).softmax(dim=2).amax(dim=2).mean() > 0.3, "of guesses it is 0.05"


@pytest.mark.parametrize("seed", range(5))
def test_what_rounded_sums_cannot_tell_is_no_error_below_zero(seed: int) -> None:
    features = 1 + 0.01 * torch.randn(6, 60, generator=seeded(seed))  # one class, far fewer samples than features
    gram, sums = features.T @ features, features.sum(dim=0)[:, None]  # in float32, as a method keeps them
    fit = fit_by_sums(gram.double(), sums.double(), 6, 6, torch.finfo(torch.float32).eps)
    assert 0 < fit.error < 0.1


@pytest.mark.parametrize("spread", [2.0, 3.0, 6.0, 100.0])
def test_outputs_that_a_strong_ridge_shrank_are_sharpened_no_further_than_noise_allows(spread: float) -> None:
    """Held to samples that were never seen: sharpened they tell more of the labels than as they come out."""
    drawn = np.random.default_rng(5)
    means, labels = 3 * drawn.normal(size=(20, DIM)), np.arange(120) % 20
    rows, unseen = (means[labels] + spread * drawn.normal(size=(120, DIM)) for _ in range(2))
    fit = fit_by_sums(torch.from_numpy(rows.T @ rows), torch.from_numpy(rows.T @ np.eye(20)[labels]), 120, 120)
    outputs = torch.from_numpy(unseen @ ridge_solution(rows, labels, 20, fit.strength))

    def loss(factor: float) -> float:
        return float(torch.nn.functional.cross_entropy(factor * outputs, torch.from_numpy(labels)))

    assert loss(fit.sharpness(10.0)) < min(map(loss, (3.0, 10.0, 30.0, 100.0))) + 0.05
    if spread < 100:
        assert loss(fit.sharpness(10.0)) < loss(10.0) - 0.1


def test_a_strength_chosen_by_sums_does_not_depend_on_how_samples_came() -> None:
    features, labels = blobs(0, [20, 20, 20], spread=4.0)
    whole, parts = (Ridge(DIM, lambda x: x, counted=True) for _ in range(2))
    together, apart = whole.add(features, task_of(0, labels, 3), None, seeded(0)), []
    for index, label in enumerate((0, 1, 2)):
        own = labels == label
        view = of_labels(task_view(index, 1, features[own], labels=labels[own]), label, 1)
        apart = parts.add(features[own], view, None, seeded(index))
    torch.testing.assert_close(torch.cat(apart), torch.cat(together), rtol=1e-2, atol=1e-5)
    assert [part.tolist() for part in parts.counts] == [[20.0]] * 3


def test_more_images_let_ranpacs_sums_choose_again() -> None:
    features, labels = blobs(0, [40, 40, 40], spread=6.0)
    part = torch.cat([torch.arange(0, 5), torch.arange(40, 45), torch.arange(80, 85)])
    rest = torch.tensor(sorted(set(range(120)) - set(part.tolist())))

    def view(rows: Tensor, new: bool) -> TaskView:
        found = task_view(0, 3, features[rows], labels=labels[rows])
        return found if new else replace(found, new_labels=())

    heads = []
    for first, later in ((torch.cat([part, rest]), None), (part, rest)):
        method = RanPAC(RanPACConfig(projection=40, strength_by="sums"), tiny_vit())
        method.begin_task(view(first, new=True))
        method.end_task(view(first, new=True))
        if later is not None:
            method.more(view(later, new=False))
        heads.append(torch.cat(list(method.head.weight)))
    torch.testing.assert_close(heads[1], heads[0], rtol=1e-2, atol=1e-4)


def test_ridge_survives_fewer_samples_than_dimensions() -> None:
    ridge = Ridge(DIM, lambda x: x)
    for task in range(2):
        features, labels = blobs(task, [1, 2])
        (*_, weight) = ridge.add(features, task_of(task, labels), None, seeded(task))
        assert weight.isfinite().all()
        assert weight.abs().max() < 100


def test_ridge_is_the_solution_over_the_features_of_all_tasks() -> None:
    tasks = [blobs(0, [30, 20]), blobs(1, [11]), blobs(2, [5, 40])]
    method = taught(RidgeHead(RidgeHeadConfig(strength=7.0), tiny_vit()), tasks)
    features, labels = whole(tasks)
    inputs = np.concatenate([features, np.ones((len(features), 1))], axis=1)
    expected = inputs @ ridge_solution(inputs, labels, 5, 7.0)
    found = method.predict(known(torch.from_numpy(features).float())).logits
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-4)
    assert np.std(expected) > 0.05


@pytest.mark.parametrize("strength", [None, 1.0])
def test_features_that_are_not_finite_are_refused(strength: float | None) -> None:
    ridge = Ridge(6, lambda x: x)
    features = torch.randn(10, 6, generator=seeded(1))
    features[3, 2] = float("nan")
    with pytest.raises(DualPromptError, match=r"not finite; lower train\.lr"):
        ridge.add(features, task_of(0, torch.arange(10) % 2), strength, seeded(2))


@pytest.mark.parametrize("images", [1, 2, 3, 4])
def test_few_images_do_not_choose_a_strength_that_fits_them_alone(images: int) -> None:
    ridge = Ridge(6, lambda x: x)
    features = torch.randn(images, 6, generator=seeded(3))
    [weight] = ridge.add(features, task_of(0, torch.arange(images) % 2), None, seeded(4))
    assert torch.isfinite(weight).all()
    assert float(weight.abs().max()) < 10
