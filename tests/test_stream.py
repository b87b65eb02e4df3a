from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from dualprompt.config import BenchmarkConfig
from dualprompt.data.cache import Store
from dualprompt.data.sources import DATASETS, ArraySource, Dataset, Reader, Split
from dualprompt.data.stream import Stream, Subset, build_stream, refuse_idle_share
from dualprompt.errors import DualPromptError

STORE = Store(64, True)


class Drawn(Reader):
    """A dataset whose pixels say what they show: red the class, green the number, blue 1 if for the test."""

    title = "drawn"
    licence = "none"

    def __init__(self, name: str) -> None:
        self.name = name
        self.train_counts: list[int] = []
        self.test_counts: list[int] = []

    def load(self, root: Path) -> Dataset:
        classes = tuple(f"k{i}" for i in range(len(self.train_counts)))
        return Dataset(self.name, classes, self._split(self.train_counts, 0), self._split(self.test_counts, 1))

    def _split(self, counts: list[int], blue: int) -> Split:
        rows = [(label, number, blue) for label, count in enumerate(counts) for number in range(count)]
        order = np.random.default_rng(7).permutation(len(rows))  # classes lie mixed, as in real files
        colours = np.array(rows, np.uint8).reshape(-1, 3)[order]
        pixels = np.broadcast_to(colours[:, None, None], (len(rows), 2, 2, 3)).copy()
        return Split(ArraySource(pixels), colours[:, 0].astype(np.int64))


DRAWN = Drawn("drawn-a")
OTHER = Drawn("drawn-b")
for reader in (DRAWN, OTHER):
    DATASETS.register(reader.name)(reader)


@pytest.fixture(autouse=True)
def _fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("DUALPROMPT_CACHE", str(tmp_path / "cache"))
    DRAWN.train_counts, DRAWN.test_counts = [5] * 6, [2] * 6
    OTHER.train_counts, OTHER.test_counts = [3] * 2, [2] * 2


def stream(dataset: Any = "drawn-a", seed: int = 0, **fields: Any) -> Stream:
    return build_stream(BenchmarkConfig(dataset=dataset, **fields), seed, STORE)


def colours(subset: Subset) -> list[tuple[int, ...]]:
    return [tuple(pixel) for pixel in subset.images.gather(subset.indices).pixels[:, 0, 0].tolist()]


def image_folder(folder: Path, classes: str, count: int = 4) -> Path:
    for name, number in itertools.product(classes, range(count)):
        (folder / name).mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (6, 4 + number), (ord(name), number, 0)).save(folder / name / f"{number}.png")
    return folder


@st.composite
def benchmarks(draw: st.DrawFn) -> dict[str, Any]:
    counts = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4).filter(lambda counts: sum(counts) > 1))
    total = sum(counts)
    names = draw(st.permutations([f"k{i}" for i in range(total)]))
    kind = draw(st.sampled_from(["counts", "names", "some names", "equal", "none"]))
    ends = list(itertools.accumulate(counts))
    by_name = [list(names[end - count : end]) for end, count in zip(ends, counts, strict=True)]
    divisors = [n for n in range(1, total + 1) if total % n == 0]
    tasks: Any = {
        "counts": counts,
        "names": by_name,
        "some names": [[*group[:1]] for group in by_name] if len(by_name) > 1 else by_name,
        "equal": draw(st.sampled_from(divisors)),
        "none": None,
    }[kind]
    return {
        "tasks": tasks,
        "class_order": draw(st.sampled_from(["fixed", "shuffled"])),
        "validation": draw(st.sampled_from([0.0, 0.01, 0.2, 0.5, 0.99])),
        "train_counts": draw(st.lists(st.integers(1, 9), min_size=total, max_size=total)),
        "test_counts": draw(st.lists(st.integers(1, 4), min_size=total, max_size=total)),
    }


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(benchmark=benchmarks(), seed=st.integers(0, 1000))
def test_every_image_of_a_used_class_is_in_one_place(benchmark: dict[str, Any], seed: int):
    DRAWN.train_counts, DRAWN.test_counts = benchmark.pop("train_counts"), benchmark.pop("test_counts")
    found = stream(seed=seed, **benchmark)

    assert [task.index for task in found.experiences] == list(range(len(found.experiences)))
    numbers = [number for task in found.experiences for number in task.labels]
    assert numbers == list(range(len(found.classes)))
    assert len(set(found.classes)) == len(found.classes)
    assert found.classes == tuple(name for task in found.experiences for name in task.classes)

    seen: list[tuple[int, ...]] = []
    for task in found.experiences:
        held_out = Counter(task.validation.labels.tolist())
        for number, name in zip(task.labels, task.classes, strict=True):
            images = DRAWN.train_counts[int(name[1:])]
            share = benchmark["validation"]
            assert held_out[number] == (min(max(1, round(images * share)), images - 1) if share else 0)
        for subset, blue in ((task.train, 0), (task.validation, 0), (task.test, 1)):
            shown = colours(subset) if len(subset) else []
            assert [found.classes[label] for label in subset.labels] == [f"k{red}" for red, _, _ in shown]
            assert all(label in task.labels for label in subset.labels.tolist())
            assert all(colour[2] == blue for colour in shown)
            assert subset.indices.tolist() == sorted(subset.indices.tolist())
            assert subset.indices.dtype == subset.labels.dtype == torch.int64
            seen += shown
    expected = [
        (int(name[1:]), number, blue)
        for name in found.classes
        for blue, counts in enumerate((DRAWN.train_counts, DRAWN.test_counts))
        for number in range(counts[int(name[1:])])
    ]
    assert sorted(seen) == sorted(expected)
    assert stream(seed=seed, **benchmark).fingerprint == found.fingerprint


