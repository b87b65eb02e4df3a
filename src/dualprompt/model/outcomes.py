"""What a model said of images that it was not made of: how right it was, and how sure, by task and class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch

from dualprompt.methods.contract import Verdicts
from dualprompt.model.network import Network
from dualprompt.model.results import Answer, TaskInfo, trust

RANKED = 3  # labels that are noted of an image, best first


@dataclass(frozen=True)
class Outcome:
    """What was said of one image, held out or left out, when its lesson was learned."""

    trust: float
    strange: float | None = None  # its trust if its own class had not been known; None: not measured
    ranked: tuple[str, ...] = ()  # the best classes; empty: an earlier release did not note them


Outcomes: TypeAlias = Mapping[int, Mapping[str, Sequence[Outcome]]]
"""By the task's id and the image's true class."""


def of_answers(answers: Sequence[Answer]) -> list[Outcome]:
    """Return what answers said, which name `RANKED` classes each."""
    return [Outcome(round(each.trust, 4), None, tuple(score.label for score in each.top)) for each in answers]


def of_verdicts(network: Network, verdicts: Verdicts, truth: Sequence[str]) -> list[Outcome]:
    """Return what leaving images out, or holding them out, says of each of them; `truth` is their labels."""
    known = {label: place for place, label in enumerate(network.classes)}
    own = torch.tensor([known[label] for label in truth], device=verdicts.logits.device)
    logits = network.of_labels(verdicts.logits)
    sure = _trust(network, verdicts, logits)
    ranked = logits.topk(min(RANKED, len(known)), dim=1).indices.tolist()
    strange: list[float | None] = [None] * len(truth)
    if len(known) > 2:
        strange = list(_trust(network, verdicts, logits.scatter(1, own[:, None], -torch.inf)))
    named = [tuple(network.classes[place] for place in places) for places in ranked]
    return [Outcome(*found) for found in zip(sure, strange, named, strict=True)]


def _trust(network: Network, verdicts: Verdicts, logits: torch.Tensor) -> list[float]:
    """Return how sure each of the best labels is."""
    probability, best = logits.softmax(dim=1).max(dim=1)
    rows = torch.cat([verdicts.logits, torch.full_like(logits[:, :1], -torch.inf)], dim=1)
    column = rows.gather(1, network.columns[best]).argmax(dim=1, keepdim=True)  # which of the label's rows
    similarity = verdicts.cosines.gather(1, network.columns[best].gather(1, column))[:, 0]
    return [round(float(each), 4) for each in trust(similarity.cpu().numpy(), probability.cpu().numpy())]


def measured(task: TaskInfo, own: Mapping[str, Sequence[Outcome]]) -> TaskInfo:
    """Return a task with the accuracy that its outcomes add up to; None where nothing is kept to tell it by."""
    judged = [(label, each.ranked[0]) for label, several in own.items() for each in several if each.ranked]
    correct = sum(label == said for label, said in judged)
    accuracy = 100 * correct / len(judged) if judged else None
    return replace(task, accuracy=accuracy, held=len(judged), correct=correct)


def remeasured(task: TaskInfo, outcomes: Outcomes) -> TaskInfo:
    """Return a task with the accuracy that is left of it; where outcomes have no labels, as it is."""
    own = outcomes.get(task.id, {})
    return measured(task, own) if any(each.ranked for several in own.values() for each in several) else task


def without(outcomes: Outcomes, labels: Sequence[str]) -> Outcomes:
    """Return outcomes in which some classes were never named: what came after them moves up."""
    return _ranked(outcomes, dict.fromkeys(labels))


def renamed(outcomes: Outcomes, names: Mapping[str, str]) -> Outcomes:
    """Return outcomes in which classes have other names; classes of one name are one."""
    called: dict[int, dict[str, list[Outcome]]] = {}
    for number, own in _ranked(outcomes, names).items():
        for label, several in own.items():
            called.setdefault(number, {}).setdefault(names.get(label, label), []).extend(several)
    return called


def _ranked(outcomes: Outcomes, names: Mapping[str, str | None]) -> Outcomes:
    def changed(outcome: Outcome) -> Outcome:
        labels = dict.fromkeys(names.get(label, label) for label in outcome.ranked)
        return replace(outcome, ranked=tuple(label for label in labels if label is not None))

    return {
        number: {label: [changed(each) for each in several] for label, several in own.items()}
        for number, own in outcomes.items()
    }


def confusion(outcomes: Outcomes) -> dict[str, dict[str, int]]:
    """Return how often images of each class were taken for which, over all tasks."""
    found: dict[str, dict[str, int]] = {}
    for own in outcomes.values():
        for label, several in own.items():
            for said in (each.ranked[0] for each in several if each.ranked):
                row = found.setdefault(label, {})
                row[said] = row.get(said, 0) + 1
    return found
