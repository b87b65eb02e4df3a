"""A benchmark as the method meets it: tasks of new classes, one after another."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dualprompt.config import BenchmarkConfig, parse
from dualprompt.data.cache import Store, bad_images, decode
from dualprompt.data.folder import load_folder, one_form
from dualprompt.data.images import Images
from dualprompt.data.sources import DATASETS, GROUPS, Dataset
from dualprompt.errors import DualPromptError, nearest
from dualprompt.files import data_root, digest
from dualprompt.progress import SILENT, Progress
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
class Task:
    """New classes, with the images to learn them from and to be evaluated on."""

    index: int  # 0-based
    name: str
    classes: tuple[str, ...]
    first_class: int
    train: Subset
    validation: Subset
    test: Subset

    @property
    def class_range(self) -> range:
        """The classes of the task as the stream numbers them."""
        return range(self.first_class, self.first_class + len(self.classes))

    def judged(self, evaluate_on: Literal["test", "validation"]) -> Subset:
        """Return the images that evaluation reads."""
        return self.test if evaluate_on == "test" else self.validation


@dataclass(frozen=True, eq=False)
class TaskStream:
    """Tasks in the order they come. Classes are numbered in that order, from 0 over all tasks."""

    tasks: tuple[Task, ...]
    fingerprint: str  # changes with any image, label, class name, split or order
    bad: tuple[Path, ...]  # unreadable images that were left out

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of all classes, in the order of their numbers."""
        return tuple(name for task in self.tasks for name in task.classes)


class _Plan(NamedTuple):
    """A task before its images are decoded."""

    name: str | None  # None: called by its place
    dataset: int
    members: list[int]  # its classes as the dataset numbers them
    classes: tuple[str, ...]


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


def build_stream(config: BenchmarkConfig, seed: int, store: Store, progress: Progress = SILENT) -> TaskStream:
    """Return the tasks that `config` describes, with every image decoded (once, see `decode`).

    A single dataset is cut into `config.tasks`; a list is one task for each. "shuffled" permutes the classes
    of a dataset before it is cut by numbers of classes; where the config says what each task holds (a list of
    datasets, or class names) it permutes the tasks. The validation split is the same for every seed.
    """
    config = _expanded(config)
    names = config.dataset if isinstance(config.dataset, list) else [config.dataset]
    root = Path(config.root).expanduser() if config.root else None
    datasets = [load_dataset(name, root, config.test_share) for name in names]
    plans = _plan(config, seed, names, datasets)
    splits = [split for dataset in datasets for split in (dataset.train, dataset.test)]
    decoded = [decode(split, store, skip_bad=True, progress=progress) for split in splits]
    bad = tuple(path for part in decoded for path in part.bad)
    if bad and not config.skip_bad:  # after all splits, so that all bad images are named at once
        raise bad_images(bad, sum(len(split) for split in splits))
    if bad:
        progress.note(f"{len(bad)} unreadable image{'s' if len(bad) > 1 else ''} left out")
    pools = [_Pool(part.images, split.labels[part.kept]) for part, split in zip(decoded, splits, strict=True)]
    tasks: list[Task] = []
    first_class = 0
    for plan in plans:
        train, test = pools[2 * plan.dataset : 2 * plan.dataset + 2]
        tasks.append(_task(len(tasks), first_class, plan, train, test, config))
        first_class += len(plan.classes)
    fingerprint = digest([[part.fingerprint for part in decoded], [_identity(task) for task in tasks]])
    return TaskStream(tuple(tasks), fingerprint, bad)


def _expanded(config: BenchmarkConfig) -> BenchmarkConfig:
    """Return the config with groups of datasets replaced by their members, a task each."""
    if isinstance(config.dataset, str) and config.dataset not in GROUPS:
        return config
    names = config.dataset if isinstance(config.dataset, list) else [config.dataset]
    members = [member for name in names for member in GROUPS.get(name, (name,))]
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
    return not _is_path(name) and name in DATASETS


def _plan(config: BenchmarkConfig, seed: int, names: Sequence[str], datasets: Sequence[Dataset]) -> list[_Plan]:
    order_seed = seed if config.class_order_seed is None else config.class_order_seed
    rng = np.random.default_rng(derive(order_seed, "class_order"))
    order = rng.permutation if config.class_order == "shuffled" else np.arange
    named = [task for task in config.tasks if isinstance(task, list)] if isinstance(config.tasks, list) else []
    if isinstance(config.dataset, list):
        plans = [_whole(names[i], i, dataset) for i, dataset in enumerate(datasets)]
    elif named:
        named = [[one_form(name) for name in task] for task in named]
        plans = [_Plan(None, 0, _members(task, datasets[0].classes), tuple(task)) for task in named]
    else:
        classes = datasets[0].classes
        counts = _counts(config.tasks, len(classes))
        groups = np.split(order(len(classes)), np.cumsum(counts)[:-1]) if counts else []
        plans = [_Plan(None, 0, group.tolist(), tuple(classes[i] for i in group)) for group in groups]
        order = np.arange  # the shuffle is spent on the classes
    _check(plans)
    return [plans[i] for i in order(len(plans))]


