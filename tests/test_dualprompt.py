"""The method: one image's prediction depends on that image alone, and learning a task leaves the earlier ones be."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lightning_fabric import Fabric
from safetensors.torch import load_file, save_file
from torch import Tensor

from dualprompt.config import RunConfig
from dualprompt.data.stream import Subset
from dualprompt.data.views import View
from dualprompt.errors import DualPromptError
from dualprompt.methods.base import METHODS, Batch, Phase, TaskView, method_config
from dualprompt.methods.dualprompt import DualPrompt, DualPromptConfig
from dualprompt.methods.frozen_head import FrozenHead, FrozenHeadConfig
from dualprompt.prompts.bank import match_loss
from dualprompt.training.evaluate import Score, evaluate
from dualprompt.training.feed import Feed
from dualprompt.training.loader import Loader
from dualprompt.training.optimise import make_optimiser
from helpers import (
    SIDE,
    batch_of,
    noise_pictures,
    of_labels,
    ragged,
    random_dualprompt,
    random_images,
    seeded,
    spread_keys,
    subset_of,
    task_view,
    tiny_vit,
)

HOW: dict[str, dict[str, Any]] = {
    "projected": {"prompting": "pre-t", "prefix_at": "projected"},
    "input": {"prompting": "pre-t", "prefix_at": "input"},
    "pro-t": {"prompting": "pro-t"},
}
LAYERS: dict[str, dict[str, Any]] = {
    "apart": {"g_layers": (1,), "e_layers": (2, 3)},
    "together": {"g_layers": (2, 4), "e_layers": (2, 3, 4)},
}


@pytest.fixture(scope="module")
def fabric() -> Fabric:
    return Fabric(accelerator="cpu", devices=1)


def close(one: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def snapshot(method: DualPrompt) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in method.state().items()}


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize("selection", ["query", "oracle"])
def test_an_image_gets_its_logits_whatever_else_is_in_the_batch(selection: Any, layers: str, how: str) -> None:
    method = random_dualprompt(tasks=4, **LAYERS[layers], **HOW[how])
    images = random_images(9)
    tasks = spread_keys(method, images)
    assert set(tasks.tolist()) == {0, 1, 2, 3}, "the batch should mix tasks"
    if selection == "oracle":
        tasks = torch.tensor([3, 1, 0, 2, 2, 0, 3, 1, 1])

    def predict(rows: Tensor) -> tuple[Tensor, Tensor]:
        prediction = method.predict(batch_of(images[rows], task=tasks[rows]), selection)
        assert prediction.selected is not None
        return prediction.logits, prediction.selected

    together, selected = predict(torch.arange(9))
    assert torch.equal(selected, tasks)
    for row in range(9):
        alone, own = predict(torch.tensor([row]))
        close(alone[0], together[row])
        assert own.item() == selected[row]
    for seed in range(3):
        order = torch.randperm(9, generator=seeded(seed))
        shuffled, picked = predict(order)
        close(shuffled, together[order])
        assert torch.equal(picked, selected[order])
    # The prompts matter: with another task's E-Prompt every image gets other logits.
    wrong = method.predict(batch_of(images, task=(tasks + 1) % 4), "oracle").logits
    assert ((wrong - together).abs().amax(dim=1) > 1e-3).all()


def test_each_image_receives_the_prompt_it_selected_with_keys_before_values() -> None:
    method = random_dualprompt(tasks=4)
    selected = torch.tensor([2, 0, 3, 3, 1])
    prompts = method.bank.prompts_for(selected)
    for number, layer in enumerate(method.config.e_layers):
        prefix = prompts[layer].prefix
        assert prefix is not None
        for row, task in enumerate(selected.tolist()):
            assert torch.equal(prefix[row], method.bank.e_prompt[task][number])


def test_reshaping_instead_of_permuting_would_be_noticed() -> None:
    """The field's mistake: (layers, 2, batch, …) reshaped to (layers, batch, 2, …) mixes K, V and images."""
    method = random_dualprompt(tasks=4)
    images = random_images(8)
    selected = spread_keys(method, images)
    right = method.predict(batch_of(images)).logits
    chosen = torch.stack([method.bank.e_prompt[task] for task in selected.tolist()])  # (batch, layers, 2, rows, dim)
    layers, batch = chosen.shape[1], len(chosen)
    reshaped = chosen.permute(1, 2, 0, 3, 4).reshape(layers, batch, 2, *chosen.shape[3:]).transpose(0, 1)
    mistaken = method.head.predict(method.backbone(images, method.bank._attach(reshaped)))
    permuted = method.head.predict(method.backbone(images, method.bank._attach(chosen)))
    close(permuted, right)
    assert ((mistaken - right).abs().amax(dim=1) > 1e-3).sum() >= batch // 2


