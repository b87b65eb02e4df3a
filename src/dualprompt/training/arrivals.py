"""How an online stream reaches a method: in portions, each with no word of what is still to come."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from dualprompt.data.stream import Experience, Subset
from dualprompt.methods.base import Method, TaskView
from dualprompt.seeds import derive
from dualprompt.training.feed import Feed
from dualprompt.training.select import batches_of


@dataclass(frozen=True)
class Portion:
    """Images of an online stream that come together: those from `start` to before `stop`."""

    number: int  # counted from 0
    start: int
    stop: int
    known: int  # labels that had come before it; they are 0, 1, …, known − 1
    seen: int  # labels that have come with it
    evaluated: bool  # whether the classes so far are evaluated after it


def portions(train: Subset, batch_size: int, every: int | None, by_batch: bool) -> list[Portion]:
    """Return the portions of a stream's training images, in order.

    Classes are evaluated after the batch with which the number of images reaches a multiple of `every`, whatever the
    portions: so all methods are evaluated at the same moments. A method without gradient steps gets all images between
    two evaluations at once (not `by_batch`): nothing else can be seen of it in between.
    """
    count, ends = len(train), list[tuple[int, bool]]()
    for stop in range(batch_size, count + batch_size, batch_size):
        due = every is not None and min(stop, count) // every > (stop - batch_size) // every
        if by_batch or due or stop >= count:
            ends.append((min(stop, count), due))
    seen = (train.labels.cummax(dim=0).values + 1).tolist() if count else []
    found, start, known = list[Portion](), 0, 0
    for number, (stop, due) in enumerate(ends):
        found.append(Portion(number, start, stop, known, seen[stop - 1], due))
        start, known = stop, seen[stop - 1]
    return found


class Arrivals:
    """An online stream as a method meets it."""

    def __init__(self, task: Experience, method: Method, feed: Feed) -> None:
        self.task, self.method, self.feed = task, method, feed
        cut = partial(portions, task.train, feed.config.train.batch_size, feed.config.benchmark.evaluate_every)
        phases = method.phases(self.view(cut(by_batch=True)[0]))
        if len(phases) > 1 or any((each.data, each.epochs, each.epochs_factor) != ("task", None, 1) for each in phases):
            raise ValueError("who learns an online stream trains on what comes, once, or has no gradient steps")
        if method.hold_out or (method.buffer is not None and method.buffer.reserve):
            raise ValueError("who learns an online stream sets no images aside")
        self.phase = phases[0] if phases else None
        self.portions = cut(by_batch=bool(phases))

    def view(self, portion: Portion, begun: bool = False) -> TaskView:
        """Return what the method may know when a portion comes: its images, and all labels so far.

        `begun` says that its new labels are known already, because the run stood behind it when it was stopped.
        """
        rows, seen = torch.arange(portion.start, portion.stop), tuple(range(portion.seen))
        return TaskView(
            index=portion.number + begun,  # 0 is for who has met nothing yet
            name=self.task.name,
            labels=seen,
            new_labels=() if begun else seen[portion.known :],
            seen=seen,
            generator=torch.Generator().manual_seed(derive(self.feed.config.seed, "begin", portion.number)),
            queries=lambda: self.feed.features(self.task.train)[portion.start : portion.stop],
            targets=self.task.train.labels[rows].to(self.feed.fabric.device),
            batches=lambda: batches_of(self.method, self.feed, self._some(self.task.train, rows)),
        )

    def judged(self, portion: Portion) -> Subset:
        """Return the images of all classes so far on which these are evaluated."""
        every = self.task.judged(self.feed.config.benchmark.evaluate_on)
        return self._some(every, (every.labels < portion.seen).nonzero()[:, 0])

    def since_evaluation(self, portion: Portion) -> int:
        """Return how many portions have come since the last evaluation, this one among them."""
        before = [each.number for each in self.portions[: portion.number] if each.evaluated]
        return portion.number - (before[-1] if before else -1)

    def _some(self, subset: Subset, rows: Tensor) -> Subset:
        return self.feed.some(subset, rows, self.method.uses_frozen)
