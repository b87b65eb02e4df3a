"""The mathematics of the adapter methods, against formulas written out plainly from the papers and their codes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dualprompt.backbones import vit
from dualprompt.config import TrainConfig
from dualprompt.errors import DualPromptError
from dualprompt.methods.aper import APER
from dualprompt.methods.base import METHODS, Method, Phase, StreamKind, TaskView, method_config
from dualprompt.methods.ease import EASE, completed
from dualprompt.methods.hide_prompt import HiDePrompt, contrast
from dualprompt.methods.inflora import InfLoRA, InfLoRAConfig, extended, main_directions
from dualprompt.methods.lae import HEAD_ALONE, LAE
from dualprompt.methods.sd_lora import SDLoRA
from dualprompt.methods.slca import SLCA, shares_of_means
from dualprompt.training.optimise import make_optimiser
from helpers import as_vit, batch_of, numbers, random_images, seeded, task_view, tiny_vit

DIM = 32
SMALL: dict[str, dict[str, Any]] = {
    "aper": {"bottleneck": 3},
    "ease": {"bottleneck": 3},
    "hide-prompt": {"e_layers": [1, 2], "e_length": 2, "align_epochs": 2, "align_samples": 6, "centroids": 2},
    "inflora": {"rank": 2},
    "lae": {"layers": [1, 2, 3], "rank": 2},
    "lora": {"rank": 2},
    "sd-lora": {"rank": 2},
    "slca": {"align_epochs": 2, "align_samples": 6},
}


def make(name: str, **options: Any) -> Any:
    return METHODS[name](method_config({"name": name, **SMALL[name], **options}), tiny_vit())


def task(index: int, classes: int = 3, each: int = 4) -> TaskView:
    images = random_images(classes * each, seed=40 + index)
    labels = torch.arange(classes * each) % classes + classes * index
    return task_view(index, classes, tiny_vit()(images), images, labels, batch_size=5)


@torch.no_grad()
def shake(method: Method, seed: int = 3, scale: float = 0.1) -> None:
    """Move what trains, as training would."""
    for number, parameter in enumerate(method.trainable().values()):
        parameter.add_(scale * torch.randn(parameter.shape, generator=seeded(seed + number)))


def learned(name: str, tasks: int = 2, **options: Any) -> Any:
    """A method after some tasks in which steps were random."""
    method = make(name, **options)
    for index in range(tasks):
        learn(method, index)
    return method.eval()


def learn(method: Method, index: int) -> None:
    view = task(index)
    method.train()
    method.begin_task(view)
    for phase in method.phases(view):
        method.begin_phase(phase, view)
    shake(method, seed=10 * index)
    method.eval()
    method.end_task(view)


@pytest.mark.parametrize("name", SMALL)
def test_an_answer_depends_on_its_image_alone(name: str) -> None:
    method, images = learned(name), random_images(7, seed=5)
    whole = method.predict(batch_of(images))
    order = torch.randperm(7, generator=seeded(2))
    moved = method.predict(batch_of(images[order]))
    torch.testing.assert_close(moved.logits, whole.logits[order], rtol=1e-4, atol=1e-5)
    for i in range(7):
        alone = method.predict(batch_of(images[i : i + 1]))
        torch.testing.assert_close(alone.logits[0], whole.logits[i], rtol=1e-4, atol=1e-5)
    assert len(whole.logits.unique(dim=0)) == 7
    assert whole.logits.shape[1] == 6


@pytest.mark.parametrize("name", SMALL)
def test_the_loss_reaches_all_that_trains(name: str) -> None:
    method = make(name)
    for index in range(2):
        view = task(index)
        method.begin_task(view)
        for phase in method.phases(view):
            method.begin_phase(phase, view)
        if method.phases(view):
            batch = batch_of(random_images(6), torch.arange(6) % 3 + 3 * index)
            shake(method)
            method.loss(batch).backward()
            trainable = method.trainable()
            assert trainable
            for key, parameter in trainable.items():
                assert parameter.grad is not None, key
                assert parameter.grad.abs().max() > 0, key
                parameter.grad = None
        method.end_task(view)


def cosine(one: np.ndarray, other: np.ndarray) -> float:
    return float(one @ other / (np.linalg.norm(one) * np.linalg.norm(other)))


# APER and EASE


def test_aper_compares_frozen_and_adapted_features_with_class_means() -> None:
    method, asked = learned("aper"), random_images(3, seed=6)
    assert isinstance(method, APER)
    assert method.adaptation is not None

    def read(images: Tensor) -> np.ndarray:
        assert method.adaptation is not None
        both = method.backbone(images), method.backbone(images, method.adaptation.layers())
        return np.concatenate([numbers(each) for each in both], axis=1)

    found = numbers(method.predict(batch_of(asked)).logits)
    for index in range(2):
        view = task(index)
        images, labels = torch.cat([b.images for b in view.batches()]), view.targets.numpy()
        means = [read(images)[labels == label].mean(axis=0) for label in view.labels]
        for row, feature in enumerate(read(asked)):
            for place, mean in enumerate(means):
                assert found[row, 3 * index + place] == pytest.approx(cosine(feature, mean), abs=1e-5)
    with pytest.raises(DualPromptError, match="without a first session APER is simple-cil"):
        make("aper", first_session="none")


@pytest.mark.parametrize("name", ["aper", "ease"])
def test_the_scale_of_cosines_grows_well_beyond_1_in_the_steps_of_a_task(name: str) -> None:
    """As by the originals' SGD. Where it stays near 1, the loss can only fall by pulling features into corners."""
    method, view = make(name), task(0)
    method.train()
    method.begin_task(view)
    [phase] = method.phases(view)
    optimiser = make_optimiser(method, TrainConfig(lr=0.005), phase.lr)
    batch = next(iter(view.batches()))
    for _ in range(195):
        optimiser.zero_grad()
        method.loss(batch).backward()
        optimiser.step()
    assert 5 < method.training_head.sigma.item() < 20