def test_shuffle_is_a_permutation_that_the_seed_determines():
    DRAWN.train_counts, DRAWN.test_counts = [1] * 40, [1] * 40
    fixed = stream(tasks=8).classes
    assert fixed == tuple(f"k{i}" for i in range(40))
    orders = [stream(seed=seed, tasks=8, class_order="shuffled").classes for seed in (0, 1, 0)]
    assert sorted(orders[0]) == sorted(orders[1]) == sorted(fixed)
    assert orders[0] == orders[2]
    assert len({fixed, orders[0], orders[1]}) == 3
    pinned = [stream(seed=seed, tasks=8, class_order="shuffled", class_order_seed=1).classes for seed in (0, 5)]
    assert pinned == [orders[1], orders[1]]


def test_tasks_given_by_content_are_shuffled_whole():
    tasks = [["k0", "k5"], ["k3"], ["k2", "k1", "k4"]]
    as_given = stream(tasks=tasks)
    assert [list(task.classes) for task in as_given.experiences] == tasks
    assert [task.name for task in as_given.experiences] == ["task 1", "task 2", "task 3"]
    orders = {
        tuple(task.classes for task in stream(seed=s, tasks=tasks, class_order="shuffled").experiences)
        for s in range(20)
    }
    assert len(orders) > 2
    assert all(sorted(map(list, order)) == sorted(tasks) for order in orders)


def test_unequal_tasks():
    found = stream(tasks=[1, 3, 2])
    assert [task.labels for task in found.experiences] == [(0,), (1, 2, 3), (4, 5)]
    assert [len(task.train) for task in found.experiences] == [5, 15, 10]
    for seed in range(5):
        shuffled = stream(seed=seed, tasks=[1, 3, 2], class_order="shuffled")
        assert [len(task.classes) for task in shuffled.experiences] == [1, 3, 2]


def test_validation_is_the_same_for_every_seed_and_order():
    def held_out(seed: int, order: str) -> set[tuple[int, ...]]:
        found = stream(seed=seed, tasks=3, class_order=order, validation=0.4)
        return {colour for task in found.experiences for colour in colours(task.validation)}

    reference = held_out(0, "fixed")
    assert len(reference) == 6 * 2
    assert held_out(1, "shuffled") == held_out(2, "shuffled") == reference

    (task,) = stream(validation=0.4).experiences
    places = set()
    for number in task.labels:
        held = task.validation.indices[task.validation.labels == number].tolist()
        rows = sorted(held + task.train.indices[task.train.labels == number].tolist())
        places.add(tuple(rows.index(row) for row in held))
    assert len(places) > 1  # not the same places in every class


def test_test_per_class_takes_the_first_test_images_and_no_others():
    whole, little = stream(tasks=3), stream(tasks=3, test_per_class=1)
    assert whole.fingerprint != little.fingerprint
    for full, few in zip(whole.experiences, little.experiences, strict=True):
        assert torch.equal(few.train.indices, full.train.indices)
        for label in full.test.labels.unique():
            mine = full.test.indices[full.test.labels == label]
            assert len(mine) > 1
            assert torch.equal(few.test.indices[few.test.labels == label], mine[:1])


