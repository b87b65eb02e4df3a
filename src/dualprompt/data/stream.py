"""A benchmark as the method meets it: experiences, which most papers call tasks, one after another."""

from __future__ import annotations

import functools
import os
import random
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from dualprompt.config import BenchmarkConfig, parse
from dualprompt.data.cache import Store, bad_images, decode
from dualprompt.data.experience import Experience, Plan, Stream, Subset, union
from dualprompt.data.folder import load_folder, one_form, own_test_images
from dualprompt.data.images import Images
from dualprompt.data.making import Pool, make_experiences
from dualprompt.data.origin import mark
from dualprompt.data.sources import DATASETS, GROUPS, Dataset, checked
from dualprompt.errors import DualPromptError, nearest
from dualprompt.files import data_root, digest, with_home
from dualprompt.progress import SILENT, Progress
from dualprompt.registry import Registry
from dualprompt.seeds import derive

__all__ = ["STREAMS", "Experience", "Plan", "Planner", "Stream", "Subset", "build_stream", "outline", "union"]

Planner = Callable[[BenchmarkConfig, int, Sequence[Dataset]], list[Plan]]
"""A kind of stream: a function from a benchmark's config, the run's seed and the datasets to a list of plans."""

STREAMS: Registry[Planner] = Registry("stream", "dualprompt.data.streams")


def build_stream(config: BenchmarkConfig, seed: int, store: Store, progress: Progress = SILENT) -> Stream:
    """Return the experiences that `config` describes, with every image decoded (once, see `decode`).

    `config.stream` names who plans them (`data/streams`). The validation split is the same for every seed.
    """
    config, datasets, plans = _planned(config, seed)
    splits = [split for dataset in datasets for split in (dataset.train, dataset.test)]
    decoded = [decode(split, store, skip_bad=True, progress=progress) for split in splits]
    mark(datasets, decoded, store)
    bad = tuple(path for part in decoded for path in part.bad)
    if bad and not config.skip_bad:  # after all splits, so that all bad images are named at once
        raise bad_images(bad, sum(len(split) for split in splits))
    if bad:
        progress.note(f"{len(bad)} unreadable image{'s' if len(bad) > 1 else ''} left out")
    pools = [Pool(part.images, split.labels[part.kept]) for part, split in zip(decoded, splits, strict=True)]
    experiences = make_experiences(config, stream_seed(config, seed), datasets, plans, pools)
    fingerprint = digest([[part.fingerprint for part in decoded], [_identity(each) for each in experiences]])
    return Stream(tuple(experiences), fingerprint, bad)


def outline(config: BenchmarkConfig, seed: int) -> Stream:
    """Return a stream without its pixels, as it is planned: no image is read, so none is known to be unreadable."""
    config, datasets, plans = _planned(config, seed)
    splits = [split for dataset in datasets for split in (dataset.train, dataset.test)]
    pools = [Pool(Images.concat([]), split.labels) for split in splits]
    return Stream(tuple(make_experiences(config, stream_seed(config, seed), datasets, plans, pools)), "", ())


def _planned(config: BenchmarkConfig, seed: int) -> tuple[BenchmarkConfig, list[Dataset], list[Plan]]:
    """Return a config without names of groups, its datasets, and what is planned with them."""
    config = expanded(config)
    root = with_home(config.root) if config.root else None
    datasets = [load_dataset(name, root, config.test_share) for name in names_of(config)]
    plans = STREAMS[config.stream](config, seed, datasets)
    _check(plans)
    return config, datasets, plans


def refuse_idle_share(config: BenchmarkConfig) -> None:
    """Refuse a share of test images where no dataset is divided by it; runs that began so before go on."""
    names = names_of(expanded(config))
    if config.test_share == BenchmarkConfig.model_fields["test_share"].default:
        return
    if all(is_registered(name) or own_test_images(with_home(name)) for name in names):
        raise DualPromptError(
            f"benchmark.test_share divides folders without train/ and test/, but {' and '.join(names)} "
            f"{'has' if len(names) == 1 else 'have'} test images of {'its' if len(names) == 1 else 'their'} own: "
            "leave it out"
        )


def names_of(config: BenchmarkConfig) -> list[str]:
    """Return the names of a benchmark's datasets."""
    return config.dataset if isinstance(config.dataset, list) else [config.dataset]


def stream_seed(config: BenchmarkConfig, seed: int) -> int:
    """Return the seed of all that is drawn to make a stream, given the run's."""
    return seed if config.class_order_seed is None else config.class_order_seed


def drawn_by_run(config: BenchmarkConfig) -> bool:
    """Return whether another seed of a run may make another stream."""
    fixed = not config.order_follows_run and config.stream in ("class", "domain")
    return config.class_order_seed is None and not (fixed and config.shots is None and config.imbalance is None)


def order_of(config: BenchmarkConfig, seed: int, names: Sequence[str] = ()) -> Callable[[int], np.ndarray]:
    """Return what puts so many things in the benchmark's order: as they are, drawn from a seed, or as it lists them.

    `names` are what a list of names may say of the things, in the order that they are numbered in.
    """
    order, order_seed = config.class_order, stream_seed(config, seed)
    if isinstance(order, list):
        listed = [name for name in order if isinstance(name, str)]
        numbers = members([one_form(name) for name in listed], names, "class_order") if listed and names else order
        return functools.partial(_as_listed, numbers)
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


def members(names: Sequence[str], known: Sequence[str], option: str) -> list[int]:
    """Return the places of names among the known ones; `option` is where the names were given."""
    places = {name: place for place, name in enumerate(known)}
    for name in names:
        if name not in places:
            raise DualPromptError(f"benchmark.{option}: unknown class '{name}'; {nearest(name, known)}")
    return [places[name] for name in names]


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
        return name if known or not with_home(name).is_dir() else str(with_home(name).absolute())

    dataset = (
        [absolute(name) for name in config.dataset] if isinstance(config.dataset, list) else absolute(config.dataset)
    )
    root = None if config.root is None else str(with_home(config.root).absolute())
    return config.model_copy(update={"dataset": dataset, "root": root})


def load_dataset(name: str, root: Path | None = None, test_share: float = 0.2) -> Dataset:
    """Return a registered dataset from below `root` (default: the data root), or a folder of class folders."""
    if is_registered(name):
        return checked(name, DATASETS[name].load(root or data_root()))
    if _is_path(name) or Path(name).is_dir():
        return load_folder(with_home(name), test_share)
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
    if len(plans) > 1 and any(plan.arrive is not None for plan in plans):
        raise ValueError("an online stream is a single experience: nobody knows where another would begin")


def _identity(experience: Experience) -> list[object]:
    subsets = (experience.train, experience.validation, experience.test)
    told = [] if experience.border else ["online" if experience.online else "no border"]
    return [experience.classes, *([subset.indices.tolist(), subset.labels.tolist()] for subset in subsets), *told]
