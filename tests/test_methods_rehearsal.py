"""ER, DER++, GDumb, BiC and Co²L: their losses by plain loops, and what trains when."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dualprompt.config import compose
from dualprompt.methods.base import METHODS, Batch, BufferPlan, Phase, TaskView, method_config
from dualprompt.methods.bic import BiC, bias_correction, correction_loss
from dualprompt.methods.co2l import Co2L, asymmetric_contrast, relation_distillation
from dualprompt.methods.derpp import DERPP, noted_error
from dualprompt.methods.er import ER
from dualprompt.methods.gdumb import GDumb, GDumbConfig, cutmix
from dualprompt.run.folder import Run
from dualprompt.training import group
from dualprompt.training.loop import train
from dualprompt.training.setup import prepare
from helpers import as_vit, of_labels, random_images, seeded, task_view, tiny_vit
from sandbox import World

NAMES = ("er", "der++", "gdumb", "bic", "co2l")
CLASSES = 3  # a task


def make(name: str, **options: Any) -> Any:
    return METHODS[name](method_config({"name": name, **options}), tiny_vit())


def labelled(count: int, first: int, seed: int, **options: Any) -> Batch:
    """Random images of the task whose first class is `first`."""
    images, second = random_images(count, seed), random_images(count, seed + 1000)
    labels = first + torch.arange(count) % CLASSES
    return Batch(lambda: images, labels, make_second=lambda: second, **options)


def after_tasks(name: str, tasks: int = 2, **options: Any) -> Any:
    """A method in the first phase of its `tasks`-th task, with a head that says something."""
    method = make(name, **options)
    for index in range(tasks):
        method.begin_task(task_view(index, CLASSES))
        spread(method.head, index)
    view = task_view(tasks - 1, CLASSES)
    method.begin_phase(method.phases(view)[0], view)
    return method


def spread(module: nn.Module, seed: int) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=seeded(seed)))


@torch.no_grad()
def plain_logits(method: Any, images: Tensor) -> list[list[float]]:
    """The head's logits of each image, without any method's additions."""
    weight, bias = torch.cat(list(method.head.weight)), torch.cat(list(method.head.bias))
    return (method.backbone(images) @ weight.T + bias).tolist()


def log_softmax(values: list[float]) -> list[float]:
    total = sum(math.exp(value - max(values)) for value in values)
    return [value - max(values) - math.log(total) for value in values]


def cross_entropies(logits: list[list[float]], labels: Tensor) -> list[float]:
    return [-log_softmax(row)[label] for row, label in zip(logits, labels.tolist(), strict=True)]


def value(loss: Tensor) -> float:
    return float(loss.detach())


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


@pytest.mark.parametrize("frozen", [False, True])
def test_er_is_the_cross_entropy_of_batch_and_replay_together(frozen: bool) -> None:
    method: ER = after_tasks("er", train_backbone=not frozen)
    batch, replay = labelled(4, CLASSES, 1), labelled(5, 0, 2)
    ours = cross_entropies(plain_logits(method, batch.images), batch.labels)
    theirs = cross_entropies(plain_logits(method, replay.images), replay.labels)
    if frozen:  # known features stand for the images
        for part in (batch, replay):
            part.frozen = method.backbone(part.images)
            part.make_images = None  # type: ignore[assignment]
            del part.images
    assert value(method.loss(batch)) == pytest.approx(mean(ours), rel=1e-4)
    batch.replay = (replay,)
    assert value(method.loss(batch)) == pytest.approx(mean(ours + theirs), rel=1e-4)


def test_noted_error_counts_known_columns_only() -> None:
    nan = math.nan
    logits = torch.tensor([[1.0, 2.0, 3.0, 9.0], [0.0, 1.0, 5.0, 9.0]], requires_grad=True)
    noted = torch.tensor([[0.0, 4.0, nan], [1.0, 1.0, 2.0]])  # the fourth class is new
    error = noted_error(logits, noted)
    assert value(error) == pytest.approx(((1 + 4) / 2 + (1 + 0 + 9) / 3) / 2)
    error.backward()
    assert logits.grad is not None
    expected = [[1 / 2, -2 / 2, 0, 0], [-1 / 3, 0, 3 / 3, 0]]
    torch.testing.assert_close(logits.grad, torch.tensor(expected))


def test_derpp_draws_twice_and_weighs_each_draw() -> None:
    method: DERPP = after_tasks("der++", alpha=0.7, beta=0.2)
    batch, dark, answers = labelled(4, CLASSES, 1), labelled(5, 0, 2), labelled(6, 0, 3)
    ours = mean(cross_entropies(plain_logits(method, batch.images), batch.labels))
    assert value(method.loss(batch)) == pytest.approx(ours, rel=1e-4)
    dark.noted = torch.randn(5, CLASSES, generator=seeded(4))
    now = plain_logits(method, dark.images)
    squares = [(now[i][c] - float(dark.noted[i, c])) ** 2 for i in range(5) for c in range(CLASSES)]
    replayed = mean(cross_entropies(plain_logits(method, answers.images), answers.labels))
    batch.replay = (dark, answers)
    assert value(method.loss(batch)) == pytest.approx(ours + 0.7 * mean(squares) + 0.2 * replayed, rel=1e-4)
    assert (DERPP.Config().alpha, DERPP.Config().beta) == (0.3, 0.5)  # type: ignore[attr-defined]


def test_derpp_notes_the_logits_of_all_classes_so_far() -> None:
    method: DERPP = after_tasks("der++")
    batch = labelled(4, CLASSES, 1)
    expected = torch.tensor(plain_logits(method, batch.images))
    torch.testing.assert_close(method.note(batch), expected, rtol=1e-4, atol=1e-5)
    assert method.buffer == BufferPlan(1000, "reservoir", notes=True)


def test_cutmix_pastes_a_box_of_the_image_before() -> None:
    images = torch.arange(5).float()[:, None, None, None].expand(5, 3, 8, 8).contiguous()
    noise = torch.tensor(
        [
            [0.0, 0.75, 0.5, 0.5],  # a quarter of the area, in the middle
            [0.0, 0.75, 0.0, 0.5],  # the same, but half of it above the image
            [0.6, 0.0, 0.5, 0.5],  # not mixed
            [0.4, 0.0, 0.5, 0.5],  # all of it
            [0.0, 0.75, 0.5, 1.0],
        ]
    )
    mixed, share = cutmix(images, noise, 0.5)
    assert share.tolist() == [0.75, 0.875, 1.0, 0.0, 0.875]
    boxes = [
        (range(2, 6), range(2, 6)),
        (range(0, 2), range(2, 6)),
        None,
        (range(8), range(8)),
        (range(2, 6), range(6, 8)),
    ]
    for i, box in enumerate(boxes):
        for y in range(8):
            for x in range(8):
                pasted = box is not None and y in box[0] and x in box[1]
                assert mixed[i, :, y, x].tolist() == [float((i - 1) % 5 if pasted else i)] * 3


def test_cutmix_mixes_half_of_the_images_by_a_uniform_share() -> None:
    images = torch.zeros(4000, 1, 32, 32)
    images[::2] = 1  # neighbours differ
    mixed, share = cutmix(images, torch.rand(4000, 4, generator=seeded(0)), 0.5)
    assert abs(float((share == 1).float().mean()) - 0.5) < 0.04
    own = (mixed == images).float().mean(dim=(1, 2, 3))
    torch.testing.assert_close(own, share)
    # E[1 − share | mixed]: a box of side s = √(1 − λ) around a uniform centre keeps s − s²/4 of each side.
    sides = torch.linspace(0, 1, 100_001)[1:]
    expected = float(((sides - sides**2 / 4) ** 2 * 2 * sides).mean())
    assert float((1 - share[share < 1]).mean()) == pytest.approx(expected, abs=0.02)


@pytest.mark.parametrize("train_backbone", [True, False])
def test_gdumb_learns_mixed_images_by_both_labels(train_backbone: bool) -> None:
    method: GDumb = after_tasks("gdumb", train_backbone=train_backbone)
    batch = labelled(6, 0, 1, noise=torch.rand(6, 4, generator=seeded(2)))
    assert batch.noise is not None
    mixed, share = cutmix(batch.images, batch.noise, 0.5)
    assert 0 < float((share < 1).float().mean()) < 1
    logits = plain_logits(method, mixed)
    own, other = cross_entropies(logits, batch.labels), cross_entropies(logits, batch.labels.roll(1))
    expected = mean([s * a + (1 - s) * b for s, a, b in zip(share.tolist(), own, other, strict=True)])
    if not train_backbone:
        batch.frozen = method.backbone(batch.images)  # of the images before they were mixed: no use
    assert value(method.loss(batch)) == pytest.approx(expected, rel=1e-4)
    plain: GDumb = after_tasks("gdumb", cutmix=0, train_backbone=train_backbone)
    expected = mean(cross_entropies(plain_logits(plain, batch.images), batch.labels))
    assert plain.phases(task_view(1))[0].noise == 0
    assert value(plain.loss(labelled(6, 0, 1))) == pytest.approx(expected, rel=1e-4)


def test_gdumb_starts_from_the_pre_trained_weights_at_every_task() -> None:
    method: GDumb = make("gdumb", cycles=3, lr=0.1)
    before = {name: value.clone() for name, value in method.backbone.state_dict().items()}
    method.begin_task(task_view(0))
    spread(method, 3)
    method.begin_task(task_view(1))
    assert all(torch.equal(value, before[name]) for name, value in method.backbone.state_dict().items())
    assert len(torch.cat(list(method.head.bias))) == 6
    assert all(not parameter.any() for parameter in method.head.parameters())
    assert method.phases(task_view(1)) == (Phase(data="buffer", epochs=7, cycles=3, lr=0.1, noise=4),)
    assert method.buffer == BufferPlan(1000, "balanced", fill="before")
    assert set(method.state()) == {name for name, _ in method.named_parameters()}


def test_gdumb_knows_its_buffer_by_heart(world: World, tmp_path: Path) -> None:
    """In the end all images of the buffer are right; thirty passes in one cosine, as for a task, do not do."""

    class Watched(GDumb):
        right: list[float]

        def end_task(self, task: TaskView) -> None:
            super().end_task(task)
            hits = [self.predict(each).logits.argmax(1) == each.labels for each in task.batches()]
            self.right.append(float(torch.cat(hits).float().mean()))

    class Briefly(Watched):
        def phases(self, task: TaskView) -> tuple[Phase, ...]:
            return (replace(super().phases(task)[0], epochs=30, cycles=1),)

    def learn(kind: type[Watched], name: str) -> list[float]:
        # The buffer has room for everything, and the only task is all of it.
        own = {"benchmark.tasks": 1, "method.name": "gdumb", "method.buffer_size": 60}
        training = {"train.lr": 0.002, "train.schedule": "cosine", "train.batch_size": 39}
        config = group.plan([compose(str(world.preset), None, own | training)], baseline=False)[0].config
        setup = prepare(config)
        method = kind(GDumbConfig.model_validate(config.method), setup.method.backbone)
        method.right = []
        run = Run.create(tmp_path / name, config, setup.stream, setup.weights, setup.precision)
        train(replace(setup, method=method), run)
        return method.right

    assert min(learn(Watched, "converged")) > 0.99
    assert max(learn(Briefly, "briefly")) < 0.9


def bic_by_hand(method: BiC, teacher: Callable[[Tensor], list[list[float]]], batch: Batch) -> float:
    """λ · KL(softmax(ô/2), softmax(o/2)) over the old classes + (1 − λ) · CE over all, one image after another."""
    student = corrected(method, plain_logits(method, batch.images))
    old, new = method.head.labels[0], len(method.head.bias[-1])
    losses = []
    for now, before, label in zip(student, teacher(batch.images), batch.labels.tolist(), strict=True):
        log_p = log_softmax([value / 2 for value in now[:old]])
        log_q = log_softmax([value / 2 for value in before])
        divergence = sum(math.exp(q) * (q - p) for p, q in zip(log_p, log_q, strict=True))
        losses.append(old / (old + new) * divergence - new / (old + new) * log_softmax(now)[label])
    return mean(losses)


def corrected(method: BiC, logits: list[list[float]]) -> list[list[float]]:
    pairs = [pair.tolist() for pair, rows in zip(method.correction, method.head.bias, strict=True) for _ in rows]
    return [[a * z + b for z, (a, b) in zip(row, pairs, strict=True)] for row in logits]


@pytest.mark.parametrize("train_backbone", [True, False])
def test_bic_distils_the_corrected_old_model_by_the_share_of_old_classes(train_backbone: bool) -> None:
    method: BiC = after_tasks("bic", train_backbone=train_backbone)
    with torch.no_grad():
        method.correction[1].copy_(torch.tensor([0.6, -0.4]))
    reference = after_tasks("bic", train_backbone=train_backbone)  # what the teacher must be
    view = task_view(2, 2)  # four of six classes would be 2/3, six of eight are 3/4
    method.begin_task(of_labels(view, 6, 2))
    with torch.no_grad():
        reference.correction[1].copy_(torch.tensor([0.6, -0.4]))
    method.begin_phase(method.phases(view)[0], view)
    spread(method.head, 7)
    if train_backbone:
        spread(as_vit(method.backbone).blocks[3], 8)
    batch = labelled(5, 5, 1)

    def teacher(images: Tensor) -> list[list[float]]:
        return corrected(reference, plain_logits(reference, images))

    expected = bic_by_hand(method, teacher, batch)
    assert value(method.loss(batch)) == pytest.approx(expected, rel=1e-4)
    logits = torch.tensor(corrected(method, plain_logits(method, batch.images)))
    torch.testing.assert_close(method.predict(batch).logits, logits, rtol=1e-4, atol=1e-4)


def test_bic_on_its_first_task_is_plain_cross_entropy_on_all_images() -> None:
    method: BiC = after_tasks("bic", tasks=1)
    batch = labelled(5, 0, 1)
    expected = mean(cross_entropies(plain_logits(method, batch.images), batch.labels))
    assert value(method.loss(batch)) == pytest.approx(expected, rel=1e-4)
    assert method.phases(task_view(0)) == (Phase(data="task+buffer"),)
    assert method.buffer == BufferPlan(1000, "balanced", reserve=True)


def reserved_view(index: int, batches: list[Batch]) -> TaskView:
    return TaskView(**{**vars(task_view(index, CLASSES)), "reserved": lambda: iter(batches)})


def correction_by_hand(pair: list[float], logits: list[list[float]], labels: list[int], decay: float) -> float:
    """The mean over classes of the mean CE of their images, with the newest classes' logits at α·z + β; and decay."""
    alpha, beta = pair
    first = len(logits[0]) - CLASSES
    losses: dict[int, list[float]] = {}
    for row, label in zip(logits, labels, strict=True):
        now = row[:first] + [alpha * value + beta for value in row[first:]]
        losses.setdefault(label, []).append(-log_softmax(now)[label])
    return mean([mean(each) for each in losses.values()]) + decay / 2 * ((alpha - 1) ** 2 + beta**2)