class Tiny:
    """Three tasks of two classes: noise around a picture a class, evaluated through the real feed and evaluator."""

    def __init__(self, fabric: Fabric, method: DualPrompt, images_a_task: int = 37) -> None:
        self.fabric, self.method = fabric, method
        rng = np.random.default_rng(8)
        self.labels = [2 * task + np.arange(images_a_task) % 2 for task in range(3)]
        means = rng.integers(0, 256, (6, SIDE, SIDE, 3))
        self.pixels = [
            np.clip(means[labels] + rng.normal(0, 90, (len(labels), SIDE, SIDE, 3)), 0, 255).astype(np.uint8)
            for labels in self.labels
        ]

    def subsets(self, order: np.ndarray | None = None) -> list[Subset]:
        order = np.arange(len(self.labels[0])) if order is None else order
        return [subset_of(p[order], labels[order]) for p, labels in zip(self.pixels, self.labels, strict=True)]

    def feed(self, batch_size: int = 128, interpolation: str = "bilinear", **train: Any) -> Feed:
        values = {"benchmark": {"dataset": "x"}, "evaluate": {"batch_size": batch_size}, "train": train}
        view = View(SIDE, (0.5,) * 3, (0.25,) * 3, interpolation, "resize", "none")
        return Feed(RunConfig.model_validate(values), view, self.method.backbone, self.fabric)

    def learn(self, epochs: int = 3, lr: float = 0.05) -> None:
        for index, subset in enumerate(self.subsets()):
            learn(self.method, self.feed(batch_size=16, lr=lr), subset, index, epochs)


def learn(method: DualPrompt, feed: Feed, subset: Subset, index: int, epochs: int, classes: int = 2) -> TaskView:
    """Train one task as the loop does."""
    view = task_view(index, classes, feed.features(subset))
    method.begin_task(view)
    optimiser = make_optimiser(method, feed.config.train)
    for epoch in range(epochs):
        loader = Loader(feed, subset, index, Phase())
        for local in loader.epoch(epoch):
            loss = method.loss(loader.batch(local.spec))
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
    method.end_task(view)
    return view


def fresh(**options: Any) -> DualPrompt:
    return random_dualprompt(tasks=0, **options)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("selection", ["query", "oracle"])
def test_accuracy_is_the_same_at_any_batch_size_and_in_any_order(fabric: Fabric, selection: Any, how: str) -> None:
    tiny = Tiny(fabric, fresh(**HOW[how]))
    tiny.learn()
    method = tiny.method
    scores = [evaluate(method, tiny.feed(size), tiny.subsets(), selection) for size in (1, 7, 128)]
    assert scores[0] == scores[1] == scores[2]
    assert [score.images for score in scores[0]] == [37] * 3

    def labels(size: int) -> Tensor:
        feed, found = tiny.feed(size), []
        for task, subset in enumerate(tiny.subsets()):
            for spec in feed.evaluation(subset):
                batch = feed.batch(subset.images, replace(spec, task=torch.full_like(spec.labels, task)))
                found.append(method.predict(batch, selection).logits.argmax(dim=1))
        return torch.cat(found)

    assert torch.equal(labels(1), labels(128))
    assert torch.equal(labels(7), labels(128))
    shuffled = tiny.subsets(np.random.default_rng(0).permutation(37))
    assert evaluate(method, tiny.feed(7), shuffled, selection) == scores[0]
    assert sum(score.correct for score in scores[0]) > 111 / 6 * 2, "a method that has learned nothing proves nothing"
    if selection == "query":
        assert any(score.matched not in (0, 37) for score in scores[0]), "matching should be neither all nor none"
    else:
        assert all(score.matching == 100 for score in scores[0])


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_images_of_different_sizes_are_judged_alike_at_any_batch_size(fabric: Fabric, interpolation: str) -> None:
    method = random_dualprompt(tasks=3)
    spread_keys(method, random_images(3))
    shapes = [(5, 7), (16, 16), (40, 9), (12, 30), (8, 8), (23, 17), (16, 5), (9, 40), (31, 31)]
    images = ragged(noise_pictures(shapes))
    labels = torch.arange(len(shapes))
    subset = Subset(images, torch.arange(len(shapes)), labels)
    tiny = Tiny(fabric, method)

    def logits(size: int) -> Tensor:
        feed = tiny.feed(size, interpolation)
        batches = [feed.batch(subset.images, spec) for spec in feed.evaluation(subset)]
        return torch.cat([method.predict(batch).logits for batch in batches])

    together = logits(128)
    for size in (1, 2, 7):
        close(logits(size), together)


