"""Blurry tasks: some classes come in one task only; of the others, some images come in any task.

i-Blurry (Koh et al., 2022) has equal tasks. Si-Blurry (Moon et al., 2023) draws how many classes, and how many stray
images, each task has. Both are online, and nobody is told of the tasks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dualprompt.config import BenchmarkConfig
from dualprompt.data.arrival import Arrival, in_tasks
from dualprompt.data.sources import Dataset
from dualprompt.data.stream import STREAMS, Plan, order_of
from dualprompt.data.streams.online import all_classes, generator_of, number_of, single
from dualprompt.errors import DualPromptError

DISJOINT, BLUR = 0.5, 0.1  # N and M of both papers


@STREAMS.register("i-blurry")
def i_blurry(config: BenchmarkConfig, seed: int, datasets: Sequence[Dataset]) -> list[Plan]:
    """Cut disjoint and blurry classes into equal tasks; a share of each task's blurry images strays."""
    return [_blurry(config, seed, datasets, drawn=False)]


@STREAMS.register("si-blurry")
def si_blurry(config: BenchmarkConfig, seed: int, datasets: Sequence[Dataset]) -> list[Plan]:
    """Do the same at borders that are drawn, with a share of all blurry images that is spread over tasks at random."""
    return [_blurry(config, seed, datasets, drawn=True)]


def _blurry(config: BenchmarkConfig, seed: int, datasets: Sequence[Dataset], drawn: bool) -> Plan:
    tasks = number_of(config.tasks, "tasks")
    alone_share = DISJOINT if config.disjoint is None else config.disjoint
    stray_share = BLUR if config.blur is None else config.blur
    in_order = order_of(config, seed, all_classes(config, datasets))

    def arrive(classes: np.ndarray) -> Arrival:
        rng, order = generator_of(config, seed), in_order(classes.max() + 1)
        groups = np.split(order, [int(alone_share * len(order))])
        alone, shared = (
            [rng.permutation(np.flatnonzero(np.isin(classes, part))) for part in _cut(group, tasks, rng, drawn)]
            for group in groups
        )
        if not drawn and any(len(a) + len(b) == 0 for a, b in zip(alone, shared, strict=True)):
            raise DualPromptError(
                f"benchmark.tasks: {len(order)} classes, {len(groups[0])} of them disjoint, leave some of {tasks} "
                "equal tasks without images; take fewer tasks"
            )
        if drawn:
            strays = np.arange(int(stray_share * sum(map(len, shared))))
            wanted = [len(part) for part in _cut(strays, tasks, rng, drawn)]
        else:
            wanted = [int(stray_share * len(rows)) for rows in shared]
        # A task has as many strays as it gives away; where its borders leave it fewer, it gives what it has.
        given = [rows[:count] for rows, count in zip(shared, wanted, strict=True)]
        back = np.split(rng.permutation(np.concatenate(given)), np.cumsum(wanted)[:-1])
        stay = [rows[count:] for rows, count in zip(shared, wanted, strict=True)]
        return in_tasks([np.concatenate(parts) for parts in zip(alone, stay, back, strict=True)], rng)

    return single(config, datasets, arrive)


def _cut(things: np.ndarray, parts: int, rng: np.random.Generator, drawn: bool) -> list[np.ndarray]:
    """Cut things into equal parts, or at places that are drawn: then a part may be empty."""
    if not drawn or not len(things):
        return np.array_split(things, parts)
    return np.split(things, np.sort(rng.integers(0, len(things), parts - 1)))
