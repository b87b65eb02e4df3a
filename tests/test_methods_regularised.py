"""FT-seq, EWC, LwF and the upper bound: their mathematics, computed another way, and what it does to forgetting."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dualprompt.errors import DualPromptError
from dualprompt.methods.base import METHODS, Batch, Phase, TaskView, method_config
from dualprompt.methods.ewc import EWC
from dualprompt.methods.finetune import FineTune
from helpers import SIDE, random_images, seeded, task_view, tiny_vit

CLASSES = 3  # of every task
NAMES = ("ft-seq", "ft++", "ewc", "lwf", "upper-bound")


def make(name: str, depth: int = 4, **options: Any) -> Any:
    return METHODS[name](method_config({"name": name, **options}), tiny_vit(depth=depth))


def clusters(index: int, seed: int = 0, count: int = 30) -> TaskView:
    """A task whose classes are easy to tell apart."""
    centres = torch.randn(CLASSES, 3, SIDE, SIDE, generator=seeded(10 * seed + 7 + index))
    labels = torch.randint(0, CLASSES, (count,), generator=seeded(index))
    images = centres[labels] + torch.randn(count, 3, SIDE, SIDE, generator=seeded(10 * seed + 70 + index))
    return task_view(index, CLASSES, images=images, labels=labels + index * CLASSES, batch_size=10)


def feature_task(count: int, batch_size: int = 7) -> TaskView:
    """A first task of random frozen features."""
    features = torch.randn(count, 32, generator=seeded(5))
    labels = torch.randint(0, CLASSES, (count,), generator=seeded(6))
    return task_view(0, CLASSES, images=features, labels=labels, batch_size=batch_size, frozen=True)


def images_of(task: TaskView) -> Tensor:
    return torch.cat([batch.images for batch in task.batches()])


def whole(task: TaskView) -> Batch:
    return Batch(lambda: images_of(task), task.targets)


def scatter(method: FineTune, seed: int = 2) -> None:
    """Move every trained weight to a random place, as if it had been trained."""
    generator = seeded(seed)
    with torch.no_grad():
        for name, parameter in method.named_parameters():
            if name in method.state():
                scale = 0.3 if name.startswith("head") else 0.05
                parameter += scale * torch.randn(parameter.shape, generator=generator)


def begun(name: str, tasks: int, **options: Any) -> Any:
    """A method in the middle of its last task, with random weights."""
    method = make(name, **options)
    for index in range(tasks):
        method.begin_task(clusters(index))
    scatter(method)
    return method


def weights_of(method: FineTune, tasks: int) -> list[Tensor]:
    """What EWC protects after `tasks` tasks."""
    rows = [rows for index in range(tasks) for rows in (method.head.weight[index], method.head.bias[index])]
    return [*method.backbone.parameters(), *rows]


def flat(tensors: Any) -> Tensor:
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def steps(method: FineTune, task: TaskView, count: int, lr: float = 4e-3) -> None:
    optimiser = torch.optim.Adam(method.trainable().values(), lr=lr)
    for _ in range(count):
        for batch in task.batches():
            optimiser.zero_grad()
            method.loss(batch).backward()
            optimiser.step()


def learn(method: FineTune, task: TaskView, epochs: int) -> None:
    """What the training loop does, in short."""
    method.begin_task(task)
    (phase,) = method.phases(task)
    method.begin_phase(phase, task)
    steps(method, task, epochs)
    method.end_task(task)


def accuracy(method: FineTune, task: TaskView) -> float:
    return float((method.predict(whole(task)).logits.argmax(dim=1) == task.targets).float().mean())


def linear_classifier(task: TaskView, **options: Any) -> tuple[EWC, np.ndarray]:
    """A softmax classifier on the task's features, and the probabilities it gives, in double precision."""
    method = make("ewc", train_backbone=False, **options)
    method.begin_task(task)
    scatter(method)
    weight, bias = (rows[0].detach().double().numpy() for rows in (method.head.weight, method.head.bias))
    exponents = np.exp(images_of(task).double().numpy() @ weight.T + bias)
    return method, exponents / exponents.sum(axis=1, keepdims=True)


