"""A benchmark as the method meets it: experiences, which most papers call tasks, one after another."""

from __future__ import annotations

import functools
import os
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dualprompt.config import BenchmarkConfig, parse
from dualprompt.data.cache import Store, bad_images, decode
from dualprompt.data.folder import load_folder
from dualprompt.data.images import Images
from dualprompt.data.sources import DATASETS, GROUPS, Dataset
from dualprompt.errors import DualPromptError, nearest
from dualprompt.files import data_root, digest
from dualprompt.progress import SILENT, Progress
from dualprompt.registry import Registry
from dualprompt.seeds import derive


@dataclass(frozen=True, eq=False)
class Subset:
    """Some of `images`, in the order of their source, with their labels."""

    images: Images
    indices: Tensor  # (size,) int64, into images
    labels: Tensor  # (size,) int64, classes as the stream numbers them
    notes: Tensor | None = None  # (size, columns) what a method keeps with images in its buffer

    def __len__(self) -> int:
        return len(self.indices)


@dataclass(frozen=True, eq=False)
class Experience:
    """Some classes, new or returning, with the images to learn them from and to be evaluated on.

    A stream numbers its classes in the order in which they first come, from 0. These numbers are the labels.
    """

    index: int  # 0-based
    name: str
    labels: tuple[int, ...]  # of its classes, ascending
    new_labels: tuple[int, ...]  # those that no earlier experience had
    seen: tuple[int, ...]  # all labels of the stream so far, its own among them
    classes: tuple[str, ...]  # the names of `labels`
    train: Subset
    validation: Subset
    test: Subset
    border: bool = True  # whether the method is told that it begins and ends: else images just go on coming

    def judged(self, evaluate_on: Literal["test", "validation"]) -> Subset:
        """Return the images that evaluation reads."""
        return self.test if evaluate_on == "test" else self.validation


@dataclass(frozen=True, eq=False)
class Stream:
    """Experiences in the order they come."""

    experiences: tuple[Experience, ...]
    fingerprint: str  # changes with any image, label, class name, split or order
    bad: tuple[Path, ...]  # unreadable images that were left out

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of all classes, in the order of their labels."""
        named = {
            label: name for each in self.experiences for label, name in zip(each.labels, each.classes, strict=True)
        }
        return tuple(named[label] for label in sorted(named))

    @property
    def returns(self) -> bool:
        """Whether a label ever comes back."""
        return any(each.new_labels != each.labels for each in self.experiences)

    @property
    def bordered(self) -> bool:
        """Whether the method is told where every experience begins and ends."""
        return all(each.border for each in self.experiences)


class Plan(NamedTuple):
    """An experience before its images are decoded: which classes of which dataset it has, and how much of them.

    Classes of one name are one class, which returns where an earlier experience had it.
    """

    name: str | None  # None: called by its place
    dataset: int  # its place in the benchmark's list
    members: Sequence[int]  # its classes, as the dataset numbers them
    classes: Sequence[str]  # what the stream calls them
    parts: Sequence[slice] = ()  # which of each class's training images it has; empty: all
    border: bool = True  # see Experience


Planner = Callable[[BenchmarkConfig, int, Sequence[Dataset]], list[Plan]]
"""A kind of stream: a function from a benchmark's config, the run's seed and the datasets to a list of plans."""

STREAMS: Registry[Planner] = Registry("stream", "dualprompt.data.streams")


class _Pool(NamedTuple):
    """The decoded images of a split."""

    images: Images
    labels: np.ndarray  # as the dataset numbers them

    def rows(self, member: int, class_name: str, purpose: str) -> np.ndarray:
        """Return where the images of a class are; there must be some."""
        rows = np.flatnonzero(self.labels == member)
        if not len(rows):
            raise DualPromptError(f"class '{class_name}' has no readable {purpose} images; add some or leave it out")
        return rows


def build_stream(config: BenchmarkConfig, seed: int, store: Store, progress: Progress = SILENT) -> Stream:
    """Return the experiences that `config` describes, with every image decoded (once, see `decode`).

    `config.stream` names who plans them (`data/streams`). The validation split is the same for every seed.
    """
    config = expanded(config)
    root = Path(config.root).expanduser() if config.root else None
    datasets = [load_dataset(name, root, config.test_share) for name in names_of(config)]
    plans = STREAMS[config.stream](config, seed, datasets)
    _check(plans)
    splits = [split for dataset in datasets for split in (dataset.train, dataset.test)]
    decoded = [decode(split, store, skip_bad=True, progress=progress) for split in splits]
    bad = tuple(path for part in decoded for path in part.bad)
    if bad and not config.skip_bad:  # after all splits, so that all bad images are named at once
        raise bad_images(bad, sum(len(split) for split in splits))
    if bad:
        progress.note(f"{len(bad)} unreadable image{'s' if len(bad) > 1 else ''} left out")
    pools = [_Pool(part.images, split.labels[part.kept]) for part, split in zip(decoded, splits, strict=True)]
    experiences: list[Experience] = []
    numbers: dict[str, int] = {}  # label of each class so far
    for plan in plans:
        train, test = pools[2 * plan.dataset : 2 * plan.dataset + 2]
        experiences.append(_experience(len(experiences), plan, numbers, train, test, config))
    fingerprint = digest([[part.fingerprint for part in decoded], [_identity(each) for each in experiences]])
    return Stream(tuple(experiences), fingerprint, bad)


def names_of(config: BenchmarkConfig) -> list[str]:
    """Return the names of a benchmark's datasets."""
    return config.dataset if isinstance(config.dataset, list) else [config.dataset]


