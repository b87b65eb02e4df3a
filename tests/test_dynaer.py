"""DynaER: what each loss is by hand, what stays as it was, and what a test image is given."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dualprompt.backbones.resnet import ResNet, ResNetConfig, draw
from dualprompt.methods.base import Phase
from dualprompt.methods.dynaer import CLASSIFIER, WARM_UP, DynaER, DynaERConfig
from helpers import batch_of, random_images, seeded, task_view

SMALL = ResNetConfig(16, width=4, stem="cifar", pool=False)
CLASSES = 3


def net(seed: int = 0) -> ResNet:
    return draw(ResNet(SMALL), seeded(seed))


def moved(method: DynaER, seed: int) -> None:
    """Move every trained weight, and the statistics by passes in training mode, as training does."""
    method.train()
    with torch.no_grad():
        for parameter in method.trainable().values():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=seeded(seed)))
        method.represent(batch_of(random_images(8, seed)))
    method.eval()


def learned(tasks: int, **options: Any) -> DynaER:
    """A DynaER that has learned some tasks, each as if by training."""
    method = DynaER(DynaERConfig(**options), net())
    for index in range(tasks):
        task = task_view(index, CLASSES)
        method.begin_task(task)
        for phase in method.phases(task):
            method.begin_phase(phase, task)
            moved(method, 10 * index)
        method.end_task(task)
    return method


def in_phase(index: int, name: str, **options: Any) -> DynaER:
    """A DynaER in a phase of its task number `index`."""
    method, task = learned(index, **options), task_view(index, CLASSES)
    method.begin_task(task)
    for phase in method.phases(task):
        method.begin_phase(phase, task)
        if phase.name == name:
            return method.train()
    raise AssertionError(name)


def test_the_phases_of_a_task() -> None:
    method = DynaER(DynaERConfig(), net())
    first, second = method.phases(task_view(0)), method.phases(task_view(1))
    assert [phase.name for phase in first] == [WARM_UP, "learn"]
    assert first[0].recipe == {"schedule": "constant", "warmup_epochs": 10}
    assert first[1] == Phase(data="task+buffer")
    assert second[:2] == first
    assert second[2].cut
    assert (second[2].epochs, second[2].lr, second[2].recipe["milestones"]) == (30, 0.1, (15,))
    assert len(DynaER(DynaERConfig(second_stage="align", warmup_epochs=0), net()).phases(task_view(1))) == 1


def test_at_the_first_task_it_is_a_plain_resnet() -> None:
    """A step of each: the same loss, the same gradients, the same statistics."""
    method, plain, images, labels = in_phase(0, "learn"), net().train(), random_images(6), torch.arange(6) % CLASSES
    head = method.head.detach().clone().requires_grad_()
    method.loss(batch_of(images, labels)).backward()
    loss = F.cross_entropy(plain(images) @ head.T, labels)
    loss.backward()
    assert torch.equal(method.head.grad, head.grad)  # type: ignore[arg-type]
    for (name, mine), other in zip(method.backbone.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.grad, other.grad), name  # type: ignore[arg-type]
    assert all(torch.equal(a, b) for a, b in zip(method.backbone.buffers(), plain.buffers(), strict=True))
    assert torch.equal(method.eval().predict(batch_of(images)).logits, plain.eval()(images) @ method.head.detach().T)


def test_the_loss_by_hand() -> None:
    """CE over the super-feature, plus λ_a times CE over (any old class, new classes) of the newest backbone alone."""
    method = in_phase(2, "learn", auxiliary_weight=0.7)
    images, labels = random_images(5), torch.tensor([0, 4, 6, 8, 7])  # two old ones; the newest classes are 6, 7, 8
    first, second, third = (copy.deepcopy(each) for each in method.networks)
    assert method.auxiliary is not None
    features = [first(images), second(images), third(images)]
    logits = torch.cat(features, dim=1) @ method.head.T
    coarse = features[2] @ method.auxiliary.T
    assert logits.shape == (5, 9)
    assert coarse.shape == (5, 4)
    picked = torch.tensor([0, 0, 1, 3, 2])
    expected = -logits.log_softmax(1)[torch.arange(5), labels].mean()
    expected += 0.7 * -coarse.log_softmax(1)[torch.arange(5), picked].mean()
    found = method.loss(batch_of(images, labels))
    torch.testing.assert_close(found, expected)
    found.backward()
    assert {name for name, p in method.named_parameters() if p.grad is not None} == set(method.trainable())
    assert {name.split(".")[0] for name in method.trainable()} == {"added", "head", "auxiliary"}
    assert not any(name.startswith("added.0.") for name in method.trainable())


def test_the_classifier_stage_by_hand() -> None:
    method = in_phase(1, CLASSIFIER)
    assert set(method.trainable()) == {"head"}
    images, labels = random_images(4), torch.tensor([0, 2, 3, 5])
    before = {name: value.clone() for name, value in method.state().items()}
    logits = torch.cat([each(images) for each in copy.deepcopy(method).eval().networks], dim=1) @ method.head.T
    torch.testing.assert_close(method.loss(batch_of(images, labels)), F.cross_entropy(logits / 5, labels))
    assert all(torch.equal(value, before[name]) for name, value in method.state().items()), "statistics rest too"


def test_a_test_image_is_given_all_classes_by_the_super_feature() -> None:
    method, images = learned(3), random_images(7)
    expected = torch.cat([each.eval()(images) for each in copy.deepcopy(method).networks], dim=1) @ method.head.T
    torch.testing.assert_close(method.predict(batch_of(images)).logits, expected.detach())
    alone = torch.cat([method.predict(batch_of(images[[row]])).logits for row in (3, 1, 6)])
    torch.testing.assert_close(alone, expected[[3, 1, 6]].detach(), atol=1e-5, rtol=1e-5)


def test_old_backbones_never_change_again() -> None:
    """Bit for bit, statistics of their BatchNorms too; and a new one starts as the one before it ended."""
    method = learned(2)
    before = {name: value.clone() for name, value in method.state().items() if not name.startswith("head")}
    task = task_view(2, CLASSES)
    method.begin_task(task)
    state = method.state()
    newest = {name for name in state if name.startswith("added.1.")}
    assert all(torch.equal(state[name], before[name.replace("added.1.", "added.0.")]) for name in newest)
    for phase in method.phases(task):
        method.begin_phase(phase, task)
        moved(method, 30)
    method.end_task(task)
    after = method.state()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    statistics = [name for name in newest if ".running_" in name]
    assert statistics
    assert all(not torch.equal(after[name], before[name.replace("added.1.", "added.0.")]) for name in statistics)


def test_heads_are_drawn_anew_after_the_warm_up() -> None:
    method, task = learned(1), task_view(1, CLASSES)
    method.begin_task(task)
    heads: list[tuple[Tensor, Tensor | None]] = []
    for phase in method.phases(task):
        method.begin_phase(phase, task)
        heads.append((method.head.detach().clone(), method.auxiliary))
    assert [head.shape for head, _ in heads] == [(6, 64)] * 3
    assert not any(torch.equal(heads[a][0], heads[b][0]) for a, b in ((0, 1), (1, 2), (0, 2)))
    assert heads[0][1] is not None
    assert heads[2][1] is None
    again = learned(1)
    again.begin_task(task_view(1, CLASSES))
    again.begin_phase(method.phases(task)[1], task)  # as a run does that is resumed inside it
    assert torch.equal(again.head, heads[1][0])


@pytest.mark.parametrize(("reset", "variance"), [("normal", 1.0), ("uniform", 1 / 3)])
def test_how_wide_heads_are_drawn(reset: Any, variance: float) -> None:
    method, task = DynaER(DynaERConfig(reset=reset), net()), task_view(0, 200)
    method.begin_task(task)
    assert float(method.head.detach().var() * method.backbone.dim) == pytest.approx(1, rel=0.1)
    method.begin_phase(method.phases(task)[1], task)
    assert float(method.head.detach().var() * method.backbone.dim) == pytest.approx(variance, rel=0.1)


def test_alignment_makes_new_rows_as_long_as_old_ones() -> None:
    method, task = learned(1, second_stage="align"), task_view(1, CLASSES)
    method.begin_task(task)
    method.begin_phase(method.phases(task)[1], task)
    with torch.no_grad():
        method.head[CLASSES:] *= 3
    before = method.head.detach().clone()
    method.end_task(task)
    lengths = method.head.detach().norm(dim=1)
    assert float(lengths[:CLASSES].mean()) == pytest.approx(float(lengths[CLASSES:].mean()))
    assert torch.equal(method.head[:CLASSES], before[:CLASSES])
    torch.testing.assert_close(F.normalize(method.head, dim=1), F.normalize(before, dim=1))


def test_a_drawn_network_begins_as_the_identity() -> None:
    drawn = net()
    drawn.name = "resnet18-cifar-nf4"
    zeroed = DynaER(DynaERConfig(), copy.deepcopy(drawn)).backbone.state_dict()
    last = [name for name in zeroed if name.endswith("bn2.weight")]
    assert len(last) == 8
    assert not any(zeroed[name].any() for name in last)
    assert all(torch.equal(value, drawn.state_dict()[name]) for name, value in zeroed.items() if name not in last)
    kept = DynaER(DynaERConfig(), net()).backbone.state_dict()  # weights of a file stay as they are
    assert all(kept[name].all() for name in last)


def test_what_is_added_is_all_backbones_but_the_first() -> None:
    method = learned(3)
    size = sum(parameter.numel() for parameter in net().parameters())
    report = method.parameters_report()
    assert report["additional"]["count"] == 2 * size
    assert report["additional"]["percent_of_backbone"] == pytest.approx(200)
    assert report["trained"] == 3 * size + 9 * 3 * method.backbone.dim
