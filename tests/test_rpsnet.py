"""RPSNet: its network, its paths, its loss by hand, what stays as it was, and who chooses among paths by what."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dualprompt.backbones.resnet import ResNet, ResNetConfig, draw
from dualprompt.methods.base import Batch, TaskView
from dualprompt.methods.paths import LAYERS, PathNetwork
from dualprompt.methods.rpsnet import RPSNet, RPSNetConfig, mixed_distillation
from helpers import SIDE, batch_of, random_images, seeded, task_view

CLASSES = 2
RESNET = ResNetConfig(SIDE, width=4, stem="cifar", pool=False)


def make(**options: Any) -> RPSNet:
    small = {"width": 2, "modules": 3}
    return RPSNet(RPSNetConfig(**{**small, **options}), draw(ResNet(RESNET), seeded(0)))


def moved(method: RPSNet, seed: int) -> None:
    """Move every trained weight, and the statistics by a pass in training mode, as training does."""
    generator = seeded(seed)
    method.train()
    with torch.no_grad():
        for name, parameter in method.trainable().items():
            scale = 1.0 if name.startswith("head.") else 0.05
            parameter.add_(scale * torch.randn(parameter.shape, generator=generator))
        method.features(batch_of(random_images(8, seed)))
    method.eval()


def learn(method: RPSNet, index: int, task: TaskView | None = None) -> None:
    task = task or task_view(index, CLASSES)
    method.begin_task(task)
    for number, phase in enumerate(method.phases(task)):
        method.begin_phase(phase, task)
        moved(method, 100 * index + number)
        method.end_epoch(task)
    method.end_task(task)


def learned(tasks: int, **options: Any) -> RPSNet:
    method = make(**options)
    for index in range(tasks):
        learn(method, index)
    return method


def begun(index: int, **options: Any) -> RPSNet:
    """One that has learned `index` tasks and is in the first phase of the next."""
    method, task = learned(index, **options), task_view(index, CLASSES)
    method.begin_task(task)
    method.begin_phase(method.phases(task)[0], task)
    return method.train()


def count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def test_it_is_as_large_as_the_original() -> None:
    """One path of 11.0 million, shortcuts of 1.55 million, 89.6 million with all modules."""
    with torch.device("meta"):
        network = PathNetwork(64, 8, 32)
        network.take(torch.zeros(LAYERS, dtype=torch.int64, device="cpu"), 0)
        assert count(network.layers) == pytest.approx(11.0e6, rel=0.005)
        assert count(network.shortcuts) == pytest.approx(1.55e6, rel=0.005)
        for module in range(1, 8):
            network.take(torch.full((LAYERS,), module, device="cpu"), 1)
        assert count(network) == pytest.approx(89.6e6, rel=0.002)
    assert network.dim == 512


def test_a_pass_by_hand() -> None:
    method, images = learned(3), random_images(3)
    network = method.backbone.eval()
    x = images
    for layer in range(1, 10):
        out = torch.stack([part(x) for part in network.at(layer - 1).values()]).sum(dim=0)
        if layer in (4, 6, 8):
            out = out + network.shortcuts[str(layer - 1)](x)
        elif layer in (2, 3, 5, 9):
            out = out + x
        x = F.relu(out)
        if layer in (5, 7):
            x = F.max_pool2d(x, 2)
    assert x.shape == (3, 16, SIDE // 4, SIDE // 4)
    torch.testing.assert_close(network(images), x.mean(dim=(2, 3)))
    channels = [network.state_dict()[f"layers.{layer}.0.0.weight"].shape[0] for layer in range(LAYERS)]
    assert channels == [2 * width for width in (1, 1, 1, 2, 2, 4, 4, 8, 8)]


def test_a_path_is_drawn_every_second_task() -> None:
    method = make(modules=8)
    sizes, births = [], []
    for index in range(6):
        learn(method, index)
        sizes.append(sum(len(method.backbone.at(layer)) for layer in range(LAYERS)))
        births.append(method.backbone.birth.clone())
    assert sizes[:2] == [9, 9]
    assert sizes[2] == sizes[3] > 9
    assert sizes[4] == sizes[5] > sizes[2]
    assert births[0][:, 0].tolist() == [0] * LAYERS
    assert [int(birth.max()) for birth in births] == [0, 0, 1, 1, 2, 2]
    assert all((birth == generation).sum(dim=1).max() <= 1 for birth, generation in ((births[5], 1), (births[5], 2)))


def test_what_was_frozen_never_changes_again() -> None:
    """Modules of older generations, bit for bit, statistics too; shortcuts and head go on."""
    method = learned(3)  # its second path is there
    before = {name: value.clone() for name, value in method.state().items()}
    births = method.backbone.birth.clone()
    learn(method, 3)  # trains that path on
    for task in (3, 4):
        after = method.state()
        fixed = [
            name for name in before
            if name.startswith("backbone.layers.")
            and births[int(name.split(".")[2]), int(name.split(".")[3])] < task // 2
        ]  # fmt: skip
        assert any("running_mean" in name for name in fixed)
        assert all(torch.equal(after[name], before[name]) for name in fixed)
        others = [name for name in before if "shortcuts" in name and not name.endswith("tracked")]
        assert all(not torch.equal(after[name], before[name]) for name in others)
        newest = [name for name in before if name.startswith("backbone.layers.") and name not in fixed]
        assert all(name.endswith("tracked") or not torch.equal(after[name], before[name]) for name in newest)
        before = {name: value.clone() for name, value in after.items()}
        learn(method, task + 1)


def test_with_parity_statistics_of_frozen_modules_drift() -> None:
    method = learned(2, parity=True)
    name = "backbone.layers.0.0.1.running_mean"
    before, weight = method.state()[name].clone(), method.state()["backbone.layers.0.0.0.weight"].clone()
    learn(method, 2)
    assert not torch.equal(method.state()[name], before)
    assert torch.equal(method.state()["backbone.layers.0.0.0.weight"], weight)


@pytest.mark.parametrize(("task", "phi"), [(1, 1.0), (2, 1.0), (3, 2.5), (5, 7.5)])
@pytest.mark.parametrize("parity", [False, True])
def test_the_loss_by_hand(task: int, phi: float, parity: bool) -> None:
    method = begun(task, parity=parity)
    images, labels = random_images(4), torch.tensor([0, 1, 2 * task, 2 * task + 1])
    before = learned(task, parity=parity)
    twin = copy.deepcopy(method)
    z = twin.head.all(twin.backbone(images))
    with torch.no_grad():
        network = copy.deepcopy(method.backbone).eval() if parity else before.backbone.eval()
        old = before.head.all(network(images))
    assert old.shape == (4, 2 * task)
    expected = -z.log_softmax(1)[torch.arange(4), labels].mean()
    for row in range(4):
        target = torch.cat([old[row], F.one_hot(labels[[row]], 2 * task + 2)[0, 2 * task :].float()])
        p, q = (target / 2).softmax(0), (z[row] / 2).softmax(0)
        terms = (p * (p / q).log()).detach().clamp_min(0)
        expected = expected + phi * terms.sum() / 4
    torch.testing.assert_close(method.loss(batch_of(images, labels)), expected, atol=1e-4, rtol=1e-5)


def test_distillation_of_equals_is_nothing() -> None:
    old = torch.randn(3, 4, generator=seeded(1))
    labels = torch.tensor([0, 4, 5])
    same = torch.cat([old, torch.tensor([[0.0, 0], [1, 0], [0, 1]])], dim=1)
    assert float(mixed_distillation(same, old, labels, 2.0)) == pytest.approx(0, abs=1e-6)
    assert float(mixed_distillation(same + torch.eye(6)[:3], old, labels, 2.0)) > 0.01


def test_the_teacher_knows_no_untrained_module() -> None:
    """On its own path by default; as released it has the new path's, which say something else."""
    images = random_images(3)
    before = learned(2).backbone.eval()
    plain, released = begun(2), begun(2, parity=True)
    for method in (plain, released):
        assert method.teacher is not None
        assert not method.teacher[0].training
    assert torch.equal(plain.teacher[0](images), before(images))  # type: ignore[index]
    assert not torch.allclose(released.teacher[0](images), before(images))  # type: ignore[index]


