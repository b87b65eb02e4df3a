"""What is kept of features instead of images, and what is made of it in closed form, against plain computations."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.covariance import OAS
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from torch import Tensor

from blobs import DIM, blobs, in_portions, known, ridge_solution, task_of, taught, whole
from dualprompt.errors import DualPromptError
from dualprompt.methods.base import METHODS, Batch, Method, StreamKind, method_config
from dualprompt.methods.dualprompt import DualPrompt, DualPromptConfig
from dualprompt.methods.klda import KLDA, KLDAConfig, median_distance
from dualprompt.methods.lda import LDA, LDAConfig
from dualprompt.methods.ridge_head import RidgeHead, RidgeHeadConfig
from dualprompt.methods.simple_cil import SimpleCIL, SimpleCILConfig
from dualprompt.methods.statistics import (
    ClassGaussians,
    Discriminant,
    GaussianMatching,
    KeyMatching,
    class_means,
    packed,
    realign,
    shrunk,
    spherical_means,
    unpacked,
    within_class,
)
from helpers import batch_of, random_dualprompt, random_images, seeded, task_view, tiny_vit


def test_means_of_classes_by_hand() -> None:
    features, labels = torch.tensor([[1.0, 2.0], [3.0, 6.0], [5.0, -1.0]]), torch.tensor([0, 0, 2])
    assert class_means(features, labels, 3).tolist() == [[2.0, 4.0], [0.0, 0.0], [5.0, -1.0]]


def test_simple_cil_compares_with_class_means() -> None:
    method = SimpleCIL(SimpleCILConfig(), tiny_vit())
    means: list[np.ndarray] = []
    for index, sizes in enumerate([[5, 9, 2], [7, 1, 4]]):
        features, labels = blobs(index, sizes)
        view = task_view(index, 3, features, labels=labels + 3 * index)
        assert not method.phases(view)
        method.begin_task(view)
        method.end_task(view)
        means += [features.numpy()[labels.numpy() == c].mean(axis=0) for c in range(3)]
    tests = torch.cat([blobs(index, [4, 4, 4])[0] for index in range(2)])
    logits = method.predict(known(tests)).logits.numpy()
    for row, feature in enumerate(tests.numpy()):
        for c, mean in enumerate(means):
            cosine = feature @ mean / (np.linalg.norm(feature) * np.linalg.norm(mean))
            assert logits[row, c] == pytest.approx(cosine, abs=1e-5)


def centred_scores(scores: np.ndarray) -> np.ndarray:
    """Scores without what all classes of an image have in common, which no posterior sees."""
    return scores - scores.mean(axis=1, keepdims=True)


@pytest.mark.parametrize("solver", ["lsqr", "eigen"])
@pytest.mark.parametrize("shrinkage", [0.01, 0.3, 1.0])
def test_lda_is_that_of_scikit_learn(solver: Literal["lsqr", "eigen"], shrinkage: float) -> None:
    tasks = [blobs(0, [40, 40, 40]), blobs(1, [40]), blobs(2, [40, 40])]  # equal counts: equal priors there too
    method = taught(LDA(LDAConfig(shrinkage=shrinkage), tiny_vit()), tasks)
    reference = LinearDiscriminantAnalysis(solver=solver, shrinkage=shrinkage).fit(*whole(tasks))
    tests = torch.cat([blobs(task, [5, 5, 5], spread=3.0)[0] for task in range(4)])
    expected = centred_scores(reference.decision_function(tests.double().numpy()))
    found = method.predict(known(tests)).logits.numpy()
    np.testing.assert_allclose(centred_scores(found), expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())
    assert len(set(expected.argmax(axis=1))) == 6


def test_lda_gives_each_class_the_same_chance_however_many_images_it_has() -> None:
    tasks = [blobs(0, [100, 4]), blobs(1, [9, 60])]
    features, labels = whole(tasks)
    method = taught(LDA(LDAConfig(), tiny_vit()), tasks)
    means = np.stack([features[labels == c].mean(axis=0) for c in range(4)])
    covariance = OAS(assume_centered=True).fit(features - means[labels]).covariance_
    tests = blobs(5, [6, 6], spread=3.0)[0]
    off = tests.double().numpy()[:, None] - means
    expected = centred_scores(-np.einsum("ncd,de,nce->nc", off, np.linalg.inv(covariance), off) / 2)
    found = centred_scores(method.predict(known(tests)).logits.numpy())
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())


def make_closed(name: str) -> Method:
    """A method in closed form; `strength` is given, as what it is chosen on is drawn task by task."""
    backbone = tiny_vit()
    return {
        "lda": lambda: LDA(LDAConfig(), backbone),
        "klda": lambda: KLDA(KLDAConfig(projection=60), backbone),
        "ridge": lambda: RidgeHead(RidgeHeadConfig(strength=3.0), backbone),
    }[name]()


@pytest.mark.parametrize("name", ["lda", "klda", "ridge"])
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_the_order_of_tasks_and_images_does_not_matter(name: str, data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.lists(st.integers(1, 12), min_size=1, max_size=3), min_size=2, max_size=4))
    tasks = [blobs(number, own) for number, own in enumerate(sizes)]
    # KLDA's map is drawn with the first task in sight, so that one keeps its place.
    stays = 1 if name == "klda" else 0
    moved = data.draw(st.permutations(range(stays, len(tasks))))
    order = [*range(stays), *moved]
    shuffled = []
    for number in order:
        features, labels = tasks[number]
        rows = data.draw(st.permutations(range(len(labels)))) if number or not stays else list(range(len(labels)))
        shuffled.append((features[rows], labels[rows]))
    one, other = (taught(make_closed(name), each) for each in (tasks, shuffled))
    tests = torch.cat([features for features, _ in tasks])
    firsts = np.cumsum([0, *map(len, sizes)])
    columns = [column for number in order for column in range(firsts[number], firsts[number + 1])]
    expected, found = (method.predict(known(tests)).logits.numpy() for method in (one, other))
    assert np.isfinite(expected).all()
    np.testing.assert_allclose(found, expected[:, columns], rtol=1e-3, atol=2e-4 * max(1, np.abs(expected).max()))


def test_fourier_features_approximate_the_kernel_of_the_median_distance() -> None:
    tasks = [blobs(0, [30, 30])]
    points = tasks[0][0].double().numpy()
    distances = np.linalg.norm(points[:, None] - points, axis=2)
    median = np.median(distances[np.triu_indices(60, 1)])
    assert median_distance(tasks[0][0], seeded(1)) == pytest.approx(median, rel=0.01)
    for bandwidth in (0.5, 1.0, 2.0):
        method = KLDA(KLDAConfig(projection=20000, bandwidth=bandwidth), tiny_vit())
        method.discriminant = Discriminant(1)  # 20,000² numbers would say nothing of the map
        method.draw_map(task_view(0, 2, tasks[0][0]))
        mapped = method.expand(tasks[0][0]).double().numpy()
        kernel = np.exp(-(distances**2) / (2 * (bandwidth * median) ** 2))
        np.testing.assert_allclose(mapped @ mapped.T, kernel, atol=0.04)  # 5 standard errors: 1/√20,000 each
        assert kernel.min() < 0.9


def test_klda_is_lda_of_the_mapped_features() -> None:
    tasks = [blobs(0, [50, 50]), blobs(1, [50]), blobs(2, [50, 50])]
    method = taught(KLDA(KLDAConfig(projection=40, shrinkage=0.1), tiny_vit()), tasks)
    state = {name: value.double().numpy() for name, value in method.state().items()}

    def mapped(points: np.ndarray) -> np.ndarray:
        return np.sqrt(2 / 40) * np.cos(points @ state["frequencies"] + state["phase"])

    features, labels = whole(tasks)
    reference = LinearDiscriminantAnalysis(solver="lsqr", shrinkage=0.1).fit(mapped(features), labels)
    expected = centred_scores(reference.decision_function(mapped(features)))
    found = method.predict(known(torch.from_numpy(features).float())).logits.numpy()
    np.testing.assert_allclose(centred_scores(found), expected, rtol=1e-3, atol=1e-3 * np.abs(expected).max())


def test_median_distance_of_equal_points_is_no_zero() -> None:
    assert median_distance(torch.ones(5, DIM), seeded(0)) == 1.0
    assert median_distance(torch.ones(1, DIM), seeded(0)) == 1.0


def test_a_covariance_is_kept_as_its_triangle() -> None:
    matrix = torch.randn(7, 7, generator=seeded(0))
    matrix = matrix + matrix.T
    assert packed(matrix).shape == (28,)
    assert torch.equal(unpacked(packed(matrix), 7), matrix)
    method = taught(LDA(LDAConfig(), tiny_vit()), [blobs(0, [9, 9]), blobs(1, [9])])
    kept = method.parameters_report()["kept"]
    assert kept == {"count": DIM * (DIM + 1) // 2 + 3 * DIM + 1, "mb": (4 * (DIM * (DIM + 1) // 2 + 3 * DIM) + 8) / 1e6}


def test_scatter_is_the_same_in_parts_as_at_once() -> None:
    features, labels = blobs(0, [2000, 2900])
    means, scatter = within_class(features, labels, 2, lambda rows: rows * 2)
    plain = 2 * features.double().numpy()
    expected = np.stack([plain[labels.numpy() == c].mean(axis=0) for c in range(2)])
    np.testing.assert_allclose(means.numpy(), expected, rtol=1e-10)
    centred = plain - expected[labels.numpy()]
    np.testing.assert_allclose(scatter.numpy(), centred.T @ centred, rtol=1e-7, atol=1e-6)


def test_shrinkage_is_the_oracle_approximating_one() -> None:
    for count in (3, 10, 100, 5000):
        features = torch.randn(count, 8, generator=seeded(count), dtype=torch.float64) * torch.arange(1, 9)
        reference = OAS(assume_centered=True).fit(features.numpy()).covariance_
        np.testing.assert_allclose(shrunk(features.T @ features, count).numpy(), reference, rtol=1e-6)
        assert np.linalg.eigvalsh(reference).min() > 0


def test_gaussian_matching_is_the_mahalanobis_distance_to_the_nearest_class() -> None:
    matching = GaussianMatching(DIM)
    centred, means, tasks = [], [], []
    for task, sizes in enumerate([[30, 5, 12], [8, 40], [20, 20, 20, 3]]):
        features, labels = blobs(task, sizes)
        matching.add(features, labels, len(sizes), seeded(0))
        for c in range(len(sizes)):
            own = features[labels == c].double().numpy()
            means.append(own.mean(axis=0))
            tasks.append(task)
            centred.append(own - own.mean(axis=0))
    inverse = np.linalg.inv(OAS(assume_centered=True).fit(np.concatenate(centred)).covariance_)
    tests = torch.cat([blobs(task, [9, 9, 9, 9], spread=3.0)[0] for task in range(5)])
    expected, similar = [], []
    for query in tests.double().numpy():
        distances = [(query - mean) @ inverse @ (query - mean) for mean in means]
        expected.append(tasks[int(np.argmin(distances))])
        cosines = [query @ mean / np.linalg.norm(query) / np.linalg.norm(mean) for mean in means]
        similar.append(max(c for c, task in zip(cosines, tasks, strict=True) if task == expected[-1]))
    matched, similarity = matching.match(tests)
    assert matched.tolist() == expected
    np.testing.assert_allclose(similarity.numpy(), similar, atol=1e-5)
    assert set(expected) == {0, 1, 2}


def test_a_model_that_kept_the_whole_covariance_is_read() -> None:
    matching, other = GaussianMatching(DIM), GaussianMatching(DIM)
    matching.add(*blobs(0, [9, 9]), 2, seeded(0))
    state = matching.state_dict()
    other.restore(state | {"scatter": unpacked(state["scatter"], DIM)})
    assert torch.equal(other.scatter, matching.scatter)
    assert torch.equal(other.weight, matching.weight)


def test_several_keys_find_planted_clusters() -> None:
    """Two clusters on opposite sides: their one mean stands for neither, and would match another task's images."""
    directions = F.normalize(torch.randn(6, DIM, generator=seeded(1)), dim=1)
    directions[1] = -directions[0] + 0.3 * directions[4]

    def around(rows: list[int], count: int, seed: int) -> Tensor:
        noise = torch.randn(len(rows) * count, DIM, generator=seeded(seed))
        return directions[rows].repeat_interleave(count, dim=0) * 4 + 0.1 * noise

    found = spherical_means(around([0, 1, 2], 40, seed=2), 3, seeded(5))
    assert (found @ directions[:3].T).amax(dim=0).min() > 0.98
    assert torch.equal(found, spherical_means(around([0, 1, 2], 40, seed=2), 3, seeded(5)))

    matching = KeyMatching(DIM, keys_per_task=2)
    for rows in ([0, 1], [2, 3], [4, 5]):
        matching.add(around(rows, 30, seed=3), torch.empty(0), 0, seeded(6))
    matched, similarity = matching.match(around([0, 1, 2, 3, 4, 5], 10, seed=4))
    assert matched.tolist() == [0] * 20 + [1] * 20 + [2] * 20
    assert similarity.min() > 0.9
    assert [key.shape for key in matching.keys] == [(2, DIM)] * 3