def test_fisher_of_a_linear_softmax_classifier_has_its_closed_form():
    """∂log p_y/∂W = (onehot(y) − p) xᵀ: the mean over images of its square, which is not the square of the mean."""
    task = feature_task(50)
    method, p = linear_classifier(task, fisher_labels="true")
    x, residual = images_of(task).double().numpy(), np.eye(CLASSES)[task.targets.numpy()] - p
    weight = np.einsum("nc,nd->cd", residual**2, x**2) / len(x)
    expected = np.concatenate([weight.ravel(), (residual**2).mean(axis=0)])
    np.testing.assert_allclose(method.fisher(task).numpy(), expected, rtol=1e-4)
    of_batch_mean = (np.einsum("nc,nd->cd", residual, x) / len(x)) ** 2
    assert weight.sum() > 10 * of_batch_mean.sum()  # so the assertion above tells the two apart


def test_fisher_under_the_models_own_labels_has_its_closed_form():
    """E (onehot(y) − p)² = p (1 − p). Random signs stand for the expectation, so one image comes many times."""
    x = images_of(feature_task(1))
    features, labels = x.expand(40_000, -1), torch.zeros(40_000, dtype=torch.int64)
    task = task_view(0, CLASSES, images=features, labels=labels, batch_size=20_000, frozen=True)
    method, p = linear_classifier(task, fisher_images=40_000)
    variance = p[0] * (1 - p[0])
    expected = np.concatenate([np.outer(variance, x[0].double().numpy() ** 2).ravel(), variance])
    np.testing.assert_allclose(method.fisher(task).numpy(), expected, rtol=0.03)


@pytest.mark.parametrize("logits", ["masked", "unmasked"])
def test_fisher_of_the_whole_model_is_that_of_its_single_images(logits: str):
    method, task = begun("ewc", 2, training_logits=logits, fisher_labels="true"), clusters(1)
    weights = [weight.requires_grad_() for weight in weights_of(method, 2)]
    expected = torch.zeros(sum(weight.numel() for weight in weights))
    for image, label in zip(images_of(task), task.targets, strict=True):
        z = method.head.all(method.backbone(image[None]))[0]
        log_p = z[CLASSES:].log_softmax(0)[label - CLASSES] if logits == "masked" else z.log_softmax(0)[label]
        expected += flat(torch.autograd.grad(log_p, weights, materialize_grads=True)) ** 2 / len(task.targets)
    torch.testing.assert_close(method.fisher(task), expected, rtol=1e-3, atol=1e-7)


def test_fisher_of_the_whole_model_under_its_own_labels_is_the_expectation():
    method, image = begun("ewc", 1, fisher_images=3000), random_images(1)
    images, labels = image.expand(3000, -1, -1, -1), torch.zeros(3000, dtype=torch.int64)
    task = task_view(0, CLASSES, images=images, labels=labels, batch_size=300)
    log_p = method.head.all(method.backbone(image))[0].log_softmax(0)
    expected = torch.zeros(())
    for likely in log_p:
        gradient = flat(torch.autograd.grad(likely, weights_of(method, 1), retain_graph=True))
        expected = expected + likely.detach().exp() * gradient**2
    found = method.fisher(task)
    assert F.cosine_similarity(found, expected, dim=0) > 0.99
    assert float(found.sum() / expected.sum()) == pytest.approx(1, rel=0.05)


@settings(max_examples=20, deadline=None)
@given(images=st.integers(1, 40), wanted=st.integers(1, 50), batch_size=st.integers(1, 41))
def test_fisher_is_taken_on_evenly_spaced_images(images: int, wanted: int, batch_size: int):
    task = feature_task(images, batch_size)
    used = min(images, wanted)
    chosen = [math.floor(index * images / used) for index in range(used)]
    assert np.ptp(np.diff([*chosen, images])) <= 1
    method, _ = linear_classifier(task, fisher_labels="true", fisher_images=wanted)
    features, labels = images_of(task)[chosen], task.targets[chosen]
    alone = task_view(0, CLASSES, images=features, labels=labels, frozen=True)
    torch.testing.assert_close(method.fisher(task), method.fisher(alone))


