"""How a run fills the rehearsal buffer of its method, and sets images aside that are never trained on."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from dualprompt.data.stream import Experience, Subset, union
from dualprompt.derived import predicting
from dualprompt.methods.base import Batch, Method
from dualprompt.methods.buffer import Buffer, part
from dualprompt.training.feed import Feed


class Rehearsal:
    """The buffer of a run, if its method has one."""

    def __init__(self, method: Method, feed: Feed) -> None:
        self.method, self.feed = method, feed
        self.buffer = Buffer(method.buffer, feed.config.seed) if method.buffer else None

    def held(self) -> Subset | None:
        """Return the images that may be trained on again; the same object until the next offer."""
        return None if self.buffer is None else self.buffer.as_subset()

    def set_aside(self, task: Experience) -> tuple[Subset, Subset | None]:
        """Return the task's images that are trained on, and all that are reserved from now on, if any are."""
        if self.buffer is None or not self.buffer.plan.reserve:
            return task.train, None
        apart, old = self.buffer.to_reserve(task.train, task.index), self.buffer.reserved()
        reserved = union([*([old] if len(old) else []), part(task.train, apart)])
        return part(task.train, ~apart), reserved

    def by_step(self, task: Experience) -> bool:
        """Return whether images of the task are offered with the step that first trains on them."""
        return self.buffer is not None and (self.buffer.plan.fill == "step" or not task.border)

    def offer_step(self, task: Experience, subset: Subset, rows: Tensor, step: int, again: bool = False) -> Subset:
        """Let the buffer choose from the images of a step; return what it holds then.

        Who goes on with a run offers `again` what was offered before. What was noted then is restored, not asked.
        Where the task has a border, images are noted there.
        """
        assert self.buffer is not None
        note = None
        if self.buffer.plan.notes:
            later = again or task.border
            note = (lambda images: torch.zeros(len(images), 0)) if later else partial(self._ask, self.method.note)
        self.buffer.offer(part(subset, rows), task.index, note, step=step)
        return self.buffer.as_subset()

    def notes(self, task: Experience) -> Tensor | None:
        """Return what was noted of the images held, where images are noted from step to step."""
        return self.buffer.as_subset().notes if self.buffer is not None and not task.border else None

    def restore_notes(self, notes: Tensor | None) -> None:
        """Take over what was noted, after all that was offered has been offered again."""
        if self.buffer is not None and notes is not None:
            self.buffer.restore_notes(notes)

    def offer(self, task: Experience, moment: Literal["before", "after"]) -> None:
        """Let the buffer choose from the task's images, if this is the moment that its plan names.

        Those that it took in by the step are noted when the task ends, if it has notes.
        """
        if self.buffer is None:
            return
        note = partial(self._ask, self.method.note) if self.buffer.plan.notes else None
        if self.by_step(task):
            if moment == "after" and note is not None:
                self.buffer.note_missing(note)
        elif self.buffer.plan.fill == moment:
            features = partial(self._ask, self.method.represent) if self.buffer.plan.policy == "herding" else None
            self.buffer.offer(task.train, task.index, note, features)

    @torch.no_grad()
    def _ask(self, question: Callable[[Batch], Tensor], subset: Subset) -> Tensor:
        """Return what the method says of every image of a subset, in the test view."""
        answers = []
        with predicting(self.method):
            for spec in self.feed.evaluation(subset, self.method.uses_frozen, shared=False):
                batch = self.feed.batch(subset.images, spec.to(self.feed.fabric.device))
                answers.append(question(batch).float().cpu())
        return torch.cat(answers)

    def state(self) -> dict[str, Tensor]:
        """Return what the buffer holds, on the device."""
        held = {} if self.buffer is None else self.buffer.state()
        return {name: value.to(self.feed.fabric.device) for name, value in held.items()}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Take over the result of `state()`."""
        if self.buffer is not None:
            self.buffer.load_state(state)

    def report(self) -> dict[str, int] | None:
        """Return how much is kept."""
        return None if self.buffer is None else {"images": len(self.buffer), "bytes": self.buffer.bytes}
