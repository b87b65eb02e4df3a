"""In which order the images of an online stream come: each once, and nobody is told what comes next."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np


class Arrival(NamedTuple):
    """An order of images."""

    order: np.ndarray  # (images,) a permutation of them
    marks: Sequence[int] = ()  # how many had come when each task of the plan ended


# Asked with the class of every image, (images,), numbered as its plan lists classes, in the order of their source.
Arrive = Callable[[np.ndarray], Arrival]


class Arranged(NamedTuple):
    """An order of the images of known classes."""

    order: np.ndarray
    classes: list[str]  # in the order in which the first image of each comes
    marks: tuple[int, ...]


def arranged(arrive: Arrive, rows: Mapping[str, np.ndarray]) -> Arranged:
    """Return in which order images come, given the rows of each class in their source."""
    names, places = list(rows), np.repeat(np.arange(len(rows)), [len(each) for each in rows.values()])
    classes = places[np.argsort(np.concatenate(list(rows.values())))]
    order, marks = arrive(classes)
    if not np.array_equal(np.sort(order), np.arange(len(classes))):
        raise ValueError("an online stream brings each of its images exactly once")
    comes = dict.fromkeys(classes[order].tolist())
    return Arranged(order, [names[place] for place in comes], tuple(map(int, marks)))


def in_tasks(tasks: Sequence[np.ndarray], rng: np.random.Generator) -> Arrival:
    """Return the order in which the images of one task come after those of another, shuffled inside each."""
    order = np.concatenate([rng.permutation(each) for each in tasks])
    return Arrival(order, np.cumsum([len(each) for each in tasks]).tolist())