def test_ease_completes_prototypes_as_its_code_does() -> None:
    """One pair of classes after another, with all classes that came since the later adapter."""
    sizes = (3, 2, 4)
    real = [torch.randn(classes, i + 1, 5, generator=seeded(i)) for i, classes in enumerate(sizes)]
    table = {(t, c, j): numbers(real[t][c, j]) for t in range(3) for c in range(sizes[t]) for j in range(t + 1)}
    for t in range(3):
        for later in range(t + 1, 3):
            donors = [(u, e) for u in range(later, 3) for e in range(sizes[u])]
            for c in range(sizes[t]):
                alike = np.exp([cosine(table[t, c, t], table[u, e, t]) for u, e in donors])
                mixed = sum(w * table[u, e, later] for w, (u, e) in zip(alike / alike.sum(), donors, strict=True))
                table[t, c, later] = np.asarray(mixed)
    for t, found in enumerate(completed(real)):
        assert found.shape == (sizes[t], 3, 5)
        for c in range(sizes[t]):
            for j in range(3):
                np.testing.assert_allclose(numbers(found[c, j]), table[t, c, j], atol=1e-6)


def ease_logits(method: EASE, images: Tensor) -> np.ndarray:
    """Sums of cosines: a class's own adapter counts 1, the others share α."""
    tasks = len(method.prototypes)
    features = [numbers(method.backbone(images, method.adapters.layers(j))) for j in range(tasks)]
    logits = []
    for own, prototypes in enumerate(completed(list(method.prototypes))):
        for row in numbers(prototypes):
            parts = [
                (1.0 if j == own else method.config.others_weight / (tasks - 1))
                * np.array([cosine(feature, row[j]) for feature in features[j]])
                for j in range(tasks)
            ]
            logits.append(sum(parts))
    return np.stack(logits, axis=1)


