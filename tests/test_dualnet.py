"""DualNet: both learners by hand, the look-ahead at its ends, and what the buffer's notes do."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dualprompt.backbones.resnet import ResNet, ResNetConfig, draw
from dualprompt.config import TrainConfig, compose
from dualprompt.data import distort
from dualprompt.data.distort import SSL_DRAWS
from dualprompt.errors import DualPromptError
from dualprompt.methods.base import METHODS, Batch, method_config
from dualprompt.methods.dualnet import DualNet
from dualprompt.methods.slow_fast import barlow_twins, fast_block, noted_divergence
from dualprompt.run.folder import Run
from dualprompt.training.loop import train
from dualprompt.training.optimise import make_optimisers
from dualprompt.training.setup import prepare
from helpers import batch_of, seeded, task_view, tiny_vit
from sandbox import NETWORKS, World, remains
from test_online import Until

SIDE, CLASSES = 32, 3


def resnet(pool: bool = True) -> ResNet:
    return draw(ResNet(ResNetConfig(SIDE, width=4, stem="cifar", pool=pool)), seeded(4)).freeze()


def made(tasks: int = 1, **options: Any) -> DualNet:
    method = METHODS["dualnet"](method_config({"name": "dualnet", "slow_batch": 6, **options}), resnet())
    assert isinstance(method, DualNet)
    for index in range(tasks):
        method.begin_task(task_view(index, CLASSES))
    with torch.no_grad():  # a head of zeros would hide the features
        for parameter in method.head.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=seeded(9)))
    return method


def some(count: int, seed: int, noise: int = 0, classes: int = CLASSES) -> Batch:
    images = torch.randn(count, 3, SIDE, SIDE, generator=seeded(seed))
    drawn = torch.rand(count, noise, generator=seeded(seed + 50)) if noise else None
    return Batch(lambda: images, torch.arange(count) % classes, noise=drawn)


def training_batch(method: DualNet, replay: bool = True) -> Batch:
    """A batch as the loop makes it for the method's phase."""
    (phase,) = method.phases(task_view(1, CLASSES))
    batch = some(5, 1, phase.noise, method.head.classes)
    if replay:
        batch.replay = tuple(some(5, 20 + number, phase.noise) for number in range(phase.replay))
        batch.replay += tuple(some(size, 40 + n, phase.noise) for n, size in enumerate(phase.more_replay))
        for number, old in enumerate(batch.replay):
            old.noted = torch.randn(len(old.labels), CLASSES, generator=seeded(70 + number))
    return batch


def carry_out(method: DualNet, batch: Batch) -> list[float]:
    """Take every step of a batch, as the loop does."""
    (phase,) = method.phases(task_view(1, CLASSES))
    steps = method.steps(phase)
    config = TrainConfig(optimiser="sgd", momentum=0.0, lr=0.03)
    optimisers, losses = make_optimisers(method, steps, config), []
    method.train()
    for step in steps:
        method.zero_grad()
        loss = step.loss(batch)
        loss.backward()
        optimisers[step.name].step()
        if step.after is not None:
            step.after()
        losses.append(float(loss.detach()))
    return losses


def test_barlow_twins_by_hand() -> None:
    generator = seeded(0)
    one, two = torch.randn(6, 4, generator=generator), 3 + 2 * torch.randn(6, 4, generator=generator)
    expected = 0.0
    for i in range(4):
        for j in range(4):
            correlation = float(torch.corrcoef(torch.stack([one[:, i], two[:, j]]))[0, 1])
            expected += (correlation - 1) ** 2 if i == j else 0.002 * correlation**2
    assert float(barlow_twins(one, two, 0.002)) == pytest.approx(expected, rel=1e-4)
    assert float(barlow_twins(one, one, 0.0)) == pytest.approx(0, abs=1e-6)
    still = torch.ones(6, 4, requires_grad=True)  # a feature that says nothing divides by no zero
    barlow_twins(still, two, 0.002).backward()
    assert still.grad is not None
    assert still.grad.isfinite().all()


def test_the_divergence_by_hand() -> None:
    logits = torch.tensor([[1.0, 2.0, 0.5], [0.0, 1.0, 4.0], [1.0, 1.0, 1.0]], requires_grad=True)
    nan = torch.nan
    noted = torch.tensor([[2.0, 1.0], [0.5, nan], [nan, nan]])
    found = noted_divergence(logits, noted, 2.0)
    past, now = torch.tensor([2.0, 1.0]).div(2).softmax(dim=0), torch.tensor([1.0, 2.0]).div(2).softmax(dim=0)
    expected = (past * (past / now).log()).sum() / 3  # one known class is certain, then and now; no note adds nothing
    torch.testing.assert_close(found, expected)
    found.backward()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()
    assert logits.grad[1:].abs().max() == 0


