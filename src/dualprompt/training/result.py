"""What a run says of itself: the log's line of a task, and the final numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dualprompt.backbones.passes import Passes, counted
from dualprompt.data.stream import Experience
from dualprompt.derived import predicting
from dualprompt.errors import one_line
from dualprompt.metrics import anytime, summarise
from dualprompt.run.checkpoint import Position
from dualprompt.run.folder import Run
from dualprompt.run.measures import UNKNOWN, of_file
from dualprompt.training.arrivals import Portion
from dualprompt.training.evaluate import Score, matches
from dualprompt.training.setup import Setup


def task_line(
    task: Experience, scores: Sequence[Score], trained: float, evaluated: float, images: int
) -> dict[str, Any]:
    """Return the log's line of a task.

    Args:
        task: the task that was learned.
        scores: of every task so far.
        trained: the seconds that training took.
        evaluated: the seconds that the evaluation took.
        images: how many were trained on, in all processes; 0 where nothing was.
    """
    return {
        "event": "task",
        "task": task.index + 1,
        "name": task.name,
        "accuracy": [score.accuracy for score in scores],
        "matching": [score.matching for score in scores if score.matching is not None] or None,
        "images": [score.images for score in scores],
        "seconds": {
            "train": round(trained, 3),
            "evaluate": round(evaluated, 3),
            "train_images_per_second": round(images / trained, 1) if images else None,
        },
    }


def anytime_line(portion: Portion, score: Score, loss: float | None) -> dict[str, Any]:
    """Return the log's line of an evaluation on the way; `loss` is the mean since the one before, of gradient steps."""
    line = {"event": "anytime", "images": portion.stop, "classes": portion.seen, "accuracy": score.accuracy}
    return line if loss is None else line | {"loss": loss}


def final_result(setup: Setup, position: Position, buffer: dict[str, int] | None, run: Run) -> dict[str, Any]:
    """Return the final numbers of a `run` that stands behind its last task, with those of its rehearsal buffer."""
    config, method = setup.config, setup.method
    matching = position.matching if matches(method) else None
    images = [len(subset) for subset in setup.evaluated(len(position.accuracy))]
    return {
        "method": method.config.name,
        "benchmark": config.benchmark.name,
        "backbone": setup.weights.name,
        "recipe": config.train.recipe,
        "seed": config.seed,
        "tasks": [task.name for task in setup.stream.experiences],
        "class_order": list(setup.stream.classes),
        **summarise(position.accuracy, matching[-1] if matching else None, images),
        **(of_file(run.predictions_path) if setup.fabric.is_global_zero else UNKNOWN),  # others may not see it
        "judged_images": images,
        "accuracy_matrix": position.accuracy,
        "matching_matrix": matching,
        "matching_confusion": position.confusion or None,
        "selection": getattr(method.config, "selection", None),
        "peeks": method.peeks,
        "parameters": method.parameters_report(),
        "cost": _cost(setup, position.spent),
        "seconds": run.seconds(),
        "queries": _queries(setup),
        "buffer": buffer,
        **(anytime(position.curve, position.accuracy) if setup.stream.online else {}),
        "skipped_images": len(setup.stream.bad),
        "run_dir": one_line(str(run.folder)),
    }


def _cost(setup: Setup, spent: Passes) -> dict[str, dict[str, float]]:
    """Return what learning took for each training image, all its epochs together, and what one prediction takes."""
    subset, method = setup.evaluated(1)[0], setup.method
    chosen = getattr(method.config, "selection", None)
    spec = setup.feed.fixed(subset, torch.tensor([0])).to(setup.fabric.device)  # of which nothing is known
    batch = setup.feed.question(subset.images, spec)
    batch.task = torch.zeros_like(batch.labels) if chosen == "oracle" else None
    with torch.no_grad(), predicting(method), torch.compiler.set_stance("force_eager"), counted() as once:
        method.answer(batch, chosen)
    images = sum(len(task.train) for task in setup.stream.experiences)
    return {"train": (spent * (1 / images)).report(), "predict": once.report()}


def _queries(setup: Setup) -> str:
    if setup.method.trains_backbone:
        return "none: the backbone is trained"
    if not setup.method.uses_frozen:
        return "none: every pass has prompts"
    if setup.feed.view.training_is_fixed:
        return "one pass an image, in its only view"
    return f"{setup.config.train.query_view} view in training, one pass an image in evaluation"