def fishers_of(method: EWC, tasks: int) -> list[tuple[Tensor, Tensor]]:
    """Go through tasks without training; return each one's Fisher and final weights, zero for later tasks' rows."""
    found = []
    for index in range(tasks):
        task = clusters(index)
        method.begin_task(task)
        scatter(method, seed=50 + index)
        found.append((method.fisher(task), flat(weights_of(method, index + 1))))
        method.end_task(task)
    method.begin_task(clusters(tasks))
    longest = len(found[-1][0])
    return [(F.pad(fisher, (0, longest - len(fisher))), F.pad(w, (0, longest - len(w)))) for fisher, w in found]


def explicit_penalty(method: EWC, tasks: list[tuple[Tensor, Tensor]], factor: float) -> tuple[float, Tensor]:
    """Return the sum of the tasks' penalties at the current weights, and its gradient, in double precision."""
    weights = flat(weights_of(method, len(method.head.bias) - 1)).double().requires_grad_()
    penalty = sum(factor * (fisher.double() * (weights - then.double()) ** 2).sum() for fisher, then in tasks)
    assert isinstance(penalty, Tensor)
    return float(penalty.detach()), torch.autograd.grad(penalty, weights)[0]


def test_one_penalty_stands_for_the_sum_over_all_tasks():
    method = make("ewc", ewc_lambda=70.0, training_logits="unmasked", fisher_labels="true")
    tasks = fishers_of(method, 3)
    assert method.importance.shape == method.anchor.shape == tasks[-1][0].shape  # not three times that
    differences = []
    for seed in (81, 82):
        scatter(method, seed)
        value, gradient = explicit_penalty(method, tasks, 70 / 2)
        found = torch.autograd.grad(method.penalty(), weights_of(method, 3))
        torch.testing.assert_close(flat(found).double(), gradient, rtol=1e-3, atol=1e-5)
        differences.append(method.penalty().item() - value)
    assert differences[0] == pytest.approx(differences[1], rel=1e-3)  # the constant that is left out


def test_the_online_penalty_decays_and_stands_at_the_newest_weights():
    method = make("ewc", online=True, gamma=0.6, ewc_lambda=10.0, training_logits="unmasked", fisher_labels="true")
    tasks = fishers_of(method, 3)
    scatter(method)
    importance = sum(0.6 ** (2 - age) * fisher for age, (fisher, _) in enumerate(tasks))
    assert isinstance(importance, Tensor)
    value, _ = explicit_penalty(method, [(importance, tasks[-1][1])], 10 / 2)
    assert method.penalty().item() == pytest.approx(value, rel=1e-4)


def test_ewcs_loss_is_the_new_classes_cross_entropy_plus_the_penalty():
    method = make("ewc")
    fishers_of(method, 2)
    scatter(method)
    batch = whole(clusters(2))
    logits = method.head.all(method.backbone(batch.images))[:, 2 * CLASSES :]
    expected = F.cross_entropy(logits, batch.labels - 2 * CLASSES) + method.penalty()
    assert method.penalty().item() > 0
    torch.testing.assert_close(method.loss(batch), expected)


def test_gamma_without_online_is_refused():
    with pytest.raises(DualPromptError, match=r"gamma 0\.5 has no effect without online: true"):
        method_config({"name": "ewc", "gamma": 0.5})