@pytest.mark.parametrize("train_backbone", [True, False])
def test_bic_solves_for_the_newest_alpha_and_beta_to_the_optimum(train_backbone: bool) -> None:
    """Task after task: the slope is zero and no neighbour is better, whatever the learning rate; old pairs stay."""
    method: BiC = after_tasks("bic", tasks=1, train_backbone=train_backbone)
    method.end_task(reserved_view(0, [labelled(9, 0, 5)]))
    assert method.correction[0].tolist() == [1, 0], "there was nothing to weigh the first classes against"
    for task in (1, 2):
        method.begin_task(task_view(task, CLASSES))
        spread(method.head, 10 + task)
        with torch.no_grad():
            method.head.bias[-1].add_(4)  # the bias towards new classes that stage one leaves
        before = [pair.tolist() for pair in method.correction[:-1]]
        # 4 images of each old class, 2 of each new one: classes count alike.
        batches = [labelled(12, CLASSES * old, 20 + old) for old in range(task)] + [labelled(6, CLASSES * task, 30)]
        labels = torch.cat([batch.labels for batch in batches]).tolist()
        raw = [row for batch in batches for row in corrected(method, plain_logits(method, batch.images))]
        method.end_task(reserved_view(task, batches))
        assert [pair.tolist() for pair in method.correction[:-1]] == before
        found = method.correction[-1].tolist()
        assert max(abs(found[0] - 1), abs(found[1])) > 0.6, "further than sixty steps of 0.01 can go"
        at = correction_by_hand(found, raw, labels, 1e-4)
        assert at < correction_by_hand([1, 0], raw, labels, 1e-4) - 0.1
        for step in (1e-3, 0.1):
            around = [
                correction_by_hand([found[0] + a * step, found[1] + b * step], raw, labels, 1e-4)
                for a, b in ((1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (1, -1), (-1, 1), (-1, -1))
            ]
            assert min(around) > at
            slopes = [(around[i] - around[i + 1]) / (2 * step) for i in (0, 2)]
            assert slopes == pytest.approx([0, 0], abs=1e-4 if step < 0.1 else 0.1)
        other = labelled(5, 0, 40)
        shown = torch.tensor(corrected(method, plain_logits(method, other.images)))
        torch.testing.assert_close(method.predict(other).logits, shown, rtol=1e-4, atol=1e-4)
        assert not any(name.startswith("correction") for name in method.trainable())


def test_a_bias_correction_is_finite_where_the_images_are_told_apart() -> None:
    logits = torch.tensor([[9.0, 0.0, -9.0], [0.0, 9.0, -9.0], [0.0, 0.0, 9.0]])  # the decay alone keeps it finite
    labels = torch.arange(3)
    pair = bias_correction(logits, labels, 2, 1e-4)
    assert pair.isfinite().all()
    pair.requires_grad_()
    (slope,) = torch.autograd.grad(correction_loss(pair, logits.double(), labels, 2, 1e-4), pair)
    assert float(slope.abs().max()) < 1e-7


def test_bic_leaves_the_correction_where_only_one_side_has_images() -> None:
    for first in (0, CLASSES):
        method: BiC = after_tasks("bic")
        method.end_task(reserved_view(1, [labelled(6, first, 1)]))
        assert method.correction[1].tolist() == [1, 0]
    method = after_tasks("bic")
    method.end_task(reserved_view(1, []))
    assert method.correction[1].tolist() == [1, 0]


def unit_rows(count: int, seed: int, dim: int = 5) -> Tensor:
    return nn.functional.normalize(torch.randn(count, dim, generator=seeded(seed), dtype=torch.float64), dim=1)


def contrast_by_hand(z: list[list[float]], labels: list[int], anchors: list[int], temperature: float) -> float:
    losses = []
    for i in anchors:
        others = [k for k in range(len(z)) if k != i]
        logits = [sum(a * b for a, b in zip(z[i], z[k], strict=True)) / temperature for k in others]
        chances = log_softmax(logits)
        losses.append(-mean([chance for k, chance in zip(others, chances, strict=True) if labels[k] == labels[i]]))
    return mean(losses)


def relations_by_hand(now: list[list[float]], past: list[list[float]], kappa: float, past_kappa: float) -> float:
    losses = []
    for i in range(len(now)):
        others = [k for k in range(len(now)) if k != i]
        log_p, log_q = (
            log_softmax([sum(a * b for a, b in zip(z[i], z[k], strict=True)) / t for k in others])
            for z, t in ((now, kappa), (past, past_kappa))
        )
        losses.append(-sum(math.exp(q) * p for p, q in zip(log_p, log_q, strict=True)))
    return mean(losses)


def contrast_of_authors(z: list[list[float]], labels: list[int], anchors: list[int]) -> float:
    """As the authors' code has it at T = 0.5: times T over SupCon's base, and old images count as 0 in the mean."""
    return 0.5 / 0.07 * contrast_by_hand(z, labels, anchors, 0.5) * len(anchors) / len(z)


def test_contrast_has_new_images_as_anchors_only() -> None:
    z, labels = unit_rows(9, 1), [3, 0, 4, 3, 1, 0, 4, 1, 0]
    new = [0, 2, 3, 6]
    anchors = torch.tensor(labels) >= 3

    def contrast(similarity: Tensor, labels: list[int]) -> Tensor:
        return asymmetric_contrast(similarity, torch.tensor(labels), anchors, 0.5, 0.07)

    found = contrast(z @ z.T, labels)
    assert value(found) == pytest.approx(contrast_of_authors(z.tolist(), labels, new))
    assert value(found) != pytest.approx(contrast_of_authors(z.tolist(), labels, list(range(9))), rel=0.01)
    # Old images are negatives: whether two of them are alike, in label or in feature, changes nothing.
    assert torch.equal(contrast(z @ z.T, [3, 0, 4, 3, 0, 1, 4, 1, 2]), found)
    similarity = (z @ z.T).requires_grad_()
    contrast(similarity, labels).backward()
    assert similarity.grad is not None
    assert not similarity.grad[~anchors].any()
    assert similarity.grad[anchors][:, ~anchors].all()
    # Where an old image has an anchor's class it is a positive.
    mixed = [3, 3, 4, 3, 1, 0, 4, 1, 0]
    assert value(contrast(z @ z.T, mixed)) == pytest.approx(contrast_of_authors(z.tolist(), mixed, new))
    # A batch may hold old images only; then there is nothing to contrast.
    nothing = asymmetric_contrast(z @ z.T, torch.tensor(labels), torch.zeros(9, dtype=torch.bool), 0.5, 0.07)
    assert value(nothing) == 0


def test_relations_are_distilled_between_all_images() -> None:
    now, past = unit_rows(6, 1), unit_rows(6, 2)
    similarity = (now @ now.T).requires_grad_()
    found = relation_distillation(similarity, past @ past.T, 0.2, 0.01)
    assert value(found) == pytest.approx(relations_by_hand(now.tolist(), past.tolist(), 0.2, 0.01))
    found.backward()
    assert similarity.grad is not None
    assert not similarity.grad.diagonal().any()  # no image is compared with itself
    same = (past @ past.T / 0.01 * 0.2).requires_grad_()  # the same relations: the minimum
    relation_distillation(same, past @ past.T, 0.2, 0.01).backward()
    assert same.grad is not None
    assert float(same.grad.abs().max()) < 1e-12


@torch.no_grad()
def projected(method: Co2L, images: Tensor) -> list[list[float]]:
    return nn.functional.normalize(method.projector(method.backbone(images)), dim=1).tolist()


@pytest.mark.parametrize("train_backbone", [True, False])
def test_co2l_contrasts_two_views_and_distils_from_the_model_before(train_backbone: bool) -> None:
    method: Co2L = after_tasks("co2l", tasks=1, train_backbone=train_backbone)
    first = labelled(4, 0, 5)
    images, labels = torch.cat([first.images, first.second]), first.labels.tolist() * 2
    expected = contrast_of_authors(projected(method, images), labels, list(range(8)))
    assert value(method.loss(first)) == pytest.approx(expected, rel=1e-3)

    method.begin_task(task_view(1))
    method.begin_phase(method.phases(task_view(1))[0], task_view(1))
    batch = mingled(labelled(4, CLASSES, 1), labelled(5, 0, 2))
    images, labels = torch.cat([batch.images, batch.second]), batch.labels.tolist() * 2
    new = [place for place, label in enumerate(labels) if label >= CLASSES]
    assert len(new) == 8
    assert new != list(range(8))
    past = projected(method, images)
    spread(method.projector, 8)
    if train_backbone:
        spread(as_vit(method.backbone).blocks[3], 9)
    now = projected(method, images)
    contrast, relations = contrast_of_authors(now, labels, new), relations_by_hand(now, past, 0.2, 0.01)
    assert value(method.loss(batch)) == pytest.approx(contrast + relations, rel=1e-3)
    method.config = method.config.model_copy(update={"distillation_weight": 0.0})
    assert value(method.loss(batch)) == pytest.approx(contrast, rel=1e-3)


def mingled(one: Batch, other: Batch) -> Batch:
    """The images of two batches, shuffled."""
    order = torch.randperm(len(one.labels) + len(other.labels), generator=seeded(4))

    def both(first: Tensor, second: Tensor) -> Tensor:
        return torch.cat([first, second])[order]

    return Batch(
        lambda: both(one.images, other.images),
        both(one.labels, other.labels),
        make_second=lambda: both(one.second, other.second),
    )


def test_co2l_draws_new_and_old_images_alike_and_its_projector_has_a_rate() -> None:
    method: Co2L = after_tasks("co2l", head_lr=0.02)
    assert method.phases(task_view(1))[0] == Phase(data="task+buffer", views=2, augment="random_resized_crop")
    names = [name for name, _ in method.named_parameters()]
    rates = {name.split(".")[0]: method.own_lr(name) for name in names}
    assert rates == {"backbone": None, "head": 0.02, "projector": 0.001}
    assert make("co2l", projector_lr=None).own_lr("projector.0.weight") is None


@pytest.mark.parametrize("train_backbone", [True, False])
def test_co2l_trains_features_first_and_then_a_head_from_zero(train_backbone: bool) -> None:
    method: Co2L = after_tasks("co2l", tasks=1, train_backbone=train_backbone)
    method.begin_task(task_view(1))
    assert all(not parameter.any() for parameter in method.head.parameters())
    learn, head = method.phases(task_view(1))
    assert (head.data, head.balanced, head.views) == ("task+buffer", True, 1)
    for _ in range(2):  # the phases of two tasks
        method.begin_phase(learn, task_view(1))
        roots = {name.split(".")[0] for name in method.trainable()}
        assert roots == ({"backbone", "projector"} if train_backbone else {"projector"})
        method.loss(labelled(4, CLASSES, 1)).backward()
        assert all(parameter.grad is not None for parameter in method.trainable().values())
        method.zero_grad()
        method.begin_phase(head, task_view(1))
        assert {name.split(".")[0] for name in method.trainable()} == {"head"}
        batch = labelled(4, 2, 1)
        expected = mean(cross_entropies(plain_logits(method, batch.images), batch.labels))
        loss = method.loss(batch)
        assert value(loss) == pytest.approx(expected, rel=1e-4)
        loss.backward()
        assert {name.split(".")[0] for name, p in method.named_parameters() if p.grad is not None} == {"head"}
    assert method.buffer == BufferPlan(1000, "reservoir")


def test_the_projector_comes_from_the_task_s_generator() -> None:
    one, other = after_tasks("co2l", tasks=1), after_tasks("co2l", tasks=1)
    for a, b in zip(one.projector.parameters(), other.projector.parameters(), strict=True):
        assert torch.equal(a, b)
        assert 0.8 < value(a.abs().max()) * math.sqrt(32) <= 1
