"""The only training loop."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from dualprompt.config import TrainConfig
from dualprompt.data.stream import Subset, Task
from dualprompt.errors import DualPromptError, InterruptedRunError, one_line
from dualprompt.methods.base import Batch, Method, Phase, TaskView
from dualprompt.metrics import summarise
from dualprompt.progress import SILENT, Bar, Progress
from dualprompt.run import predictions
from dualprompt.run.checkpoint import (
    BUFFER,
    Position,
    State,
    fitting,
    of_buffer,
    of_method,
    restore_optimiser,
)
from dualprompt.run.folder import Run
from dualprompt.run.tracking import tracked
from dualprompt.seeds import derive
from dualprompt.training.buffer import Buffer, part
from dualprompt.training.distributed import distribute, total
from dualprompt.training.evaluate import Answers, evaluate, matches
from dualprompt.training.feed import Course
from dualprompt.training.material import material, union
from dualprompt.training.setup import Setup
from dualprompt.training.steps import Inputs, Steps, on_device


def train(
    setup: Setup, run: Run, progress: Progress = SILENT, learned: Callable[[int], None] | None = None
) -> dict[str, Any]:
    """Learn every task of the stream, judging all seen tasks after each; return and write the result.

    A run that was begun before continues where its last checkpoint stands, to the same result. `learned` hears after
    each task how many are behind it.
    """
    loop = _Loop(setup, run, progress, keeps_predictions=True)
    with tracked(run, loop.config.track if loop.writes else (), progress):
        with _stop_signals(loop):
            for task in setup.stream.tasks[loop.position.task :]:
                loop.learn(task)
                if learned is not None:
                    learned(loop.position.task)
        return loop.finish()


def extend(setup: Setup, run: Run, progress: Progress = SILENT) -> None:
    """Learn the stream's tasks on top of the model that the run begins with; `setup.method` then knows them.

    Their numbers go on from those of the tasks it knows. Tasks without test images are not judged.
    """
    loop = _Loop(setup, run, progress)
    with _stop_signals(loop):
        for task in setup.stream.tasks:
            if task.index >= loop.position.task:
                loop.learn(task)


class _Loop:
    """The state of a run while it runs: method, buffer, position."""

    def __init__(self, setup: Setup, run: Run, progress: Progress, keeps_predictions: bool = False) -> None:
        self.setup, self.run, self.progress = setup, run, progress
        self.keeps_predictions = keeps_predictions
        self.config, self.method, self.fabric = setup.config, setup.method, setup.fabric
        self.stop_asked: str | None = None
        self.saved_at = time.monotonic()
        self.position, self.resumed = run.checkpoints.last()
        self.loss = (self.resumed.loss if self.resumed else torch.zeros(())).to(self.fabric.device)
        self.before = self._on_device(run.checkpoints.after_task(self.position.task - 1))
        self.buffer = Buffer(self.method.buffer, self.config.seed) if self.method.buffer else None
        if self.position.task > setup.stream.tasks[-1].index + 1:
            raise DualPromptError(f"{run.checkpoints.folder} holds more tasks than the run has; remove the later files")
        if self.before:
            with fitting(run.checkpoints.folder):
                self.method.load_state(of_method(self.before))
                if self.buffer is not None:
                    self.buffer.load_state({name: value.cpu() for name, value in of_buffer(self.before).items()})
        if self.writes:
            run.cut_log(self.position.log_bytes)

    @property
    def writes(self) -> bool:
        """Whether this process is the one that writes files."""
        return self.fabric.is_global_zero

    def _on_device(self, state: State) -> State:
        return {name: value.to(self.fabric.device) for name, value in state.items()}

    def learn(self, task: Task) -> None:
        """Train one task, phase after phase, judge all seen tasks, and keep both."""
        self._set_aside(task)
        view = self._view(task)
        self.method.begin_task(view)
        self._offer(task, "before")
        seconds, images = 0.0, 0
        phases = self.method.phases(view)
        for number, phase in enumerate(phases):
            if number < self.position.phase:
                continue
            began = time.monotonic()
            images += self._phase(task, view, number, phase, alone=len(phases) == 1)
            seconds += time.monotonic() - began
        began = time.monotonic()
        self.method.eval()
        self.method.end_task(view)
        self._offer(task, "after")
        self._judge(task, seconds + time.monotonic() - began, images)

    def _set_aside(self, task: Task) -> None:
        """Tell the task's images that are trained on from those that the buffer reserves, if it does."""
        self.trained, self.reserved = task.train, None
        if self.buffer is not None and self.buffer.plan.reserve:
            apart = self.buffer.to_reserve(task.train, task.index)
            old = self.buffer.reserved()
            self.trained = part(task.train, ~apart)
            self.reserved = union([*([old] if len(old) else []), part(task.train, apart)])

    def _offer(self, task: Task, moment: str) -> None:
        """Let the buffer choose from the task's images, where the method has one."""
        if self.buffer is None or self.buffer.plan.fill != moment:
            return
        self.buffer.offer(task.train, task.index, self._note if self.buffer.plan.notes else None)

    @torch.no_grad()
    def _note(self, subset: Subset) -> torch.Tensor:
        self.method.eval()
        feed, notes = self.setup.feed, []
        for inputs in feed.judging(subset, self.method.uses_frozen, shared=False):
            note = self.method.note(feed.batch(subset.images, on_device(inputs, self.fabric.device)))
            notes.append(note.float().cpu())
        return torch.cat(notes)

    def _view(self, task: Task) -> TaskView:
        feed = self.setup.feed

        def batches(subset: Subset | None) -> Iterator[Batch]:
            if subset is not None and len(subset):
                for inputs in feed.judging(subset, self.method.uses_frozen, shared=False):
                    yield feed.batch(subset.images, on_device(inputs, self.fabric.device))

        return TaskView(
            index=task.index,
            name=task.name,
            classes=len(task.classes),
            first_class=task.first_class,
            generator=torch.Generator().manual_seed(derive(self.config.seed, "begin", task.index)),
            queries=lambda: feed.features(task.train),
            labels=task.train.labels.to(self.fabric.device),
            batches=lambda: batches(task.train),
            reserved=lambda: batches(self.reserved),
        )

    def _phase(self, task: Task, view: TaskView, number: int, phase: Phase, alone: bool) -> int:
        """Train for the epochs of a phase, from where the run stands; return the images seen."""
        self.method.begin_phase(phase, view)
        if self.resumed:
            trained = {name for name, p in self.method.named_parameters() if p.requires_grad}
            with fitting(self.run.checkpoints.progress_path):
                self.method.load_state(of_method(self.before) | self._on_device(self.resumed.method))
            for name, parameter in self.method.named_parameters():
                parameter.requires_grad_(name in trained)
        optimiser = make_optimiser(self.method, self.config.train, phase.lr, self.fabric.device)
        if self.resumed:
            with fitting(self.run.checkpoints.progress_path):
                restore_optimiser(optimiser, self.resumed.optimiser)
        self.resumed = None
        held = self.buffer.as_subset() if self.buffer is not None else None
        seen = [each.train for each in self.setup.stream.tasks[: task.index + 1]]
        subset = material(self.method, phase, [*seen[:-1], self.trained], held)
        course = self.setup.feed.course(subset, task.index, phase, number, held, self.method.uses_frozen)
        epochs = phase.epochs_factor * (phase.epochs or self.config.train.epochs)
        work = _Work(phase, number, epochs, course, optimiser)
        steps = Steps(self._step(work), self.fabric, self.config.train.batch_size, self.method.capturable)
        last = self.setup.stream.tasks[-1].index
        label = f"task {task.index + 1}/{last + 1} {task.name}{'' if alone else f', {phase.name}'}"
        if self.position.epoch > work.epochs or self.position.step > course.steps:
            raise DualPromptError(
                f"{self.run.checkpoints.progress_path} is of a longer run; delete it to go on before it"
            )
        done = self.position.epoch * len(subset) + self.position.step * course.size
        images = 0
        with self.progress.bar(label, len(subset) * work.epochs, "img", done=done) as bar:
            for epoch in range(self.position.epoch, work.epochs):
                images += self._epoch(task, epoch, work, steps, bar)
        self.position = replace(self.position, phase=number + 1, epoch=0, step=0)
        return images

    def _step(self, work: _Work) -> Callable[[Inputs], None]:
        """Return one training step, which only queues work on the device."""
        loss_of = distribute(self.fabric, self.method)
        clip, parameters = self.config.train.clip, list(self.method.trainable().values())

        def step(inputs: Inputs) -> None:
            weight = inputs.pop("weight")
            work.optimiser.zero_grad(set_to_none=True)
            loss = loss_of(work.course.batch(inputs)) * weight
            self.fabric.backward(loss)
            if clip is not None:
                nn.utils.clip_grad_norm_(parameters, clip)
            work.optimiser.step()
            self.loss += total(self.fabric, loss.detach()) / self.fabric.world_size

        return lambda inputs: step(dict(inputs))

    def _epoch(self, task: Task, epoch: int, work: _Work, steps: Steps, bar: Bar) -> int:
        self.method.train()
        images, count = 0, work.course.steps
        start = self.position.step if epoch == self.position.epoch else 0
        for step, share in enumerate(work.course.epoch(epoch, start), start=start):
            done = (epoch * count + step) / (work.epochs * count)
            set_rates(work.optimiser, self.config.train, done, work.phase.cycles)
            steps(share.inputs | {"weight": torch.tensor(share.weight)})
            images += share.images
            bar.advance(share.images * self.fabric.world_size)
            last = step + 1 == count
            self.position = replace(self.position, task=task.index, phase=work.number, epoch=epoch, step=step + 1)
            if last:
                self._end_epoch(task, epoch, work, bar)
            stop = self._stop_asked()
            if stop or self._due(last):
                self._save(work)
            if stop:
                raise self._stopped()
        return images

    def _end_epoch(self, task: Task, epoch: int, work: _Work, bar: Bar) -> None:
        mean = float(self.loss) / work.course.steps
        if not math.isfinite(mean):
            raise DualPromptError(
                f"the loss of task {task.index + 1}, epoch {epoch + 1} is not finite; lower train.lr "
                "(and rates of the method's own, as head_lr) or set train.clip"
            )
        self.loss.zero_()
        bar.say(f"loss {mean:.3f}")
        if self.writes:
            extra = {} if work.number == 0 else {"phase": work.phase.name}
            self.run.log(event="epoch", task=task.index + 1, epoch=epoch + 1, loss=mean, **extra)
        self.position = replace(self.position, epoch=epoch + 1, step=0)

    def _judge(self, task: Task, seconds: float, images: int) -> None:
        subsets = self.setup.judged(task.index + 1)
        began = time.monotonic()
        judged = all(map(len, subsets))
        answers = self._answers(task, subsets) if judged else None
        feed = self.setup.feed
        scores = evaluate(self.method, feed, subsets, progress=self.progress, answers=answers) if judged else []
        accuracy = [score.accuracy for score in scores]
        matching = [score.matching for score in scores if score.matching is not None]
        if self.writes:
            self.run.log(
                event="task",
                task=task.index + 1,
                name=task.name,
                accuracy=accuracy,
                matching=matching or None,
                images=[score.images for score in scores],
                seconds={
                    "train": round(seconds, 3),
                    "evaluate": round(time.monotonic() - began, 3),
                    "train_images_per_second": round(images * self.fabric.world_size / seconds, 1) if images else None,
                },
            )
        self.position = Position(
            task=task.index + 1,
            log_bytes=self.run.log_bytes() if self.writes else 0,
            accuracy=[*self.position.accuracy, accuracy],
            matching=[*self.position.matching, matching],
            confusion=[score.selected for score in scores if score.selected is not None],
        )
        if answers is not None:
            found = answers.gathered(self.fabric)
            if self.writes:  # before the checkpoint: what comes after it is not judged again
                predictions.write(self.run.predictions_path, found)
        if self.writes:
            self.run.checkpoints.save_task(self.position, self._state(), self.before)
        self.before = {name: value.clone() for name, value in self._state().items()}
        if scores:
            self.progress.note(_sentence(task, accuracy, matching))
        if self._stop_asked():  # during the evaluation
            raise self._stopped()

    def _answers(self, task: Task, subsets: list[Subset]) -> Answers | None:
        """Return room for what the finished method answers, image by image."""
        last = task.index == self.setup.stream.tasks[-1].index
        return Answers(subsets, self.fabric.device) if self.keeps_predictions and last else None

    def _due(self, epoch_ends: bool) -> bool:
        """Return whether to save: now and then, and at an epoch's end unless that was done a moment ago."""
        wait = self.config.checkpoint.every_seconds / (10 if epoch_ends else 1)
        return time.monotonic() - self.saved_at >= wait

    def _state(self) -> State:
        """Return all that the run has made so far: the method's state and the buffer's."""
        held = self.buffer.state() if self.buffer is not None else {}
        return self.method.state() | {f"{BUFFER}{name}": value.to(self.fabric.device) for name, value in held.items()}

    def _save(self, work: _Work) -> None:
        self.saved_at = time.monotonic()
        if not self.writes:
            return
        self.position = replace(self.position, log_bytes=self.run.log_bytes())
        # The buffer changes between phases only, and in a way that the run repeats when it is resumed.
        self.run.checkpoints.save_progress(self.position, self.method.state(), self.before, work.optimiser, self.loss)

    def _stop_asked(self) -> bool:
        """Return whether any process was asked to stop; all must leave at the same step."""
        asked = self.stop_asked is not None
        if self.fabric.world_size == 1:
            return asked
        return bool(total(self.fabric, torch.tensor(float(asked), device=self.fabric.device)))

    def _stopped(self) -> InterruptedRunError:
        return InterruptedRunError(f"stopped by {self.stop_asked or 'another process'}")

    def finish(self) -> dict[str, Any]:
        """Return the final numbers, writing them where that has not been done."""
        matching = self.position.matching if matches(self.method) else None
        images = [len(subset) for subset in self.setup.judged(len(self.position.accuracy))]
        result = {
            "method": self.method.config.name,
            "benchmark": self.config.benchmark.name,
            "backbone": self.setup.weights.name,
            "recipe": self.config.train.recipe,
            "seed": self.config.seed,
            "tasks": [task.name for task in self.setup.stream.tasks],
            **summarise(self.position.accuracy, matching[-1] if matching else None, images),
            "judged_images": images,
            "accuracy_matrix": self.position.accuracy,
            "matching_matrix": matching,
            "matching_confusion": self.position.confusion or None,
            "selection": getattr(self.method.config, "selection", None),
            "parameters": self.method.parameters_report(),
            "queries": self._queries(),
            "buffer": None if self.buffer is None else {"images": len(self.buffer), "bytes": self.buffer.bytes},
            "skipped_images": len(self.setup.stream.bad),
            "run_dir": one_line(str(self.run.folder)),
        }
        if self.writes:
            self.run.finish(result)
            self.run.checkpoints.progress_path.unlink(missing_ok=True)  # the optimiser's state has no further use
        return result

    def _queries(self) -> str:
        if self.method.trains_backbone:
            return "none: the backbone is trained"
        if not self.method.uses_frozen:
            return "none: every pass has prompts"
        if self.setup.feed.view.training_is_fixed:
            return "one pass an image, in its only view"
        return f"{self.config.train.query_view} view in training, one pass an image in evaluation"