def test_batch_vote_depends_on_the_batch(fabric: Fabric) -> None:
    """A batch of one task votes the task out: what the option's label warns of."""
    tiny = Tiny(fabric, fresh())
    tiny.learn()

    def matched(size: int) -> list[int | None]:
        return [score.matched for score in evaluate(tiny.method, tiny.feed(size), tiny.subsets(), "batch_vote")]

    by_image = [score.matched for score in evaluate(tiny.method, tiny.feed(), tiny.subsets(), "query")]
    assert matched(1) == by_image, "alone, an image is its own majority"
    assert all(count in (0, 37) for count in matched(128)), "a batch of one task is all right or all wrong"
    assert sum(matched(128)) > sum(by_image)  # type: ignore[arg-type]


def test_batch_vote_gives_an_image_other_logits_in_other_company() -> None:
    method = random_dualprompt(tasks=3)
    images = random_images(20)
    selected = spread_keys(method, images)
    one, another = ((selected == task).nonzero()[:3, 0] for task in (0, 1))
    alone = method.predict(batch_of(images[one[:1]]), "batch_vote").logits[0]
    outvoted = method.predict(batch_of(images[torch.cat([one[:1], another[:2]])]), "batch_vote")
    assert outvoted.selected is not None
    assert outvoted.selected.tolist() == [1, 1, 1]
    assert (outvoted.logits[0] - alone).abs().max() > 1e-3


@pytest.mark.parametrize("keys", ["learned", "mean"])
@pytest.mark.parametrize("logits", ["masked", "unmasked"])
def test_learning_leaves_earlier_tasks_bit_identical(fabric: Fabric, logits: str, keys: str) -> None:
    method = fresh(training_logits=logits, keys=keys)
    tiny = Tiny(fabric, method)
    feed = tiny.feed(lr=0.05)
    backbone = {name: value.clone() for name, value in method.backbone.state_dict().items()}
    earlier: dict[str, Tensor] = {}
    for index, subset in enumerate(tiny.subsets()):
        learn(method, feed, subset, index, epochs=3)
        evaluate(method, feed, tiny.subsets()[: index + 1])
        trained = {"bank.g_prompt", f"bank.e_prompt.{index}"} | (
            {f"bank.task_key.{index}"} if keys == "learned" else set()
        )
        heads = range(index + 1) if logits == "unmasked" else [index]
        assert method.trainable().keys() == trained | {f"head.{part}.{i}" for part in ("weight", "bias") for i in heads}
        now = method.state()
        for name, value in earlier.items():
            unchanged = torch.equal(now[name], value)
            if name == "bank.g_prompt" or (name.startswith("head.") and logits == "unmasked"):
                assert not unchanged, f"{name} is shared and should have trained on"
            else:
                assert unchanged, name
        earlier = snapshot(method)
    assert len(earlier) == 1 + 3 * 4
    for name, value in method.backbone.state_dict().items():
        assert torch.equal(value, backbone[name]), name


def test_the_next_e_prompt_starts_from_the_last_and_its_key_does_not() -> None:
    for e_init in ("previous", "fresh"):
        method = random_dualprompt(tasks=2, e_init=e_init)
        last = method.bank.e_prompt[1].detach().clone()
        method.begin_task(task_view(2))
        e_prompt, key = method.bank.e_prompt[2].detach(), method.bank.task_key[2].detach()
        assert torch.equal(e_prompt, last) == (e_init == "previous")
        assert key.min() >= 0
        assert key.max() < 0.01
        with torch.no_grad():
            e_prompt += 1
        assert torch.equal(method.bank.e_prompt[1], last), "it starts as a copy, not as the same tensor"


