"""The only training loop: task → phase → epoch → batch → loss → backward → clip → step → evaluate → save.

In an online stream there is one phase and one epoch, and every batch may be followed by an evaluation.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from dualprompt.backbones.passes import Passes, counted
from dualprompt.data.specs import BatchSpec
from dualprompt.data.stream import Experience, Subset
from dualprompt.errors import DualPromptError
from dualprompt.methods.apart import cut_to_rarest, hold_out
from dualprompt.methods.base import Phase, TaskView
from dualprompt.progress import SILENT, AnytimeEvaluated, Bar, Loss, Progress, TaskEvaluated, Work
from dualprompt.run import predictions
from dualprompt.run.answers import Answers
from dualprompt.run.checkpoint import Unfinished, fitting
from dualprompt.run.folder import Run
from dualprompt.run.tracking import tracked
from dualprompt.training.arrivals import Arrivals, Portion
from dualprompt.training.distributed import total
from dualprompt.training.evaluate import Score, evaluate
from dualprompt.training.loader import Loader, LocalBatch
from dualprompt.training.optimise import set_rates
from dualprompt.training.rehearsal import Rehearsal
from dualprompt.training.result import anytime_line, final_result, task_line
from dualprompt.training.select import select_subset, task_view
from dualprompt.training.setup import Setup
from dualprompt.training.standing import Standing
from dualprompt.training.steps import carried_out
from dualprompt.training.stop import Stop
from dualprompt.training.work import PhaseWork, Trained, prepared

CarryOut = Callable[[BatchSpec], None]  # a step, as it is written or from a record


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


class Loop:
    """A run while it runs: whole tasks first, then tasks whose images come one by one, then what both need."""

    def __init__(self, setup: Setup, run: Run, progress: Progress, keeps_predictions: bool = False) -> None:
        self.setup, self.run, self.progress = setup, run, progress
        self.keeps_predictions = keeps_predictions
        self.config, self.method, self.feed, self.fabric = setup.config, setup.method, setup.feed, setup.fabric
        self.stop = Stop(self.fabric, progress)
        self.rehearsal = Rehearsal(self.method, self.feed)
        self.standing = Standing(setup, run, self.rehearsal)
        self.loss = self.standing.loss_so_far()  # summed over the steps of the epoch; it stays where it is
        self.trained = Trained()  # what the task has taken
        self.image_cost = Passes()  # of an image of a step

    @property
    def writes(self) -> bool:
        """Whether this process is the one that writes files."""
        return self.fabric.is_global_zero

    def learn(self, task: Experience) -> None:
        """Train one task, all of it at once or as its images come, evaluate all seen tasks, and keep both."""
        with self._accounted(task):
            if task.online:
                self._learn_online(task)
            else:
                self._learn_whole(task)
        self._evaluate(task)

    def _learn_whole(self, task: Experience) -> None:
        """Train a task whose images are all there, phase after phase."""
        own, reserved = self.rehearsal.set_aside(task)
        own, held_out = hold_out(own, self.method.hold_out, self.config.seed, task.index)
        view = task_view(task, self.method, self.feed, reserved, held_out, self.setup.evaluated(task.index + 1))
        self.method.begin_task(view)
        self.rehearsal.offer(task, "before")
        phases = self.method.phases(view)
        for number, phase in enumerate(phases):
            if number >= self.standing.position.phase:
                with self.trained.timed():
                    self._phase(task, own, view, number, phase, alone=len(phases) == 1)
        with self.trained.timed():
            self.method.eval()
            self.method.end_task(view)
            self.rehearsal.offer(task, "after")

    def _phase(self, task: Experience, own: Subset, view: TaskView, number: int, phase: Phase, alone: bool) -> None:
        """Train for the epochs of a phase, from where the run stands.

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
        held = self.rehearsal.held()
        old = [each.train for each in self.setup.stream.experiences if each.index < task.index]
        subset = select_subset(self.method, phase, [*old, own], held)
        subset = cut_to_rarest(subset, self.config.seed, task.index) if phase.cut else subset
        live = self.rehearsal.by_step(task)
        if live and not (alone and phase.data == "task"):
            raise ValueError("a method whose buffer is filled by the step has one phase, on the task's images")
        loader = Loader(self.feed, subset, task.index, phase, number, held, self.method.uses_frozen, live)
        epochs = phase.epochs_of(self.config.train.epochs)
        self.standing.check_within(epochs, loader.steps)
        self._offer_again(task, loader, resumed)
        work, step = self._prepared(view, loader, resumed, epochs)
        position = self.standing.position
        done = position.epoch * len(subset) + position.step * loader.size
        with self.progress.bar(self._work(task, len(subset) * epochs, done, None if alone else phase.name)) as bar:
            for epoch in range(position.epoch, epochs):
                self._epoch(task, epoch, work, step, bar)
        self.standing.move(phase=number + 1, epoch=0, step=0)

    def _epoch(self, task: Experience, epoch: int, work: PhaseWork, step: CarryOut, bar: Bar) -> None:
        """Train on every batch of an epoch, from where the run stands.

        Args:
            task: the task that is learned.
            epoch: which epoch of the phase it is.
            work: the phase.
            step: carries out `_step`.
            bar: who is told how far it is.
        """
        self.method.train()
        position, loader, count = self.standing.position, work.loader, work.loader.steps
        start = position.step if epoch == position.epoch else 0
        for number, batch in enumerate(loader.epoch(epoch, start), start=start):
            self._train_on(batch, work, step, (epoch * count + number) / (work.epochs * count))
            if epoch == 0 and loader.live:
                loader.replay_from(self.rehearsal.offer_step(task, loader.subset, batch.rows, number))
            bar.advance(batch.images * self.fabric.world_size)
            last = number + 1 == count
            self.standing.move(task=task.index, phase=loader.number, epoch=epoch, step=number + 1)
            if last:
                self._end_epoch(task, epoch, work, bar)
            self._save_or_stop(task, work.optimisers, epoch_ends=last)

    def _train_on(self, batch: LocalBatch, work: PhaseWork, step: CarryOut, done: float) -> None:
        """Train on one batch, at the learning rates of when `done` of the phase is behind it; note what it takes."""
        for optimiser in work.optimisers.values():
            set_rates(optimiser, work.recipe, done, work.loader.phase.cycles, work.epochs)
        step(batch.spec)
        self.standing.spend(self.image_cost * len(batch.rows))
        self.trained.images += batch.images

    def _step(self, work: PhaseWork, spec: BatchSpec) -> None:
        """Train on one batch. This only queues work on the device, so that it can be recorded from outside."""
        batch = work.loader.batch(spec)
        for step in work.steps:
            for parameter in work.parameters:  # also those that only other steps move
                parameter.grad = None
            loss = step.loss(batch) * spec.weight
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
        mean = self._mean_loss(work.loader.steps, f"of task {task.index + 1}, epoch {epoch + 1}")
        self._log_loss(task, epoch, mean, bar, work.loader.phase.name if work.loader.number else None)
        self.standing.move(epoch=epoch + 1, step=0)

    def _log_loss(self, task: Experience, epoch: int, mean: float, bar: Bar, phase: str | None = None) -> None:
        """Tell and log the mean loss of an epoch, or of what is left of it."""
        bar.remark(Loss(mean))
        if self.writes:
            named = {} if phase is None else {"phase": phase}
            self.run.log(event="epoch", task=task.index + 1, epoch=epoch + 1, loss=mean, **named)

    def _mean_loss(self, steps: int, place: str) -> float:
        """Return the mean of the losses summed over so many steps, and begin anew; `place` says which they are."""
        mean = float(self.loss) / steps
        if not math.isfinite(mean):
            raise DualPromptError(
                f"the loss {place} is not finite; lower train.lr (and rates of the method's own, as head_lr) or set "
                "train.clip"
            )
        self.loss.zero_()
        return mean

    def _evaluate(self, task: Experience) -> None:
        """Evaluate all seen tasks, where they have images for it, log their scores, and save."""
        subsets = self.setup.evaluated(task.index + 1)
        began, scores, answers = time.monotonic(), list[Score](), None
        if all(map(len, subsets)):
            if self.keeps_predictions:
                answers = Answers.after(self.setup.stream, task.index + 1, self.config, self.fabric.device)
            scores = evaluate(self.method, self.feed, subsets, None, self.progress, answers, len(task.seen))
        if self.writes:
            images = self.trained.images * self.fabric.world_size
            self.run.log(**task_line(task, scores, self.trained.seconds, time.monotonic() - began, images))
        if answers is not None:
            found = answers.gathered(partial(total, self.fabric))
            if self.writes:  # before the checkpoint: what comes after it is not evaluated again
                images = predictions.of_stream(self.setup.stream, self.config.benchmark.evaluate_on)
                predictions.keep(self.run.predictions_path, images, task.index, found)
        self.standing.save_task(task, scores)
        if scores:
            accuracy, matching = self.standing.position.accuracy[-1], self.standing.position.matching[-1]
            self.progress.receive(TaskEvaluated(task.index + 1, task.name, tuple(accuracy), tuple(matching)))
        if self.stop.asked:  # during the evaluation
            raise self.stop.error()

    def finish(self) -> dict[str, Any]:
        """Return the final numbers, writing them where that has not been done."""
        result = final_result(self.setup, self.standing.position, self.rehearsal.report(), self.run)
        if self.writes:
            self.run.finish(result)
            self.run.checkpoints.progress_path.unlink(missing_ok=True)  # the optimiser's state has no further use
        return result

    def _learn_online(self, task: Experience) -> None:
        """Learn from images that come portion after portion, each once.

        The method is told of a label when its first image comes, and of nothing that is still to come.
        """
        arrivals, done = Arrivals(task, self.method, self.feed), self.standing.position.step
        self.standing.check_within(1, len(arrivals.portions))
        resumed = self.standing.restore_method(begun=False)
        come = arrivals.portions[done - 1].stop if done else 0
        with self.progress.bar(self._work(task, len(task.train), come)) as bar:
            if arrivals.phase is not None:
                self._train_online(arrivals, arrivals.phase, resumed, bar)
                return
            for portion in arrivals.portions[done:]:
                with self.trained.timed(), counted() as passes:
                    self.method.begin_task(arrivals.view(portion))
                    self.method.eval()
                    self.method.end_task(arrivals.view(portion))
                self.standing.spend(passes)
                self._after_portion(arrivals, portion, None, bar)

    def _train_online(self, arrivals: Arrivals, phase: Phase, resumed: Unfinished | None, bar: Bar) -> None:
        """Train on every batch of an online stream, from where the run stands.

        Args:
            arrivals: the stream, whose portions are batches.
            phase: how it is trained on.
            resumed: what was kept of the work, if the run was stopped in the middle of it.
            bar: who is told how far it is.
        """
        task, done, updates = arrivals.task, self.standing.position.step, self.config.train.updates
        live, frozen = self.rehearsal.by_step(task), self.method.uses_frozen
        loader = Loader(self.feed, task.train, task.index, phase, 0, self.rehearsal.held(), frozen, live, in_order=True)
        self._offer_again(task, loader, resumed)
        batches, ready = loader.arriving(done, updates), None
        if done:  # the method stands where it stood, but for what it does not keep
            view = arrivals.view(arrivals.portions[done - 1], begun=True)
            with counted():
                self.method.begin_task(view)
                self.method.begin_phase(phase, view)
            ready = self._prepared(view, loader, resumed)
        for portion in arrivals.portions[done:]:
            with self.trained.timed(), counted() as passes:
                self.method.train()
                if grows := portion.known < portion.seen:
                    self.method.begin_task(arrivals.view(portion))
                if ready is None or grows:
                    view = arrivals.view(portion, begun=True)
                    self.method.begin_phase(phase, view)
                    ready = self._prepared(view, loader, before=ready and ready[0])
                work, step = ready
                for _ in range(updates):
                    self._train_on(next(batches), work, step, portion.number / len(arrivals.portions))
                if live:
                    rows = torch.arange(portion.start, portion.stop)
                    loader.replay_from(self.rehearsal.offer_step(task, task.train, rows, portion.number))
            self.standing.spend(passes)
            self._after_portion(arrivals, portion, work, bar)
        last = arrivals.portions[-1]
        if not last.evaluated:
            mean = self._mean_loss(updates * arrivals.since_evaluation(last), "at the end of the stream")
            self._log_loss(task, 0, mean, bar)
        self.method.eval()
        self.method.end_task(arrivals.view(last, begun=True))

    def _after_portion(self, arrivals: Arrivals, portion: Portion, work: PhaseWork | None, bar: Bar) -> None:
        """Evaluate all classes so far if it is time to, and keep what was learned; `work` is of gradient steps."""
        bar.advance(portion.stop - portion.start)
        self.standing.move(task=arrivals.task.index, step=portion.number + 1)
        if portion.evaluated:
            steps = self.config.train.updates * arrivals.since_evaluation(portion)
            loss = None if work is None else self._mean_loss(steps, f"after {portion.stop} images")
            own = [arrivals.judged(portion)]
            [score] = evaluate(self.method, self.feed, own, progress=self.progress, classes=portion.seen)
            self.standing.note_anytime(portion, score)
            if self.writes:
                self.run.log(**anytime_line(portion, score, loss))
            self.progress.receive(AnytimeEvaluated(portion.stop, portion.seen, score.accuracy))
        self._save_or_stop(arrivals.task, {} if work is None else work.optimisers, epoch_ends=False)

    @contextmanager
    def _accounted(self, task: Experience) -> Iterator[None]:
        """Note what a task takes: seconds and images in `trained`; passes where the run stands."""
        self.trained, self.feed.asked = Trained(), False
        with counted() as beside_steps:
            yield
        if task.online:
            self.feed.asked = self.method.uses_frozen  # evaluations on the way have asked too
        self.standing.spend(beside_steps + self.feed.known_features_cost(task.train))

    def _prepared(
        self,
        view: TaskView,
        loader: Loader,
        resumed: Unfinished | None = None,
        epochs: int = 1,
        before: PhaseWork | None = None,
    ) -> tuple[PhaseWork, CarryOut]:
        """Return what a phase works with, its optimisers as a resumed run left them, and what carries out `_step`.

        See `work.prepared` for the others.
        """
        work = prepared(self.method, view, loader, epochs, before)
        self.standing.restore_optimisers(work.optimisers, resumed)
        size, step = self.config.train.batch_size, partial(self._counted_step, work)
        return work, carried_out(step, self.fabric, size, self.method.capturable)

    def _counted_step(self, work: PhaseWork, spec: BatchSpec) -> None:
        """Train on one batch, and note what each of its images took; what is replayed from a record takes the same."""
        with counted() as passes:
            self._step(work, spec)
        self.image_cost = passes * (1 / len(spec))

    def _offer_again(self, task: Experience, loader: Loader, resumed: Unfinished | None) -> None:
        """Offer a live buffer what a resumed run has trained on before, step by step."""
        if not loader.live:
            return
        position = self.standing.position
        for step in range(loader.steps if position.epoch else position.step):
            self.rehearsal.offer_step(task, loader.subset, loader.rows(0, step), step, again=True)
        with fitting(self.run.checkpoints.progress_path):
            self.rehearsal.restore_notes(None if resumed is None else resumed.notes)
        if (held := self.rehearsal.held()) is not None:
            loader.replay_from(held)

    def _save_or_stop(self, task: Experience, optimisers: dict[str, Optimizer], epoch_ends: bool) -> None:
        """Keep the work in progress if it is time to, or if the run is to stop, which it then does."""
        stop = self.stop.asked
        if stop or self.standing.save_is_due(epoch_ends):
            self.standing.save(optimisers, self.loss, self.rehearsal.notes(task))
        if stop:
            raise self.stop.error()

    def _work(self, task: Experience, images: int, done: int, phase: str | None = None) -> Work:
        """Return what is told of training: how many images there are to come, and how many came earlier."""
        tasks = self.setup.stream.experiences[-1].index + 1
        return Work("training", images, "img", done, task.name, task.index + 1, tasks, phase)