@dataclass(frozen=True)
class _Work:
    """A phase that is being trained."""

    phase: Phase
    number: int
    epochs: int
    course: Course
    optimiser: torch.optim.Optimizer


def effective_lr(config: TrainConfig) -> float:
    """Return the learning rate after scaling."""
    return config.lr * config.batch_size / 256 if config.lr_scale == "batch/256" else config.lr


def make_optimiser(
    method: Method, config: TrainConfig, lr: float | None = None, device: torch.device | None = None
) -> torch.optim.Optimizer:
    """Return a fresh optimiser; each phase has its own, so that no momentum of old tasks moves new ones.

    `lr` is the phase's own learning rate, if it has one. Parameters that start at the same rate make a group.
    """
    start = effective_lr(config) if lr is None else lr
    alike: dict[float, list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in method.trainable().items():
        own = method.own_lr(name)
        alike.setdefault(start if own is None else own, []).append((name, parameter))
    on_gpu = device is not None and device.type == "cuda"
    groups: list[dict[str, Any]] = [
        # On a GPU the learning rate and the step count live there, so that a recorded step can read them.
        {"params": named, "lr": torch.tensor(rate, device=device) if on_gpu else rate, "initial_lr": rate}
        for rate, named in alike.items()
    ]
    if config.optimiser == "sgd":
        return torch.optim.SGD(groups, momentum=0.9, weight_decay=config.weight_decay, fused=on_gpu)
    kind = torch.optim.AdamW if config.weight_decay else torch.optim.Adam
    return kind(groups, betas=config.betas, weight_decay=config.weight_decay, fused=on_gpu, capturable=on_gpu)


def set_rates(optimiser: torch.optim.Optimizer, config: TrainConfig, done: float, cycles: int = 1) -> None:
    """Set the learning rates for a step, `done` of the phase being behind it.

    A cosine is run through `cycles` times, each time twice as long as before (SGDR, Loshchilov & Hutter, 2017).
    """
    if config.schedule == "constant":
        return
    if cycles > 1:
        at = 1 + done * (2**cycles - 1)  # the cosines begin at 1, 2, 4, …
        done = at / 2 ** math.floor(math.log2(at)) - 1
    for group in optimiser.param_groups:
        rate = group["initial_lr"] * (1 + math.cos(math.pi * done)) / 2
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(rate)  # in place: a recorded step reads this tensor
        else:
            group["lr"] = rate


def _sentence(task: Task, accuracy: list[float], matching: list[float]) -> str:
    mean = sum(accuracy) / len(accuracy)
    text = f"after task {task.index + 1} ({task.name}): A = {mean:.2f} %, newest task {accuracy[-1]:.2f} %"
    return text + (f", matching {sum(matching) / len(matching):.2f} %" if matching else "")


@contextmanager
def _stop_signals(loop: _Loop) -> Iterator[None]:
    """Turn Ctrl-C and SIGTERM into a request that the loop honours after the current step; a second one kills."""

    def ask(number: int, _: Any) -> None:
        if loop.stop_asked is not None:
            raise KeyboardInterrupt
        loop.stop_asked = signal.Signals(number).name
        loop.progress.note("stopping at the next safe moment; ask once more to stop at once, at the last checkpoint")

    try:
        previous = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not in the main thread: whoever runs us there handles signals
        yield
        return
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