def order_of(config: BenchmarkConfig, seed: int) -> Callable[[int], np.ndarray]:
    """Return what puts so many things in the benchmark's order: as they are, drawn from a seed, or as it lists them."""
    order, order_seed = config.class_order, seed if config.class_order_seed is None else config.class_order_seed
    if isinstance(order, list):
        return functools.partial(_as_listed, order)
    kind, _, own = order.partition("-")
    order_seed = int(own) if own else order_seed
    # The orders of other codes come from the generators of these codes, which their seeds go into as they are.
    if kind == "pilot":  # and PyCIL's: np.random.seed(seed), then np.random.permutation
        if order_seed >= 2**32:
            raise DualPromptError(
                f"benchmark.class_order: NumPy's seeds lie below 2³², found {order_seed}; take another"
            )
        return np.random.RandomState(order_seed).permutation
    if kind == "coda":  # CODA-Prompt's: seed 0 leaves the classes as they are
        return functools.partial(_shuffled_by_python, order_seed)
    return np.random.default_rng(derive(order_seed, "class_order")).permutation if kind == "shuffled" else np.arange


def _as_listed(order: Sequence[int | str], count: int) -> np.ndarray:
    if sorted(map(str, order)) != sorted(map(str, range(count))):
        raise DualPromptError(
            f"benchmark.class_order: a list has each number from 0 to {count - 1} once, or the name of each class; the "
            f"{len(order)} entries found do not"
        )
    return np.array(order, dtype=np.int64)


def _shuffled_by_python(seed: int, count: int) -> np.ndarray:
    order = list(range(count))
    if seed:
        random.Random(seed).shuffle(order)
    return np.array(order, dtype=np.int64)


def whole(name: str, place: int, dataset: Dataset) -> Plan:
    """Return a plan of all classes of the dataset at some place of the list; the names of known ones begin with it."""
    prefix = f"{name}/" if is_registered(name) else ""
    classes = tuple(prefix + class_name for class_name in dataset.classes)
    return Plan(dataset.name, place, range(len(classes)), classes)


def place_of(number: int, plan: Plan) -> str:
    """Return how an error speaks of the `number`-th plan, counted from 1."""
    return f"{number} ('{plan.name}')" if plan.name else str(number)


def expanded(config: BenchmarkConfig) -> BenchmarkConfig:
    """Return the config with groups of datasets replaced by their members, a task each."""
    if isinstance(config.dataset, str) and config.dataset not in GROUPS:
        return config
    members = [member for name in names_of(config) for member in GROUPS.get(name, (name,))]
    return parse(BenchmarkConfig, config.model_dump() | {"dataset": members}, "benchmark")


def with_absolute_paths(config: BenchmarkConfig) -> BenchmarkConfig:
    """Return the config with the paths of folders made absolute, so that it means the same from every directory."""

    def absolute(name: str) -> str:
        known = name in GROUPS or is_registered(name)
        return name if known or not Path(name).expanduser().is_dir() else str(Path(name).expanduser().absolute())

    dataset = (
        [absolute(name) for name in config.dataset] if isinstance(config.dataset, list) else absolute(config.dataset)
    )
    root = None if config.root is None else str(Path(config.root).expanduser().absolute())
    return config.model_copy(update={"dataset": dataset, "root": root})


def load_dataset(name: str, root: Path | None = None, test_share: float = 0.2) -> Dataset:
    """Return a registered dataset from below `root` (default: the data root), or a folder of class folders."""
    if is_registered(name):
        return DATASETS[name].load(root or data_root())
    if _is_path(name) or Path(name).is_dir():
        return load_folder(Path(name).expanduser(), test_share)
    raise DualPromptError(
        f"unknown dataset '{name}'; {nearest(name, [*DATASETS.names(), *GROUPS])}; or the path of a folder"
    )