@pytest.mark.parametrize(("init", "low", "high"), [("uniform", 0.0, 0.01), ("wide", -1.0, 1.0)])
def test_initial_values(init: str, low: float, high: float) -> None:
    method = random_dualprompt(tasks=0, init=init, g_length=50, e_length=50)
    method.begin_task(task_view(0))
    bank = method.bank
    for values in (bank.g_prompt, bank.e_prompt[0], bank.task_key[0]):
        assert low <= values.min()
        assert values.max() < high
        assert values.max() - values.min() > 0.7 * (high - low)
        assert abs(values.mean() - (low + high) / 2) < 0.2 * (high - low)
    assert not torch.equal(bank.g_prompt[0], bank.e_prompt[0][0])
    assert not method.head.weight[0].any()
    assert not method.head.bias[0].any()
    again = random_dualprompt(tasks=0, init=init, g_length=50, e_length=50)
    again.begin_task(task_view(0))
    assert all(torch.equal(value, again.state()[name]) for name, value in method.state().items())


def test_only_learned_keys_and_seen_classes_are_considered() -> None:
    images = random_images(40)
    for tasks in (1, 2, 5):
        method = random_dualprompt(tasks=tasks, classes=3)
        spread_keys(method, images)
        prediction = method.predict(batch_of(images))
        assert prediction.logits.shape == (40, 3 * tasks)
        assert prediction.selected is not None
        assert set(prediction.selected.tolist()) == set(range(tasks))
        assert torch.isfinite(prediction.logits).all()


def test_masked_loss_is_the_cross_entropy_with_infinity_outside_the_task() -> None:
    features, labels = torch.randn(5, 32, generator=seeded(4)), torch.tensor([3, 5, 4, 4, 3])
    method = random_dualprompt(tasks=2, classes=3)
    logits = method.head.all(features)
    infinite = logits.masked_fill(torch.arange(6) < 3, -torch.inf)
    close(method.classification_loss(features, labels), F.cross_entropy(infinite, labels))
    unmasked = random_dualprompt(tasks=2, classes=3, training_logits="unmasked")
    close(unmasked.classification_loss(features, labels), F.cross_entropy(logits, labels))
    assert abs(method.classification_loss(features, labels) - unmasked.classification_loss(features, labels)) > 0.1


@pytest.mark.parametrize("logits", ["masked", "unmasked"])
def test_which_rows_of_the_head_train(logits: str) -> None:
    method = random_dualprompt(tasks=3, training_logits=logits)
    images, labels = random_images(4), torch.tensor([6, 7, 8, 6])
    method.loss(batch_of(images, labels)).backward()
    trained = [weight.grad is not None and bool(weight.grad.any()) for weight in method.head.weight]
    assert trained == [logits == "unmasked", logits == "unmasked", True]


def test_the_head_rows_of_unequal_tasks_stand_in_order() -> None:
    method = fresh()
    sizes, first = (2, 5, 1, 3), 0
    for index, classes in enumerate(sizes):
        method.begin_task(of_labels(task_view(index, classes), first, classes))
        with torch.no_grad():
            method.head.bias[-1].copy_(torch.arange(first, first + classes))
        first += classes
    logits = method.predict(batch_of(random_images(2))).logits
    assert torch.equal(logits, torch.arange(11.0).expand(2, 11))
    features, labels = torch.randn(3, 32, generator=seeded(5)), torch.tensor([8, 10, 9])
    close(
        method.classification_loss(features, labels), F.cross_entropy(torch.arange(8.0, 11.0).expand(3, 3), labels - 8)
    )


def test_the_mean_key_is_the_closed_form_and_nothing_matches_better() -> None:
    queries = torch.randn(50, 32, generator=seeded(6)) * torch.rand(50, 1, generator=seeded(7)) * 9 + 0.5
    method = random_dualprompt(tasks=1, keys="mean")
    assert "bank.task_key.0" not in method.trainable()
    method.end_task(task_view(0, queries=queries))
    key = method.bank.task_key[0].detach()
    by_hand = np.mean([q / np.linalg.norm(q) for q in queries.numpy().astype(np.float64)], axis=0)
    np.testing.assert_allclose(key.numpy(), by_hand, rtol=1e-5)
    best = match_loss(queries, key)
    close(match_loss(queries, 3 * key), best)
    for seed in range(20):
        nudge = torch.randn(32, generator=seeded(seed)) * 0.1
        assert match_loss(queries, key + nudge) > best
    leaf = key.clone().requires_grad_()
    match_loss(queries, leaf).backward()
    assert leaf.grad is not None
    assert leaf.grad.norm() < 1e-5


def test_a_mean_key_replaces_what_a_prediction_had_remembered() -> None:
    method = random_dualprompt(tasks=2, keys="mean")
    images = random_images(6)
    method.predict(batch_of(images))
    with torch.no_grad():
        queries = method.backbone(images)
    method.end_task(task_view(1, queries=queries))
    assert torch.equal(method.bank.keys()[1], method.bank.task_key[1])
    close(method.bank.similarities(queries), F.cosine_similarity(queries[:, None], method.bank.keys()[None], dim=2))


