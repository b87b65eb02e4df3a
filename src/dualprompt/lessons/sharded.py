"""Learning from shards of images that are looked at elsewhere: only their features come back.

Decoding and the backbone's pass are nearly all of the work, and each image is seen alone. So any number of processes or
machines may share them, and the model is the one that a single process would have made, up to rounding.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dualprompt.errors import DualPromptError
from dualprompt.files import with_home
from dualprompt.lessons.forgetting import compact
from dualprompt.lessons.teaching import Lesson, concluded, leave_out
from dualprompt.methods.base import Batch, Method
from dualprompt.methods.contract import TaskView
from dualprompt.model import foundation as foundations
from dualprompt.model.foundation import Foundation, Model
from dualprompt.model.images import ImageLike, read_some
from dualprompt.model.results import PromptChoice
from dualprompt.progress import Progress, Work
from dualprompt.seeds import derive

SHARD = 256  # images
Map = Callable[[Callable[["Shard"], "Seen"], Iterable["Shard"]], Iterable["Seen"]]


@dataclass(frozen=True)
class Shard:
    """Some images, and through which backbone and method they are looked at."""

    images: tuple[ImageLike, ...]  # files by their absolute paths
    made_of: str  # JSON of what `foundation.build` takes


@dataclass(frozen=True)
class Seen:
    """What is left of a shard's images."""

    features: np.ndarray  # (images that could be read, width)
    faults: dict[int, str]  # what is wrong with the others, by their place
    weights: str  # SHA-256 of the backbone that saw them


def see(shard: Shard) -> Seen:
    """Look at the images of a shard, in whatever process this is."""
    foundation, method = _built(shard.made_of)
    view = foundation.view
    pixels, faults = read_some(shard.images, view.side, view.interpolation)
    good = pixels[[row for row in range(len(pixels)) if row not in faults]]
    found = [_features(foundation, method, part) for part in np.array_split(good, max(1, -(-len(good) // 64)))]
    return Seen(torch.cat(found).cpu().numpy(), faults, foundation.weights.sha256)


def _features(foundation: Foundation, method: Method, pixels: np.ndarray) -> Tensor:
    with torch.inference_mode():
        found = method.observe(foundation.batch(pixels))
    if found is None:
        name = foundation.options.name
        raise DualPromptError(f"method '{name}' must see the images itself; take dualprompt-lda, or leave --ray out")
    return found.float()


@lru_cache(maxsize=1)
def _built(made_of: str) -> tuple[Foundation, Method]:
    foundation = foundations.build(**json.loads(made_of))
    return foundation, foundation.method().eval()


def learn(
    foundation: Foundation,
    model: Model,
    name: str,
    classes: Mapping[str, Sequence[ImageLike]],
    over: Map,
    progress: Progress,
    skip_bad: bool = False,
) -> Model:
    """Return the model that has learned one more task, in closed form, from features that `over` brings.

    Args:
        foundation: what the model is built on.
        model: what it knows.
        name: of the task.
        classes: the images of each class, files that every process must see.
        over: maps a function over shards, in their order.
        progress: who is told how far it is.
        skip_bad: leave out images that cannot be read, rather than refuse them all.
    """
    if not foundation.method().judges_itself:
        raise DualPromptError(f"method '{foundation.options.name}' must see the images itself; take dualprompt-lda")
    options = foundation.options.model_copy(update={"prompts": "never"})
    base = replace(foundation, options=options)
    left, features = _seen(base, classes, over, progress, skip_bad)
    state = compact(base, model.state, model.rows).state() if model.tasks else {}
    known = sum(row is not None for row in model.rows)
    # Only their number is asked for: the images themselves are elsewhere.
    lesson = Lesson(name, left, np.empty((len(features), 0, 0, 3), np.uint8))
    method = base.method(state)
    view = _view(base, lesson, len(model.tasks), known, features)
    method.begin_task(view)
    method.eval()
    method.end_task(view)
    learned = concluded(foundation, model, lesson, method, np.zeros(len(features), bool))
    newest = replace(learned.tasks[-1], prompts=PromptChoice(False, "none are trained where shards are looked at"))
    return replace(learned, tasks=(*learned.tasks[:-1], newest))


def _seen(
    foundation: Foundation,
    classes: Mapping[str, Sequence[ImageLike]],
    over: Map,
    progress: Progress,
    skip_bad: bool,
) -> tuple[dict[str, list[ImageLike]], Tensor]:
    """Return the images of each class that could be read, and the features of all."""
    labelled = [(name, _absolute(image)) for name, own in classes.items() for image in own]
    faults, features, first = {}, [], 0
    with progress.bar(Work("features", len(labelled), "img")) as bar:
        for seen in over(see, _shards(foundation, [image for _, image in labelled])):
            if seen.weights != foundation.weights.sha256:
                raise DualPromptError(
                    f"a machine has another backbone than '{foundation.weights.name}' (its SHA-256 differs); put the "
                    "same file everywhere"
                )
            faults |= {first + row: fault for row, fault in seen.faults.items()}
            features.append(torch.from_numpy(seen.features))
            count = len(seen.features) + len(seen.faults)
            first += count
            bar.advance(count)
    return leave_out(labelled, faults, skip_bad, progress), torch.cat(features).to(foundation.device)


def _absolute(image: ImageLike) -> ImageLike:
    return str(with_home(image).absolute()) if isinstance(image, str | Path) else image


def _shards(foundation: Foundation, images: Sequence[ImageLike]) -> Iterator[Shard]:
    config = foundation.config
    made_of: dict[str, Any] = {
        "values": {"method": foundation.options.model_dump(mode="json"), "train": config.train.model_dump(mode="json")},
        "backbone": config.backbone.name,
        "input_size": config.backbone.input_size,
        "device": "auto" if config.device != "cpu" else "cpu",
        "seed": config.seed,
    }
    text = json.dumps(made_of, sort_keys=True)
    for start in range(0, len(images), SHARD):
        yield Shard(tuple(images[start : start + SHARD]), text)


def _view(foundation: Foundation, lesson: Lesson, index: int, known: int, features: Tensor) -> TaskView:
    """Return a task whose images are known by their features alone."""
    labels = torch.from_numpy(lesson.labels) + known
    seen = tuple(range(known + len(lesson.classes)))

    def batches() -> Iterator[Batch]:
        for part, own in zip(features.split(4096), labels.split(4096), strict=True):
            yield Batch(_elsewhere, own.to(features.device), frozen=part)

    return TaskView(
        index=index,
        name=lesson.name,
        labels=seen[known:],
        new_labels=seen[known:],
        seen=seen,
        generator=torch.Generator().manual_seed(derive(foundation.config.seed, "begin", index)),
        queries=lambda: features,
        targets=labels.to(features.device),
        batches=batches,
    )


def _elsewhere() -> Tensor:
    raise TypeError("the images are elsewhere: a method that learns from shards has their features")
