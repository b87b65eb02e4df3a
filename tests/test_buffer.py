"""What the rehearsal buffer keeps, in what proportions, and that it comes back from a checkpoint."""

from __future__ import annotations

import time
from collections import Counter
from typing import Literal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save
from scipy.stats import chi2
from torch import Tensor

from dualprompt.data.images import Images
from dualprompt.data.stream import Subset
from dualprompt.methods.base import BufferPlan
from dualprompt.methods.buffer import Buffer, part
from helpers import noise_pictures, ragged, subset_of

Policy = Literal["reservoir", "balanced"]
POLICIES: list[Policy] = ["reservoir", "balanced"]


def dots(labels: list[int]) -> Subset:
    """Images of one pixel."""
    return subset_of(np.zeros((len(labels), 1, 1, 3), np.uint8), labels)


def kept(buffer: Buffer) -> Counter[int]:
    return Counter(buffer.as_subset().labels.tolist())


def test_a_reservoir_keeps_every_image_of_the_stream_with_equal_probability() -> None:
    sizes, room, draws = (7, 30, 3, 20), 12, 1500
    total = sum(sizes)
    tasks = [dots(list(range(sum(sizes[:t]), sum(sizes[: t + 1])))) for t in range(len(sizes))]  # labels tell images
    counts = np.zeros(total)
    for seed in range(draws):
        buffer = Buffer(BufferPlan(room, "reservoir"), seed)
        for index, task in enumerate(tasks):
            buffer.offer(task, index)
        found = buffer.as_subset().labels.numpy()
        assert len(np.unique(found)) == room
        counts[found] += 1
    share = room / total
    # Counts of draws without replacement are correlated by −1/(total − 1), hence the factor.
    statistic = ((counts - draws * share) ** 2).sum() / (draws * share * (1 - share)) * (total - 1) / total
    assert chi2.ppf(0.001, total - 1) < statistic < chi2.ppf(0.999, total - 1)


def test_a_reservoir_that_is_offered_steps_needs_no_border() -> None:
    """Whatever the steps and wherever tasks end, each image of the stream is kept with equal probability."""
    steps, room, draws, total = (1, 4, 9, 1, 4, 2, 9), 6, 800, 30
    assert sum(steps) == total
    rows = torch.arange(total)
    everything = dots(rows.tolist())  # labels tell images
    counts = np.zeros(total)
    for seed in range(draws):
        buffer = Buffer(BufferPlan(room, "reservoir", fill="step"), seed)
        for step, own in enumerate(rows.split(steps)):
            buffer.offer(part(everything, own), int(step > 3), step=step)
            assert len(buffer) == min(room, sum(steps[: step + 1]))
        counts[buffer.as_subset().labels.numpy()] += 1
    assert counts.sum() == room * draws
    share = room / total
    statistic = ((counts - draws * share) ** 2).sum() / (draws * share * (1 - share)) * (total - 1) / total
    assert chi2.ppf(0.001, total - 1) < statistic < chi2.ppf(0.999, total - 1)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.integers(1, 12), st.sampled_from(POLICIES))
def test_offers_by_the_step_keep_only_what_was_offered(sizes: list[int], room: int, policy: Policy) -> None:
    everything = dots(list(range(sum(sizes))))
    buffer, offered = Buffer(BufferPlan(room, policy, fill="step"), 0), 0
    for step, own in enumerate(torch.arange(sum(sizes)).split(sizes)):
        buffer.offer(part(everything, own), 0, step=step)
        offered += len(own)
        found = buffer.as_subset().labels.tolist()
        assert len(set(found)) == len(found) == min(room, offered)
        assert max(found) < offered
    assert buffer.seen == offered


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 7), max_size=40), min_size=1, max_size=5),
    st.integers(1, 30),
    st.integers(0, 3),
)
def test_a_balanced_buffer_is_balanced_under_any_stream(stream: list[list[int]], room: int, seed: int) -> None:
    buffer, offered = Buffer(BufferPlan(room, "balanced"), seed), Counter[int]()
    for index, labels in enumerate(stream):
        before = kept(buffer)
        buffer.offer(dots(labels), index)
        offered.update(labels)
        now = kept(buffer)
        assert len(buffer) == min(room, offered.total())
        largest = max(now.values(), default=0)
        for label, count in offered.items():
            assert now[label] >= min(count, largest - 1)
        if all(count >= room for count in offered.values()):
            assert max(now.values(), default=0) - min((now[label] for label in offered), default=0) <= 1
        for label in before.keys() - set(labels):
            assert now[label] <= before[label]


