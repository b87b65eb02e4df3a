"""The only training loop: task → phase → epoch → batch → loss → backward → clip → step → evaluate → save."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn
from torch.optim import Optimizer

from dualprompt.config import TrainConfig
from dualprompt.data.stream import Experience, Subset
from dualprompt.errors import DualPromptError
from dualprompt.methods.base import Phase, Step, TaskView
from dualprompt.progress import SILENT, Bar, Loss, Progress, TaskEvaluated, Work
from dualprompt.run import predictions
from dualprompt.run.folder import Run
from dualprompt.run.tracking import tracked
from dualprompt.training.batch import BatchSpec
from dualprompt.training.distributed import distribute, total
from dualprompt.training.evaluate import Answers, Score, evaluate
from dualprompt.training.loader import Loader
from dualprompt.training.optimise import ReadyStep, make_optimisers, recipe_of, set_rates
from dualprompt.training.rehearsal import Rehearsal
from dualprompt.training.result import final_result, task_line
from dualprompt.training.select import cut_to_rarest, hold_out, select_subset, task_view
from dualprompt.training.setup import Setup
from dualprompt.training.standing import Standing
from dualprompt.training.steps import carried_out
from dualprompt.training.stop import Stop


def train(
    setup: Setup, run: Run, progress: Progress = SILENT, learned: Callable[[int], None] | None = None
) -> dict[str, Any]:
    """Learn every task of the stream, evaluating all seen tasks after each; return and write the result.

    A run that was begun before continues where its last checkpoint stands, to the same result.

    Args:
        setup: method, data and devices.
        run: the folder in which it is kept.
        progress: who is told how far it is.
        learned: receives after each task how many are behind it.
    """
    loop = Loop(setup, run, progress, keeps_predictions=True)
    with tracked(run, setup.config.track if loop.writes else (), progress):
        with loop.stop.on_signals():
            for task in setup.stream.experiences[loop.standing.position.task :]:
                loop.learn(task)
                if learned is not None:
                    learned(loop.standing.position.task)
        return loop.finish()


def extend(setup: Setup, run: Run, progress: Progress = SILENT) -> None:
    """Learn the stream's tasks on top of the model that the run begins with; `setup.method` then knows them.

    Their numbers go on from those of the tasks it knows. Tasks without test images are not evaluated.
    """
    loop = Loop(setup, run, progress)
    setup.feed.pause = loop.stop.leave
    with loop.stop.on_signals():
        for task in setup.stream.experiences:
            if task.index >= loop.standing.position.task:
                loop.learn(task)


@dataclass
class Trained:
    """What a task's training took."""

    seconds: float = 0.0
    images: int = 0  # of this process

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Add the seconds that something takes."""
        began = time.monotonic()
        yield
        self.seconds += time.monotonic() - began


@dataclass(frozen=True)
class PhaseWork:
    """A phase that is being trained: what a step works with."""

    phase: Phase
    task: TaskView
    recipe: TrainConfig
    number: int
    epochs: int
    loader: Loader
    steps: list[ReadyStep]  # of each batch, in order
    optimisers: dict[str, Optimizer]  # by the name that steps which share one have in common
    parameters: list[nn.Parameter]  # all that train


class Loop:
    """A run while it runs."""

    def __init__(self, setup: Setup, run: Run, progress: Progress, keeps_predictions: bool = False) -> None:
        self.setup, self.run, self.progress = setup, run, progress
        self.keeps_predictions = keeps_predictions
        self.config, self.method, self.feed, self.fabric = setup.config, setup.method, setup.feed, setup.fabric
        self.stop = Stop(self.fabric, progress)
        self.rehearsal = Rehearsal(self.method, self.feed)
        self.standing = Standing(setup, run, self.rehearsal)
        self.loss = self.standing.loss_so_far()  # summed over the steps of the epoch; it stays where it is

    @property
    def writes(self) -> bool:
        """Whether this process is the one that writes files."""
        return self.fabric.is_global_zero

    def learn(self, task: Experience) -> None:
        """Train one task, phase after phase, evaluate all seen tasks, and keep both."""
        own, reserved = self.rehearsal.set_aside(task)
        own, held_out = hold_out(own, self.method.hold_out, self.config.seed, task.index)
        view = task_view(task, self.method, self.feed, reserved, held_out, self.setup.evaluated(task.index + 1))
        self.method.begin_task(view)
        self.rehearsal.offer(task, "before")
        trained = Trained()
        phases = self.method.phases(view)
        for number, phase in enumerate(phases):
            if number >= self.standing.position.phase:
                with trained.timed():
                    trained.images += self._phase(task, own, view, number, phase, alone=len(phases) == 1)
        with trained.timed():
            self.method.eval()
            self.method.end_task(view)
            self.rehearsal.offer(task, "after")
        self._evaluate(task, trained)

    def _phase(self, task: Experience, own: Subset, view: TaskView, number: int, phase: Phase, alone: bool) -> int:
        """Train for the epochs of a phase, from where the run stands; return the images seen.

        Args:
            task: the task that is learned.
            own: those of its images that may be trained on.
            view: what the method may know of it.
            number: which of the task's phases it is.
            phase: what is trained on, for how long, and how.
            alone: whether the task has no other phase.
        """
        self.method.begin_phase(phase, view)
        resumed = self.standing.restore_method()
        recipe, steps = recipe_of(phase, self.config.train), self.method.steps(phase)
        optimisers = make_optimisers(self.method, steps, recipe, phase.lr, self.fabric.device)
        self.standing.restore_optimisers(optimisers, resumed)

        held, old = (
            self.rehearsal.held(),
            [each.train for each in self.setup.stream.experiences if each.index < task.index],
        )
        subset = select_subset(self.method, phase, [*old, own], held)
        subset = cut_to_rarest(subset, self.config.seed, task.index) if phase.cut else subset
        live = self.rehearsal.by_step(task)
        if live and not (alone and phase.data == "task"):
            raise ValueError("a method whose buffer is filled by the step has one phase, on the task's images")
        loader = Loader(self.feed, subset, task.index, phase, number, held, self.method.uses_frozen, live)
        epochs = phase.epochs_of(self.config.train.epochs)
        self.standing.check_within(epochs, loader.steps)

        if live:
            self._offer_again(task, loader)
        ready, parameters = self._ready(steps, optimisers, recipe), list(self.method.trainable().values())
        work = PhaseWork(phase, view, recipe, number, epochs, loader, ready, optimisers, parameters)
        step = carried_out(
            partial(self._step, work),
            self.fabric,
            self.config.train.batch_size,
            record=self.method.capturable and not live,
        )
        images = 0
        with self.progress.bar(self._work(task, work, alone)) as bar:
            for epoch in range(self.standing.position.epoch, epochs):
                images += self._epoch(task, epoch, work, step, bar)
        self.standing.move(phase=number + 1, epoch=0, step=0)
        return images

    def _ready(self, steps: Sequence[Step], optimisers: dict[str, Optimizer], recipe: TrainConfig) -> list[ReadyStep]:
        """Return a method's steps with all that carrying them out takes."""
        losses = distribute(self.fabric, self.method, [step.loss for step in steps])
        trainable, clip = self.method.trainable(), recipe.clip
        return [
            ReadyStep(
                loss_of,
                optimisers[step.name],
                [parameter for name, parameter in trainable.items() if step.moves(name)],
                clip if step.clip is None else step.clip,
                step.after,
            )
            for step, loss_of in zip(steps, losses, strict=True)
        ]

    def _epoch(self, task: Experience, epoch: int, work: PhaseWork, step: Callable[[BatchSpec], None], bar: Bar) -> int:
        """Train on every batch of an epoch, from where the run stands; return the images seen.

        Args:
            task: the task that is learned.
            epoch: which epoch of the phase it is.
            work: the phase.
            step: carries out `_step`, as it is written or from a record.
            bar: who is told how far it is.
        """
        self.method.train()
        position, count, images = self.standing.position, work.loader.steps, 0
        start = position.step if epoch == position.epoch else 0
        for number, batch in enumerate(work.loader.epoch(epoch, start), start=start):
            done = (epoch * count + number) / (work.epochs * count)
            for optimiser in work.optimisers.values():
                set_rates(optimiser, work.recipe, done, work.phase.cycles, work.epochs)
            step(batch.spec)
            if epoch == 0 and self.rehearsal.by_step(task):
                work.loader.replay_from(self.rehearsal.offer_step(task, work.loader.subset, batch.rows, number))
            images += batch.images
            bar.advance(batch.images * self.fabric.world_size)
            last = number + 1 == count
            self.standing.move(task=task.index, phase=work.number, epoch=epoch, step=number + 1)
            if last:
                self._end_epoch(task, epoch, work, bar)
            stop = self.stop.asked
            if stop or self.standing.save_is_due(epoch_ends=last):
                self.standing.save(work.optimisers, self.loss)
            if stop:
                raise self.stop.error()
        return images

    def _offer_again(self, task: Experience, loader: Loader) -> None:
        """Offer the buffer what a resumed run has trained on before, step by step."""
        position = self.standing.position
        for step in range(loader.steps if position.epoch else position.step):
            loader.replay_from(self.rehearsal.offer_step(task, loader.subset, loader.rows(0, step), step))

    def _step(self, work: PhaseWork, spec: BatchSpec) -> None:
        """Train on one batch. This only queues work on the device, so that it can be recorded from outside."""
        batch = work.loader.batch(spec)
        for step in work.steps:
            for parameter in work.parameters:  # also those that only other steps move
                parameter.grad = None
            loss = step.loss_of(batch) * spec.weight
            self.fabric.backward(loss)
            if step.clip is not None:
                nn.utils.clip_grad_norm_(step.parameters, step.clip)
            step.optimiser.step()
            if step.after is not None:
                step.after()
            self.loss += total(self.fabric, loss.detach()) / self.fabric.world_size

    def _end_epoch(self, task: Experience, epoch: int, work: PhaseWork, bar: Bar) -> None:
        """Read, check and log the mean loss; this is the only time an epoch that a value is read back."""
        self.method.end_epoch(work.task)
        mean = float(self.loss) / work.loader.steps
        if not math.isfinite(mean):
            raise DualPromptError(
                f"the loss of task {task.index + 1}, epoch {epoch + 1} is not finite; lower train.lr "
                "(and rates of the method's own, as head_lr) or set train.clip"
            )
        self.loss.zero_()
        bar.remark(Loss(mean))
        if self.writes:
            extra = {} if work.number == 0 else {"phase": work.phase.name}
            self.run.log(event="epoch", task=task.index + 1, epoch=epoch + 1, loss=mean, **extra)
        self.standing.move(epoch=epoch + 1, step=0)

    def _evaluate(self, task: Experience, trained: Trained) -> None:
        """Evaluate all seen tasks, where they have images for it, log their scores, and save."""
        subsets = self.setup.evaluated(task.index + 1)
        began, scores, answers = time.monotonic(), list[Score](), None
        if all(map(len, subsets)):
            answers = self._room_for_answers(task, subsets)
            scores = evaluate(self.method, self.feed, subsets, progress=self.progress, answers=answers)
        if self.writes:
            images = trained.images * self.fabric.world_size
            self.run.log(**task_line(task, scores, trained.seconds, time.monotonic() - began, images))
        if answers is not None:
            found = answers.gathered(self.fabric)
            if self.writes:  # before the checkpoint: what comes after it is not evaluated again
                predictions.write(self.run.predictions_path, found)
        self.standing.save_task(task, scores)
        if scores:
            accuracy, matching = self.standing.position.accuracy[-1], self.standing.position.matching[-1]
            self.progress.receive(TaskEvaluated(task.index + 1, task.name, tuple(accuracy), tuple(matching)))
        if self.stop.asked:  # during the evaluation
            raise self.stop.error()

    def _room_for_answers(self, task: Experience, subsets: list[Subset]) -> Answers | None:
        """Return room for what the finished method answers, image by image."""
        last = task.index == self.setup.stream.experiences[-1].index
        return Answers(subsets, self.fabric.device) if self.keeps_predictions and last else None

    def _work(self, task: Experience, work: PhaseWork, alone: bool) -> Work:
        """Return what is told of a phase, and how much of it was done earlier."""
        position, images = self.standing.position, len(work.loader.subset)
        return Work(
            "training",
            total=images * work.epochs,
            unit="img",
            done=position.epoch * images + position.step * work.loader.size,
            name=task.name,
            task=task.index + 1,
            tasks=self.setup.stream.experiences[-1].index + 1,
            phase=None if alone else work.phase.name,
        )

    def finish(self) -> dict[str, Any]:
        """Return the final numbers, writing them where that has not been done."""
        folder = str(self.run.folder)
        result = final_result(self.setup, self.standing.position, self.rehearsal.report(), folder)
        if self.writes:
            self.run.finish(result)
            self.run.checkpoints.progress_path.unlink(missing_ok=True)  # the optimiser's state has no further use
        return result