def test_train_per_class_takes_the_first_after_the_validation_split():
    whole = stream(tasks=3, validation=0.4)
    first = stream(tasks=3, validation=0.4, train_per_class=2)
    for task, cut in zip(whole.experiences, first.experiences, strict=True):
        for number in task.labels:
            all_rows = task.train.indices[task.train.labels == number]
            assert torch.equal(cut.train.indices[cut.train.labels == number], all_rows[:2])
        assert torch.equal(task.validation.indices, cut.validation.indices)
        assert torch.equal(task.test.indices, cut.test.indices)
    assert first.fingerprint != whole.fingerprint


def test_judged_is_the_split_that_evaluation_reads():
    task = stream(validation=0.2).experiences[0]
    assert task.judged("test") is task.test
    assert task.judged("validation") is task.validation


def test_tasks_of_one_dataset_share_its_images():
    found = stream(tasks=3, validation=0.2)
    assert len({id(subset.images) for task in found.experiences for subset in (task.train, task.validation)}) == 1
    assert len({id(task.test.images) for task in found.experiences}) == 1


def test_list_of_datasets_is_one_task_each():
    found = stream(["drawn-a", "drawn-b"])
    assert [task.name for task in found.experiences] == ["drawn-a", "drawn-b"]
    assert found.experiences[1].classes == ("drawn-b/k0", "drawn-b/k1")
    assert found.experiences[1].labels == (6, 7)
    assert sorted(set(found.experiences[1].test.labels.tolist())) == [6, 7]
    assert {red for red, _, _ in colours(found.experiences[1].train)} == {0, 1}
    orders = {stream(["drawn-a", "drawn-b"], seed=s, class_order="shuffled").experiences[0].name for s in range(20)}
    assert orders == {"drawn-a", "drawn-b"}


def test_folders_as_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    first, second = image_folder(tmp_path / "letters", "ab"), image_folder(tmp_path / "more", "c")
    found = stream([str(first), str(second)], test_share=0.5)
    assert [task.name for task in found.experiences] == ["letters", "more"]
    assert found.classes == ("a", "b", "c")
    for task in found.experiences:
        assert [len(task.train), len(task.test)] == [2 * len(task.classes)] * 2
        for subset in (task.train, task.test):
            names = [chr(red) for red, _, _ in colours(subset)]
            assert names == [found.classes[label] for label in subset.labels]
    monkeypatch.chdir(tmp_path)
    assert stream("letters", tasks=2).classes == ("a", "b")  # a folder here, by its bare name


def test_fingerprint_follows_anything_that_changes_the_stream(tmp_path: Path):
    folder = image_folder(tmp_path / "letters", "abcd")

    def fingerprint(**fields: Any) -> str:
        return stream(str(folder), **{"tasks": 2, **fields}).fingerprint

    variants = [
        fingerprint(),
        fingerprint(tasks=4),
        fingerprint(tasks=[["b", "a"], ["c", "d"]]),
        fingerprint(validation=0.3),
        fingerprint(train_per_class=1),
        fingerprint(test_share=0.5),
        fingerprint(class_order="shuffled"),
    ]
    assert len(set(variants)) == len(variants)
    assert fingerprint() == variants[0]
    Image.new("RGB", (6, 4), (1, 2, 3)).save(folder / "a" / "0.png")
    assert fingerprint() != variants[0]


def test_a_share_of_test_images_that_divides_nothing_is_refused_in_new_runs(tmp_path: Path) -> None:
    divided = tmp_path / "divided"
    for split in ("train", "test"):
        image_folder(divided / split, "abcd")
    plain = image_folder(tmp_path / "plain", "efgh")
    for names, said in (
        ("drawn-a", "but drawn-a has test images of its own: leave it out"),
        ([str(divided), "drawn-a"], f"but {divided} and drawn-a have test images of their own"),
    ):
        with pytest.raises(DualPromptError, match=r"benchmark\.test_share divides folders") as caught:
            refuse_idle_share(BenchmarkConfig(name="b", dataset=names, test_share=0.5))
        assert said in str(caught.value)
        assert stream(names, test_share=0.5).experiences  # of a run that began before
    refuse_idle_share(BenchmarkConfig(name="b", dataset=[str(plain), str(divided)], test_share=0.5))
    refuse_idle_share(BenchmarkConfig(name="b", dataset=str(divided), test_share=0.2))  # as it is by itself
    assert [len(task.test) for task in stream([str(plain), str(divided)], test_share=0.5).experiences] == [8, 16]


