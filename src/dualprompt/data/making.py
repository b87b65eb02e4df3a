"""From plans to experiences: which images of which class are learned, held out and tested, and when they come."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from dualprompt.config import BenchmarkConfig
from dualprompt.data.arrival import arranged
from dualprompt.data.experience import Experience, Plan, Subset
from dualprompt.data.images import Images
from dualprompt.data.sources import Dataset
from dualprompt.data.thinning import Thinning, long_tail
from dualprompt.errors import DualPromptError
from dualprompt.seeds import derive


class Pool(NamedTuple):
    """The decoded images of a split."""

    images: Images
    labels: np.ndarray  # as the dataset numbers them

    def rows(self, member: int, class_name: str, purpose: str) -> np.ndarray:
        """Return where the images of a class are; there must be some."""
        rows = np.flatnonzero(self.labels == member)
        if not len(rows):
            raise DualPromptError(f"class '{class_name}' has no readable {purpose} images; add some or leave it out")
        return rows


def make_experiences(
    config: BenchmarkConfig, seed: int, datasets: Sequence[Dataset], plans: Sequence[Plan], pools: Sequence[Pool]
) -> list[Experience]:
    """Return the experiences of plans, from the train and test images of each dataset in turn."""
    if config.shots_from > len(plans):
        raise DualPromptError(
            f"benchmark.shots_from is {config.shots_from}, but the stream has {len(plans)} task"
            f"{'s' if len(plans) > 1 else ' (an online one is a single task)'}: no class would have few images"
        )
    experiences: list[Experience] = []
    numbers: dict[str, int] = {}  # label of each class so far
    thin = _thinning(config, seed, plans)
    for plan in plans:
        train, test = (_pool(pools[split::2], datasets, plan.dataset) for split in (0, 1))
        experiences.append(_experience(len(experiences), plan, numbers, train, test, config, thin))
    return experiences


def _pool(pools: Sequence[Pool], datasets: Sequence[Dataset], place: int | None) -> Pool:
    """Return the images of the dataset at some place, or of all together, whose classes are then numbered through."""
    if place is not None or len(pools) == 1:
        return pools[place or 0]
    first = np.cumsum([0, *(len(dataset.classes) for dataset in datasets)])
    labels = [pool.labels + number for pool, number in zip(pools, first, strict=False)]
    return Pool(Images.concat([pool.images for pool in pools]), np.concatenate(labels))


def _thinning(config: BenchmarkConfig, seed: int, plans: Sequence[Plan]) -> Thinning:
    names = list(dict.fromkeys(name for plan in plans for name in plan.classes))
    shares = {} if config.imbalance is None else long_tail(names, config.imbalance, seed)
    return Thinning(seed, config.shots, config.shots_from, shares)


def _experience(
    index: int,
    plan: Plan,
    numbers: dict[str, int],
    train: Pool,
    test: Pool,
    config: BenchmarkConfig,
    thin: Thinning,
) -> Experience:
    """Return the experience of a plan.

    Args:
        index: its place in the stream.
        plan: which classes it has.
        numbers: the labels of the classes so far, to which its new ones are added.
        train: the training images of its dataset.
        test: the test images.
        config: how many of them are used.
        thin: which training images of a class are left.
    """
    known = len(numbers)
    parts = plan.parts or [slice(None)] * len(plan.members)
    rows: dict[str, dict[str, np.ndarray]] = {"train": {}, "validation": {}, "test": {}}
    for member, name, part in zip(plan.members, plan.classes, parts, strict=True):
        learned, held_out = _hold_out(train.rows(member, name, "training"), config.validation, name)
        rows["train"][name] = thin(learned[: config.train_per_class], name, index)[part]
        rows["validation"][name] = held_out
        rows["test"][name] = test.rows(member, name, "test")[: config.test_per_class]
    if config.evaluate_on == "validation" and not any(map(len, rows["validation"].values())):
        raise DualPromptError(
            f"task {index + 1} has no validation images: its classes have a single training image each"
        )
    if not any(map(len, rows["train"].values())):
        raise DualPromptError(f"task {index + 1} has no training images; plan fewer tasks")
    arrival = None if plan.arrive is None else arranged(plan.arrive, rows["train"])
    for name in plan.classes if arrival is None else arrival.classes:
        numbers.setdefault(name, len(numbers))
    labels, names = tuple(sorted(numbers[name] for name in plan.classes)), {n: name for name, n in numbers.items()}
    subset = _subset(train.images, numbers, rows["train"])
    if arrival is not None:
        order = torch.from_numpy(arrival.order)
        subset = Subset(subset.images, subset.indices[order], subset.labels[order])
    return Experience(
        index=index,
        name=plan.name or f"task {index + 1}",
        labels=labels,
        new_labels=tuple(range(known, len(numbers))),
        seen=tuple(range(len(numbers))),
        classes=tuple(names[label] for label in labels),
        train=subset,
        validation=_subset(train.images, numbers, rows["validation"]),
        test=_subset(test.images, numbers, rows["test"]),
        border=plan.border and arrival is None,
        online=arrival is not None,
        marks=() if arrival is None else arrival.marks,
    )


def _hold_out(rows: np.ndarray, fraction: float, class_name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows to learn from, at least one, and the validation rows, at least one if two are there."""
    count = min(max(1, round(len(rows) * fraction)), len(rows) - 1) if fraction else 0
    rng = np.random.default_rng(derive(0, "validation", class_name))
    held_out = np.sort(rng.permutation(rows)[:count])
    return np.setdiff1d(rows, held_out), held_out


def _subset(images: Images, numbers: Mapping[str, int], rows: Mapping[str, np.ndarray]) -> Subset:
    """Return the rows of each class, by name, in the order of the source."""
    labels = np.repeat(np.array([numbers[name] for name in rows], np.int64), [len(each) for each in rows.values()])
    indices = np.concatenate(list(rows.values()))
    order = np.argsort(indices)
    return Subset(images, torch.from_numpy(indices[order]), torch.from_numpy(labels[order]))
