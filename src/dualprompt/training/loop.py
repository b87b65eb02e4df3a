"""The only training loop."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from dualprompt.config import TrainConfig
from dualprompt.data.stream import Task
from dualprompt.errors import DualPromptError, InterruptedRunError
from dualprompt.files import write_json
from dualprompt.methods.base import TaskView
from dualprompt.metrics import summarise
from dualprompt.progress import SILENT, Bar, Progress
from dualprompt.seeds import derive
from dualprompt.training.checkpoint import Position, State, restore_optimiser
from dualprompt.training.distributed import distribute, total
from dualprompt.training.evaluate import evaluate
from dualprompt.training.run import Run
from dualprompt.training.setup import Setup


def train(setup: Setup, run: Run, progress: Progress = SILENT) -> dict[str, Any]:
    """Learn every task of the stream, judging all seen tasks after each; return and write the result.

    A run that was begun before continues where its last checkpoint stands, to the same result.
    """
    loop = _Loop(setup, run, progress)
    with _stop_signals(loop):
        for task in setup.stream.tasks[loop.position.task :]:
            loop.learn(task)
    return loop.finish()


class _Loop:
    """The state of a run while it runs: method, optimiser, position."""

    def __init__(self, setup: Setup, run: Run, progress: Progress) -> None:
        self.setup, self.run, self.progress = setup, run, progress
        self.config, self.method, self.fabric = setup.config, setup.method, setup.fabric
        self.stop_asked: str | None = None
        self.saved_at = time.monotonic()
        self.position, self.resumed = run.checkpoints.last()
        self.loss = (self.resumed.loss if self.resumed else torch.zeros(())).to(self.fabric.device)
        self.before = self._on_device(run.checkpoints.after_task(self.position.task - 1))
        if self.before:
            self.method.load_state(self.before)
        if self.writes:
            run.cut_log(self.position.log_bytes)

    @property
    def writes(self) -> bool:
        """Whether this process is the one that writes files."""
        return self.fabric.is_global_zero

    def _on_device(self, state: State) -> State:
        return {name: value.to(self.fabric.device) for name, value in state.items()}

    def learn(self, task: Task) -> None:
        """Train one task, judge all seen tasks, and keep both."""
        view = self._view(task)
        self.method.begin_task(view)
        if self.resumed:
            self.method.load_state(self.before | self._on_device(self.resumed.method))
        trainable = self.method.trainable()
        optimiser = make_optimiser(trainable, self.config.train)
        if self.resumed:
            restore_optimiser(optimiser, list(trainable), self.resumed.optimiser)
        self.resumed = None
        loss_of = distribute(self.fabric, self.method)
        started, images = time.monotonic(), 0
        done = self.position.epoch * len(task.train) + self.position.step * self.config.train.batch_size
        label = f"task {task.index + 1}/{len(self.setup.stream.tasks)} {task.name}"
        with self.progress.bar(label, len(task.train) * self.config.train.epochs, "img", done=done) as bar:
            for epoch in range(self.position.epoch, self.config.train.epochs):
                images += self._epoch(task, epoch, loss_of, trainable, optimiser, bar)
        seconds = time.monotonic() - started
        self.method.end_task(view)
        self._judge(task, seconds, images)

    def _view(self, task: Task) -> TaskView:
        return TaskView(
            index=task.index,
            name=task.name,
            classes=len(task.classes),
            first_class=task.first_class,
            generator=torch.Generator().manual_seed(derive(self.config.seed, "begin", task.index)),
            queries=lambda: self.setup.feed.features(task.train),
        )

    def _epoch(
        self,
        task: Task,
        epoch: int,
        loss_of: Any,
        trainable: dict[str, nn.Parameter],
        optimiser: Any,
        bar: Bar,
    ) -> int:
        self.method.train()
        feed, images, names = self.setup.feed, 0, list(trainable)
        start = self.position.step if epoch == self.position.epoch else 0
        steps = feed.steps(task.train)
        for step, share in enumerate(
            feed.training(task.train, task.index, epoch, start, self.method.uses_frozen), start=start
        ):
            loss = loss_of(share.batch)
            optimiser.zero_grad(set_to_none=True)
            self.fabric.backward(loss * share.weight)
            if self.config.train.clip is not None:
                nn.utils.clip_grad_norm_(trainable.values(), self.config.train.clip)
            optimiser.step()
            self.loss += total(self.fabric, loss.detach() * share.weight) / self.fabric.world_size
            images += len(share.batch.labels)
            bar.advance(len(share.batch.labels) * self.fabric.world_size)
            last = step + 1 == steps
            self.position = replace(self.position, task=task.index, epoch=epoch, step=step + 1)
            if last:
                self._end_epoch(task, epoch, steps, bar)
            stop = self._stop_asked()
            if last or stop or self._due():
                self._save(optimiser, names)
            if stop:
                raise self._stopped()
        return images

    def _end_epoch(self, task: Task, epoch: int, steps: int, bar: Bar) -> None:
        mean = float(self.loss) / steps
        if not math.isfinite(mean):
            raise DualPromptError(
                f"the loss of task {task.index + 1}, epoch {epoch + 1} is not finite; lower train.lr or set train.clip"
            )
        self.loss = torch.zeros_like(self.loss)
        bar.say(f"loss {mean:.3f}")
        if self.writes:
            self.run.log(event="epoch", task=task.index + 1, epoch=epoch + 1, loss=mean)
        self.position = replace(self.position, epoch=epoch + 1, step=0)

    def _judge(self, task: Task, seconds: float, images: int) -> None:
        subsets = self.setup.judged(task.index + 1)
        began = time.monotonic()
        scores = evaluate(self.method, self.setup.feed, subsets, progress=self.progress)
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
        )
        if self.writes:
            self.run.checkpoints.save_task(self.position, self.method.state(), self.before)
        self.before = {name: value.clone() for name, value in self.method.state().items()}
        self.progress.note(_sentence(task, accuracy, matching))
        if self._stop_asked():  # during the evaluation
            raise self._stopped()

    def _due(self) -> bool:
        return time.monotonic() - self.saved_at >= self.config.checkpoint.every_seconds

    def _save(self, optimiser: torch.optim.Optimizer, names: list[str]) -> None:
        self.saved_at = time.monotonic()
        if not self.writes:
            return
        self.position = replace(self.position, log_bytes=self.run.log_bytes())
        self.run.checkpoints.save_progress(self.position, self.method.state(), self.before, optimiser, names, self.loss)

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
        matching = self.position.matching if self.method.selections else None
        result = {
            "method": self.method.config.name,
            "benchmark": self.config.benchmark.name,
            "backbone": self.setup.weights.name,
            "recipe": self.config.train.recipe,
            "seed": self.config.seed,
            "tasks": [task.name for task in self.setup.stream.tasks],
            **summarise(self.position.accuracy, matching[-1] if matching else None),
            "accuracy_matrix": self.position.accuracy,
            "matching_matrix": matching,
            "selection": getattr(self.method.config, "selection", None),
            "parameters": self.method.parameters_report(),
            "queries": self._queries(),
            "skipped_images": len(self.setup.stream.bad),
            "run_dir": str(self.run.folder),
        }
        if self.writes:
            write_json(self.run.result_path, result)
            self.run.checkpoints.progress_path.unlink(missing_ok=True)  # the optimiser's state has no further use
        return result

    def _queries(self) -> str:
        if self.setup.feed.view.training_is_fixed:
            return "one pass an image, in its only view"
        return f"{self.config.train.query_view} view in training, one pass an image in evaluation"


def make_optimiser(trainable: dict[str, nn.Parameter], config: TrainConfig) -> torch.optim.Optimizer:
    """Return a fresh Adam; each task has its own, so that no momentum of old tasks moves new ones."""
    return torch.optim.Adam(list(trainable.values()), lr=config.effective_lr, betas=config.betas)


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