def test_lwfs_distillation_by_hand():
    """T² Σ_c q_c (log q_c − log p_c), q of the model before the task, over the old classes alone."""
    method = begun("lwf", 1)
    batch = whole(clusters(1))
    teacher = method.predict(batch).logits.double()
    method.begin_task(clusters(1))
    scatter(method, seed=4)
    student = method.head.all(method.backbone(batch.images)).detach().double()
    expected = 0.0
    for z, z_old, label in zip(student.tolist(), teacher.tolist(), batch.labels.tolist(), strict=True):
        new = [math.exp(value) for value in z[CLASSES:]]
        expected -= math.log(new[label - CLASSES] / sum(new))
        p, q = ([math.exp(value / 2) for value in values[:CLASSES]] for values in (z, z_old))
        for a, b in zip(p, q, strict=True):
            expected += 4 * b / sum(q) * (math.log(b / sum(q)) - math.log(a / sum(p)))
    assert method.loss(batch).item() == pytest.approx(expected / len(batch.labels), rel=1e-4)


@given(st.floats(0.5, 20))
@settings(max_examples=10, deadline=None)
def test_lwf_distils_nothing_at_first_and_its_gradients_vanish_on_the_old_model(temperature: float):
    method = make("lwf", temperature=temperature, training_logits="unmasked")
    batch = whole(clusters(0))
    method.begin_task(clusters(0))
    assert method.loss(batch).item() == pytest.approx(math.log(CLASSES))
    scatter(method)
    new = whole(clusters(1))
    method.begin_task(clusters(1))
    plain = F.cross_entropy(method.head.all(method.backbone(new.images)), new.labels)
    torch.testing.assert_close(method.loss(new), plain)  # the model is still the old one


def test_lwf_trains_the_old_rows_even_where_new_logits_are_masked():
    method, task = begun("lwf", 2), clusters(1)
    (phase,) = method.phases(task)
    method.begin_phase(phase, task)
    assert {"head.weight.0", "head.bias.0"} <= set(method.trainable())
    assert not {"head.weight.0", "head.bias.0"} & set(begun("ewc", 2).trainable())


def test_lwf_warms_up_the_new_rows_alone_before_all_train():
    method, task = begun("lwf", 2, warmup_epochs=3), clusters(1)
    warm, joint = method.phases(task)
    assert (warm.epochs, joint) == (3, Phase())
    assert len(begun("lwf", 2).phases(task)) == 1, "off unless it is asked for"
    for _ in range(2):  # the phases of two tasks
        method.begin_phase(warm, task)
        assert set(method.trainable()) == {"head.weight.1", "head.bias.1"}
        before = {name: value.clone() for name, value in method.state().items()}
        (rows,) = (method.head.current(method.features(whole(task))),)
        assert torch.equal(method.loss(whole(task)), F.cross_entropy(rows, task.targets - 3)), "nothing to distil"
        steps(method, task, 2)
        moved = {name for name, value in method.state().items() if not torch.equal(value, before[name])}
        assert moved == {"head.weight.1", "head.bias.1"}
        method.begin_phase(joint, task)
        assert set(method.trainable()) == {name for name, _ in method.named_parameters()}
        steps(method, task, 1)
    frozen = begun("lwf", 2, warmup_epochs=3, train_backbone=False)
    frozen.begin_phase(joint, task)
    assert not any(name.startswith("backbone.") for name in frozen.trainable())


def test_ft_plus_plus_is_ft_seq_with_the_old_classes_left_out():
    masked, plain, task = begun("ft++", 2), begun("ft-seq", 2), clusters(1)
    for method in (masked, plain):
        scatter(method)
    features = masked.features(whole(task)).detach()
    weight, bias = masked.head.weight, masked.head.bias
    new = F.linear(features, weight[1], bias[1])
    torch.testing.assert_close(masked.loss(whole(task)), F.cross_entropy(new, task.targets - 3))
    every = F.linear(features, torch.cat(list(weight)), torch.cat(list(bias)))
    torch.testing.assert_close(plain.loss(whole(task)), F.cross_entropy(every, task.targets))
    assert not {"head.weight.0", "head.bias.0"} & set(masked.trainable())
    assert masked.predict(whole(task)).logits.shape == every.shape, "it predicts among all classes"
    assert method_config({"name": "ft-seq"}).training_logits == "unmasked"
    with pytest.raises(DualPromptError, match=r"training_logits.*for unmasked ones use ft-seq"):
        method_config({"name": "ft++", "training_logits": "unmasked"})


