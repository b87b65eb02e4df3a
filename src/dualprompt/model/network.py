"""A method that has learned some tasks, with the names of what it knows; it is replaced, never changed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from dualprompt.data.augment import normalise
from dualprompt.methods.base import Batch, Method
from dualprompt.run.checkpoint import State

HeadRow = tuple[int, str]
"""A row of the head: the id of the task that taught it, and its label."""
Rows = tuple[HeadRow | None, ...]
"""All of them; None is one of a forgotten class, which is zero."""


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
        rows: Rows,
    ) -> None:
        super().__init__()
        self.method = method.eval().requires_grad_(False)
        alive = [(i, *row) for i, row in enumerate(rows) if row is not None]
        self.classes = tuple(dict.fromkeys(label for *_, label in alive))
        experts = [[i for i, _, label in alive if label == wanted] for wanted in self.classes]
        most = max(map(len, experts), default=1)
        device = method.backbone.device
        # A class that was taught several times, or merged, has several rows: it is as probable as all of them.
        columns = [[*own, *[len(rows)] * (most - len(own))] for own in experts]  # the last is that of no class
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
        logits = self.of_labels(found.logits.float())
        probability, best = logits.softmax(dim=1).max(dim=1)
        task = self.task_of[best] if found.selected is None else found.selected
        similarity = probability if found.similarity is None else found.similarity.float()
        return logits, task, similarity

    def of_labels(self, logits: Tensor) -> Tensor:
        """Return the logits of labels from those of all rows: the probabilities of a label's rows add up."""
        if self.columns.shape[1] == 1:
            return logits[:, self.columns[:, 0]]
        nothing = torch.full_like(logits[:, :1], float("-inf"))
        return torch.cat([logits, nothing], dim=1)[:, self.columns].logsumexp(dim=2)


SMALL = 2**20  # numbers that may be made without being asked for


def refuse_larger(expected: State, found: State) -> None:
    """Refuse with a ValueError a method that would make more numbers than the file has for it."""
    for name, value in expected.items():
        held = found[name].numel() if name in found else SMALL
        if value.numel() > held:
            raise ValueError(f"'{name}' has {held:,} numbers, but its options call for {value.numel():,}")
