"""A tiny learner for tests: its tasks, options and images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from dualprompt.learner import ContinualLearner
from sandbox import World

TINY = {"g_layers": [1], "e_layers": [2, 3], "g_length": 2, "e_length": 3, "train.batch_size": 4, "train.epochs": 2}
FLAGS = ["--method", "dualprompt"]
FLAGS += [word for key, value in TINY.items() for word in (f"--{key if '.' in key else f'method.{key}'}", f"{value}")]
TASKS = {"spring": ("ash", "birch"), "summer": ("cedar", "elm"), "autumn": ("fir", "hazel")}
ALL = tuple(label for classes in TASKS.values() for label in classes)


def empty(world: World, **options: Any) -> ContinualLearner:
    return ContinualLearner(str(world.weights), "dualprompt", options=TINY | options, device="cpu")


def trees(world: World, *classes: str, split: str = "test") -> list[Path]:
    return [path for label in classes for path in sorted((world.images / split / label).iterdir())]


def outputs(learner: ContinualLearner, images: list[Path]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    with torch.inference_mode():
        return learner.network()(torch.from_numpy(np.stack([learner.pixels(path) for path in images])))


def reloaded(learner: ContinualLearner, path: Path) -> ContinualLearner:
    return ContinualLearner.load(learner.save(path))