def test_a_new_class_takes_its_slots_from_the_largest() -> None:
    buffer = Buffer(BufferPlan(10, "balanced"), 0)
    buffer.offer(dots([0] * 50 + [1] * 2), 0)
    assert kept(buffer) == {0: 8, 1: 2}
    buffer.offer(dots([2] * 50), 1)
    assert kept(buffer) == {0: 4, 1: 2, 2: 4}
    buffer.offer(dots([3]), 2)
    assert kept(buffer)[3] == 1
    assert kept(buffer)[1] == 2


def test_the_images_of_a_class_that_make_room_are_drawn_at_random() -> None:
    pixels = np.arange(20, dtype=np.uint8)[:, None, None, None].repeat(3, axis=3)
    stays = np.zeros(20)
    for seed in range(400):
        buffer = Buffer(BufferPlan(20, "balanced"), seed)
        buffer.offer(subset_of(pixels[:10], [0] * 10), 0)
        buffer.offer(subset_of(pixels[10:], [0] * 10), 1)  # more of the same class, later
        buffer.offer(dots([1] * 20), 2)
        subset = buffer.as_subset()
        stays[[subset.images.image(row)[0, 0, 0] for row in range(20) if subset.labels[row] == 0]] += 1
    assert stays.sum() == 400 * 10
    assert abs(stays - 200).max() < 4 * 10  # four standard deviations of B(400, ½)


@pytest.mark.parametrize("policy", POLICIES)
def test_images_are_raw_copies_with_their_labels(policy: Policy) -> None:
    pictures = noise_pictures([(2, 3), (4, 1), (1, 1), (5, 5)] * 6)
    images = ragged(pictures)
    label_of = {picture.tobytes(): index for index, picture in enumerate(pictures)}
    buffer = Buffer(BufferPlan(9, policy), 1)
    for task, rows in enumerate((torch.arange(3, 14), torch.arange(14, 24))):  # the subset is not all of the images
        buffer.offer(Subset(images, rows, rows), task)
    found = buffer.as_subset()
    expected = [(found.images.image(row).copy(), int(label)) for row, label in enumerate(found.labels)]
    images.flat.zero_()
    assert len(buffer) == len({label for _, label in expected}) == 9
    for row, (picture, label) in enumerate(expected):
        assert label_of[picture.tobytes()] == label >= 3
        np.testing.assert_array_equal(found.images.image(row), picture)  # unharmed by what became of the source
    assert buffer.bytes == sum(picture.nbytes for picture, _ in expected) + 9 * 8
    assert buffer.as_subset() is found