@settings(max_examples=30, deadline=None)
@given(points=st.integers(1, 12), distinct=st.integers(1, 4), count=st.integers(1, 6), seed=st.integers(0, 99))
def test_k_means_gives_finite_directions_for_any_points(points: int, distinct: int, count: int, seed: int) -> None:
    base = torch.randn(distinct, DIM, generator=seeded(seed))
    centres = spherical_means(base[torch.arange(points) % distinct], count, seeded(seed))
    assert centres.shape == (count, DIM)
    torch.testing.assert_close(centres.norm(dim=1), torch.ones(count))


def test_gaussians_are_sampled_as_they_were_seen() -> None:
    gaussians = ClassGaussians()
    seen = [blobs(task, [2000, 3000]) for task in range(2)]
    for task, (features, labels) in enumerate(seen):
        gaussians.add(features, task_of(task, labels))
    drawn, classes = gaussians.sample(20000, seeded(1))
    assert classes.unique_consecutive().tolist() == [0, 1, 2, 3]
    for task, (features, labels) in enumerate(seen):
        for c in range(2):
            own, sample = features[labels == c], drawn[classes == 2 * task + c]
            assert (own.mean(dim=0) - sample.mean(dim=0)).abs().max() < 0.05
            assert (own.T.cov() - sample.T.cov()).abs().max() < 0.15
            assert own.T.cov().abs().max() > 0.5