def test_fingerprint_follows_class_names(tmp_path: Path):
    for part in ("train", "test"):
        image_folder(tmp_path / "letters" / part, "ab")
    before = stream(str(tmp_path / "letters")).fingerprint
    for part in ("train", "test"):
        (tmp_path / "letters" / part / "b").rename(tmp_path / "letters" / part / "bee")
    assert stream(str(tmp_path / "letters")).fingerprint != before


def test_bad_images_of_all_splits_are_named_at_once_or_skipped(tmp_path: Path):
    folder = tmp_path / "letters"
    for part in ("train", "test"):
        image_folder(folder / part, "ab")
    bad = [folder / "test" / "b" / "1.png", folder / "train" / "a" / "2.png"]
    for path in bad:
        path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(DualPromptError, match="2 of 16 images cannot be read") as error:
        stream(str(folder))
    assert all(str(path) in str(error.value) for path in bad)

    found = stream(str(folder), skip_bad=True)
    assert sorted(found.bad) == bad
    (task,) = found.experiences
    assert Counter(task.train.labels.tolist()) == {0: 3, 1: 4}
    assert (ord("a"), 2, 0) not in colours(task.train)
    assert (ord("a"), 3, 0) in colours(task.train)
    assert Counter(task.test.labels.tolist()) == {0: 4, 1: 3}

    for path in (folder / "test" / "b").iterdir():
        path.write_bytes(b"?")
    with pytest.raises(DualPromptError, match="class 'b' has no readable test images"):
        stream(str(folder), skip_bad=True)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tasks": 4}, "6 classes cannot be cut into 4 equal tasks; choose one of 1, 2, 3, 6, or"),
        ({"tasks": 7}, "6 classes cannot be cut into 7 equal tasks"),
        ({"tasks": 0}, "at least 1 task, found 0"),
        ({"tasks": -2}, "at least 1 task, found -2"),
        ({"tasks": []}, "no tasks"),
        ({"tasks": [3, 2]}, "sum to 5, but there are 6 classes"),
        ({"tasks": [3, 4]}, "sum to 7, but there are 6 classes"),
        ({"tasks": [6, 0]}, r"at least 1 class, found \[6, 0\]"),
        ({"tasks": [["k0", "k9"]]}, "unknown class 'k9'; did you mean 'k"),
        ({"tasks": [["k0", "k1"], ["k2", "k0"]]}, "class 'k0' is in two tasks, 1 and 2"),
        ({"tasks": [["k0", "k1"], ["k2", "k2"]]}, "class 'k2' is twice in task 2"),
        ({"tasks": [["k0", "k1"], []]}, "task 2 has no classes"),
        ({"tasks": [["k3"]]}, r"a single class \('k3'\); it needs at least 2"),
        ({"dataset": []}, "no tasks"),
        ({"dataset": "drawn-c"}, "unknown dataset 'drawn-c'; did you mean 'drawn-.'"),
        ({"dataset": "no/such"}, "no/such does not exist"),
        ({"dataset": ["drawn-b", "drawn-b"]}, r"'drawn-b/k0' is in two tasks, 1 \('drawn-b'\) and 2"),
    ],
)
def test_refusals_are_one_line_that_names_the_fault(fields: dict[str, Any], message: str):
    with pytest.raises(DualPromptError, match=message) as error:
        stream(**{"dataset": "drawn-a", **fields})
    assert "\n" not in str(error.value)


def test_the_same_class_in_two_folders_is_refused(tmp_path: Path):
    folders = [str(image_folder(tmp_path / name, classes)) for name, classes in (("one", "ab"), ("two", "cb"))]
    with pytest.raises(DualPromptError, match=r"class 'b' is in two tasks, 1 \('one'\) and 2 \('two'\)"):
        stream(folders)


def test_one_class_in_all_is_refused_but_a_task_of_one_class_is_fine(tmp_path: Path):
    single, other = (str(image_folder(tmp_path / name, name)) for name in ("a", "b"))
    with pytest.raises(DualPromptError, match="a single class"):
        stream(single)
    assert [task.classes for task in stream([single, other]).experiences] == [("a",), ("b",)]


def test_evaluation_on_an_empty_validation_split_is_refused():
    DRAWN.train_counts = [1, 1, 5, 5, 5, 5]
    with pytest.raises(DualPromptError, match="task 1 has no validation images"):
        stream(tasks=3, validation=0.2, evaluate_on="validation")
    assert len(stream(tasks=3, validation=0.2).experiences[0].validation) == 0
