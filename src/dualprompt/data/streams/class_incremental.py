"""Class-incremental: every task brings new classes, and no class comes back."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dualprompt.config import BenchmarkConfig
from dualprompt.data.folder import one_form
from dualprompt.data.sources import Dataset
from dualprompt.data.stream import STREAMS, Plan, members, names_of, order_of, place_of, whole
from dualprompt.errors import DualPromptError


@STREAMS.register("class")
def class_incremental(config: BenchmarkConfig, seed: int, datasets: Sequence[Dataset]) -> list[Plan]:
    """Cut a single dataset into `config.tasks`; a list is one task for each.

    The order permutes the classes of a dataset before it is cut by numbers of classes; where the config says what each
    task holds (a list of datasets, or class names) it permutes the tasks.
    """
    many = isinstance(config.dataset, list)
    order = order_of(config, seed, [each.name for each in datasets] if many else datasets[0].classes)
    named = [task for task in config.tasks if isinstance(task, list)] if isinstance(config.tasks, list) else []
    if many:
        plans = [whole(name, i, datasets[i]) for i, name in enumerate(names_of(config))]
    elif named:
        named = [[one_form(name) for name in task] for task in named]
        plans = [Plan(None, 0, members(task, datasets[0].classes, "tasks"), tuple(task)) for task in named]
    else:
        classes = datasets[0].classes
        counts = _counts(config.tasks, len(classes), config.first)
        groups = np.split(order(len(classes)), np.cumsum(counts)[:-1]) if counts else []
        plans = [Plan(None, 0, group.tolist(), tuple(classes[i] for i in group)) for group in groups]
        order = np.arange  # the shuffle is spent on the classes
    _refuse_returning(plans)
    return [plans[i] for i in order(len(plans))]


def _refuse_returning(plans: Sequence[Plan]) -> None:
    """Refuse a class in two tasks."""
    owner: dict[str, str] = {}
    for number, plan in enumerate(plans, start=1):
        here = place_of(number, plan)
        for name in plan.classes:
            if owner.setdefault(name, here) != here:
                raise DualPromptError(
                    f"class '{name}' is in two tasks, {owner[name]} and {here}; keep or rename one of them, or set "
                    "benchmark.stream: domain if all tasks have the same classes"
                )


def _counts(tasks: int | list[int] | list[list[str]] | None, total: int, first: int | None = None) -> list[int]:
    """Return how many classes each task has; a `first` one comes before those that `tasks` says."""
    if first is not None:
        if first >= total:
            raise DualPromptError(f"benchmark.first: {first} of {total} classes leave none for the tasks that follow")
        return [first, *_counts(tasks, total - first)]
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
