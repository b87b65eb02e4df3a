"""Herding: the buffer keeps, of every class, the images whose mean is nearest to the mean of all."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save
from torch import Tensor

from dualprompt.data.stream import Subset
from dualprompt.methods.apart import cut_to_rarest, hold_out
from dualprompt.methods.base import BufferPlan
from dualprompt.methods.buffer import Buffer, herd
from helpers import seeded, subset_of


def by_definition(features: Tensor, count: int) -> list[int]:
    """Try every image that is left, and take the one that brings the mean of the chosen nearest to the mean of all."""
    features = F.normalize(features.double(), dim=1)
    mean, chosen = features.mean(dim=0), list[int]()
    for _ in range(count):
        left = [row for row in range(len(features)) if row not in chosen]
        distance = {row: (mean - features[[*chosen, row]].mean(dim=0)).norm() for row in left}
        chosen.append(min(left, key=lambda row: float(distance[row])))
    return chosen


@settings(max_examples=60, deadline=None)
@given(st.integers(3, 12), st.integers(2, 6), st.integers(0, 1000))
def test_the_next_is_the_one_that_brings_the_mean_nearest(images: int, dim: int, seed: int) -> None:  # two images tie
    features = torch.randn(images, dim, generator=seeded(seed)) + 0.5
    assert herd(features, images).tolist() == by_definition(features, images)


def test_by_hand() -> None:
    """Directions at 0°, 10°, 60° and 100°: lengths do not count, and the mean lies near 43°."""
    angles = torch.tensor([0.0, 10.0, 60.0, 100.0]).deg2rad()
    features = torch.stack([angles.cos(), angles.sin()], dim=1) * torch.tensor([5.0, 1.0, 2.0, 0.1])[:, None]
    # 60° is nearest. With 10° beside it the two are at 35°, with 0° at 30°, with 100° at 80°. Then 100° balances.
    assert herd(features, 3).tolist() == [2, 1, 3]


def test_a_shorter_ranking_is_the_beginning_of_a_longer_one() -> None:
    features = torch.randn(40, 5, generator=seeded(1))
    longest = herd(features, 40)
    assert sorted(longest.tolist()) == list(range(40))
    for count in range(40):
        assert torch.equal(herd(features, count), longest[:count])


def task(index: int, classes: int, each: int = 9) -> Subset:
    """Images whose first two bytes say which they are; classes are mixed."""
    numbers = np.arange(each * classes) + 1000 * index
    pixels = np.stack([numbers % 256, numbers // 256, numbers * 0], axis=1)[:, None, None].astype(np.uint8)
    return subset_of(pixels, np.arange(each * classes) % classes + index * classes)


def numbers(subset: Subset) -> list[int]:
    """What the pixel of each image says."""
    return [int(p[0]) + 256 * int(p[1]) for p in (subset.images.image(int(row))[0, 0] for row in subset.indices)]


def features(subset: Subset) -> Tensor:
    """A random feature for each image, by its number."""
    return torch.stack([torch.randn(4, generator=seeded(number)) for number in numbers(subset)])


def ranked(subset: Subset, label: int) -> list[int]:
    mine = Subset(subset.images, subset.indices[subset.labels == label], subset.labels[subset.labels == label])
    found = numbers(mine)
    return [found[row] for row in herd(features(mine), len(found)).tolist()]


def of_class(buffer: Buffer, label: int) -> list[int]:
    held = buffer.as_subset()
    return [n for n, each in zip(numbers(held), held.labels.tolist(), strict=True) if each == label]


@pytest.mark.parametrize("seed", [0, 1])
def test_every_class_keeps_the_beginning_of_its_ranking(seed: int) -> None:
    tasks = [task(index, 2) for index in range(4)]
    buffer = Buffer(BufferPlan(14, "herding"), seed)
    for index, each in enumerate(tasks):
        buffer.offer(each, index, features=features)
        places = 14 // (2 * index + 2)  # 7, 3, 2, 1
        for label in range(2 * index + 2):
            assert of_class(buffer, label) == ranked(tasks[label // 2], label)[:places]
    assert len(buffer) == 8


def test_more_classes_than_places_leave_one_to_the_oldest() -> None:
    buffer = Buffer(BufferPlan(3, "herding"), 0)
    for index in range(3):
        buffer.offer(task(index, 2), index, features=features)
    assert Counter(buffer.as_subset().labels.tolist()) == {0: 1, 1: 1, 2: 1}


@pytest.mark.parametrize("split", [0, 1, 2])
def test_a_herd_goes_on_from_its_state(split: int) -> None:
    tasks = [task(index, 2) for index in range(3)]
    through, first, second = (Buffer(BufferPlan(11, "herding"), 3) for _ in range(3))
    for index, each in enumerate(tasks):
        through.offer(each, index, features=features)
    for index, each in enumerate(tasks[:split]):
        first.offer(each, index, features=features)
    second.load_state(load(save({name: value.contiguous() for name, value in first.state().items()})))
    for index, each in enumerate(tasks[split:], start=split):
        second.offer(each, index, features=features)
    one, other = through.state(), second.state()
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_herding_needs_features() -> None:
    with pytest.raises(ValueError, match="features"):
        Buffer(BufferPlan(3, "herding"), 0).offer(task(0, 2), 0)
    with pytest.raises(ValueError, match="reserves"):
        BufferPlan(3, "herding", reserve=True)


def test_a_cut_leaves_every_class_as_many_as_the_rarest_has() -> None:
    labels = [0] * 9 + [1] * 4 + [2] * 6
    many = subset_of(np.arange(19, dtype=np.uint8)[:, None, None, None].repeat(3, axis=3), labels)
    cut = cut_to_rarest(many, seed=1, task=2)
    assert Counter(cut.labels.tolist()) == {0: 4, 1: 4, 2: 4}
    assert all(labels[int(number)] == label for number, label in zip(cut.indices, cut.labels, strict=True))
    assert torch.equal(cut.indices, cut_to_rarest(many, seed=1, task=2).indices)
    assert not torch.equal(cut.indices, cut_to_rarest(many, seed=2, task=2).indices)


def test_a_share_of_each_class_is_held_out() -> None:
    many = subset_of(np.zeros((31, 1, 1, 3), np.uint8), [0] * 20 + [1] * 10 + [2])
    left, apart = hold_out(many, 0.1, seed=0, task=1)
    assert apart is not None
    assert Counter(apart.labels.tolist()) == {0: 2, 1: 1}  # the only image of a class is trained on
    assert sorted([*left.indices.tolist(), *apart.indices.tolist()]) == list(range(31))
    assert hold_out(many, 0, seed=0, task=1) == (many, None)
