"""What streams promise whose images come once: each image exactly once, in an order that the seed decides."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dualprompt.config import BenchmarkConfig, parse
from dualprompt.data.arrival import Arrival, arranged
from dualprompt.data.cache import Store
from dualprompt.data.sources import DATASETS, ArraySource, Dataset, Reader, Split
from dualprompt.data.stream import STREAMS, Experience, Plan, Stream, build_stream, drawn_by_run
from dualprompt.data.thinning import Thinning, long_tail
from dualprompt.errors import DualPromptError
from dualprompt.training.arrivals import portions
from helpers import subset_of

KINDS = ("online", "i-blurry", "si-blurry")
STORE = Store(64, True)


@dataclass
class Drawn(Reader):
    """A dataset of as many images of each class as asked for, each with pixels of its own; classes are mixed."""

    name: str = "drawn"
    title = "drawn"
    licence = "none"
    counts: list[int] = field(default_factory=lambda: [3, 4])

    def load(self, root: Path) -> Dataset:
        names = tuple(f"class {number}" for number in range(len(self.counts)))
        rng = np.random.default_rng(1)
        labels = rng.permutation(np.repeat(np.arange(len(self.counts)), self.counts))
        pixels = np.arange(len(labels), dtype=np.uint8)[:, None, None, None] + np.zeros((1, 2, 2, 3), np.uint8)
        test = np.repeat(np.arange(len(self.counts)), 2)
        return Dataset(
            self.name,
            names,
            Split(ArraySource(pixels), labels),
            Split(ArraySource(pixels[:1].repeat(len(test), 0)), test),
        )


DRAWN, OTHER = Drawn(), Drawn("drawn too")
DATASETS.register("drawn")(DRAWN)
DATASETS.register("drawn too")(OTHER)


def stream(kind: str, seed: int = 0, dataset: Any = "drawn", **fields: Any) -> Stream:
    return build_stream(BenchmarkConfig(dataset=dataset, stream=kind, **fields), seed, STORE)


def only(found: Stream) -> Experience:
    [experience] = found.experiences
    return experience


@settings(deadline=None, max_examples=60)
@given(
    kind=st.sampled_from(KINDS),
    counts=st.lists(st.integers(2, 9), min_size=2, max_size=7),
    tasks=st.integers(1, 6),
    shares=st.tuples(st.floats(0, 1), st.floats(0, 1)),
    order=st.sampled_from(["fixed", "shuffled"]),
    validation=st.sampled_from([0.0, 0.3]),
    seed=st.integers(0, 50),
)
def test_every_image_comes_exactly_once(
    kind: str, counts: list[int], tasks: int, shares: tuple[float, float], order: str, validation: float, seed: int
) -> None:
    DRAWN.counts = counts
    tasks = min(tasks, len(counts)) if kind == "online" else tasks
    if kind == "i-blurry":  # equal tasks: each has a class of one kind
        alone = int(shares[0] * len(counts))
        tasks = min(tasks, max(alone, len(counts) - alone))
    blurry = {} if kind == "online" else {"disjoint": shares[0], "blur": shares[1]}
    fields: dict[str, Any] = {"tasks": tasks, "class_order": order, "validation": validation, **blurry}
    found = stream(kind, seed, **fields)
    each = only(found)
    truth = DRAWN.load(Path()).train.labels
    come = np.concatenate([each.train.indices, each.validation.indices])
    assert sorted(come) == list(range(sum(counts))), "an image is missing, or comes twice"
    assert len(each.train) == len(each.train.indices.unique())
    names = np.array([f"class {number}" for number in truth])
    assert [each.classes[label] for label in each.train.labels] == names[each.train.indices].tolist()
    # Labels are numbered as they come, so that whoever has seen k of them has seen 0 to k − 1.
    first = [int((each.train.labels == label).nonzero()[0]) for label in each.labels]
    assert first == sorted(first)
    assert each.online
    assert not each.border
    assert found.online
    assert not found.bordered
    assert len(each.marks) == tasks
    assert list(each.marks) == sorted(each.marks)
    assert each.marks[-1] == len(each.train)
    again = stream(kind, seed, **fields)
    assert again.fingerprint == found.fingerprint
    assert torch.equal(only(again).train.indices, each.train.indices)


def by_task(each: Experience) -> np.ndarray:
    """Images of each class (column) in each task (row)."""
    parts = np.split(each.train.labels.numpy(), each.marks[:-1])
    return np.stack([np.bincount(part, minlength=len(each.labels)) for part in parts])


def test_another_seed_is_another_stream() -> None:
    DRAWN.counts = [9] * 6
    for kind in KINDS:
        prints = {stream(kind, seed, tasks=3, class_order="shuffled").fingerprint for seed in range(4)}
        assert len(prints) == 4
        assert len({stream(kind, seed, tasks=3, class_order_seed=5).fingerprint for seed in range(4)}) == 1
    config = BenchmarkConfig(dataset="drawn", stream="online")
    assert drawn_by_run(config)
    assert not drawn_by_run(config.model_copy(update={"class_order_seed": 1}))
    assert not drawn_by_run(BenchmarkConfig(dataset="drawn"))
    assert drawn_by_run(BenchmarkConfig(dataset="drawn", shots=2))


def test_online_is_shuffled_or_comes_group_after_group() -> None:
    DRAWN.counts = [9] * 6
    mixed = only(stream("online"))
    assert mixed.marks == (54,)
    assert len(set(mixed.train.labels[:12].tolist())) > 3
    groups = by_task(only(stream("online", tasks=3)))
    assert (np.count_nonzero(groups, axis=0) == 1).all()
    assert groups.sum(axis=1).tolist() == [18, 18, 18]
    ordered = only(stream("online", tasks=6))
    assert torch.equal(ordered.train.labels, torch.arange(6).repeat_interleave(9))
    rows = ordered.train.indices[:9]
    assert rows.tolist() != sorted(rows.tolist()), "inside a class images are shuffled"


def test_i_blurry_has_equal_tasks_whose_blurry_images_stray() -> None:
    """As in the published lists of N = 50, M = 30: five tasks, each of which keeps about 76 % of its blurry classes."""
    DRAWN.counts = [200] * 10
    counts = by_task(only(stream("i-blurry", 3, tasks=5, disjoint=0.5, blur=0.3, class_order="shuffled")))
    assert counts.sum(axis=1).tolist() == [400] * 5
    disjoint = np.count_nonzero(counts, axis=0) == 1
    assert disjoint.sum() == 5
    assert (counts[:, disjoint].max(axis=1) == 200).all(), "one disjoint class a task"
    blurry = counts[:, ~disjoint]
    home = blurry.max(axis=0)
    assert (home >= 140).all(), "what does not stray stays at home"
    assert abs(home.mean() - (140 + 60 / 5)) < 6, "of what strays, a fifth comes back"
    assert stream("i-blurry", tasks=5, disjoint=1.0).fingerprint != stream("i-blurry", tasks=5).fingerprint
    pure = by_task(only(stream("i-blurry", tasks=5, disjoint=1.0)))
    assert (np.count_nonzero(pure, axis=0) == 1).all()


def test_si_blurry_draws_its_borders() -> None:
    DRAWN.counts = [40] * 20
    sizes, classes = set(), set()
    for seed in range(5):
        counts = by_task(only(stream("si-blurry", seed, tasks=4, disjoint=0.5, blur=0.1, class_order="shuffled")))
        alone = np.count_nonzero(counts, axis=0) == 1
        assert alone.sum() >= 10, "the disjoint classes, and blurry ones of which nothing has strayed"
        home = counts.max(axis=0)
        assert (40 * 20 - home.sum()) <= 0.1 * 10 * 40, "no more strays than their share"
        sizes.add(tuple(counts.sum(axis=1)))
        classes.add(tuple(np.count_nonzero(counts == home, axis=1)))
    assert len(sizes) == 5
    assert len(classes) > 1
    strays = [40 * 20 - by_task(only(stream("si-blurry", seed, tasks=4))).max(axis=0).sum() for seed in range(5)]
    assert max(strays) > 10
    assert stream("si-blurry", tasks=4).fingerprint != stream("si-blurry", tasks=4, blur=0.2).fingerprint


@pytest.mark.parametrize("kind", KINDS)
def test_an_order_by_names_is_that_of_their_numbers(kind: str) -> None:
    DRAWN.counts, numbers = [4, 5, 6, 7], [2, 0, 3, 1]
    by_number, by_name = (
        only(stream(kind, tasks=2, class_order=order)) for order in (numbers, [f"class {number}" for number in numbers])
    )
    assert by_name.classes == by_number.classes
    assert torch.equal(by_name.train.indices, by_number.train.indices)
    with pytest.raises(DualPromptError, match="unknown class 'klass 2'"):
        stream(kind, tasks=2, class_order=["klass 2", "class 0", "class 3", "class 1"])


def test_several_datasets_make_one_stream() -> None:
    DRAWN.counts, OTHER.counts = [4, 5], [3, 6, 2]
    each = only(stream("si-blurry", 1, ["drawn", "drawn too"], tasks=2))
    assert sorted(each.classes) == sorted(
        [f"drawn/class {n}" for n in range(2)] + [f"drawn too/class {n}" for n in range(3)]
    )
    assert sorted(each.train.indices.tolist()) == list(range(20))
    sizes = {each.classes[label]: int((each.train.labels == label).sum()) for label in each.labels}
    assert [sizes[f"drawn/class {n}"] for n in range(2)] == [4, 5]
    assert [sizes[f"drawn too/class {n}"] for n in range(3)] == [3, 6, 2]
    # Each image is its own class's: the pixels of the two datasets count up from 0.
    pixels = each.train.images.gather(each.train.indices).pixels[:, 0, 0, 0].tolist()
    of = {0: DRAWN.load(Path()).train.labels, 1: OTHER.load(Path()).train.labels}
    for row, value, label in zip(each.train.indices.tolist(), pixels, each.train.labels.tolist(), strict=True):
        second = row >= 9
        assert value == row - 9 * second
        assert each.classes[label] == f"{'drawn too' if second else 'drawn'}/class {of[second][value]}"


def test_who_brings_an_image_twice_is_found_out() -> None:
    rows = {"a": np.array([0, 2]), "b": np.array([1])}
    found = arranged(lambda classes: Arrival(np.array([2, 0, 1]), [3]), rows)
    assert found.classes == ["a", "b"]
    for order in ([0, 0, 1], [0, 1], [0, 1, 2, 3]):
        with pytest.raises(ValueError, match="each of its images exactly once"):
            arranged(lambda classes, order=order: Arrival(np.array(order)), rows)


@STREAMS.register("two online")
def two_online(config: BenchmarkConfig, seed: int, datasets: Any) -> list[Plan]:
    """What is not allowed: two experiences that are told apart, and online."""
    plan = STREAMS["online"](config, seed, datasets)[0]
    return [plan, plan]


def test_an_online_stream_is_one_experience() -> None:
    DRAWN.counts = [3, 3]
    with pytest.raises(ValueError, match="a single experience"):
        stream("two online")


@settings(deadline=None)
@given(
    labels=st.lists(st.integers(0, 6), min_size=1, max_size=60),
    size=st.integers(1, 9),
    every=st.none() | st.integers(1, 70),
)
def test_portions_are_all_images_once_and_tell_nothing_of_the_future(
    labels: list[int], size: int, every: int | None
) -> None:
    comes = list(dict.fromkeys(labels))
    numbered = [comes.index(label) for label in labels]  # as a stream numbers them
    train = subset_of(np.zeros((len(labels), 1, 1, 3), np.uint8), numbered)
    found = {by_batch: portions(train, size, every, by_batch) for by_batch in (True, False)}
    for each in found.values():
        assert [portion.number for portion in each] == list(range(len(each)))
        assert [p.start for p in each] == [0, *(p.stop for p in each[:-1])]
        assert each[-1].stop == len(labels)
        for portion in each:
            assert portion.known == len(set(numbered[: portion.start]))
            assert portion.seen == len(set(numbered[: portion.stop]))
    assert all(portion.stop - portion.start == size for portion in found[True][:-1])
    moments = [[portion.stop for portion in each if portion.evaluated] for each in found.values()]
    assert moments[0] == moments[1], "with or without gradient steps, methods are evaluated at the same moments"
    if every is None:
        assert moments[0] == []
    else:
        reached = [stop // every for stop in [0, *(portion.stop for portion in found[True])]]
        assert len(moments[0]) == len(set(reached)) - 1
        for multiple in range(every, len(labels) + 1, every):
            assert any(multiple <= moment < multiple + size for moment in moments[0])


def test_shots_are_drawn_from_the_task_on_that_has_them() -> None:
    DRAWN.counts = [30, 20, 3, 25]
    whole = stream("class", tasks=2)
    few = stream("class", tasks=2, shots=5)
    later = stream("class", tasks=2, shots=5, shots_from=2)
    assert [each.train.labels.bincount(minlength=2)[-2:].tolist() for each in few.experiences] == [[5, 5], [3, 5]]
    assert torch.equal(later.experiences[0].train.indices, whole.experiences[0].train.indices)
    assert torch.equal(later.experiences[1].train.indices, few.experiences[1].train.indices)
    for one, other in zip(few.experiences, whole.experiences, strict=True):
        assert set(one.train.indices.tolist()) <= set(other.train.indices.tolist())
        assert one.train.indices.tolist() == sorted(one.train.indices.tolist())
        assert torch.equal(one.test.indices, other.test.indices)
    seeds = {tuple(stream("class", seed, tasks=2, shots=5).experiences[0].train.indices.tolist()) for seed in range(4)}
    assert len(seeds) == 4
    assert (
        stream("class", 3, tasks=2, class_order_seed=1, shots=5).fingerprint
        == stream("class", 4, tasks=2, class_order_seed=1, shots=5).fingerprint
    )


@pytest.mark.parametrize(("kind", "beyond"), [("class", 3), ("online", 2)])
def test_shots_may_not_begin_behind_the_last_task(kind: str, beyond: int) -> None:
    DRAWN.counts = [5] * 4
    assert stream(kind, tasks=2, shots=1, shots_from=beyond - 1).experiences
    with pytest.raises(DualPromptError, match=rf"shots_from is {beyond}, but the stream has {beyond - 1} task"):
        stream(kind, tasks=2, shots=1, shots_from=beyond)


@pytest.mark.parametrize(("kind", "most"), [("online", 5), ("i-blurry", 3)])
def test_no_equal_task_is_empty(kind: str, most: int) -> None:
    DRAWN.counts = [5] * 5
    assert np.diff(only(stream(kind, tasks=most)).marks, prepend=0).all()
    with pytest.raises(DualPromptError, match=r"benchmark\.tasks: 5 classes"):
        stream(kind, tasks=most + 1)


@settings(deadline=None)
@given(classes=st.integers(2, 12), ratio=st.floats(1, 200), seed=st.integers(0, 9))
def test_a_long_tail_falls_exponentially(classes: int, ratio: float, seed: int) -> None:
    shares = long_tail([str(n) for n in range(classes)], ratio, seed)
    falling = sorted(shares.values(), reverse=True)
    assert falling[0] == 1
    assert falling[-1] == pytest.approx(1 / ratio)
    steps = [b / a for a, b in itertools.pairwise(falling)]
    assert steps == pytest.approx([ratio ** (-1 / (classes - 1))] * (classes - 1))


def test_a_long_tailed_stream() -> None:
    DRAWN.counts = [64] * 4
    each = only(stream("online", 2, imbalance=64))
    assert sorted(each.train.labels.bincount().tolist()) == [1, 4, 16, 64]
    other = stream("class", 2, tasks=2, imbalance=64)
    sizes = {each.classes[i]: int(n) for i, n in enumerate(each.train.labels.bincount())}
    for task in other.experiences:
        for label, name in zip(task.labels, task.classes, strict=True):
            assert int((task.train.labels == label).sum()) == sizes[name], "the same classes are rare in any stream"
    assert Thinning(shares={"a": 0.001})(np.arange(7), "a", 0).tolist() != []


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"stream": "class", "disjoint": 0.5}, "disjoint and blur are for blurry streams"),
        ({"stream": "online", "blur": 0.5}, "disjoint and blur are for blurry streams"),
        ({"shots_from": 2}, "shots_from says where benchmark.shots begins"),
        ({"imbalance": 0.5}, "benchmark.imbalance"),
        ({"shots": 0}, "benchmark.shots"),
        *(({"stream": kind, "first": 1, "tasks": 2}, f"stream '{kind}' has no such task") for kind in KINDS),
    ],
)
def test_values_that_make_no_sense_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(DualPromptError, match=message):
        parse(BenchmarkConfig, {"dataset": "drawn"} | fields, "benchmark")


@pytest.mark.parametrize("tasks", [None, [1, 1], 0])
def test_blurry_tasks_are_counted(tasks: Any) -> None:
    DRAWN.counts = [3, 3]
    with pytest.raises(DualPromptError, match=r"benchmark\.tasks: this stream takes a number of tasks, at least 1"):
        stream("si-blurry", tasks=tasks)
