"""What a method keeps for each task alone, where its state names it `name.0`, `name.1`, …, and how that is forgotten.

A forgotten class leaves a column of zeros in the classifier, so that sums over the others stay exact, until the next
task is learned; of all else that was its own nothing stays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from dualprompt.methods.base import numbered

State = dict[str, Tensor]
# Which tensors come one a task, and along which dimension they list its classes (None: they are the whole task's).
OfTask = Mapping[str, int | None]
CLASSIFIER = ("head.weight", "head.bias")  # one block of rows a task


def owned(state: State, of_task: OfTask, task: int) -> State:
    """Return the tensors of a task alone; the classifier must have no columns of forgotten classes."""
    return {name: state[name] for prefix in of_task if (name := f"{prefix}.{task}") in state}


def has_own_parts(state: State, of_task: OfTask) -> bool:
    """Return whether tasks have more of their own than rows of the classifier."""
    return any(numbered(state, prefix) for prefix in of_task if prefix not in CLASSIFIER)


def without(state: State, of_task: OfTask, task: int, classes: Sequence[int], places: Sequence[int] | None) -> State:
    """Return what is left without some classes of a task; see `Method.forget`."""
    left = dict(state)
    for prefix, axis in of_task.items():
        name = f"{prefix}.{task}"
        if prefix in CLASSIFIER or name not in left:
            continue
        if places is None:
            others = numbered(left, prefix)
            _replace(left, prefix, others[:task] + others[task + 1 :])
        elif axis is not None:
            stay = [i for i in range(left[name].shape[axis]) if i not in places]
            left[name] = left[name].index_select(axis, torch.tensor(stay, device=left[name].device))
    for prefix in CLASSIFIER:
        start = 0
        for block, values in enumerate(numbered(state, prefix)):
            mine = [column - start for column in classes if start <= column < start + len(values)]
            if mine:
                left[f"{prefix}.{block}"] = values.index_fill(0, torch.tensor(mine, device=values.device), 0)
            start += len(values)
    return left


def compacted(state: State, classes: Sequence[int]) -> State:
    """Return a state without some columns of the classifier; blocks that have no other go too."""
    left, gone = dict(state), set(classes)
    for prefix in CLASSIFIER:
        blocks, start = [], 0
        for values in numbered(state, prefix):
            alive = [i for i in range(len(values)) if start + i not in gone]
            start += len(values)
            if alive:
                blocks.append(values[torch.tensor(alive, device=values.device)])
        _replace(left, prefix, blocks)
    return left


def refuse_misfits(state: State, of_task: OfTask, sizes: Sequence[int], columns: int) -> None:
    """Refuse with a ValueError tensors that are not those of tasks with so many classes each."""
    for prefix, axis in of_task.items():
        found = numbered(state, prefix)
        if prefix in CLASSIFIER:
            if sum(map(len, found)) != columns:
                raise ValueError(f"'{prefix}' is of {sum(map(len, found))} classes, not of {columns}")
        elif found and len(found) != len(sizes):
            raise ValueError(f"'{prefix}' is of {len(found)} tasks, not of {len(sizes)}")
        elif found and axis is not None and [value.shape[axis] for value in found] != list(sizes):
            raise ValueError(f"'{prefix}' is of other classes than those of the tasks")


def _replace(state: State, prefix: str, values: Sequence[Tensor]) -> None:
    for name in [name for name in state if name.rpartition(".")[0] == prefix]:
        del state[name]
    state.update({f"{prefix}.{number}": value for number, value in enumerate(values)})