def test_the_upper_bound_may_train_longer():
    assert make("upper-bound").phases(clusters(0)) == (Phase(data="everything"),)
    longer = make("upper-bound", epochs_factor=4).phases(clusters(0))
    assert longer == (Phase(data="everything", epochs_factor=4),)


def test_the_upper_bound_trains_everything_from_the_pretrained_weights():
    method = make("upper-bound")
    for index in range(3):
        task = clusters(index)
        method.begin_task(task)
        assert [phase.data for phase in method.phases(task)] == ["everything"]
        for name, value in tiny_vit().state_dict().items():
            assert torch.equal(method.backbone.state_dict()[name], value)
        assert all(not rows.any() for rows in method.head.parameters())
        assert set(method.trainable()) == {name for name, _ in method.named_parameters()}
        scatter(method)
    assert method.joint
    assert not any(name.startswith("pretrained") for name in method.state())


def test_masked_logits_are_refused_for_the_upper_bound():
    with pytest.raises(DualPromptError, match=r"training_logits.*use unmasked"):
        method_config({"name": "upper-bound", "training_logits": "masked"})


@pytest.mark.parametrize("train_backbone", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_a_state_is_taken_back_inside_a_task(name: str, train_backbone: bool):
    """In the order of a resumed run: the state before the task, begin_task, the work in progress."""
    method, task = make(name, train_backbone=train_backbone), clusters(2)
    for index in range(2):
        learn(method, clusters(index), epochs=1)
    before = {key: value.clone() for key, value in method.state().items()}
    assert train_backbone == any(key.startswith("backbone.") for key in before)
    method.begin_task(task)
    (phase,) = method.phases(task)
    method.begin_phase(phase, task)
    steps(method, task, 1)
    other = make(name, train_backbone=train_backbone)
    other.load_state(before)
    other.begin_task(task)
    other.load_state(before | {key: value.clone() for key, value in method.state().items()})
    other.begin_phase(phase, task)
    assert list(other.trainable()) == list(method.trainable())
    for each in (method, other):
        steps(each, task, 1)
        each.end_task(clusters(2))
    assert method.state().keys() == other.state().keys()
    for key, value in method.state().items():
        assert torch.equal(value, other.state()[key]), key
    assert torch.equal(method.predict(whole(task)).logits, other.predict(whole(task)).logits)


@pytest.mark.parametrize("name", NAMES)
def test_a_frozen_backbone_stays_and_spares_passes(name: str):
    method, task = make(name, train_backbone=False), clusters(0)
    with torch.no_grad():
        features = tiny_vit()(images_of(task))

    def no_images() -> Tensor:
        raise AssertionError("the features are known")

    method.begin_task(task)
    batch = Batch(no_images, task.targets, frozen=features)
    method.loss(batch).backward()
    assert all(weight.grad is None for weight in method.backbone.parameters())
    assert torch.equal(method.predict(batch).logits, method.predict(whole(task)).logits)


def after_two_tasks(name: str, **options: Any) -> tuple[float, float]:
    """Return the accuracy on the first task and the mean of both, over three pairs of tasks."""
    found = []
    for seed in range(3):
        method = make(name, depth=2, **options)
        for index in range(2):
            learn(method, clusters(index, seed), epochs=15)
        found.append([accuracy(method, clusters(index, seed)) for index in range(2)])
    first, second = np.mean(found, axis=0)
    return first, (first + second) / 2


def test_fine_tuning_forgets_and_its_remedies_forget_less():
    first, both = after_two_tasks("ft-seq")
    assert first < 0.1
    assert both > 0.45  # it did learn the second
    masked_first, _ = after_two_tasks("ft++")  # which helps too, but less
    for name, options in (("ewc", {"ewc_lambda": 1e4}), ("lwf", {})):
        remedied_first, remedied_both = after_two_tasks(name, **options)
        assert remedied_first > masked_first + 0.3
        assert remedied_both > both + 0.1
