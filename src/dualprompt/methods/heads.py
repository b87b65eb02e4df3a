"""The classifier: one block of rows a task, so that learning a task touches only its own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dualprompt.derived import Deriving


class GrowingHead(Deriving):
    """A linear classifier that gains the classes of each new task, starting at zero."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim
        self.weight = nn.ParameterList()  # each (classes of the task, dim)
        self.bias = nn.ParameterList()
        self.classes = 0  # seen so far
        self.register_buffer("_device", torch.empty(0), persistent=False)

    @property
    def first_newest(self) -> int:
        """The newest task's first class: its classes come after all older ones."""
        return self.classes - len(self.bias[-1])

    def grow(self, classes: int, train_old: bool) -> None:
        """Add `classes` rows of zeros; the older rows train on only if `train_old`."""
        self._append(torch.zeros(classes, self.dim), torch.zeros(classes), train_old)

    def restore(self, weights: Sequence[Tensor], biases: Sequence[Tensor], train_old: bool) -> None:
        """Replace all rows, for instance by those of a checkpoint."""
        self.weight, self.bias, self.classes = nn.ParameterList(), nn.ParameterList(), 0
        for weight, bias in zip(weights, biases, strict=True):
            self._append(weight.clone(), bias.clone(), train_old)

    def _append(self, weight: Tensor, bias: Tensor, train_old: bool) -> None:
        if len(self.weight):  # what is older was settled when its successor came
            self.weight[-1].requires_grad_(train_old)
            self.bias[-1].requires_grad_(train_old)
        device = self.get_buffer("_device").device
        self.weight.append(nn.Parameter(weight.to(device)))
        self.bias.append(nn.Parameter(bias.to(device)))
        self.classes += len(bias)
        self.drop_derived()

    def newest(self, features: Tensor) -> Tensor:
        """Return the logits of the newest task's classes, (batch, classes of that task)."""
        return _linear(features, self.weight[-1], self.bias[-1])

    def all(self, features: Tensor) -> Tensor:
        """Return the logits of every class seen so far, with gradients, (batch, classes)."""
        return _linear(features, *self._joined())

    def predict(self, features: Tensor) -> Tensor:
        """Return the logits of every class seen so far, without gradients; the joined rows are kept."""
        with torch.no_grad():
            return _linear(features, *self.derived("rows", self._joined))

    def _joined(self) -> tuple[Tensor, Tensor]:
        return torch.cat(list(self.weight)), torch.cat(list(self.bias))


def _linear(features: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """A classifier stays in fp32 whatever the backbone computes in."""
    return F.linear(features.float(), weight, bias)


def with_one(features: Tensor) -> Tensor:
    """Append a 1, whose weight is the bias."""
    return F.pad(features, (0, 1), value=1.0)
