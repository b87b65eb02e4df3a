"""Where a run stands, in memory and on disk: what it begins from, goes on from, and keeps."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.optim import Optimizer

from dualprompt.backbones.passes import Passes
from dualprompt.data.stream import Experience
from dualprompt.errors import DualPromptError
from dualprompt.run.checkpoint import (
    BUFFER,
    Position,
    State,
    Unfinished,
    fitting,
    of_buffer,
    of_method,
    restore,
    restore_optimisers,
)
from dualprompt.run.folder import Run
from dualprompt.training.arrivals import Portion
from dualprompt.training.evaluate import Score
from dualprompt.training.rehearsal import Rehearsal
from dualprompt.training.setup import Setup


class Standing:
    """The position of a run, the state before its current task, and the work in progress that it was resumed with."""

    def __init__(self, setup: Setup, run: Run, rehearsal: Rehearsal) -> None:
        self.run, self.rehearsal, self.method = run, rehearsal, setup.method
        self.device, self.writes = setup.fabric.device, setup.fabric.is_global_zero
        self.every = setup.config.checkpoint.every_seconds
        self.saved_at = time.monotonic()
        self.position, self._resumed = run.checkpoints.last()
        if self.position.task > setup.stream.experiences[-1].index + 1:
            raise DualPromptError(f"{run.checkpoints.folder} holds more tasks than the run has; remove the later files")
        self._before = self._on_device(run.checkpoints.after_task(self.position.task - 1))
        if self._before:
            restore(self.method, of_method(self._before), run.checkpoints.folder)
            with fitting(run.checkpoints.folder):
                rehearsal.load_state(of_buffer(self._before))
        if self.writes:
            run.cut_log(self.position.log_bytes)

    def _on_device(self, state: State) -> State:
        return {name: value.to(self.device) for name, value in state.items()}

    def loss_so_far(self) -> Tensor:
        """Return the losses of the current epoch, summed, as a resumed run finds them."""
        return (self._resumed.loss if self._resumed else torch.zeros(())).to(self.device)

    def restore_method(self, begun: bool = True) -> Unfinished | None:
        """Give the method back what a phase had trained when the run was stopped inside it; return that, if it was.

        `begun` says that the method has been told of the task again, and so has chosen what trains.
        """
        resumed, self._resumed = self._resumed, None
        if resumed is None:
            return None
        trained = {name for name, parameter in self.method.named_parameters() if parameter.requires_grad}
        state = of_method(self._before) | self._on_device(resumed.method)
        restore(self.method, state, self.run.checkpoints.progress_path)
        if begun:
            for name, parameter in self.method.named_parameters():
                parameter.requires_grad_(name in trained)
        return resumed

    def restore_optimisers(self, optimisers: Mapping[str, Optimizer], resumed: Unfinished | None) -> None:
        """Give the optimisers of a resumed phase their state back."""
        if resumed is not None:
            with fitting(self.run.checkpoints.progress_path):
                restore_optimisers(optimisers, resumed.optimisers)

    def check_within(self, epochs: int, steps: int) -> None:
        """Refuse a position that a phase of so many epochs and steps cannot have."""
        if self.position.epoch > epochs or self.position.step > steps:
            path = self.run.checkpoints.progress_path
            raise DualPromptError(f"{path} is of a longer run; delete it to go on before it")

    def move(self, **changes: int) -> None:
        """Go on to another phase, epoch or step."""
        self.position = replace(self.position, **changes)

    def spend(self, passes: Passes) -> None:
        """Note what learning has taken."""
        self.position = replace(self.position, spent=self.position.spent + passes)

    def note_anytime(self, portion: Portion, score: Score) -> None:
        """Add an evaluation on the way to the curve of an online stream."""
        point = portion.stop, portion.seen, score.accuracy
        self.position = replace(self.position, curve=[*self.position.curve, point])

    def save_is_due(self, epoch_ends: bool) -> bool:
        """Return whether to save: now and then, and at an epoch's end unless that was done a moment ago."""
        return time.monotonic() - self.saved_at >= self.every / (10 if epoch_ends else 1)

    def save(self, optimisers: Mapping[str, Optimizer], loss: Tensor, notes: Tensor | None = None) -> None:
        """Keep the work in progress."""
        self.saved_at = time.monotonic()
        if not self.writes:
            return
        self.position = replace(self.position, log_bytes=self.run.log_bytes())
        # The buffer changes in a way that the run repeats when it is resumed: it is offered the same images.
        self.run.checkpoints.save_progress(self.position, self.method.state(), self._before, optimisers, loss, notes)

    def save_task(self, task: Experience, scores: Sequence[Score]) -> None:
        """Keep a task that is learned and evaluated, and stand before the next."""
        self.position = Position(
            task=task.index + 1,
            log_bytes=self.run.log_bytes() if self.writes else 0,
            accuracy=[*self.position.accuracy, [score.accuracy for score in scores]],
            matching=[*self.position.matching, [s.matching for s in scores if s.matching is not None]],
            confusion=[score.selected for score in scores if score.selected is not None],
            spent=self.position.spent,
            curve=self.position.curve,
        )
        state = self._state()
        if self.writes:
            self.run.checkpoints.save_task(self.position, state, self._before)
        self._before = {name: value.clone() for name, value in state.items()}

    def _state(self) -> State:
        """Return all that the run has made so far: the method's state and the buffer's."""
        held = {f"{BUFFER}{name}": value for name, value in self.rehearsal.state().items()}
        return self.method.state() | held
