"""The one evaluator: accuracy and matching accuracy of each task, image by image."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dualprompt.backbones.passes import counted
from dualprompt.data.images import Images
from dualprompt.data.specs import ImageSpec
from dualprompt.data.stream import Subset
from dualprompt.derived import predicting
from dualprompt.errors import DualPromptError
from dualprompt.methods.base import Method, Selection
from dualprompt.metrics import summarise
from dualprompt.progress import SILENT, Progress, Work
from dualprompt.run.answers import Answers
from dualprompt.run.checkpoint import of_method, read, restore
from dualprompt.run.folder import Run
from dualprompt.run.measures import measured
from dualprompt.run.predictions import of_stream
from dualprompt.training.distributed import total
from dualprompt.training.feed import Feed
from dualprompt.training.setup import Setup
from dualprompt.training.steps import carried_out


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
    classes: int | None = None,
) -> list[Score]:
    """Classify each seen task's images as the method is at this moment, in the middle of a task or after it.

    Every image counts exactly once, remainder batches included, over however many processes.

    Args:
        method: what is evaluated; it is left in the mode it was in.
        feed: what makes batches of the images.
        subsets: the images of each task, from the first on.
        selection: how an E-Prompt is picked; None: as the method's config says.
        progress: who is told how far it is.
        answers: what takes down the answer to each image, and says which images of tasks to come are shown as well.
        classes: how many the method knows, as answers are checked to have; None: nobody says.
    """
    chosen = selection or getattr(method.config, "selection", None)
    # Classified right; without an answer; then how many selected each task, and in the end any that is not evaluated.
    counts = torch.zeros(3 + len(subsets), dtype=torch.int64, device=feed.fabric.device)
    scores = []
    steps: dict[Images, Callable[[ImageSpec], None]] = {}
    rows = torch.arange(sum(map(len, subsets))).split([len(subset) for subset in subsets])  # among all images
    ahead = [] if answers is None or chosen == "oracle" else answers.ahead  # which has no prompt for what is to come
    shown = [*zip(subsets, rows, strict=True), *ahead]
    work = Work("evaluating", sum(len(each) for each, _ in shown), "img")
    with predicting(method), counted(), progress.bar(work) as bar:  # what it takes is no part of learning
        for task, (subset, places) in enumerate(shown):
            images = subset.images
            if images not in steps:
                step = partial(classify, method, feed, images, chosen, counts, answers, classes)
                # A vote reads back which task won.
                record = method.capturable and chosen != "batch_vote"
                steps[images] = carried_out(step, feed.fabric, feed.config.evaluate.batch_size, record)
            counts.zero_()
            for spec in feed.evaluation(subset, method.uses_frozen):
                assert spec.rows is not None
                steps[images](replace(spec, task=torch.full_like(spec.labels, task), rows=places[spec.rows]))
                bar.advance(len(spec) * feed.fabric.world_size)
            correct, unanswered, *selected, _ = total(feed.fabric, counts).tolist()
            if unanswered:
                raise DualPromptError(
                    f"method '{method.config.name}' gives {unanswered} of {len(subset)} images no probability (its "
                    "logits are not finite); lower its learning rates, or mend its predict"
                )
            if task < len(subsets):
                picks = (selected[task], selected) if matches(method) else (None, None)
                scores.append(Score(len(subset), correct, *picks))
    return scores


def classify(
    method: Method,
    feed: Feed,
    images: Images,
    selection: Selection | None,
    counts: Tensor,
    answers: Answers | None,
    classes: int | None,
    spec: ImageSpec,
) -> None:
    """Classify a batch and count. It only queues work on the device.

    No label reaches the method, and the true task nobody but the oracle.

    Args:
        method: what classifies.
        feed: what makes the batch.
        images: those that the spec speaks of.
        selection: how an E-Prompt is picked.
        counts: what is added to: classified right, without an answer, then selected of each task and beyond them.
        answers: what takes down the answer to each image.
        classes: how many an answer is among; None: nobody says.
        spec: the images of this step, with their true tasks and rows.
    """
    batch = feed.question(images, spec if selection == "oracle" else replace(spec, task=None))
    prediction = method.answer(batch, selection)
    prediction.check(method.config.name, len(spec), classes)
    counts[0] += (prediction.logits.argmax(dim=1) == spec.labels).sum()
    counts[1] += (~prediction.logits.amax(dim=1).isfinite()).sum()
    if prediction.selected is not None:
        place = 2 + prediction.selected.clamp(max=len(counts) - 3)
        counts.index_add_(0, place, torch.ones_like(place))
    if answers is not None:
        assert spec.rows is not None
        assert spec.task is not None
        answers.note(spec.rows, spec.task, prediction)


def evaluate_again(setup: Setup, run: Run, selection: Selection | None, progress: Progress = SILENT) -> dict[str, Any]:
    """Evaluate a finished run anew, after each of its tasks, with another selection; return its result so changed."""
    method, result = setup.method, run.result()
    method.check_selection(selection)
    state: dict[str, Tensor] = {}
    accuracy, matching, scores = [], [], []
    found = of_stream(setup.stream, setup.config.benchmark.evaluate_on)
    for task in range(len(result["accuracy_matrix"])):
        state |= of_method(read(run.checkpoints.task_path(task))[0])
        restore(method, state, run.checkpoints.folder)
        answers = Answers.after(setup.stream, task + 1, setup.config, setup.fabric.device)
        seen = len(setup.stream.experiences[task].seen)
        scores = evaluate(method, setup.feed, setup.evaluated(task + 1), selection, progress, answers, seen)
        found = found.added(task, answers.gathered(partial(total, setup.fabric)))
        accuracy.append([score.accuracy for score in scores])
        matching.append([score.matching for score in scores])
    last = matching[-1] if matches(method) else None
    return {
        **result,
        **summarise(accuracy, last, [score.images for score in scores]),
        **measured(found),
        "accuracy_matrix": accuracy,
        "matching_matrix": matching if matches(method) else None,
        "matching_confusion": [score.selected for score in scores] if matches(method) else None,
        "selection": selection or result["selection"],
    }