def test_prediction_follows_every_training_step() -> None:
    method = random_dualprompt(tasks=2)
    images, labels = random_images(6), torch.tensor([3, 4, 5, 3, 4, 5])
    optimiser = make_optimiser(method, RunConfig.model_validate({"benchmark": {"dataset": "x"}}).train)
    for _ in range(3):
        seen = method.predict(batch_of(images)).logits
        method.loss(batch_of(images, labels)).backward()
        optimiser.step()
        now = method.predict(batch_of(images)).logits
        copy = random_dualprompt(tasks=0)
        copy.load_state(method.state())
        assert torch.equal(now, copy.predict(batch_of(images)).logits)
        assert not torch.equal(now, seen)


def test_the_key_learns_from_the_match_loss_only() -> None:
    images, labels = random_images(5), torch.tensor([0, 1, 2, 1, 0])
    gradients = []
    for weight in (1.0, 0.25):
        method = random_dualprompt(tasks=1, match_weight=weight)
        method.loss(batch_of(images, labels)).backward()
        key = method.bank.task_key[0]
        own = key.detach().clone().requires_grad_()
        (weight * match_loss(method.backbone(images), own)).backward()
        assert key.grad is not None
        assert own.grad is not None
        close(key.grad, own.grad)
        gradients.append({name: p.grad for name, p in method.trainable().items() if "task_key" not in name})
    for name, gradient in gradients[0].items():
        assert gradient is not None, name
        assert torch.equal(gradient, gradients[1][name]), f"the match loss must not move {name}"


def test_match_weight_zero_leaves_the_key_as_drawn() -> None:
    method = random_dualprompt(tasks=1, match_weight=0)
    images, labels = random_images(3), torch.tensor([0, 1, 2])
    assert "bank.task_key.0" not in method.trainable()
    loss = method.loss(batch_of(images, labels))
    features = method.backbone(images, method.bank.training_prompts())
    close(loss, F.cross_entropy(method.head.current(features), labels))


def test_a_known_query_stands_for_the_image() -> None:
    method = random_dualprompt(tasks=3)
    images = random_images(3)
    spread_keys(method, images)
    other = method.backbone(images.roll(1, dims=0))
    with torch.no_grad():
        same = Batch(lambda: images, torch.zeros(3).long(), query=method.backbone(images))
        swapped = Batch(lambda: images, torch.zeros(3).long(), query=other)
    assert torch.equal(method.predict(same).logits, method.predict(batch_of(images)).logits)
    prediction = method.predict(swapped)
    assert prediction.selected is not None
    assert prediction.selected.tolist() == [2, 0, 1]


@pytest.mark.parametrize("options", [{}, {"g_layers": ()}, {"e_layers": (), "prompting": "pro-t"}, {"keys": "mean"}])
def test_state_survives_a_file(tmp_path: Path, options: dict[str, Any]) -> None:
    method = random_dualprompt(tasks=3, **options)
    images = random_images(7)
    spread_keys(method, images)
    save_file(method.state(), tmp_path / "state.safetensors")
    loaded = random_dualprompt(tasks=1, **options)
    loaded.load_state(load_file(tmp_path / "state.safetensors"))
    before, after = method.predict(batch_of(images)), loaded.predict(batch_of(images))
    assert torch.equal(before.logits, after.logits)
    assert before.selected is not None
    assert after.selected is not None
    assert torch.equal(before.selected, after.selected)
    assert method.trainable().keys() == loaded.trainable().keys()
    assert not any(name.startswith("backbone.") for name in loaded.trainable())
    # It can be trained on from where it stands, and its state is its own.
    labels = torch.tensor([6, 7, 8, 6, 7, 8, 6])
    assert torch.equal(method.loss(batch_of(images, labels)), loaded.loss(batch_of(images, labels)))
    with torch.no_grad():
        loaded.head.weight[0].add_(1)
    assert torch.equal(method.predict(batch_of(images)).logits, before.logits)


def test_names_of_more_than_ten_tasks_are_read_in_order() -> None:
    method = random_dualprompt(tasks=12)
    state = dict(sorted(method.state().items()))  # 10 and 11 before 2, as a file may list them
    loaded = fresh()
    loaded.load_state(state)
    assert torch.equal(loaded.bank.keys(), method.bank.keys())
    images = random_images(3)
    assert torch.equal(loaded.predict(batch_of(images)).logits, method.predict(batch_of(images)).logits)