def test_ease_weighs_the_cosines_of_all_adapters_and_forgets_a_task_whole() -> None:
    method, asked = learned("ease", tasks=3, others_weight=0.4), random_images(4, seed=6)
    np.testing.assert_allclose(numbers(method.predict(batch_of(asked)).logits), ease_logits(method, asked), atol=1e-5)
    view = task(1)
    images = torch.cat([b.images for b in view.batches()])
    features = method.backbone(images, method.adapters.layers(0))[view.targets == 4]
    torch.testing.assert_close(method.prototypes[1][1, 0], features.mean(dim=0))
    first, third = (method.state()[f"adapters.down.{which}"].clone() for which in (0, 2))
    method.forget(1, [3, 4, 5], None)
    answers = method.predict(batch_of(asked)).logits
    assert answers.shape == (4, 9)
    assert not answers[:, 3:6].any()
    assert answers[:, 6:].abs().min() > 0
    assert [list(each.shape) for each in method.prototypes] == [[3, 1, DIM], [3, 2, DIM]]
    assert torch.equal(method.state()["adapters.down.0"], first)
    assert torch.equal(method.state()["adapters.down.1"], third)
    method.drop_classes([3, 4, 5])
    method.refuse_misfits([3, 3], 6)
    view = task(2)
    method.begin_task(view)
    shake(method)
    method.end_task(view)
    np.testing.assert_allclose(numbers(method.predict(batch_of(asked)).logits), ease_logits(method, asked), atol=1e-5)


# LAE


def test_lae_averages_slowly_and_answers_with_the_surer_of_both() -> None:
    method = make("lae", decay=0.9)
    assert isinstance(method, LAE)
    learn(method, 0)
    assert not method.averages
    online = {part: value.detach().clone() for part, value in method.adaptation.values().items()}
    view = task(1)
    method.begin_task(view)
    first, second = method.phases(view)
    assert (first.name, first.part, second.part) == (HEAD_ALONE, (0.0, 0.6), (0.6, 1.0))
    method.begin_phase(first, view)
    assert not any(name.startswith("adaptation.") for name in method.trainable())
    method.begin_phase(second, view)
    assert sum(name.startswith("adaptation.") for name in method.trainable()) == 2
    [step] = method.steps(second)
    assert step.after is not None
    expected = {part: numbers(value) for part, value in online.items()}
    for seed in range(3):
        shake(method, seed)
        step.after()
        for part, value in method.adaptation.values().items():
            expected[part] = 0.9 * expected[part] + 0.1 * numbers(value)
    for part, value in expected.items():
        np.testing.assert_allclose(numbers(method.state()[f"average.{part}.0"]), value, atol=1e-6)
    images = random_images(4, seed=6)
    features = [
        method.backbone(images, method.changes()),
        method.backbone(images, method.adaptation.attach({p: torch.tensor(v).float() for p, v in expected.items()})),
    ]
    surer = np.maximum(*(numbers(method.head.all(each).softmax(dim=1)) for each in features))
    found = method.eval().predict(batch_of(images)).logits
    np.testing.assert_allclose(numbers(found.exp()), surer, atol=1e-5)
    assert not np.allclose(surer, numbers(method.head.all(features[0]).softmax(dim=1)), atol=1e-3)


# InfLoRA


def extended_by_the_papers_loop(old: np.ndarray, moment: np.ndarray, threshold: float) -> np.ndarray:
    values = np.linalg.svd(moment, compute_uv=False)
    total = (values**2).sum()
    left = moment - old @ old.T @ moment
    directions, values, _ = np.linalg.svd(left)
    held = 1 - (values**2).sum() / total
    count = 0
    while held < threshold and values[count] > 1e-10 * total**0.5:  # the rest is rounding, to which 1.0 would come down
        held += values[count] ** 2 / total
        count += 1
    return np.hstack([old, directions[:, :count]])


def moment_of(seed: int, rank: int = 9) -> Tensor:
    rows = torch.randn(rank, 12, generator=seeded(seed), dtype=torch.float64) * torch.arange(1, rank + 1)[:, None]
    return rows.T @ rows