def _whole(name: str, index: int, dataset: Dataset) -> _Plan:
    prefix = f"{name}/" if is_registered(name) else ""
    classes = tuple(prefix + class_name for class_name in dataset.classes)
    return _Plan(dataset.name, index, list(range(len(classes))), classes)


def _members(task: Sequence[str], classes: Sequence[str]) -> list[int]:
    for name in task:
        if name not in classes:
            raise DualPromptError(f"benchmark.tasks: unknown class '{name}'; {nearest(name, classes)}")
    return [classes.index(name) for name in task]


def _counts(tasks: int | list[int] | list[list[str]] | None, total: int) -> list[int]:
    """Return how many classes each task has."""
    if tasks is None:
        return [total]
    if isinstance(tasks, int):
        if tasks < 1:
            raise DualPromptError(f"benchmark.tasks: a benchmark needs at least 1 task, found {tasks}")
        if total % tasks:
            divisors = ", ".join(str(n) for n in range(1, total + 1) if total % n == 0)
            raise DualPromptError(
                f"benchmark.tasks: {total} classes cannot be cut into {tasks} equal tasks; "
                f"choose one of {divisors}, or give a list of class counts that sum to {total}"
            )
        return [total // tasks] * tasks
    counts = [count for count in tasks if isinstance(count, int)]
    if any(count < 1 for count in counts):
        raise DualPromptError(f"benchmark.tasks: a task needs at least 1 class, found {counts}")
    if counts and sum(counts) != total:
        raise DualPromptError(f"benchmark.tasks: the class counts sum to {sum(counts)}, but there are {total} classes")
    return counts


def _check(plans: Sequence[_Plan]) -> None:
    """Refuse a benchmark without tasks, a task without classes, a class in two tasks, one class in all."""
    if not plans:
        raise DualPromptError("the benchmark has no tasks; give it at least 1 dataset and 1 task")
    owner: dict[str, str] = {}
    for number, plan in enumerate(plans, start=1):
        here = f"{number} ('{plan.name}')" if plan.name else str(number)
        if not plan.classes:
            raise DualPromptError(f"task {here} has no classes; name at least one or remove the task")
        for name in plan.classes:
            if name in owner:
                places = f"in two tasks, {owner[name]} and {here}" if owner[name] != here else f"twice in task {here}"
                raise DualPromptError(f"class '{name}' is {places}; keep or rename one of them")
            owner[name] = here
    if len(owner) < 2:
        raise DualPromptError(f"the benchmark has a single class ('{next(iter(owner))}'); it needs at least 2")


def _task(index: int, first_class: int, plan: _Plan, train: _Pool, test: _Pool, config: BenchmarkConfig) -> Task:
    rows: dict[str, list[np.ndarray]] = {"train": [], "validation": [], "test": []}
    for member, name in zip(plan.members, plan.classes, strict=True):
        learned, held_out = _hold_out(train.rows(member, name, "training"), config.validation, name)
        rows["train"].append(learned[: config.train_per_class])
        rows["validation"].append(held_out)
        rows["test"].append(test.rows(member, name, "test")[: config.test_per_class])
    if config.evaluate_on == "validation" and not any(len(each) for each in rows["validation"]):
        raise DualPromptError(
            f"task {index + 1} has no validation images: its classes have a single training image each"
        )
    return Task(
        index=index,
        name=plan.name or f"task {index + 1}",
        classes=plan.classes,
        first_class=first_class,
        train=_subset(train.images, rows["train"], first_class),
        validation=_subset(train.images, rows["validation"], first_class),
        test=_subset(test.images, rows["test"], first_class),
    )


def _hold_out(rows: np.ndarray, fraction: float, class_name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows to learn from, at least one, and the validation rows, at least one if two are there."""
    count = min(max(1, round(len(rows) * fraction)), len(rows) - 1) if fraction else 0
    rng = np.random.default_rng(derive(0, "validation", class_name))
    held_out = np.sort(rng.permutation(rows)[:count])
    return np.setdiff1d(rows, held_out), held_out


def _subset(images: Images, rows: Sequence[np.ndarray], first_class: int) -> Subset:
    """Return the rows of each class, given class by class, in the order of the source."""
    labels = np.repeat(np.arange(first_class, first_class + len(rows)), [len(each) for each in rows])
    indices = np.concatenate(rows)
    order = np.argsort(indices)
    return Subset(images, torch.from_numpy(indices[order]), torch.from_numpy(labels[order]))


def _identity(task: Task) -> list[object]:
    subsets = (task.train, task.validation, task.test)
    return [task.classes, *([subset.indices.tolist(), subset.labels.tolist()] for subset in subsets)]