def test_parameters_report() -> None:
    method = random_dualprompt(tasks=3, classes=5)  # 1 G layer × 2, 2 E layers × 3, dim 32
    report = method.parameters_report()
    prompts = 1 * 2 * 2 * 32 + 3 * 2 * 2 * 3 * 32
    additional, head = prompts + 3 * 32, 3 * 5 * (32 + 1)
    patch, positions, final = 32 * 3 * 64 + 32, 32 + (4 + 1) * 32, 2 * 32
    layer = 2 * 2 * 32 + (32 * 96 + 96) + (32 * 32 + 32) + (32 * 48 + 48) + (48 * 32 + 32)
    backbone = patch + positions + final + 4 * layer
    assert report == {
        "trained": additional + head,
        "mb": (additional + head) * 4 / 1e6,
        "percent_of_backbone": 100 * (additional + head) / backbone,
        "backbone": backbone,
        "additional": {
            "count": additional,
            "mb": additional * 4 / 1e6,
            "percent_of_backbone": 100 * additional / backbone,
        },
        "kept": {"count": 0, "mb": 0.0},
        "paper_formula": 32 * (1 * 2 + 3 * (2 * 3 + 1)),
    }
    split = random_dualprompt(tasks=3, length_counts="split", g_length=4, e_length=6).parameters_report()
    assert split["additional"]["count"] == split["paper_formula"], "`split` is what the paper counts"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"g_layers": (0,)}, "method.g_layers has layer 0; the backbone's layers are 1 to 4"),
        ({"e_layers": (2, 5)}, "method.e_layers has layer 5; the backbone's layers are 1 to 4"),
        ({"e_layers": (2, 3, 2)}, r"method.e_layers names a layer twice: \[2, 3, 2\]"),
        ({"e_length": 3, "length_counts": "split", "g_length": 2}, "prompt length 3 is odd"),
    ],
)
def test_impossible_prompts_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(DualPromptError, match=message):
        fresh(**options)


def test_a_selection_that_a_method_does_not_have_is_refused() -> None:
    head = FrozenHead(FrozenHeadConfig(), tiny_vit())
    head.begin_task(task_view(0))
    with pytest.raises(DualPromptError, match="'frozen-head' has no selection 'query'; it offers: none"):
        head.predict(batch_of(random_images(1)), "query")
    nonsense: Any = "nearest"
    with pytest.raises(DualPromptError, match="no selection 'nearest'; it offers: query, batch_vote, oracle"):
        random_dualprompt(tasks=1).predict(batch_of(random_images(1)), nonsense)
    with pytest.raises(ValueError, match="true task"):
        random_dualprompt(tasks=1).predict(batch_of(random_images(1)), "oracle")


def test_options_are_checked() -> None:
    assert {"dualprompt", "frozen-head"} <= set(METHODS.names())
    config = method_config({"name": "dualprompt"})
    assert config == DualPromptConfig(g_layers=(1, 2), e_layers=(3, 4, 5), g_length=5, e_length=20)
    with pytest.raises(DualPromptError, match=r"unknown key 'method.e_lenght'; did you mean 'e_length'\?"):
        method_config({"name": "dualprompt", "e_lenght": 3})
    with pytest.raises(DualPromptError, match=r"bad value for 'method\.prompting'"):
        method_config({"name": "dualprompt", "prompting": "pre"})
    with pytest.raises(DualPromptError, match=r"unknown method 'dualpromt'; did you mean 'dualprompt'\?"):
        method_config({"name": "dualpromt"})


def test_without_prompts_it_is_the_baseline() -> None:
    method = random_dualprompt(tasks=2, g_length=0, e_length=0)
    baseline = FrozenHead(FrozenHeadConfig(), method.backbone)
    baseline.load_state(method.state())
    images = random_images(5)
    labels = torch.tensor([3, 4, 5, 3, 4])
    assert torch.equal(method.predict(batch_of(images)).logits, baseline.predict(batch_of(images)).logits)
    match = match_loss(method.backbone(images), method.bank.task_key[-1])
    close(method.loss(batch_of(images, labels)), baseline.loss(batch_of(images, labels)) + match)


def test_scores_are_percentages_of_the_images() -> None:
    assert Score(8, 6, 2).accuracy == 75
    assert Score(8, 6, 2).matching == 25
    assert Score(8, 6, None).matching is None
