"""Which images a phase works on, and that old ones reach nobody who has no buffer."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dualprompt.config import compose
from dualprompt.data.stream import Experience, Subset, union
from dualprompt.methods.base import METHODS, Batch, Method, Phase, TaskView, method_config
from dualprompt.methods.bic import BiC, BiCConfig
from dualprompt.methods.buffer import Buffer
from dualprompt.methods.frozen_head import FrozenHead
from dualprompt.run.folder import Run
from dualprompt.training import group
from dualprompt.training.loop import train
from dualprompt.training.select import select_subset
from dualprompt.training.setup import prepare
from helpers import backbone_for, subset_of
from sandbox import World

REHEARSE = {"er", "der++", "dualnet", "dynaer", "gdumb", "bic", "co2l", "rpsnet"}


def make(name: str) -> Method:
    return METHODS[name](method_config({"name": name}), backbone_for(name))


def numbered_images(first: int, labels: list[int]) -> Subset:
    """Images whose pixels all say which they are."""
    numbers = np.arange(first, first + len(labels), dtype=np.uint8)
    return subset_of(np.broadcast_to(numbers[:, None, None, None], (len(labels), 2, 2, 3)).copy(), labels)


def seen(subset: Subset) -> list[tuple[int, int]]:
    """Return (number, label) of each image, in order."""
    return [
        (int(subset.images.image(int(index))[0, 0, 0]), int(label))
        for index, label in zip(subset.indices, subset.labels, strict=True)
    ]


def stream(*labels: list[int]) -> list[Experience]:
    tasks = []
    for index, mine in enumerate(labels):
        images = numbered_images(50 * index, mine)
        seen = tuple(range(2 * index + 2))
        names = f"a{index}", f"b{index}"
        own = Experience(index, f"task {index}", seen[-2:], seen[-2:], seen, names, images, images, images)
        tasks.append(own)
    return tasks


TASKS = stream([0, 1, 0, 1] * 6, [2, 3] * 10)
SEEN = [task.train for task in TASKS]
BUFFER = numbered_images(200, [0, 1, 1])
OLD, NEW, HELD = seen(TASKS[0].train), seen(TASKS[1].train), seen(BUFFER)


@pytest.mark.parametrize(
    ("method", "data", "buffer", "expected"),
    [
        ("ft-seq", "task", None, NEW),
        ("er", "task", BUFFER, NEW),
        ("er", "buffer", BUFFER, HELD),
        ("er", "task+buffer", BUFFER, NEW + HELD),
        ("er", "task+buffer", subset_of(np.zeros((0, 2, 2, 3), np.uint8), []), NEW),
        ("upper-bound", "everything", None, OLD + NEW),
    ],
)
def test_what_a_phase_works_on(method: str, data: Any, buffer: Subset | None, expected: list[tuple[int, int]]) -> None:
    assert seen(select_subset(make(method), Phase(data=data), SEEN, buffer)) == expected


@pytest.mark.parametrize("name", METHODS.names())
def test_old_images_reach_nobody_who_may_not_have_them(name: str) -> None:
    method = make(name)
    assert (method.buffer is not None) == (name in REHEARSE)
    assert method.joint == (name == "upper-bound")
    if name not in REHEARSE:
        for data in ("buffer", "task+buffer"):
            with pytest.raises(AssertionError, match=re.escape(f"{name} has no buffer")):
                select_subset(method, Phase(data=data), SEEN, BUFFER)
    if not method.joint:
        with pytest.raises(AssertionError, match=re.escape(f"{name} may not see the images of old tasks")):
            select_subset(method, Phase(data="everything"), SEEN, BUFFER)


class Greedy(FrozenHead):
    """Asks for replay without having a buffer."""

    replayed: list[int]

    def phases(self, task: TaskView) -> tuple[Phase, ...]:
        return (Phase(replay=2, epochs=1),)

    def loss(self, batch: Batch) -> Tensor:
        self.replayed.append(len(batch.replay))
        return super().loss(batch)


def test_the_loop_gives_no_replay_to_a_method_without_a_buffer(world: World, tmp_path: Path) -> None:
    config = group.plan([compose(str(world.preset), None, {"method.name": "frozen-head"})], baseline=False)[0].config
    setup = prepare(config)
    method = Greedy(setup.method.config, setup.method.backbone)
    method.replayed = []
    run = Run.create(tmp_path / "run", config, setup.stream, setup.weights, setup.precision)
    result = train(replace(setup, method=method), run)
    assert result["buffer"] is None
    assert set(method.replayed) == {0}
    assert len(method.replayed) == 3 * 4  # tasks of 13 images, four at a time
    assert not any(name.startswith("buffer/") for name in run.checkpoints.after_task(2))


class Watched(BiC):
    """Remembers which images it was trained on, and which were reserved for it."""

    trained: set[bytes]
    reserved: list[set[bytes]]
    classes: list[set[int]]

    def loss(self, batch: Batch) -> Tensor:
        self.trained |= {image.numpy().tobytes() for image in batch.images}
        return super().loss(batch)

    def end_task(self, task: TaskView) -> None:
        batches = list(task.reserved())
        self.reserved.append({image.numpy().tobytes() for batch in batches for image in batch.images})
        self.classes.append({label for batch in batches for label in batch.labels.tolist()})
        super().end_task(task)


@pytest.mark.parametrize("size", [3, 8, 60])
def test_no_task_trains_on_what_was_once_reserved(size: int, world: World, tmp_path: Path) -> None:
    overrides = {"method.name": "bic", "method.buffer_size": size, "train.lr": 1e-3}
    config = group.plan([compose(str(world.preset), None, overrides)], baseline=False)[0].config
    setup = prepare(config)
    method = Watched(BiCConfig.model_validate(config.method), setup.method.backbone)
    method.trained, method.reserved, method.classes = set(), [], []
    run = Run.create(tmp_path / "run", config, setup.stream, setup.weights, setup.precision)
    result = train(replace(setup, method=method), run)
    assert not method.trained & set().union(*method.reserved)
    assert len(method.trained) + len(set().union(*method.reserved)) == 3 * 13, "an image is in the one or the other"
    if size >= 12:  # a place for a reserved image of each of six classes
        assert method.classes == [{0, 1}, {0, 1, 2, 3}, {0, 1, 2, 3, 4, 5}]
        assert [len(each) for each in method.reserved] == [2, 4, 6]
    assert result["buffer"]["images"] == min(size, 3 * 13)
    corrections = [pair.tolist() for pair in method.correction]
    assert corrections[0] == [1, 0]
    assert all(pair != [1, 0] for pair in corrections[1:])


def test_union_keeps_order_and_copies_only_what_it_must() -> None:
    images = numbered_images(0, list(range(8))).images
    parts = [Subset(images, torch.tensor(rows), torch.tensor(rows) + 10) for rows in ([3, 1], [7], [0, 3])]
    joined = union(parts)
    assert seen(joined) == [(3, 13), (1, 11), (7, 17), (0, 10), (3, 13)]
    assert joined.images is images
    assert union(parts[:1]) is parts[0], "known features of a subset go with the object"
    mixed = union([parts[0], numbered_images(100, [5, 6])])
    assert seen(mixed) == [(3, 13), (1, 11), (100, 5), (101, 6)]
    assert len(mixed.images) == 4, "images that are not asked for are not copied"


def test_a_buffer_never_holds_what_it_was_not_offered() -> None:
    plan = make("er").buffer
    assert plan is not None
    buffer = Buffer(replace(plan, size=5), seed=0)
    for task in TASKS:
        buffer.offer(task.train, task.index)
        assert set(seen(buffer.as_subset())) <= set(OLD + NEW[: len(NEW) * task.index])
    TASKS[1].train.images.flat.add_(1)  # the buffer has copies of its own
    try:
        assert set(seen(buffer.as_subset())) <= set(OLD + NEW)
    finally:
        TASKS[1].train.images.flat.sub_(1)