@pytest.mark.parametrize("threshold", [0.3, 0.95, 0.9999])
def test_inflora_extends_the_space_of_old_inputs_as_gradient_projection_memory(threshold: float) -> None:
    old, by_hand = None, np.zeros((12, 0))
    for seed in range(3):
        old = extended(old, moment_of(seed), threshold)
        by_hand = extended_by_the_papers_loop(by_hand, moment_of(seed).numpy(), threshold)
        assert old.shape == by_hand.shape
        np.testing.assert_allclose(numbers(old @ old.T), by_hand @ by_hand.T, atol=1e-8)  # the space, not its signs
        np.testing.assert_allclose(numbers(old.T @ old), np.eye(old.shape[1]), atol=1e-8)
    assert old is not None
    assert old.shape[1] > 1
    chosen = main_directions(moment_of(9), old, 2)
    left = moment_of(9).numpy() - by_hand @ by_hand.T @ moment_of(9).numpy()
    if old.shape[1] <= 10:  # else less than two directions are left to choose from
        expected = np.linalg.svd(left)[0][:, :2]
        np.testing.assert_allclose(numbers(chosen @ chosen.T), expected @ expected.T, atol=1e-7)
        assert (old.T @ chosen).abs().max() < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_inflora_takes_no_direction_that_is_only_rounding(dtype: torch.dtype) -> None:
    """With a threshold of one the share that is held is reached or not by the last digit."""
    for seed in range(20):
        all_of_it = extended(None, moment_of(seed).to(dtype), 1.0)
        assert all_of_it.shape == (12, 9)
        assert extended(all_of_it, moment_of(seed).to(dtype), 1.0).shape == (12, 9)


def test_inflora_looks_at_what_enters_the_attention_and_leaves_old_inputs_alone() -> None:
    method = make("inflora", first_threshold=0.5, last_threshold=0.5, layers=[1, 3])
    assert isinstance(method, InfLoRA)
    view = task(0)
    images = torch.cat([b.images for b in view.batches()])
    x, moments = method.backbone.stem(images), []
    with torch.no_grad():
        for block in as_vit(method.backbone).blocks:
            assert isinstance(block, vit.Block)
            rows = block.norm1(x).flatten(0, 1).double()
            moments.append(rows.T @ rows)
            x = block(x)
    method.begin_task(view)
    for place, layer in enumerate((1, 3)):
        left = np.linalg.svd(numbers(moments[layer - 1]))[0][:, :2]
        for linear in range(2):  # k and v: the same A, its rows of length 1/√3, in any sign
            down = numbers(method.state()["adaptation.down.0"][place, linear])
            np.testing.assert_allclose(down.T @ down, left @ left.T / 3, atol=1e-4)
    assert {name.rpartition(".")[0] for name in method.trainable()} == {"adaptation.up", "head.weight", "head.bias"}
    shake(method)
    method.end_task(view)
    old = [each.clone() for each in method.old]
    assert [each.shape[1] > 0 for each in old] == [True, True]
    learn(method, 1)
    for place in range(2):
        for linear in range(2):
            down, up = (method.state()[f"adaptation.{part}.1"][place, linear] for part in ("down", "up"))
            assert (up @ down @ old[place]).abs().max() < 1e-5, "the second task's change does not reach old inputs"
            assert (up @ down).abs().max() > 1e-2


def test_inflora_asks_for_more_of_the_old_space_as_tasks_go_by() -> None:
    method = learned("inflora", tasks=1, first_threshold=0.5, last_threshold=0.9, horizon=4)
    seen = []
    for index in range(1, 7):
        view = replace(task(1), index=index)
        method.old.restore([])
        method.end_task(view)
        seen.append(sum(each.shape[1] for each in method.old))
    assert seen == sorted(seen)
    assert seen[2] == seen[5] > seen[0]
    config = InfLoRAConfig()  # as the released code: (1 − 0.95) · t / 10 + 0.95, t counting from 0
    assert [round(config.threshold(t), 6) for t in (0, 1, 9)] == [0.95, 0.955, 0.995]
    assert config.threshold(50) == config.threshold(9) < 1, "a task beyond the horizon still finds inputs of its own"
    with pytest.raises(DualPromptError, match="last_threshold is less than first_threshold"):
        make("inflora", first_threshold=0.9, last_threshold=0.5)