def test_realignment_balances_a_head_that_prefers_the_newest_classes() -> None:
    gaussians = ClassGaussians()
    data = [blobs(task, [100, 100]) for task in range(2)]
    for task, (features, labels) in enumerate(data):
        gaussians.add(features, task_of(task, labels))
    weights = [torch.zeros(2, DIM), torch.zeros(2, DIM)]
    biases = [torch.zeros(2), torch.full((2,), 5.0)]
    tests, targets = torch.cat([x for x, _ in data]), torch.cat([y + 2 * t for t, (_, y) in enumerate(data)])

    def accuracy(weights: list[Tensor], biases: list[Tensor]) -> float:
        logits = F.linear(tests, torch.cat(weights), torch.cat(biases))
        return (logits.argmax(dim=1) == targets).float().mean().item()

    assert accuracy(weights, biases) < 0.5
    aligned = realign(weights, biases, gaussians, seeded(3), steps=200, lr=0.01)
    assert [len(rows) for rows in aligned[0]] == [2, 2]
    assert accuracy(*aligned) > 0.95
    again = realign(weights, biases, gaussians, seeded(3), steps=200, lr=0.01)
    assert all(torch.equal(one, other) for one, other in zip(aligned[0], again[0], strict=True))


def fresh(**options: Any) -> DualPrompt:
    small = {"g_layers": (1,), "e_layers": (2, 3), "g_length": 2, "e_length": 3}
    return DualPrompt(DualPromptConfig(**{**small, **options}), tiny_vit())


