"""What batches hold: every draw derives from (seed, task, phase, epoch, step), and where pixels lie does not matter."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning_fabric import Fabric
from torch import Tensor

from dualprompt.config import RunConfig
from dualprompt.data.images import Images
from dualprompt.data.stream import Subset
from dualprompt.data.views import View
from dualprompt.methods.base import Batch, Phase
from dualprompt.training.feed import Feed
from dualprompt.training.loader import Loader
from helpers import SIDE, subset_of, tiny_vit

CPU = Fabric(accelerator="cpu", devices=1)


class Elsewhere(Feed):
    """A feed on a device that has no room for the pixels of a dataset."""

    def resident(self, images: Images) -> Tensor | None:
        return None


def feed(kind: type[Feed] = Feed, seed: int = 0, augment: Any = "none", **train: Any) -> Feed:
    values = {"benchmark": {"dataset": "x"}, "seed": seed, "train": {"batch_size": 4, "augment": augment, **train}}
    view = View(SIDE, (0.5,) * 3, (0.25,) * 3, "bilinear", "resize", augment)
    return kind(RunConfig.model_validate(values), view, tiny_vit(), CPU)


def pictures(labels: list[int], seed: int = 0, side: int = SIDE, notes: Tensor | None = None) -> Subset:
    pixels = np.random.default_rng(seed).integers(0, 256, (len(labels), side, side, 3), dtype=np.uint8)
    return replace(subset_of(pixels, labels), notes=notes)


SHOWS = feed()
TASK = pictures([0, 1, 2] * 3 + [0], seed=1)
BUFFER = pictures([7, 8, 9, 7, 8], seed=2, notes=torch.arange(10.0).view(5, 2))


def batches(loader: Loader, epoch: int = 0, start: int = 0) -> list[Batch]:
    return [loader.batch(local.spec) for local in loader.epoch(epoch, start)]


def same(one: Batch, other: Batch) -> bool:
    pairs = [(one.images, other.images), (one.labels, other.labels)]
    pairs += [(getattr(one, name), getattr(other, name)) for name in ("frozen", "query", "noted", "noise")]
    equal = all(a is b or (a is not None and b is not None and torch.equal(a, b)) for a, b in pairs)
    return equal and len(one.replay) == len(other.replay) and all(map(same, one.replay, other.replay))


def rows_of(batch: Batch, subset: Subset) -> list[int]:
    """Return which images of a subset a batch shows, by their pixels."""
    known = SHOWS.batch(subset.images, SHOWS.fixed(subset, torch.arange(len(subset)))).images
    return [int((known - image).abs().flatten(1).amax(dim=1).argmin()) for image in batch.images]


@pytest.mark.parametrize("augment", ["none", "random_resized_crop"])
def test_an_epoch_shows_every_image_once_with_its_label(augment: str) -> None:
    loader = Loader(feed(augment=augment), TASK, 0, Phase())
    labels = torch.cat([batch.labels for batch in batches(loader)])
    assert Counter(labels.tolist()) == Counter(TASK.labels.tolist())
    if augment == "none":
        shown = [row for batch in batches(loader) for row in rows_of(batch, TASK)]
        assert sorted(shown) == list(range(10))
        assert TASK.labels[shown].tolist() == labels.tolist()
    assert [len(batch.labels) for batch in batches(loader)] == [4, 4, 2]


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=60), st.integers(0, 3))
def test_a_balanced_order_draws_every_class_equally_often(labels: list[int], epoch: int) -> None:
    subset = pictures(labels, side=1)
    order = Loader(SHOWS, subset, 0, Phase(balanced=True), frozen=False)._order(epoch)
    assert len(order) == len(labels)
    classes, drawn = sorted(set(labels)), Counter(subset.labels[order].tolist())
    each = -(-len(labels) // len(classes))
    left_out = each * len(classes) - len(labels)  # where the classes do not divide the images
    assert left_out < len(classes)
    assert all(each - left_out <= drawn[label] <= each for label in classes)
    images = Counter(order.tolist())
    for label in classes:  # within a class, too, none comes far oftener than another
        times = [images[row] for row, mine in enumerate(labels) if mine == label]
        assert max(times) - min(times) <= 1 + left_out


def test_every_draw_derives_from_seed_task_phase_epoch_and_step() -> None:
    phase = Phase(replay=2, noise=3)

    def drawn(seed: int = 0, task: int = 1, number: int = 0, epoch: int = 0) -> list[Batch]:
        made = Loader(feed(seed=seed, augment="random_resized_crop"), TASK, task, phase, number, BUFFER)
        return batches(made, epoch)

    truth = drawn()
    assert all(map(same, drawn(), truth))
    for changed in ({"seed": 1}, {"task": 2}, {"number": 1}, {"epoch": 1}):
        other = drawn(**changed)
        for one, two in zip(truth, other, strict=True):
            assert one.noise is not None
            assert two.noise is not None
            assert not torch.equal(one.noise, two.noise), changed
            assert not torch.equal(one.replay[0].images, two.replay[0].images), changed
    # A run that goes on in the middle of an epoch sees what it would have seen.
    resumed = Loader(feed(augment="random_resized_crop"), TASK, 1, phase, 0, BUFFER)
    assert all(map(same, batches(resumed, start=1), truth[1:]))


def test_replay_draws_whole_batches_from_the_buffer_with_their_notes() -> None:
    loader = Loader(feed(), TASK, 0, Phase(replay=2), buffer=BUFFER)
    shown: Counter[int] = Counter()
    for epoch in range(12):
        for batch in batches(loader, epoch):
            assert [len(replay.labels) for replay in batch.replay] == [len(batch.labels)] * 2
            for replay in batch.replay:
                rows = rows_of(replay, BUFFER)
                assert BUFFER.labels[rows].tolist() == replay.labels.tolist()
                assert replay.noted is not None
                assert replay.noted[:, 0].tolist() == [2.0 * row for row in rows]
                shown.update(rows)
            assert not torch.equal(batch.replay[0].images, batch.replay[1].images) or len(batch.labels) < 4
            assert batch.noted is None
    assert set(shown) == set(range(5))
    assert max(shown.values()) < 2 * min(shown.values())  # 240 uniform draws
    for nothing in (None, pictures([])):  # before there is anything to see again
        assert all(batch.replay == () for batch in batches(Loader(feed(), TASK, 0, Phase(replay=2), buffer=nothing)))
    assert all(batch.replay == () for batch in batches(Loader(feed(), TASK, 0, Phase(), buffer=BUFFER)))


def test_a_batch_from_a_live_buffer_stays_what_it_was_drawn_as() -> None:
    """A recorded step holds the buffer of the moment when it was recorded, so its images must come with the spec."""
    phase, other = Phase(replay=2), pictures([7, 8])
    plain = batches(Loader(feed(augment="random_resized_crop"), TASK, 0, phase, buffer=BUFFER))
    loader = Loader(feed(augment="random_resized_crop"), TASK, 0, phase, buffer=BUFFER, live=True)
    for local, wanted in zip(loader.epoch(0), plain, strict=True):
        loader.replay_from(other)
        assert same(loader.batch(local.spec), wanted)
        loader.replay_from(BUFFER)


def test_two_views_are_two_draws_of_the_same_images() -> None:
    phase = Phase(views=2, augment="random_resized_crop", replay=1)
    found = batches(Loader(feed(), TASK, 0, phase, buffer=BUFFER))
    for batch in (part for each in found for part in (each, *each.replay)):
        assert batch.images.shape == batch.second.shape
        assert all(not torch.equal(one, two) for one, two in zip(batch.images, batch.second, strict=True))
        assert batch.frozen is None, "features of the fixed view are not those of a cut-out"
        assert batch.query is None
    once = batches(Loader(feed(augment="random_resized_crop"), TASK, 0, Phase()))
    for one, two in zip(once, found, strict=True):  # the recipe's augmentation and the phase's are the same
        assert torch.equal(one.images, two.images)


def test_noise_is_uniform_and_comes_for_each_image() -> None:
    loader = Loader(feed(), TASK, 0, Phase(noise=4))
    noise = [batch.noise for epoch in range(40) for batch in batches(loader, epoch)]
    assert [None if each is None else tuple(each.shape) for each in noise[:3]] == [(4, 4), (4, 4), (2, 4)]
    values = torch.cat([each.flatten() for each in noise if each is not None])
    assert float(values.min()) >= 0
    assert float(values.max()) < 1
    counts = torch.histc(values, 10, 0, 1)
    assert float((counts - len(values) / 10).square().sum() / (len(values) / 10)) < 27.9  # chi-square, 9 d.f., 0.1 %
    assert len(values.unique()) > 0.99 * len(values)
    assert all(batch.noise is None for batch in batches(Loader(feed(), TASK, 0, Phase())))


@pytest.mark.parametrize("side", [SIDE, 23])
@pytest.mark.parametrize("augment", ["none", "random_resized_crop"])
@pytest.mark.parametrize("phase", [Phase(replay=2, noise=2), Phase(views=2, augment="random_resized_crop", replay=1)])
def test_pixels_that_are_not_on_the_device_give_the_same_batches(phase: Phase, augment: str, side: int) -> None:
    task, buffer = pictures([0, 1, 2] * 3, 1, side), pictures([7, 8, 9], 2, side, torch.arange(3.0)[:, None])
    near, far = (
        batches(Loader(feed(kind, augment=augment), task, 0, phase, buffer=buffer), epoch=1)
        for kind in (Feed, Elsewhere)
    )
    assert len(near) == len(far) == 3
    for one, other in zip(near, far, strict=True):
        assert same(one, other)
        if phase.views == 2:
            assert torch.equal(one.second, other.second)
            assert torch.equal(one.replay[0].second, other.replay[0].second)
    evaluated = [
        [made.batch(task.images, spec) for spec in made.evaluation(task)] for made in (feed(), feed(kind=Elsewhere))
    ]
    assert all(map(same, *evaluated))


def test_known_features_are_those_of_the_images_shown() -> None:
    made = feed()
    for batch in batches(Loader(made, TASK, 0, Phase(replay=1), buffer=BUFFER)):
        for part in (batch, *batch.replay):
            assert part.frozen is not None
            torch.testing.assert_close(part.frozen, made.backbone(part.images))
            assert part.query is not None
            assert torch.equal(part.query, part.frozen)
    trained = batches(Loader(made, TASK, 0, Phase(replay=1), buffer=BUFFER, frozen=False))
    assert all(part.frozen is None and part.query is None for batch in trained for part in (batch, *batch.replay))
    seen = feed(augment="random_resized_crop", query_view="fixed")
    for batch in batches(Loader(seen, TASK, 0, Phase())):  # the key learns from the test view, the rest from cut-outs
        assert batch.frozen is None
        assert batch.query is not None
        features = made.features(TASK)
        gaps = (batch.query[:, None] - features).abs().amax(dim=2).amin(dim=1)
        assert float(gaps.max()) < 1e-5
