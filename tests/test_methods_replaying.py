"""What all methods with a buffer have in common: refusals, gradients, and that they go on from a state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from dualprompt.data.stream import Subset
from dualprompt.errors import DualPromptError
from dualprompt.methods.base import Batch, Method, Phase, TaskView
from dualprompt.methods.buffer import Buffer, part
from helpers import SIDE, seeded, subset_of, task_view
from test_methods_rehearsal import CLASSES, NAMES, after_tasks, labelled, make


@pytest.mark.parametrize("name", NAMES)
def test_masked_training_logits_are_refused(name: str) -> None:
    with pytest.raises(DualPromptError, match="training_logits"):
        make(name, training_logits="masked")
    with pytest.raises(DualPromptError, match="buffer_size"):
        make(name, buffer_size=0)
    assert make(name, buffer_size=77).buffer.size == 77


@pytest.mark.parametrize("name", NAMES)
def test_gradients_reach_all_that_is_trained(name: str) -> None:
    method: Method = after_tasks(name)
    batch = labelled(6, CLASSES, 1, noise=torch.rand(6, 4, generator=seeded(1)))
    noted = torch.randn(6, CLASSES, generator=seeded(2))
    batch.replay = tuple(labelled(6, 0, 2 + i, noted=noted) for i in range(method.phases(task_view(1))[0].replay))
    method.loss(batch).backward()
    trained = method.trainable()
    assert "backbone.cls_token" in trained
    assert all(p.grad is not None and p.grad.isfinite().all() for p in trained.values())
    assert all(p.grad is None for n, p in method.named_parameters() if n not in trained)


@pytest.mark.parametrize("train_backbone", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_no_value_is_read_back_and_no_shape_depends_on_one(name: str, train_backbone: bool) -> None:
    method: Method = after_tasks(name, train_backbone=train_backbone)
    for phase in method.phases(task_view(1)):
        method.begin_phase(phase, task_view(1))
        with FakeTensorMode(allow_non_fake_inputs=True):  # tensors without values: reading one is an error
            batch = labelled(6, CLASSES, 1, noise=torch.rand(6, 4))
            batch.replay = tuple(labelled(6, 0, 2, noted=torch.rand(6, CLASSES)) for _ in range(phase.replay))
            assert method.loss(batch).shape == ()
            assert method.predict(batch).logits.shape == (6, 2 * CLASSES)


class Learner:
    """Learns tasks as the loop does, from its own raw images, with plain gradient descent."""

    def __init__(self, method: Method) -> None:
        assert method.buffer is not None
        self.method, self.buffer = method, Buffer(method.buffer, seed=0)
        rng = np.random.default_rng(0)
        self.tasks = [
            subset_of(rng.integers(0, 256, (12, SIDE, SIDE, 3), np.uint8), np.arange(12) % CLASSES + CLASSES * t)
            for t in range(3)
        ]

    def batch(self, subset: Subset, rows: Tensor, **options: Any) -> Batch:
        pixels = subset.images.gather(subset.indices[rows]).pixels.permute(0, 3, 1, 2) / 255
        noted = None if subset.notes is None else subset.notes[rows]
        flipped = pixels.flip(3)
        return Batch(lambda: pixels, subset.labels[rows], make_second=lambda: flipped, noted=noted, **options)

    def step(self, task: int, phase: Phase, number: int) -> None:
        generator = seeded(1000 * task + number)
        subset = self.buffer.as_subset() if phase.data == "buffer" else self.tasks[task]
        batch = self.batch(subset, torch.randperm(len(subset), generator=generator)[:6])
        batch.noise = torch.rand(len(batch.labels), phase.noise, generator=generator)
        if len(self.buffer):
            held = self.buffer.as_subset()
            rows = [torch.randint(len(held), (6,), generator=generator) for _ in range(phase.replay)]
            batch.replay = tuple(self.batch(held, chosen) for chosen in rows)
        trained = list(self.method.trainable().values())
        optimiser = torch.optim.SGD(trained, lr=0.01)
        self.method.loss(batch).backward()
        optimiser.step()
        self.method.zero_grad()

    def learn(self, task: int, again: Callable[[Method], Method] | None = None, at: tuple[int, int] = (-1, -1)) -> None:
        """Learn a task; `again` makes a new method, which goes on at phase and step `at` as a resumed run does."""
        apart = self.buffer.to_reserve(self.tasks[task], task)
        aside = [each for each in (self.buffer.reserved(), part(self.tasks[task], apart)) if len(each)]
        batches = [self.batch(each, torch.arange(len(each))) for each in aside]
        view = TaskView(**{**vars(task_view(task, CLASSES)), "reserved": lambda: iter(batches)})
        before = {name: value.clone() for name, value in self.method.state().items()}
        self.method.begin_task(view)
        if self.buffer.plan.fill == "before":
            self.buffer.offer(self.tasks[task], task)
        for i, phase in enumerate(self.method.phases(view)):
            self.method.begin_phase(phase, view)
            for step in range(3):
                if again is not None and (i, step) == at:
                    work = {name: value.clone() for name, value in self.method.state().items()}
                    self.method = again(self.method)
                    if before:
                        self.method.load_state(before)
                    self.method.begin_task(task_view(task, CLASSES))
                    self.method.load_state(before | work)
                    self.method.begin_phase(phase, view)
                self.step(task, phase, 10 * i + step)
        self.method.end_task(view)
        if self.buffer.plan.fill == "after":
            self.buffer.offer(self.tasks[task], task, self.note)

    def note(self, subset: Subset) -> Tensor:
        return self.method.note(self.batch(subset, torch.arange(len(subset))))

    def predictions(self) -> Tensor:
        return torch.cat([self.method.predict(self.batch(task, torch.arange(12))).logits for task in self.tasks])


@pytest.mark.parametrize("train_backbone", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_a_state_brings_everything_back(name: str, train_backbone: bool) -> None:
    learner = Learner(make(name, buffer_size=10, train_backbone=train_backbone))
    learner.learn(0)
    learner.learn(1)
    state = {name: value.clone() for name, value in learner.method.state().items()}
    assert any(key.startswith("backbone.") for key in state) == train_backbone
    assert {key.split(".")[0] for key in state} <= {"backbone", "head", "projector", "correction"}  # no snapshot
    other = Learner(make(name, buffer_size=10, train_backbone=train_backbone))
    other.method.load_state(state)
    assert torch.equal(other.predictions(), learner.predictions())
    assert learner.predictions().shape == (36, 2 * CLASSES)
    assert float(learner.predictions().std()) > 0
    other.buffer.load_state(learner.buffer.state())
    learner.learn(2)
    other.learn(2)
    assert torch.equal(other.predictions(), learner.predictions())


@pytest.mark.parametrize("train_backbone", [True, False])
@pytest.mark.parametrize("task", [0, 1])
@pytest.mark.parametrize("name", NAMES)
def test_a_run_resumed_inside_a_phase_goes_on_as_if_nothing_had_happened(
    name: str, task: int, train_backbone: bool
) -> None:
    def fresh(_: Method | None = None) -> Method:
        return make(name, buffer_size=10, train_backbone=train_backbone)

    def run(at: tuple[int, int]) -> Tensor:
        learner = Learner(fresh())
        for index in range(task + 1):
            learner.learn(index, fresh if index == task else None, at)
        return learner.predictions()

    through = run((-1, -1))
    for phase in range(len(fresh().phases(task_view(task)))):
        for step in (0, 2):
            assert torch.equal(run((phase, step)), through), f"phase {phase}, step {step}"


@pytest.mark.parametrize("name", NAMES)
def test_predictions_do_not_depend_on_the_batch(name: str) -> None:
    learner = Learner(make(name, buffer_size=10))
    learner.learn(0)
    learner.learn(1)
    whole = learner.predictions()[:12]
    rows = [learner.method.predict(learner.batch(learner.tasks[0], torch.tensor([i]))).logits for i in range(12)]
    torch.testing.assert_close(torch.cat(rows), whole, rtol=1e-4, atol=1e-5)
