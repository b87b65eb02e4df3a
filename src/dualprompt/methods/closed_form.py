"""What the methods share that solve for their classifier instead of training it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from torch import Tensor

from dualprompt.methods.base import C, MethodConfig, Phase, TaskView
from dualprompt.methods.frozen_head import FrozenHead


class ClosedFormConfig(MethodConfig):
    """Options of methods without gradient steps. No logits are trained, so a task may have one class."""

    training_logits: Literal["masked", "unmasked"] = "unmasked"

    @property
    def learns_one_class(self) -> bool:
        """Yes: nothing is told apart in training."""
        return True


class ClosedForm(FrozenHead[C]):
    """A linear head on frozen features that is solved for at the end of each task.

    Sums and means do not care in which portions they are made, so borders do not matter.
    """

    def phases(self, task: TaskView) -> Sequence[Phase]:
        """Return none: there are no gradient steps."""
        return ()

    def set_head(self, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> None:
        """Replace the rows of all classes, a tensor a task."""
        self.head.restore([rows.float() for rows in weights], [rows.float() for rows in biases], train_old=False)