def settle(method: DualPrompt, tasks: int = 2) -> list[tuple[Tensor, Tensor]]:
    """Begin and end tasks with random prompts; return the features that images had with their own E-Prompt."""
    found = []
    for index in range(tasks):
        images, labels = random_images(60, seed=30 + index), torch.arange(60) % 3
        images = images + 2 * random_images(3, seed=40 + index)[labels]
        with torch.no_grad():
            view = task_view(index, 3, method.backbone(images), images, labels + 3 * index)
        method.begin_task(view)
        with torch.no_grad():
            for prompt in (method.bank.e_prompt[-1], *([method.bank.g_prompt] if index == 0 else [])):
                prompt.copy_(torch.randn(prompt.shape, generator=seeded(60 + index)))
            found.append((method.backbone(images, method.bank.training_prompts()), labels))
        method.end_task(view)
    return found


def test_ridge_head_is_the_solution_over_the_prompted_features_of_all_tasks() -> None:
    method = fresh(head="ridge", ridge_strength=5.0)
    features, labels = zip(*settle(method), strict=True)
    inputs = F.pad(torch.cat(features), (0, 1), value=1.0).double().numpy()
    solution = ridge_solution(inputs, np.concatenate([y + 3 * t for t, y in enumerate(labels)]), 6, 5.0)
    np.testing.assert_allclose(torch.cat(list(method.head.weight)).detach().numpy(), solution[:-1].T, atol=1e-4)
    np.testing.assert_allclose(torch.cat(list(method.head.bias)).detach().numpy(), solution[-1], atol=1e-4)
    assert np.abs(solution[:-1]).max() > 0.02
    assert not any(name.startswith(("gaussians", "matching")) for name in method.state())


