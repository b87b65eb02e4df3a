"""What a finished run answered for every test image: one small file beside its numbers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dualprompt.errors import DualPromptError
from dualprompt.run import checkpoint


@dataclass(frozen=True, eq=False)
class Predictions:
    """Answers after the last task, task after task, each task's images in the order of its subset."""

    counts: Tensor  # (tasks,) images of each task
    truth: Tensor  # (images,) classes as the stream numbers them
    label: Tensor  # (images,) the class that was answered
    probability: Tensor  # (images,) of that class, among all seen
    selected: Tensor  # (images,) the task whose E-Prompt was used; −1: the method selects none

    @property
    def right(self) -> Tensor:
        """Which images were classified right."""
        return self.label == self.truth

    @property
    def task(self) -> Tensor:
        """The task of each image."""
        return torch.arange(len(self.counts)).repeat_interleave(self.counts)


def write(path: Path, predictions: Predictions) -> None:
    """Keep predictions in a file, atomically."""
    small = {name: value.to(torch.int32) for name, value in vars(predictions).items() if name != "probability"}
    checkpoint.write(path, small | {"probability": predictions.probability.float()}, {})


def read(path: Path) -> Predictions:
    """Return the predictions in a file that `write` made; one that cannot have been is refused."""
    if not path.is_file():
        raise DualPromptError(f"{path} does not exist: the run was made before predictions were kept; run it again")
    try:
        with safe_open(path, framework="pt") as file:
            found = {name: file.get_tensor(name) for name in Predictions.__dataclass_fields__}
    except (SafetensorError, OSError, ValueError) as error:
        raise _damaged(path, str(error)) from None
    whole = {name: value.long() for name, value in found.items() if name != "probability"}
    predictions = Predictions(**whole, probability=found["probability"].float())
    _check(path, predictions)
    return predictions


def _check(path: Path, found: Predictions) -> None:
    counts, images = found.counts, found.truth
    if counts.ndim != 1 or not len(counts) or bool((counts < 1).any()) or images.shape != (int(counts.sum()),):
        raise _damaged(path, "the counts of its tasks do not fit its images")
    if any(value.shape != images.shape for value in (found.label, found.probability, found.selected)):
        raise _damaged(path, "its columns are not equally long")
    if bool((torch.stack((found.truth, found.label)) < 0).any()) or bool((found.selected < -1).any()):
        raise _damaged(path, "it names a class or task below 0")
    if not bool(((found.probability >= 0) & (found.probability <= 1)).all()):
        raise _damaged(path, "a probability is not between 0 and 1")


def _damaged(path: Path, reason: str) -> DualPromptError:
    return DualPromptError(f"{path} is damaged ({' '.join(reason.split())}); restore it, or make the run again")