def test_notes_are_asked_once_and_stay_as_they_were() -> None:
    asked: list[int] = []

    def note(columns: int):
        def answer(subset: Subset) -> Tensor:
            assert bool((subset.images.flat[subset.indices * 3] == subset.labels).all())
            asked.extend(subset.labels.tolist())
            return (subset.labels[:, None] * 100 + torch.arange(columns)).double()

        return answer

    buffer = Buffer(BufferPlan(15, "reservoir", notes=True), 5)
    assert buffer.bytes == 0
    for task, columns in enumerate((2, 3, 5)):
        labels = torch.arange(task * 20, task * 20 + 20)
        pixels = labels.to(torch.uint8)[:, None, None, None].expand(-1, 1, 1, 3).numpy()
        held = set(kept(buffer))
        buffer.offer(subset_of(pixels, labels), task, note(columns))
        assert sorted(asked) == sorted(set(kept(buffer)) - held)
        asked.clear()
    subset = buffer.as_subset()
    assert subset.notes is not None
    assert subset.notes.shape == (15, 5)
    assert subset.notes.dtype == torch.float32
    tasks = set()
    for label, row in zip(subset.labels.tolist(), subset.notes, strict=True):
        tasks.add(label // 20)
        columns = (2, 3, 5)[label // 20]
        assert row[:columns].tolist() == [label * 100 + column for column in range(columns)]
        assert row[columns:].isnan().all()
    assert tasks == {0, 1, 2}
    assert buffer.bytes == 15 * (3 + 8 + 5 * 4)
    with pytest.raises(ValueError, match="notes"):
        buffer.offer(dots([60]), 3)


def test_what_came_by_the_step_is_noted_when_it_is_asked_for() -> None:
    """Images of three tasks, in steps of four: those held at a task's end get its note, and keep their place."""
    buffer = Buffer(BufferPlan(9, "reservoir", "step", notes=True), 2)
    for task, columns in enumerate((2, 3, 5)):
        for step in range(3):
            labels = torch.arange(4) + 12 * task + 4 * step  # labels tell images
            pixels = labels.to(torch.uint8)[:, None, None, None].expand(-1, 1, 1, 3).numpy()
            buffer.offer(subset_of(pixels, labels), task, lambda images: torch.zeros(len(images), 0), step=step)
        before = buffer.as_subset()
        assert before.notes is not None
        assert torch.equal(before.notes.isnan().all(dim=1), before.labels >= 12 * task)

        def note(subset: Subset, first: int = 12 * task, columns: int = columns) -> Tensor:
            assert bool((subset.images.flat[subset.indices * 3] == subset.labels).all())
            assert subset.labels.min() >= first, "an older image has its note"
            return (subset.labels[:, None] * 100 + torch.arange(columns)).double()

        buffer.note_missing(note)
        held = buffer.as_subset()
        assert torch.equal(held.labels, before.labels)
        assert held.notes is not None
        for label, row in zip(held.labels.tolist(), held.notes, strict=True):
            known = (2, 3, 5)[label // 12]
            assert row[:known].tolist() == [label * 100 + column for column in range(known)]
            assert row[known:].isnan().all()
    buffer.note_missing(lambda _: pytest.fail("all are noted"))
    assert {label // 12 for label in kept(buffer)} == {0, 1, 2}
    with pytest.raises(ValueError, match="no notes"):
        Buffer(BufferPlan(9, "reservoir", "step"), 2).note_missing(lambda _: torch.zeros(0, 1))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("notes", [False, True])
@pytest.mark.parametrize("split", [0, 1, 2])
def test_a_buffer_goes_on_from_its_state(policy: Policy, notes: bool, split: int) -> None:
    def note(subset: Subset) -> Tensor:
        return subset.labels[:, None].float().expand(-1, 2)

    shapes = [(2, 3), (1, 1)] * 10
    tasks = [
        Subset(ragged(noise_pictures(shapes, t)), torch.arange(20), torch.arange(20) % 2 + 2 * t) for t in range(3)
    ]
    through, first = (Buffer(BufferPlan(7, policy, notes=notes), 3) for _ in range(2))
    for index, task in enumerate(tasks):
        through.offer(task, index, note if notes else None)
    for index, task in enumerate(tasks[:split]):
        first.offer(task, index, note if notes else None)
    second = Buffer(BufferPlan(7, policy, notes=notes), 3)
    second.load_state(load(save({name: value.contiguous() for name, value in first.state().items()})))
    for index, task in enumerate(tasks[split:], start=split):
        second.offer(task, index, note if notes else None)
    one, other = through.state(), second.state()
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert ("notes" in one) == notes


@pytest.mark.parametrize("policy", POLICIES)
def test_the_seed_and_the_task_decide_what_is_kept(policy: Policy) -> None:
    def after(seed: int, task: int) -> list[int]:
        buffer = Buffer(BufferPlan(10, policy), seed)
        buffer.offer(dots(list(range(100))), task)
        return sorted(kept(buffer))

    assert after(0, 0) == after(0, 0)
    assert after(0, 0) != after(1, 0)
    assert after(0, 0) != after(0, 1)


@pytest.mark.parametrize("policy", POLICIES)
def test_many_offers_are_quick(policy: Policy) -> None:
    task = dots([label % 100 for label in range(50_000)])
    buffer = Buffer(BufferPlan(2000, policy), 0)
    began = time.process_time()
    buffer.offer(task, 0)
    assert time.process_time() - began < 1
    assert len(buffer) == 2000


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 5)), min_size=1, max_size=6), st.booleans(), st.data())
def test_select_and_concat_equal_lists(shapes: list[tuple[int, int]], equal: bool, data: st.DataObject) -> None:
    pictures = noise_pictures(shapes[:1] * len(shapes) if equal else shapes)
    chosen = data.draw(st.lists(st.integers(0, len(shapes) - 1), max_size=8))
    images = ragged(pictures)
    selected = images.select(torch.tensor(chosen, dtype=torch.int64))
    both = Images.concat([selected, images])
    expected = [pictures[index] for index in chosen] + pictures
    assert len(selected) == len(chosen)
    assert len(both) == len(expected)
    for row, picture in enumerate(expected):
        np.testing.assert_array_equal(both.image(row), picture)
    assert len(Images.concat([])) == 0


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=60), min_size=1, max_size=4),
    st.integers(1, 40),
    st.integers(0, 3),
)
def test_a_reserve_is_kept_apart_for_ever(stream: list[list[int]], room: int, seed: int) -> None:
    buffer = Buffer(BufferPlan(room, "balanced", reserve=True), seed)
    trained, reserved, number = set[int](), set[int](), 0
    for index, few in enumerate(stream):
        labels = [4 * index + label for label in few]  # every task has classes of its own
        pixels = np.arange(number, number + len(labels)).astype("<u4").view(np.uint8).reshape(-1, 1, 1, 4)[..., :3]
        task = subset_of(pixels.copy(), labels)
        apart = buffer.to_reserve(task, index)
        assert torch.equal(apart, buffer.to_reserve(task, index)), "a resumed run sets the same aside"
        for label, count in Counter(labels).items():
            mine = int(apart[task.labels == label].sum())
            assert (1 if count > 1 else 0) <= mine <= max(1, count // 10)
        reserved |= numbers(part(task, apart)) | numbers(buffer.reserved())
        trained |= numbers(part(task, ~apart)) | numbers(buffer.as_subset())
        again = Buffer(buffer.plan, seed)
        again.load_state(load(save(buffer.state())))
        for each in (buffer, again):
            each.offer(task, index)
        assert numbers(again.reserved()) == numbers(buffer.reserved())
        assert numbers(again.as_subset()) == numbers(buffer.as_subset())
        assert len(buffer) == len(buffer.as_subset()) + len(buffer.reserved()) <= room
        assert len(buffer.reserved()) <= max(room // 10, room // 2)
        number += len(labels)
    reserved |= numbers(buffer.reserved())
    trained |= numbers(buffer.as_subset())
    assert not reserved & trained


def numbers(subset: Subset) -> set[int]:
    """What the pixel of each image says."""
    return {
        int(pixel[0]) + 256 * int(pixel[1]) for pixel in (subset.images.image(int(i))[0, 0] for i in subset.indices)
    }


@pytest.mark.parametrize(("size", "classes", "places"), [(2000, 100, 200), (200, 50, 50), (8, 6, 4), (1, 3, 0)])
def test_how_many_places_a_reserve_has(size: int, classes: int, places: int) -> None:
    buffer = Buffer(BufferPlan(size, "balanced", reserve=True), 0)
    for task in range(2):
        mine = list(range(task * classes // 2, (task + 1) * classes // 2))
        buffer.offer(dots(mine * 600), task)
    assert (len(buffer), len(buffer.reserved())) == (size, places)


def test_a_reserve_needs_a_plan_that_can_have_one() -> None:
    for policy, fill in (("reservoir", "after"), ("balanced", "before")):
        with pytest.raises(ValueError, match="reserves"):
            BufferPlan(5, policy, fill, reserve=True)  # type: ignore[arg-type]
