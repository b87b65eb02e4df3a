"""Which images a method gets to see of a task, and which a phase of it trains on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch

from dualprompt.data.experience import Experience, Subset, union
from dualprompt.methods.base import Batch, Method, Phase, TaskView
from dualprompt.progress import Work
from dualprompt.seeds import derive
from dualprompt.training.feed import Feed


def task_view(
    task: Experience,
    method: Method,
    feed: Feed,
    reserved: Subset | None,
    held_out: Subset | None = None,
    judged: Sequence[Subset] = (),
) -> TaskView:
    """Return what a method may know of a task.

    Args:
        task: the task.
        method: who is told.
        feed: what makes batches of its images.
        reserved: images that no phase ever trains on.
        held_out: images that no phase of this task trains on.
        judged: images that the tasks so far are judged on, which are shown to nobody but a method that peeks.
    """
    shown = union(judged) if judged and method.peeks else None
    return TaskView(
        index=task.index,
        name=task.name,
        labels=task.labels,
        new_labels=task.new_labels,
        seen=task.seen,
        generator=torch.Generator().manual_seed(derive(feed.config.seed, "begin", task.index)),
        queries=partial(feed.features, task.train),
        targets=task.train.labels.to(feed.fabric.device),
        batches=partial(batches_of, method, feed, task.train),
        reserved=partial(batches_of, method, feed, reserved),
        held_out=partial(batches_of, method, feed, held_out),
        apart=None if held_out is None else torch.isin(task.train.indices, held_out.indices),
        alike=None if task.train.alike is None else task.train.alike.to(feed.fabric.device),
        judged=partial(batches_of, method, feed, shown),
    )


def batches_of(method: Method, feed: Feed, subset: Subset | None) -> Iterator[Batch]:
    """Yield the images of a subset in the test view, on the device; none of none."""
    if subset is None or not len(subset):
        return
    with feed.progress.bar(Work("features", len(subset), "img")) as bar:
        for spec in feed.evaluation(subset, method.uses_frozen, shared=False):
            yield feed.batch(subset.images, spec.to(feed.fabric.device))
            bar.advance(len(spec.labels))


def select_subset(method: Method, phase: Phase, seen: Sequence[Subset], buffer: Subset | None) -> Subset:
    """Return the images of a phase of the newest task, given the training images of every task `seen` so far.

    Old images reach a method through its buffer alone; only one that is no continual learner gets everything.
    """
    if phase.data == "everything":
        assert method.joint, f"{method.config.name} may not see the images of old tasks"
        return union(seen)
    if phase.data == "task":
        return seen[-1]
    assert method.buffer is not None, f"{method.config.name} has no buffer"
    held = [buffer] if buffer is not None and len(buffer) else []
    return union(held if phase.data == "buffer" else [seen[-1], *held])
