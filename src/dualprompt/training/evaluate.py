"""The one evaluator: accuracy and matching accuracy of each task, image by image."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dualprompt.data.images import Images
from dualprompt.data.specs import ImageSpec
from dualprompt.data.stream import Subset
from dualprompt.derived import predicting
from dualprompt.methods.base import Method, Prediction, Selection
from dualprompt.metrics import summarise
from dualprompt.progress import SILENT, Progress, Work
from dualprompt.run.checkpoint import fitting, of_method, read
from dualprompt.run.folder import Run
from dualprompt.run.predictions import Predictions
from dualprompt.training.distributed import total
from dualprompt.training.feed import Feed
from dualprompt.training.setup import Setup
from dualprompt.training.steps import carried_out

if TYPE_CHECKING:
    from lightning_fabric import Fabric


@dataclass(frozen=True)
class Score:
    """Counts over one task's images."""

    images: int
    correct: int
    matched: int | None  # images that used the E-Prompt of their own task
    selected: list[int] | None = None  # images that used the E-Prompt of each task

    @property
    def accuracy(self) -> float:
        """Share of correctly classified images, in percent."""
        return 100 * self.correct / self.images

    @property
    def matching(self) -> float | None:
        """Share of images that used their own task's E-Prompt, in percent."""
        return None if self.matched is None else 100 * self.matched / self.images


class Answers:
    """Room on the device for the answers to every evaluated image. Processes fill in their own, and zeros elsewhere."""

    def __init__(self, subsets: Sequence[Subset], device: torch.device) -> None:
        self.subsets = subsets
        images = sum(map(len, subsets))
        self.whole = torch.zeros(2, images, dtype=torch.int64, device=device)  # class, and selected task + 1
        self.probability = torch.zeros(images, dtype=torch.float32, device=device)

    def note(self, rows: Tensor, prediction: Prediction) -> None:
        """Note what was answered for the images at `rows`; this only queues work on the device."""
        probability, label = prediction.logits.float().softmax(dim=1).max(dim=1)
        self.whole[0, rows] = label
        self.probability[rows] = probability
        if prediction.selected is not None:
            self.whole[1, rows] = prediction.selected.long() + 1

    def gathered(self, fabric: Fabric) -> Predictions:
        """Return the answers of all processes."""
        label, selected = total(fabric, self.whole).cpu()
        return Predictions(
            counts=torch.tensor([len(subset) for subset in self.subsets]),
            truth=torch.cat([subset.labels for subset in self.subsets]),
            label=label,
            probability=total(fabric, self.probability).cpu(),
            selected=selected - 1,
        )


def matches(method: Method) -> bool:
    """Return whether images pick an E-Prompt; with keys but without an E-Prompt there is none to pick."""
    return bool(method.selections) and bool(getattr(method.config, "e_layers", True))


@torch.no_grad()
def evaluate(
    method: Method,
    feed: Feed,
    subsets: Sequence[Subset],
    selection: Selection | None = None,
    progress: Progress = SILENT,
    answers: Answers | None = None,
) -> list[Score]:
    """Classify each seen task's images as the method is at this moment, in the middle of a task or after it.

    Every image counts exactly once, remainder batches included, over however many processes.

    Args:
        method: what is evaluated; it is left in the mode it was in.
        feed: what makes batches of the images.
        subsets: the images of each task, from the first on.
        selection: how an E-Prompt is picked; None: as the method's config says.
        progress: who is told how far it is.
        answers: what takes down the answer to each image.
    """
    chosen = selection or getattr(method.config, "selection", None)
    # Classified right; then how many selected each task, and in the end any task that is not evaluated.
    counts = torch.zeros(2 + len(subsets), dtype=torch.int64, device=feed.fabric.device)
    scores = []
    steps: dict[Images, Callable[[ImageSpec], None]] = {}
    first = 0  # row of the task's first image among all
    with predicting(method), progress.bar(Work("evaluating", sum(map(len, subsets)), "img")) as bar:
        for task, subset in enumerate(subsets):
            images = subset.images
            if images not in steps:
                step = partial(classify, method, feed, images, chosen, counts, answers)
                # A vote reads back which task won.
                record = method.capturable and chosen != "batch_vote"
                steps[images] = carried_out(step, feed.fabric, feed.config.evaluate.batch_size, record)
            counts.zero_()
            for spec in feed.evaluation(subset, method.uses_frozen):
                assert spec.rows is not None
                steps[images](replace(spec, task=torch.full_like(spec.labels, task), rows=first + spec.rows))
                bar.advance(len(spec) * feed.fabric.world_size)
            correct, *selected, _ = total(feed.fabric, counts).tolist()
            picks = (selected[task], selected) if matches(method) else (None, None)
            scores.append(Score(len(subset), correct, *picks))
            first += len(subset)
    return scores


def classify(
    method: Method,
    feed: Feed,
    images: Images,
    selection: Selection | None,
    counts: Tensor,
    answers: Answers | None,
    spec: ImageSpec,
) -> None:
    """Classify a batch and count; the true task reaches nobody but the oracle. It only queues work on the device.

    Args:
        method: what classifies.
        feed: what makes the batch.
        images: those that the spec speaks of.
        selection: how an E-Prompt is picked.
        counts: what is added to: classified right, then selected of each task and beyond them.
        answers: what takes down the answer to each image.
        spec: the images of this step, with their true tasks and rows.
    """
    batch = feed.batch(images, spec if selection == "oracle" else replace(spec, task=None))
    prediction = method.answer(batch, selection)
    counts[0] += (prediction.logits.argmax(dim=1) == spec.labels).sum()
    if prediction.selected is not None:
        place = 1 + prediction.selected.clamp(max=len(counts) - 2)
        counts.index_add_(0, place, torch.ones_like(place))
    if answers is not None:
        assert spec.rows is not None
        answers.note(spec.rows, prediction)


def evaluate_again(setup: Setup, run: Run, selection: Selection | None, progress: Progress = SILENT) -> dict[str, Any]:
    """Evaluate a finished run anew, after each of its tasks, with another selection; return its result so changed."""
    method, result = setup.method, run.result()
    method.check_selection(selection)
    state: dict[str, Tensor] = {}
    accuracy, matching, scores = [], [], []
    for task in range(len(result["accuracy_matrix"])):
        state |= of_method(read(run.checkpoints.task_path(task))[0])
        with fitting(run.checkpoints.folder):
            method.load_state(state)
        scores = evaluate(method, setup.feed, setup.evaluated(task + 1), selection, progress)
        accuracy.append([score.accuracy for score in scores])
        matching.append([score.matching for score in scores])
    last = matching[-1] if matches(method) else None
    return {
        **result,
        **summarise(accuracy, last, [score.images for score in scores]),
        "accuracy_matrix": accuracy,
        "matching_matrix": matching if matches(method) else None,
        "matching_confusion": [score.selected for score in scores] if matches(method) else None,
        "selection": selection or result["selection"],
    }
