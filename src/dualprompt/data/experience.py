"""What a stream is made of: experiences, which most papers call tasks, and their images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from dualprompt.data.arrival import Arrive
from dualprompt.data.images import Images


@dataclass(frozen=True, eq=False)
class Subset:
    """Some of `images`, in the order of their source, with their labels."""

    images: Images
    indices: Tensor  # (size,) int64, into images
    labels: Tensor  # (size,) int64, classes as the stream numbers them
    notes: Tensor | None = None  # (size, columns) what a method keeps with images in its buffer
    alike: Tensor | None = None  # (size,) numbers that images share with their copies; None: nobody has looked for any

    def __len__(self) -> int:
        return len(self.indices)


@dataclass(frozen=True, eq=False)
class Experience:
    """Some classes, new or returning, with the images to learn them from and to be evaluated on.

    A stream numbers its classes in the order in which they first come, from 0. These numbers are the labels.
    """

    index: int  # 0-based
    name: str
    labels: tuple[int, ...]  # of its classes, ascending
    new_labels: tuple[int, ...]  # those that no earlier experience had
    seen: tuple[int, ...]  # all labels of the stream so far, its own among them
    classes: tuple[str, ...]  # the names of `labels`
    train: Subset
    validation: Subset
    test: Subset
    border: bool = True  # whether the method is told that it begins and ends: else images just go on coming
    online: bool = False  # its images come one after another, each once, in the order of `train`
    marks: tuple[int, ...] = ()  # of an online one: how many images had come when each task of the plan ended

    def judged(self, evaluate_on: Literal["test", "validation"]) -> Subset:
        """Return the images that evaluation reads."""
        return self.test if evaluate_on == "test" else self.validation


@dataclass(frozen=True, eq=False)
class Stream:
    """Experiences in the order they come."""

    experiences: tuple[Experience, ...]
    fingerprint: str  # changes with any image, label, class name, split or order
    bad: tuple[Path, ...]  # unreadable images that were left out

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of all classes, in the order of their labels."""
        named = {
            label: name for each in self.experiences for label, name in zip(each.labels, each.classes, strict=True)
        }
        return tuple(named[label] for label in sorted(named))

    @property
    def returns(self) -> bool:
        """Whether a label ever comes back."""
        return any(each.new_labels != each.labels for each in self.experiences)

    @property
    def bordered(self) -> bool:
        """Whether the method is told where every experience begins and ends."""
        return all(each.border for each in self.experiences)

    @property
    def online(self) -> bool:
        """Whether images come one after another, each once."""
        return any(each.online for each in self.experiences)


class Plan(NamedTuple):
    """An experience before its images are decoded: which classes of which dataset it has, and how much of them.

    Classes of one name are one class, which returns where an earlier experience had it.
    """

    name: str | None  # None: called by its place
    dataset: int | None  # its place in the benchmark's list; None: all of them together, their classes numbered through
    members: Sequence[int]  # its classes, as the dataset numbers them
    classes: Sequence[str]  # what the stream calls them
    parts: Sequence[slice] = ()  # which of each class's training images it has; empty: all
    border: bool = True  # see Experience
    arrive: Arrive | None = None  # of an online one: says in which order its images come


def union(subsets: Sequence[Subset]) -> Subset:
    """Return the images of several subsets, one after another."""
    if len(subsets) == 1:
        return subsets[0]
    labels = torch.cat([subset.labels for subset in subsets])
    if all(subset.images is subsets[0].images for subset in subsets):
        return Subset(subsets[0].images, torch.cat([subset.indices for subset in subsets]), labels)
    images = Images.concat([subset.images.select(subset.indices) for subset in subsets])
    return Subset(images, torch.arange(len(images)), labels)


def with_copies(drawn: Tensor, alike: Tensor | None, count: int) -> Tensor:
    """Return the first `count` of all images of a class as they were drawn, or some more: each with all its copies.

    Images with more copies than would leave half of the class are passed over. `alike` are the numbers that all images
    of the subset share with their copies; None: there are none.
    """
    if alike is None:
        return drawn[:count]
    numbers, most = alike[drawn], max(count, len(drawn) // 2)
    taken = torch.zeros(len(drawn), dtype=torch.bool)
    for number in numbers:
        together = taken | (numbers == number)
        if int(taken.sum()) < count and int(together.sum()) <= most:
            taken = together
    return drawn[taken]