def test_the_fast_learner_has_the_size_of_the_original() -> None:
    blocks = nn.ModuleList(map(fast_block, (3, 64, 128, 256), (64, 128, 256, 512)))
    assert sum(parameter.numel() for parameter in blocks.parameters()) == 1_552_896


def test_features_are_the_fast_learners_maps_gated_by_the_slow_ones() -> None:
    method, batch = made().eval(), some(4, 3)
    x = batch.images
    for block, gate, side in zip(method.fast, method.backbone.maps(x), (16, 8, 4, 2), strict=True):
        conv, norm = block[0], block[1]  # type: ignore[index]
        x = F.conv2d(x, conv.weight, conv.bias, padding=1)
        x = F.batch_norm(x, norm.running_mean, norm.running_var, norm.weight, norm.bias)
        x = F.max_pool2d(x.relu(), 2, ceil_mode=True) * gate
        assert x.shape[-1] == side
    torch.testing.assert_close(method.features(batch), x.mean(dim=(2, 3)))
    expected = F.linear(x.mean(dim=(2, 3)), method.head.weight[0], method.head.bias[0])
    torch.testing.assert_close(method.predict(batch).logits, expected)


def test_the_losses_of_a_batch_by_hand() -> None:
    method = made(tasks=2)
    (phase,) = method.phases(task_view(1, CLASSES))
    assert (phase.replay, phase.more_replay) == (2, (6, 6, 6, 6))
    batch = training_batch(method)
    steps = method.steps(phase)
    assert [step.name for step in steps] == ["slow"] * 4 + ["fast"] * 2
    method.train()
    for number in range(4):
        seen, twin = batch.replay[2 + number], copy.deepcopy(method)
        assert seen.noise is not None
        mean, std = (torch.tensor(each)[:, None, None] for each in (method.backbone.mean, method.backbone.std))
        projected = []
        for view, blur in enumerate((1.0, 0.1)):
            chances = seen.noise[:, SSL_DRAWS * (2 * number + view) :][:, :SSL_DRAWS]
            shown = (distort.ssl_view(seen.images * std + mean, chances, blur) - mean) / std
            projected.append(twin.projector(twin.backbone(shown)))
        one, two = projected
        torch.testing.assert_close(steps[number].loss(batch), barlow_twins(one, two, 0.002))
    for number in range(2):
        old, twin = batch.replay[number], copy.deepcopy(method)
        assert old.noted is not None
        logits = twin.head.all(twin.features(batch_of(torch.cat([batch.images, old.images]))))
        now, before = logits[:5], logits[5:]
        past = (old.noted / 2).softmax(dim=1)
        divergence = (past * (past.log() - (before[:, :CLASSES] / 2).log_softmax(dim=1))).sum() / (2 * CLASSES)
        expected = F.cross_entropy(now, batch.labels) + F.cross_entropy(before, old.labels) + 10 * divergence
        torch.testing.assert_close(steps[4 + number].loss(batch), expected)