def test_gaussian_head_knows_the_classes_of_all_tasks() -> None:
    method = fresh(head="gaussian")
    found = settle(method)
    for task, (features, labels) in enumerate(found):
        for c in range(3):
            mean = list(method.gaussians.means)[task][c]
            torch.testing.assert_close(mean, features[labels == c].mean(dim=0), rtol=1e-4, atol=1e-4)
        right = method.head.predict(features).argmax(dim=1) == labels + 3 * task
        assert right.float().mean() > 0.7, "a head that was never trained knows the classes by their Gaussians"
    assert method.trainable().keys() >= {"head.weight.1"}
    assert "head.weight.0" not in method.trainable()


@pytest.mark.parametrize("matching", ["keys", "gaussian"])
def test_matching_replaces_the_key_and_leaves_the_oracle(matching: str) -> None:
    method = fresh(matching=matching, keys_per_task=3)
    settle(method, tasks=3)
    images = torch.cat([2 * random_images(3, seed=40 + t) + random_images(3, seed=80 + t) for t in range(3)])
    tasks = torch.arange(3).repeat_interleave(3)
    queries = method.backbone(images)
    prediction = method.predict(batch_of(images))
    assert method.matching is not None
    assert prediction.selected is not None
    assert torch.equal(prediction.selected, method.matching.match(queries)[0])
    assert (prediction.selected == tasks).float().mean() > 0.6
    assert not torch.equal(prediction.selected, method.bank.similarities(queries).argmax(dim=1))
    oracle = method.predict(batch_of(images, task=tasks), "oracle")
    assert oracle.selected is not None
    assert torch.equal(oracle.selected, tasks)
    expected = method.predict(batch_of(images, task=prediction.selected), "oracle").logits
    torch.testing.assert_close(prediction.logits, expected)
    voted = method.predict(batch_of(images[:3]), "batch_vote").selected
    assert voted is not None
    assert len(voted.unique()) == 1