def _is_path(name: str) -> bool:
    return "/" in name or os.sep in name


def is_registered(name: str) -> bool:
    """Return whether a dataset of this name is known, so that it is not the path of a folder."""
    return name in DATASETS


def _check(plans: Sequence[Plan]) -> None:
    """Refuse a benchmark without experiences, one without classes, a class twice in it, one class in all."""
    if not plans:
        raise DualPromptError("the benchmark has no tasks; give it at least 1 dataset and 1 task")
    for number, plan in enumerate(plans, start=1):
        here = place_of(number, plan)
        if not plan.classes:
            raise DualPromptError(f"task {here} has no classes; name at least one or remove the task")
        name, count = Counter(plan.classes).most_common(1)[0]
        if count > 1:
            raise DualPromptError(f"class '{name}' is twice in task {here}; keep or rename one of them")
    every = {name for plan in plans for name in plan.classes}
    if len(every) < 2:
        raise DualPromptError(f"the benchmark has a single class ('{every.pop()}'); it needs at least 2")


def _experience(
    index: int, plan: Plan, numbers: dict[str, int], train: _Pool, test: _Pool, config: BenchmarkConfig
) -> Experience:
    """Return the experience of a plan.

    Args:
        index: its place in the stream.
        plan: which classes it has.
        numbers: the labels of the classes so far, to which its new ones are added.
        train: the training images of its dataset.
        test: the test images.
        config: how many of them are used.
    """
    known = len(numbers)
    parts = plan.parts or [slice(None)] * len(plan.members)
    rows: dict[str, dict[int, np.ndarray]] = {"train": {}, "validation": {}, "test": {}}
    for member, name, part in zip(plan.members, plan.classes, parts, strict=True):
        label = numbers.setdefault(name, len(numbers))
        learned, held_out = _hold_out(train.rows(member, name, "training"), config.validation, name)
        rows["train"][label] = learned[: config.train_per_class][part]
        rows["validation"][label] = held_out
        rows["test"][label] = test.rows(member, name, "test")[: config.test_per_class]
    if config.evaluate_on == "validation" and not any(map(len, rows["validation"].values())):
        raise DualPromptError(
            f"task {index + 1} has no validation images: its classes have a single training image each"
        )
    if not any(map(len, rows["train"].values())):
        raise DualPromptError(f"task {index + 1} has no training images; plan fewer tasks")
    labels, names = tuple(sorted(rows["train"])), {label: name for name, label in numbers.items()}
    return Experience(
        index=index,
        name=plan.name or f"task {index + 1}",
        labels=labels,
        new_labels=tuple(range(known, len(numbers))),
        seen=tuple(range(len(numbers))),
        classes=tuple(names[label] for label in labels),
        train=_subset(train.images, rows["train"]),
        validation=_subset(train.images, rows["validation"]),
        test=_subset(test.images, rows["test"]),
        border=plan.border,
    )


def _hold_out(rows: np.ndarray, fraction: float, class_name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows to learn from, at least one, and the validation rows, at least one if two are there."""
    count = min(max(1, round(len(rows) * fraction)), len(rows) - 1) if fraction else 0
    rng = np.random.default_rng(derive(0, "validation", class_name))
    held_out = np.sort(rng.permutation(rows)[:count])
    return np.setdiff1d(rows, held_out), held_out


def _subset(images: Images, rows: dict[int, np.ndarray]) -> Subset:
    """Return the rows of each label, in the order of the source."""
    labels = np.repeat(np.array(list(rows), np.int64), [len(each) for each in rows.values()])
    indices = np.concatenate(list(rows.values()))
    order = np.argsort(indices)
    return Subset(images, torch.from_numpy(indices[order]), torch.from_numpy(labels[order]))


def _identity(experience: Experience) -> list[object]:
    subsets = (experience.train, experience.validation, experience.test)
    told = [] if experience.border else ["no border"]
    return [experience.classes, *([subset.indices.tolist(), subset.labels.tolist()] for subset in subsets), *told]


def union(subsets: Sequence[Subset]) -> Subset:
    """Return the images of several subsets, one after another."""
    if len(subsets) == 1:
        return subsets[0]
    labels = torch.cat([subset.labels for subset in subsets])
    if all(subset.images is subsets[0].images for subset in subsets):
        return Subset(subsets[0].images, torch.cat([subset.indices for subset in subsets]), labels)
    images = Images.concat([subset.images.select(subset.indices) for subset in subsets])
    return Subset(images, torch.arange(len(images)), labels)