def test_a_test_image_passes_all_paths_and_may_be_any_class() -> None:
    method, images = learned(5), random_images(5)
    expected = method.head.all(method.backbone.eval()(images)).detach()
    found = method.predict(batch_of(images)).logits
    assert found.shape == (5, 10)
    torch.testing.assert_close(found, expected)
    alone = torch.cat([method.predict(batch_of(images[[row]])).logits for row in (4, 0, 2)])
    torch.testing.assert_close(alone, found[[4, 0, 2]], atol=1e-5, rtol=1e-5)


def shown(index: int, held_out: Tensor, judged: Tensor) -> TaskView:
    """A task whose held-out and judged images are given, of any class so far."""
    labels = torch.randint(CLASSES * (index + 1), (len(held_out),), generator=seeded(5))

    def batches(images: Tensor):
        return lambda: iter([Batch(lambda: images, labels)])

    return replace(task_view(index, CLASSES), held_out=batches(held_out), judged=batches(judged))


@pytest.mark.parametrize("parity", [False, True])
def test_the_best_candidate_is_kept(parity: bool) -> None:
    """By held-out images of the task; by those it is judged on only where parity with the released code is wanted."""
    options = {"candidates": 5, "parity": parity, "modules": 8}
    method, other = learned(2, **options), learned(2, **options)
    assert method.hold_out == (0 if parity else 0.1)
    assert method.peeks == parity
    task = shown(2, random_images(40, seed=7), random_images(40, seed=8))
    phases = method.phases(task)
    assert [phase.name for phase in phases] == [f"path {n}" for n in range(1, 6)]
    learn(method, 2, task)
    chosen_by = next(iter(task.judged() if parity else task.held_out()))
    scores, states = [], []
    other.begin_task(task)
    for number, phase in enumerate(phases):
        other.begin_phase(phase, task)
        moved(other, 200 + number)
        scores.append(float((other.predict(chosen_by).logits.argmax(1) == chosen_by.labels).float().mean()))
        states.append({n: v.clone() for n, v in other.state().items() if not n.startswith("best.")})
    best = scores.index(max(scores))
    assert len(set(scores)) > 1
    assert method.state().keys() == states[best].keys()
    assert all(torch.equal(value, states[best][name]) for name, value in method.state().items())


def test_each_candidate_starts_where_the_task_began() -> None:
    method, task = learned(2, candidates=2, modules=8), shown(2, random_images(4), random_images(4))
    before = {name: value.clone() for name, value in method.state().items() if "birth" not in name}
    method.begin_task(task)
    for phase in method.phases(task):
        method.begin_phase(phase, task)
        state = method.state()
        assert all(torch.equal(state[name], value) for name, value in before.items())
        assert not state["head.weight.2"].any()
        moved(method, 3)


def test_what_is_added_is_what_it_has_beyond_the_backbone() -> None:
    method = learned(3)
    size = sum(parameter.numel() for parameter in ResNet(RESNET).parameters())
    report = method.parameters_report()
    assert report["backbone"] == size
    assert report["additional"]["count"] == max(0, count(method.backbone) - size)
    assert report["trained"] == count(method.backbone) + count(method.head)
