"""Online: every image comes once, and nobody is told where a task begins."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dualprompt.config import BenchmarkConfig
from dualprompt.data.arrival import Arrival, Arrive, in_tasks
from dualprompt.data.sources import Dataset
from dualprompt.data.stream import STREAMS, Plan, names_of, order_of, stream_seed, whole
from dualprompt.errors import DualPromptError
from dualprompt.seeds import derive


@STREAMS.register("online")
def online(config: BenchmarkConfig, seed: int, datasets: Sequence[Dataset]) -> list[Plan]:
    """Shuffle all images; with `config.tasks`, cut the classes into so many groups that come one after another.

    As many groups as classes is class after class.
    """
    groups = 1 if config.tasks is None else number_of(config.tasks, "groups of classes")
    classes = all_classes(config, datasets)
    if groups > len(classes):
        raise DualPromptError(f"benchmark.tasks: {len(classes)} classes cannot be cut into {groups} groups; take fewer")
    order = order_of(config, seed, classes)

    def arrive(classes: np.ndarray) -> Arrival:
        parts = np.array_split(order(classes.max() + 1), groups)
        return in_tasks([np.flatnonzero(np.isin(classes, part)) for part in parts], generator_of(config, seed))

    return [single(config, datasets, arrive)]


def single(config: BenchmarkConfig, datasets: Sequence[Dataset], arrive: Arrive) -> Plan:
    """Return the plan of one experience with all classes of all datasets."""
    classes = all_classes(config, datasets)
    return Plan("stream", None, range(len(classes)), classes, border=False, arrive=arrive)


def all_classes(config: BenchmarkConfig, datasets: Sequence[Dataset]) -> Sequence[str]:
    """Return the names of all classes of all datasets, in the order that they are numbered in."""
    if len(datasets) == 1:
        return datasets[0].classes
    plans = [whole(name, place, datasets[place]) for place, name in enumerate(names_of(config))]
    return [name for plan in plans for name in plan.classes]


def generator_of(config: BenchmarkConfig, seed: int) -> np.random.Generator:
    """Return what draws the order of a stream's images."""
    return np.random.default_rng(derive(stream_seed(config, seed), "arrival"))


def number_of(tasks: object, what: str) -> int:
    """Return how many tasks a config asks for, which must be a number; `what` says what they are."""
    if not isinstance(tasks, int) or tasks < 1:
        raise DualPromptError(f"benchmark.tasks: this stream takes a number of {what}, at least 1, found {tasks}")
    return tasks
