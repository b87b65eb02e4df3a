"""What the methods share that solve for their classifier instead of training it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from torch import Tensor
from typing_extensions import TypeVar

from dualprompt.methods.base import TaskView
from dualprompt.methods.first_session import FirstSession, FirstSessionConfig


class ClosedFormConfig(FirstSessionConfig):
    """Options of methods whose head is solved for. No logits of it are trained, so a task may have one class."""

    training_logits: Literal["masked", "unmasked"] = "unmasked"

    @property
    def learns_one_class(self) -> bool:
        """Yes: the head tells nothing apart in training."""
        return True


P = TypeVar("P", bound=ClosedFormConfig, covariant=True, default=ClosedFormConfig)


class ClosedForm(FirstSession[P]):
    """A linear head on features that never change, solved for at the end of each task.

    They are the frozen ones, or what the first session has made of them.
    """

    def begin_task(self, task: TaskView) -> None:
        """Add rows to the head, which no phase trains."""
        super().begin_task(task)
        self.head.requires_grad_(False)

    def set_head(self, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> None:
        """Replace the rows of all classes, a tensor a task; the session, if this was its task, is over."""
        self.head.restore([rows.float() for rows in weights], [rows.float() for rows in biases], train_old=False)
        self.head.requires_grad_(False)
        self.end_session()

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Take over the head, which does not train inside a task either, and what adapts."""
        super().load_state(state)
        self.head.requires_grad_(False)
