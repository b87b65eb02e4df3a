"""The one evaluator: accuracy and matching accuracy of each task, image by image."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dualprompt.data.stream import Subset
from dualprompt.methods.base import Method, Selection
from dualprompt.metrics import summarise
from dualprompt.progress import SILENT, Progress
from dualprompt.training.checkpoint import read
from dualprompt.training.distributed import total
from dualprompt.training.feed import Feed
from dualprompt.training.run import Run
from dualprompt.training.setup import Setup


@dataclass(frozen=True)
class Score:
    """Counts over one task's images."""

    images: int
    correct: int
    matched: int | None  # images that used the E-Prompt of their own task

    @property
    def accuracy(self) -> float:
        """Share of correctly classified images, in percent."""
        return 100 * self.correct / self.images

    @property
    def matching(self) -> float | None:
        """Share of images that used their own task's E-Prompt, in percent."""
        return None if self.matched is None else 100 * self.matched / self.images


@torch.no_grad()
def evaluate(
    method: Method,
    feed: Feed,
    subsets: Sequence[Subset],
    selection: Selection | None = None,
    progress: Progress = SILENT,
) -> list[Score]:
    """Judge the method on each seen task's images; `subsets[τ]` are those of task τ.

    Every image counts exactly once, remainder batches included, over however many processes.
    """
    method.eval()
    wants_oracle = (selection or getattr(method.config, "selection", None)) == "oracle"
    scores = []
    with progress.bar("evaluate", sum(map(len, subsets)), "img") as bar:
        for task, subset in enumerate(subsets):
            counts = torch.zeros(3, dtype=torch.int64, device=feed.fabric.device)
            for batch in feed.judging(subset, task, wants_oracle, method.uses_frozen):
                prediction = method.predict(batch, selection)
                counts[0] += len(batch.labels)
                counts[1] += (prediction.logits.argmax(dim=1) == batch.labels).sum()
                if prediction.selected is not None:
                    counts[2] += (prediction.selected == task).sum()
                bar.advance(len(batch.labels) * feed.fabric.world_size)
            images, correct, matched = total(feed.fabric, counts).tolist()
            scores.append(Score(images, correct, matched if method.selections else None))
    return scores


def evaluate_again(setup: Setup, run: Run, selection: Selection | None, progress: Progress = SILENT) -> dict[str, Any]:
    """Judge a finished run anew, after each of its tasks, with another way to select; return its result so changed."""
    method, result = setup.method, run.result()
    method.check_selection(selection)
    state: dict[str, Tensor] = {}
    accuracy, matching = [], []
    for task in range(len(result["accuracy_matrix"])):
        state |= read(run.checkpoints.task_path(task))[0]
        method.load_state(state)
        scores = evaluate(method, setup.feed, setup.judged(task + 1), selection, progress)
        accuracy.append([score.accuracy for score in scores])
        matching.append([score.matching for score in scores])
    last = matching[-1] if method.selections else None
    return {
        **result,
        **summarise(accuracy, last),
        "accuracy_matrix": accuracy,
        "matching_matrix": matching if method.selections else None,
        "selection": selection or result["selection"],
    }
