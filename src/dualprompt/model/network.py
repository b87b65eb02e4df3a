"""A method that has learned some tasks, with the names of what it knows; it is replaced, never changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dualprompt.data.augment import normalise
from dualprompt.methods.base import Batch, Method, numbered
from dualprompt.run.checkpoint import State

Of = Mapping[str, int | None]
HEAD = ("head.weight", "head.bias")
HeadRow = tuple[int, str]
"""A row of the head: the id of the task that taught it, and its label."""


class Network(nn.Module):
    """Everything between pixels and answer in one pass: query, matching, prompted pass, one logit a class."""

    mean: Tensor
    std: Tensor
    columns: Tensor
    task_of: Tensor

    def __init__(
        self,
        method: Method,
        mean: Sequence[float],
        std: Sequence[float],
        rows: Sequence[HeadRow | None],
    ) -> None:
        super().__init__()
        self.method = method.eval().requires_grad_(False)
        alive = [(i, *row) for i, row in enumerate(rows) if row is not None]
        self.classes = tuple(dict.fromkeys(label for *_, label in alive))
        experts = [[i for i, _, label in alive if label == wanted] for wanted in self.classes]
        most = max(map(len, experts), default=1)
        device = method.backbone.device
        # A class that was taught several times has several rows; the largest speaks.
        columns = [[*own, *[own[-1]] * (most - len(own))] for own in experts]
        tasks = list(dict.fromkeys(task for _, task, _ in alive))
        first = {label: tasks.index(task) for _, task, label in reversed(alive)}
        task_of = [first[label] for label in self.classes]
        for name, value in (
            ("mean", torch.tensor(mean)),
            ("std", torch.tensor(std)),
            ("columns", torch.tensor(columns, dtype=torch.int64).reshape(-1, most)),
            ("task_of", torch.tensor(task_of, dtype=torch.int64)),
        ):
            self.register_buffer(name, value.to(device), persistent=False)

    def forward(self, pixels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Map (batch, side, side, 3) uint8 to logits (batch, classes), matched task (batch,), similarity (batch,)."""
        images = normalise(pixels.permute(0, 3, 1, 2).float() / 255, self.mean, self.std)
        shown = images.to(self.method.backbone.dtype)
        found = self.method.answer(Batch(lambda: shown, torch.zeros_like(pixels[:, 0, 0, 0], dtype=torch.int64)))
        logits = found.logits.float()[:, self.columns].amax(dim=2)
        probability, best = logits.softmax(dim=1).max(dim=1)
        task = self.task_of[best] if found.selected is None else found.selected
        similarity = probability if found.similarity is None else found.similarity.float()
        return logits, task, similarity


@dataclass(frozen=True)
class Kept:
    """The tensors of a model, and what each row of its head is."""

    state: State
    rows: tuple[
        HeadRow | None, ...
    ]  # None: a forgotten class; its row is zero, so that sums over the others stay exact


SMALL = 2**20  # numbers that may be made without being asked for


def refuse_larger(expected: State, found: State) -> None:
    """Refuse with a ValueError a method that would make more numbers than the file has for it."""
    for name, value in expected.items():
        held = found[name].numel() if name in found else SMALL
        if value.numel() > held:
            raise ValueError(f"'{name}' has {held:,} numbers, but its options call for {value.numel():,}")


def refuse_misfits(kept: Kept, of_task: Of, sizes: Sequence[int]) -> None:
    """Refuse with a ValueError tensors that are not those of tasks with so many classes each."""
    for prefix, axis in of_task.items():
        found = numbered(kept.state, prefix)
        if prefix in HEAD:
            if sum(map(len, found)) != len(kept.rows):
                raise ValueError(f"'{prefix}' is of {sum(map(len, found))} classes, not of {len(kept.rows)}")
        elif found and len(found) != len(sizes):
            raise ValueError(f"'{prefix}' is of {len(found)} tasks, not of {len(sizes)}")
        elif found and axis is not None and [value.shape[axis] for value in found] != list(sizes):
            raise ValueError(f"'{prefix}' is of other classes than those of the tasks")


def without(kept: Kept, of_task: Of, task: int, places: Sequence[int] | None, rows: Sequence[int]) -> Kept:
    """Return what is left without some classes of a task, the `task`-th of those known.

    `places` are theirs among its classes; None: the whole task goes. `rows` are theirs in the head, and become zero.
    """
    state = dict(kept.state)
    for prefix, axis in of_task.items():
        name = f"{prefix}.{task}"
        if prefix in HEAD or name not in state:
            continue
        if places is None:
            others = numbered(state, prefix)
            _replace(state, prefix, others[:task] + others[task + 1 :])
        elif axis is not None:
            stay = [i for i in range(state[name].shape[axis]) if i not in places]
            state[name] = state[name].index_select(axis, torch.tensor(stay, device=state[name].device))
    for prefix in HEAD:
        start = 0
        for block, values in enumerate(numbered(kept.state, prefix)):
            mine = [row - start for row in rows if start <= row < start + len(values)]
            if mine:
                state[f"{prefix}.{block}"] = values.index_fill(0, torch.tensor(mine, device=values.device), 0)
            start += len(values)
    return Kept(state, tuple(None if i in rows else row for i, row in enumerate(kept.rows)))


def compact(kept: Kept) -> Kept:
    """Return the model without the rows of forgotten classes; its head then has one block of rows a task again."""
    state = dict(kept.state)
    for prefix in HEAD:
        blocks, start = [], 0
        for values in numbered(kept.state, prefix):
            alive = [i for i in range(len(values)) if kept.rows[start + i] is not None]
            start += len(values)
            if alive:
                blocks.append(values[torch.tensor(alive, device=values.device)])
        _replace(state, prefix, blocks)
    return Kept(state, tuple(row for row in kept.rows if row is not None))


def bytes_of(state: State, of_task: Of, task: int) -> int:
    """Return how much is kept for a task alone; the head must be compact."""
    return sum(state[name].nbytes for prefix in of_task if (name := f"{prefix}.{task}") in state)


def _replace(state: State, prefix: str, values: Sequence[Tensor]) -> None:
    for name in [name for name in state if name.rpartition(".")[0] == prefix]:
        del state[name]
    state.update({f"{prefix}.{number}": value for number, value in enumerate(values)})