# SD-LoRA


def change_by_hand(method: SDLoRA, layer: int, linear: int, alphas: list[float]) -> np.ndarray:
    state, total = method.state(), np.zeros((DIM, DIM))
    for which, alpha in enumerate(alphas):
        up, down = (numbers(state[f"adaptation.{part}.{which}"][layer, linear]) for part in ("up", "down"))
        newest = which == len(alphas) - 1
        total += alpha * up @ down / (1.0 if newest else np.linalg.norm(up) * np.linalg.norm(down))
    return total


def test_sd_lora_sums_directions_by_their_magnitudes() -> None:
    method = learned("sd-lora", tasks=3)
    assert isinstance(method, SDLoRA)
    alphas = [alpha.item() for alpha in method.magnitude]
    assert len(set(alphas)) == 3
    for layer, prompt in enumerate(method.changes().values()):
        assert prompt.deltas is not None
        for linear, key in enumerate(("q", "v")):
            found = numbers(prompt.deltas[key].weight()[0])
            np.testing.assert_allclose(found, change_by_hand(method, layer, linear, alphas), atol=1e-5)
    directions = [method.state()[f"adaptation.up.{which}"].clone() for which in range(3)]
    method.begin_task(task(3))
    assert [alpha.item() for alpha in method.magnitude] == pytest.approx([0.8] * 4)  # as its code begins anew
    trains = {name for name in method.trainable() if not name.startswith("head.")}
    assert trains == {"adaptation.down.3", "adaptation.up.3", *(f"magnitude.{i}" for i in range(4))}
    shake(method)
    for which, value in enumerate(directions):
        assert torch.equal(method.state()[f"adaptation.up.{which}"], value)


def test_magnitudes_of_each_map_go_on_where_they_were() -> None:
    method, images = learned("sd-lora", tasks=2, magnitudes="each"), random_images(3, seed=6)
    before = method.backbone(images, method.changes())
    method.begin_task(task(2))
    torch.testing.assert_close(method.backbone(images, method.changes()), before, rtol=1e-4, atol=1e-5)
    assert [list(alpha.shape) for alpha in method.magnitude] == [[4, 2, 1, 1]] * 3


# Alignment, SLCA and HiDe-Prompt


def test_slca_answers_with_aligned_rows_and_learns_on_from_those_of_images() -> None:
    method = learned("slca", tasks=1)
    assert isinstance(method, SLCA)
    trained = method.head.weight[0].detach().clone()
    learn(method, 1)
    aligned = torch.cat(list(method.head.weight)).detach()
    assert not torch.allclose(aligned[:3], trained)
    assert torch.equal(method.trained_weight[0], trained), "masked: the second task does not touch them"
    view = task(1)
    features = torch.cat([method.features(batch) for batch in view.batches()])
    own = numbers(features[view.targets == 4])
    root = torch.zeros(DIM, DIM, dtype=torch.bool).logical_not().triu()
    lower = torch.zeros(DIM, DIM)
    lower[root] = method.statistics.spreads[1][1]
    np.testing.assert_allclose(numbers(lower.T @ lower), np.cov(own.T) + 1e-4 * np.eye(DIM), atol=1e-4)
    method.begin_task(task(2))
    torch.testing.assert_close(torch.cat(list(method.head.weight)[:2]), torch.cat(list(method.trained_weight)))


def test_slca_takes_the_means_of_old_tasks_back_by_up_to_a_tenth() -> None:
    assert shares_of_means(4) == pytest.approx([0.925, 0.95, 0.975, 1.0])