def test_images_without_stored_logits_are_replayed_for_their_labels_alone() -> None:
    """Two of the first task, of whose three classes the second knows the first two; three of the running task."""
    method = made(tasks=2)
    batch = training_batch(method)
    old, nan = batch.replay[0], torch.nan
    old.labels = torch.tensor([0, 4, 1, 5, 3])
    old.noted = torch.tensor([[2.0, -1.0, 0.5], [nan] * 3, [1.0, 3.0, nan], [nan] * 3, [nan] * 3])
    method.train()
    logits = copy.deepcopy(method).head.all(method.features(batch_of(torch.cat([batch.images, old.images])))).detach()
    now, before = logits[:5], logits[5:]
    expected = -sum(float(row.log_softmax(dim=0)[label]) for row, label in zip(now, batch.labels, strict=True)) / 5
    expected -= sum(float(row.log_softmax(dim=0)[label]) for row, label in zip(before, old.labels, strict=True)) / 5
    for image, known in ((0, 3), (2, 2)):
        past, here = ((each[image, :known] / 2).softmax(dim=0).tolist() for each in (old.noted, before))
        expected += 10 / 6 * sum(p * math.log(p / q) for p, q in zip(past, here, strict=True))
    loss = method.loss(batch)
    assert float(loss.detach()) == pytest.approx(expected, rel=1e-4)
    loss.backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in method.parameters())
    old.noted = torch.full((5, CLASSES), nan)  # none has: two cross-entropies are left
    alone = F.cross_entropy(now, batch.labels) + F.cross_entropy(before, old.labels)
    torch.testing.assert_close(method.loss(batch).detach(), alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("offered", ["step", "task"])
def test_what_a_run_replays(offered: str, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing in the first task; then what was offered so far, with the logits of the ends of images' own tasks."""
    seen: list[tuple[int, Tensor, Tensor]] = []  # classes known at a step, and labels and notes of what it replays
    asked: list[tuple[int, Tensor]] = []  # the same of what is noted
    loss, note = DualNet._fast_loss, DualNet.note

    def watched(self: DualNet, number: int, batch: Batch) -> Tensor:
        for old in batch.replay[: self.config.fast_steps]:
            assert old.noted is not None
            seen.append((self.head.classes, old.labels.clone(), old.noted.clone()))
        return loss(self, number, batch)

    def noting(self: DualNet, batch: Batch) -> Tensor:
        asked.append((self.head.classes, batch.labels.clone()))
        return note(self, batch)

    monkeypatch.setattr(DualNet, "_fast_loss", watched)
    monkeypatch.setattr(DualNet, "note", noting)
    options = {"offered": offered, "slow_batch": 4, "outer": 1, "buffer_size": 12}
    small = {f"method.{key}": value for key, value in options.items()} | NETWORKS["dualnet"]
    whole = {"method.name": "dualnet", "train.epochs": 1, "evaluate.batch_size": 64}
    config = compose(str(world.preset), None, whole | small)
    setup = prepare(config)
    train(setup, Run.create(tmp_path / "run", config, setup.stream, setup.weights, setup.precision))
    assert {known for known, *_ in seen} == {4, 6}, "three tasks of two classes"
    for known, labels, noted in seen:
        columns = torch.where(labels < known - 2, 2 * (labels // 2 + 1), 0)
        assert torch.equal((~noted.isnan()).sum(dim=1), columns)
    of_running = sum(int((labels >= known - 2).sum()) for known, labels, _ in seen)
    assert (of_running > 0) == (offered == "step")
    assert [known for known, _ in asked] == [2, 4, 6], "at the end of each task, once"
    assert all(labels.min() >= known - 2 for known, labels in asked), "and only what has no note"


def test_a_run_goes_on_with_the_buffer_that_it_had(world: World, tmp_path: Path) -> None:
    """It is stopped in the first task, and in both epochs of the second."""
    options = {"slow_batch": 4, "outer": 1, "buffer_size": 6}
    small = {f"method.{key}": value for key, value in options.items()} | NETWORKS["dualnet"]
    small |= {"method.name": "dualnet", "checkpoint.every_seconds": 0}
    two = {"name": "tiny", "dataset": str(world.images), "tasks": 2}
    config = compose(str(world.preset_with("dualnet.yaml", benchmark=two)), None, small)
    setup = prepare(config)
    runs = [
        Run.create(tmp_path / name, config, setup.stream, setup.weights, setup.precision) for name in ("truth", "run")
    ]
    train(setup, runs[0])
    for steps in (3, 11, 5):  # a task has two epochs of five steps: at its 2nd, and at the 2nd and 6th of the other
        with pytest.raises(KeyboardInterrupt):
            train(prepare(config, share=setup), runs[1], progress=Until(steps))
        assert runs[1].checkpoints.progress_path.exists()
    train(prepare(config, share=setup), runs[1])
    mine, wanted = (remains(run.folder)["."] for run in reversed(runs))
    for what in ("result", "log", "state"):
        assert mine[what] == wanted[what], what


def test_in_the_first_task_the_slow_learner_sees_the_batch() -> None:
    method = made()
    (phase,) = method.phases(task_view(0, CLASSES))
    assert (phase.replay, phase.more_replay) == (0, ())
    batch = training_batch(method, replay=False)
    losses = carry_out(method, batch)
    assert len(losses) == 6
    assert len(set(losses[:4])) == 4, "each step has views of its own"
    lonely = some(1, 1, 88)
    assert carry_out(made(), lonely)[:4] == [0.0] * 4  # one image has no correlations


def slow_part(method: DualNet) -> dict[str, Tensor]:
    names = dict(method.named_parameters())
    return {name: value.detach().clone() for name, value in names.items() if name.startswith(("backbone", "projector"))}


def test_the_look_ahead_goes_a_share_of_the_way() -> None:
    """β = 1 is plain SGD, β = 0 leaves the slow learner, and in between lies what lies in between."""
    options = {"outer": 1, "fast_steps": 1}
    ends = {}
    for beta in (0.0, 0.25, 1.0):
        method = made(tasks=2, look_ahead=beta, **options)
        begun, batch = slow_part(method), training_batch(method)
        (phase,) = method.phases(task_view(1, CLASSES))
        *slow, _ = method.steps(phase)
        optimiser = make_optimisers(method, slow, TrainConfig(optimiser="sgd", momentum=0.0))["slow"]
        method.train()
        for step in slow:
            method.zero_grad()
            step.loss(batch).backward()
            optimiser.step()
            if step.after is not None:
                step.after()
        ends[beta] = slow_part(method)
    plain = made(tasks=2, **options)
    batch = training_batch(plain)
    plain.train()
    for number in range(2):
        plain.zero_grad()
        plain._slow_loss(number, batch).backward()
        with torch.no_grad():
            for parameter in plain._slow():
                assert parameter.grad is not None
                parameter -= 3e-4 * parameter.grad
    for name, value in begun.items():
        assert torch.equal(ends[0.0][name], value), name
        torch.testing.assert_close(ends[1.0][name], slow_part(plain)[name])
        torch.testing.assert_close(ends[0.25][name], value + 0.25 * (ends[1.0][name] - value))
    assert any(not torch.equal(ends[1.0][name], value) for name, value in begun.items())


def test_slow_steps_move_the_slow_learner_and_fast_steps_everything() -> None:
    method = made(tasks=2)
    (phase,) = method.phases(task_view(1, CLASSES))
    slow, fast = method.steps(phase)[0], method.steps(phase)[-1]
    moved = {name for name in method.trainable() if slow.moves(name)}
    assert moved == slow_part(method).keys()
    assert all(fast.moves(name) for name in method.trainable())
    before = {name: value.clone() for name, value in method.state().items()}
    carry_out(method, training_batch(method))
    assert all(not torch.equal(method.state()[name], before[name]) for name in method.trainable())


def test_a_view_is_drawn_as_it_says() -> None:
    images = torch.rand(400, 3, 16, 16, generator=seeded(1))
    chances = torch.rand(400, SSL_DRAWS, generator=seeded(2))
    views = distort.ssl_view(images, chances, 0.1)
    grey = ((views[:, 0] - views[:, 1]).abs() < 1e-6).flatten(1).all(dim=1)
    assert 0.13 < float(grey.float().mean()) < 0.27
    # Neither jittered, grey nor blurred: pixels of the original, shifted and mirrored.
    plain = torch.tensor([0.5, 0.5, 0.7, 0.9, 0.5, 0.5, 0.5, 0.5, 0.9, 0.9, 0.5]).expand(400, -1)
    assert torch.equal(distort.ssl_view(images, plain, 0.1), images)
    corner = plain.clone()
    corner[:, :3] = torch.tensor([0.99, 0.0, 0.0])
    moved = distort.shift(images, torch.tensor([[2, -2]]).expand(400, 2)).flip(3)
    assert torch.equal(distort.ssl_view(images, corner, 0.1), moved)
    blurred = distort.ssl_view(images, plain, 1.0)
    torch.testing.assert_close(blurred, distort.blur(images, torch.full((400,), 1.05)))


def test_a_prediction_depends_on_its_image_alone() -> None:
    method, batch = made(tasks=2).eval(), some(9, 3)
    whole = method.predict(batch).logits
    for size in (1, 4):
        pieces = [method.predict(batch_of(part)).logits for part in batch.images.split(size)]
        torch.testing.assert_close(torch.cat(pieces), whole, rtol=1e-4, atol=1e-4)
    order = torch.randperm(9, generator=seeded(5))
    torch.testing.assert_close(method.predict(batch_of(batch.images[order])).logits, whole[order], rtol=1e-4, atol=1e-4)


def test_networks_whose_maps_do_not_fit_are_refused() -> None:
    for backbone in (tiny_vit(), resnet(pool=False)):
        with pytest.raises(DualPromptError, match="'dualnet' needs a ResNet whose stages halve the image"):
            METHODS["dualnet"](method_config({"name": "dualnet"}), backbone)
    with pytest.raises(DualPromptError, match="training_logits unmasked"):
        method_config({"name": "dualnet", "training_logits": "masked"})
