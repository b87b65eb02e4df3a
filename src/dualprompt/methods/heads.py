"""The classifier: one block of rows for the classes that came together, so that learning touches only its own."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dualprompt.derived import Deriving
from dualprompt.methods.base import TaskView, numbered
from dualprompt.methods.contract import places


class GrowingHead(Deriving):
    """A linear classifier that gains a row for each new label, starting at zero; a label that returns has its row.

    Streams number classes in the order in which they come, so a label is the number of its row.
    """

    _places: Tensor
    _chosen: Tensor

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim
        self.weight = nn.ParameterList()  # each (labels that came together, dim)
        self.bias = nn.ParameterList()
        self.classes = 0  # seen so far
        self.labels: tuple[int, ...] = ()  # of the current task
        self.register_buffer("_device", torch.empty(0), persistent=False)
        self._own: list[int] = []  # blocks of rows that hold them
        none = torch.empty(0, dtype=torch.int64)
        self.register_buffer("_places", none, persistent=False)  # of every label among them
        self.register_buffer("_chosen", none, persistent=False)  # their rows in these blocks; empty: all, in order

    def begin(self, labels: Sequence[int], new_labels: Sequence[int], train_old: bool) -> None:
        """Take up a task: add rows of zeros for its new labels, and let the rows of all its labels train.

        Rows that came together train together. Those without a label of the task train on only if `train_old`; under a
        masked loss their gradients would be zero.
        """
        if list(new_labels) != list(range(self.classes, self.classes + len(new_labels))):
            raise ValueError(f"new labels go on from {self.classes}, but they are {list(new_labels)}")
        if new_labels:
            self._append(torch.zeros(len(new_labels), self.dim), torch.zeros(len(new_labels)))
        self._take_up(labels)
        self.choose_trainable(train_old)

    def _take_up(self, labels: Sequence[int]) -> None:
        """Make these the labels of the current task."""
        self.labels = tuple(labels)
        first_rows = list(itertools.accumulate((len(rows) for rows in self.bias), initial=0))
        self._own = sorted({bisect.bisect_right(first_rows, label) - 1 for label in labels})
        held = [label for number in self._own for label in range(*first_rows[number : number + 2])]
        chosen = [] if held == list(labels) else [held.index(label) for label in labels]
        device = self.get_buffer("_device").device
        self._chosen = torch.tensor(chosen, dtype=torch.int64, device=device)
        self._places = places(labels, self.classes).to(device)

    def choose_trainable(self, train_old: bool) -> None:
        """Let the rows of the current task's labels train, and the others only if `train_old`."""
        for number, block in enumerate(zip(self.weight, self.bias, strict=True)):
            for rows in block:
                rows.requires_grad_(train_old or number in self._own)

    def restore(self, weights: Sequence[Tensor], biases: Sequence[Tensor], train_old: bool) -> None:
        """Replace all rows, for instance by those of a checkpoint.

        The current task stays, unless there are other labels now: then it is the one that brought the newest.
        """
        self.weight, self.bias, self.classes = nn.ParameterList(), nn.ParameterList(), 0
        for weight, bias in zip(weights, biases, strict=True):
            self._append(weight.clone(), bias.clone())
        if len(self._places) != self.classes:
            self._take_up(range(self.classes - len(self.bias[-1]) if self.classes else 0, self.classes))
        self.choose_trainable(train_old)

    def _append(self, weight: Tensor, bias: Tensor) -> None:
        device = self.get_buffer("_device").device
        self.weight.append(nn.Parameter(weight.to(device)))
        self.bias.append(nn.Parameter(bias.to(device)))
        self.classes += len(bias)
        self.drop_derived()

    def blocks(self) -> Tensor:
        """Return the number of the block of rows that each class is in, (classes,): its task, where none returns."""
        sizes = torch.tensor([len(rows) for rows in self.bias], dtype=torch.int64)
        return torch.arange(len(sizes)).repeat_interleave(sizes).to(self.get_buffer("_device").device)

    def current(self, features: Tensor) -> Tensor:
        """Return the logits of the current task's labels, (batch, labels), in their order."""
        return _linear(features, *self.current_rows(list(self.weight), list(self.bias)))

    def current_rows(self, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Return the rows of the current task's labels out of all blocks of rows."""
        weight, bias = (_cat([blocks[number] for number in self._own]) for blocks in (weights, biases))
        return (weight[self._chosen], bias[self._chosen]) if len(self._chosen) else (weight, bias)

    def current_places(self, labels: Tensor) -> Tensor:
        """Return where labels stand among the current task's; −1 for those that are not among them."""
        return self._places[labels]

    def all(self, features: Tensor) -> Tensor:
        """Return the logits of every class seen so far, with gradients, (batch, classes)."""
        return _linear(features, *self._joined())

    def predict(self, features: Tensor) -> Tensor:
        """Return the logits of every class seen so far, without gradients; the joined rows are kept."""
        with torch.no_grad():
            return _linear(features, *self.derived("rows", self._joined))

    def _joined(self) -> tuple[Tensor, Tensor]:
        return torch.cat(list(self.weight)), torch.cat(list(self.bias))


class TrainingHead(GrowingHead):
    """A classifier of one task's classes that only training needs: it begins anew with the task, and goes with it."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self.places = nn.Buffer(torch.empty(0, dtype=torch.int64), persistent=False)  # of labels among its rows

    def begin_task(self, task: TaskView) -> None:
        """Begin anew, at zero, with a row for each of the task's labels."""
        self.end_task()
        rows = range(len(task.labels))
        self.begin(rows, rows, train_old=False)
        self.places = places(task.labels, len(task.seen)).to(self.places.device)

    def loss(self, features: Tensor, labels: Tensor) -> Tensor:
        """Return the mean cross-entropy over the task's own classes."""
        return F.cross_entropy(self.current(features), self.places[labels])

    def end_task(self) -> None:
        """Drop all rows."""
        self.restore([], [], train_old=False)

    def restore_below(self, prefix: str, state: dict[str, Tensor]) -> None:
        """Take over the rows of a checkpoint that was made within the task; of another it has none."""
        self.restore(*(numbered(state, f"{prefix}.{part}") for part in ("weight", "bias")), train_old=False)


# σ begins at 1 and is meant to grow to ten and more; until then only ever larger cosines lessen the loss, and features
# collapse. The originals' SGD takes it there, but Adam moves a number by no more than its rate in a step.
SIGMA_LR = 0.1


class CosineTrainingHead(TrainingHead):
    """The same with logits σ · cos(feature, row), as APER and EASE train; σ is learned, and has no state afterwards.

    Whoever has it as `training_head` lets σ learn at a rate of its own, `SIGMA_LR`.
    """

    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self.sigma = nn.Parameter(torch.empty(0), requires_grad=False)

    def begin_task(self, task: TaskView) -> None:
        """Begin anew with rows from U(−1/√dim, 1/√dim), for zeros have no direction, and σ = 1."""
        super().begin_task(task)
        [rows] = self.weight
        drawn = 2 * torch.rand(rows.shape, generator=task.generator) - 1
        rows.data.copy_(drawn / self.dim**0.5)
        self.bias.requires_grad_(False)
        self.sigma = nn.Parameter(torch.ones(1, device=self.places.device))

    def current(self, features: Tensor) -> Tensor:
        """Return the logits of the task's labels."""
        rows = torch.cat(list(self.weight))
        return self.sigma * F.linear(F.normalize(features.float(), dim=1), F.normalize(rows, dim=1))

    def end_task(self) -> None:
        """Drop all rows, and σ."""
        super().end_task()
        self.sigma = nn.Parameter(torch.empty(0, device=self.places.device), requires_grad=False)

    def restore_below(self, prefix: str, state: dict[str, Tensor]) -> None:
        """Take over rows and σ."""
        super().restore_below(prefix, state)
        self.bias.requires_grad_(False)
        sigma = state[f"{prefix}.sigma"].to(self.places.device, copy=True)
        self.sigma = nn.Parameter(sigma, requires_grad=False)


def _linear(features: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """A classifier stays in fp32 whatever the backbone computes in."""
    return F.linear(features.float(), weight, bias)


def _cat(blocks: Sequence[Tensor]) -> Tensor:
    return blocks[0] if len(blocks) == 1 else torch.cat(list(blocks))


def with_one(features: Tensor) -> Tensor:
    """Append a 1, whose weight is the bias."""
    return F.pad(features, (0, 1), value=1.0)