def test_slca_notes_labels_that_come_back() -> None:
    method = make("slca")
    method.accept(StreamKind(returns=True))
    learn(method, 0)
    again = replace(task(0), index=1, new_labels=(), labels=(0, 1, 2), seen=(0, 1, 2))
    method.begin_task(again)
    method.end_task(again)
    assert method.head.classes == 3
    _, labels = method.statistics.sample(2, seeded(1))
    assert labels.tolist() == [0, 0, 1, 1, 2, 2] * 2


def test_hide_prompts_contrast_tells_each_row_from_the_others() -> None:
    rows = torch.randn(4, 3, generator=seeded(1)).double()
    products = numbers(rows) @ numbers(rows).T / 0.8
    expected = -np.mean([products[i, i] - np.log(np.exp(products[i]).sum()) for i in range(4)])
    assert float(contrast(rows)) == pytest.approx(expected)


def test_hide_prompt_mixes_a_little_of_old_prompts_into_a_new_one_and_keeps_the_mixture() -> None:
    method = learned("hide-prompt", tasks=2, momentum=0.1)
    assert isinstance(method, HiDePrompt)
    method.begin_task(task(2))
    zero, one, two = (numbers(prompt) for prompt in method.bank.e_prompt)
    np.testing.assert_array_equal(one, two)  # which starts from the one before
    shake(method)
    two = numbers(method.bank.e_prompt[2])
    mixed = 0.9 * two + 0.1 * (zero + one) / 2
    np.testing.assert_allclose(numbers(method.training_prompt()), mixed, atol=1e-6)
    method.end_task(task(2))
    np.testing.assert_allclose(numbers(method.bank.e_prompt[2]), mixed, atol=1e-6)
    np.testing.assert_array_equal(numbers(method.bank.e_prompt[1]), one)


def test_hide_prompt_finds_an_images_task_by_its_own_features() -> None:
    """A batch of one task's images must not tell it; a vote, where it is asked for, may."""
    method, images = learned("hide-prompt", tasks=3), random_images(12, seed=7)
    scores = method.task_head.predict(method.backbone(images))
    found = method.predict(batch_of(images))
    expected = torch.tensor([0, 0, 0, 1, 1, 1, 2, 2, 2])[scores.argmax(dim=1)]
    assert torch.equal(found.selected, expected)
    assert len(expected.unique()) > 1
    for i in range(12):
        prompts = method.bank.shared_prompts(method.bank.e_prompt[int(expected[i])])
        features = method.backbone(images[i : i + 1], prompts)
        torch.testing.assert_close(found.logits[i : i + 1], method.head.all(features), rtol=1e-4, atol=1e-5)
    voted = method.predict(batch_of(images), "batch_vote").selected
    assert voted.unique().tolist() == [int(expected.bincount().argmax())]
    told = method.predict(batch_of(images, task=torch.full((12,), 2)), "oracle").selected
    assert told.tolist() == [2] * 12


@pytest.mark.parametrize("name", ["ease", "hide-prompt"])
def test_a_task_of_its_own_goes_without_touching_the_others(name: str) -> None:
    method = learned(name, tasks=2)
    kept = {key: value.clone() for key, value in method.owned_by(0).items() if not key.startswith("head.")}
    method.forget(1, [3, 4, 5], None)
    now = method.owned_by(0)
    assert kept
    assert all(torch.equal(now[key], value) for key, value in kept.items())
    answers = method.predict(batch_of(random_images(3))).logits
    assert not answers[:, 3:].any()
    assert answers[:, :3].any()


def test_phases_of_lae_cover_the_recipe_whatever_its_length() -> None:
    method = make("lae")
    method.begin_task(task(0))
    assert method.phases(task(0)) == (Phase(),)
    assert make("lae", frozen_share=0.0).phases(task(1)) == (Phase(),)
    parts = method.phases(task(1))
    for epochs in range(1, 12):
        assert sum(phase.epochs_of(epochs) for phase in parts) == epochs
        assert parts[1].epochs_of(epochs) > 0
