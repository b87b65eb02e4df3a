"""Images of tasks to come: how a method that has not learned them yet answers says what it makes of the unknown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from dualprompt.data.stream import Experience


def images_ahead(
    experiences: Sequence[Experience], learned: int, evaluate_on: Literal["test", "validation"], most: int
) -> Tensor:
    """Return some images of the tasks after the first `learned`, as rows among those that all tasks are evaluated on.

    They are of classes that are not known yet, each class with the task that brings it. Where no class is new any more,
    they are the next task's. At most so many, spread evenly.
    """
    subsets = [task.judged(evaluate_on) for task in experiences]
    rows = torch.arange(sum(map(len, subsets))).split([len(subset) for subset in subsets])
    unknown = [
        mine[torch.isin(subset.labels, torch.tensor(task.new_labels))]
        for task, subset, mine in zip(experiences[learned:], subsets[learned:], rows[learned:], strict=True)
    ]
    found = torch.cat([rows[0][:0], *unknown])
    if not len(found) and learned < len(rows):
        found = rows[learned]
    if len(found) <= most:
        return found
    return found[torch.linspace(0, len(found) - 1, most, dtype=torch.float64).round().long()]