def test_options_at_their_defaults_leave_no_trace() -> None:
    method = random_dualprompt(tasks=2)
    assert {name.split(".")[0] for name in method.state()} == {"bank", "head"}
    default = method_config({"name": "dualprompt"}).model_dump()
    assert (default["head"], default["matching"]) == ("linear", "key")
    for bad in ({"head": "lda"}, {"matching": "mean"}, {"ridge_strength": 0}, {"keys_per_task": 0}):
        with pytest.raises(DualPromptError, match=next(iter(bad))):
            method_config({"name": "dualprompt", **bad})


@pytest.mark.parametrize(
    ("name", "options"),
    [("simple-cil", {}), ("ridge", {"strength": 0.5}), ("lda", {}), ("ranpac", {"strength": 0.5, "projection": 20})],
)
def test_a_label_that_comes_back_adds_to_its_statistics(name: str, options: dict[str, Any]) -> None:
    features, labels = blobs(3, [9, 8, 7, 6, 5])
    portions = [torch.isin(labels, torch.tensor([0, 1, 2])) & (torch.arange(35) % 2 == 0)]
    portions.append(torch.isin(labels, torch.tensor([1, 3, 4])) & (torch.arange(35) % 4 > 1) & ~portions[0])
    portions.append(~portions[0] & ~portions[1])
    parts = [(features[rows], labels[rows]) for rows in portions]
    assert [len(part[0].unique(dim=0)) for part in parts] == [int(rows.sum()) for rows in portions]
    views = in_portions(parts, 5)
    assert [view.labels for view in views] == [(0, 1, 2), (1, 3, 4), (0, 1, 2, 3, 4)]
    assert [view.new_labels for view in views] == [(0, 1, 2), (3, 4), ()]
    method, whole = (METHODS[name](method_config({"name": name, **options}), tiny_vit()) for _ in range(2))
    method.accept(StreamKind(returns=True))
    for view in views:
        method.begin_task(view)
        method.end_task(view)
    [once] = in_portions([(features, labels)], 5)
    whole.begin_task(once)
    whole.end_task(once)
    frozen = Batch(lambda: torch.empty(0), labels, frozen=features)
    torch.testing.assert_close(method.predict(frozen).logits, whole.predict(frozen).logits, rtol=1e-3, atol=1e-4)
    again = METHODS[name](method_config({"name": name, **options}), tiny_vit())
    again.accept(StreamKind(returns=True))
    again.load_state(method.state())
    assert torch.equal(again.predict(frozen).logits, method.predict(frozen).logits)
    assert again.state().keys() == method.state().keys()


def test_gaussians_of_a_label_that_comes_back_are_samples_of_that_label() -> None:
    gaussians = ClassGaussians()
    gaussians.expect_returning()
    parts = [blobs(0, [50, 50]), blobs(1, [0, 50, 50])]
    for view, (features, _) in zip(in_portions(parts, 3), parts, strict=True):
        gaussians.add(features, view)
    drawn, labels = gaussians.sample(2000, seeded(1))
    assert labels.tolist() == [label for label in (0, 1, 1, 2) for _ in range(2000)]
    for task, label, rows in ((0, 1, slice(2000, 4000)), (1, 1, slice(4000, 6000)), (1, 2, slice(6000, 8000))):
        features, own = parts[task]
        assert (features[own == label].mean(dim=0) - drawn[rows].mean(dim=0)).abs().max() < 0.2
