"""The evaluator: who is told the true task, and what is counted, by hand."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
import pytest
import torch
from lightning_fabric import Fabric
from torch import Tensor

from dualprompt.config import RunConfig, compose
from dualprompt.data.stream import Subset
from dualprompt.data.views import View
from dualprompt.methods.base import METHODS, Batch, Prediction, Selection
from dualprompt.methods.frozen_head import FrozenHead, FrozenHeadConfig
from dualprompt.run.answers import Answers
from dualprompt.run.folder import Run
from dualprompt.training import group
from dualprompt.training.evaluate import Score, evaluate, evaluate_again
from dualprompt.training.feed import Feed
from dualprompt.training.loop import train
from dualprompt.training.setup import prepare
from helpers import SIDE, subset_of, task_view, tiny_vit
from sandbox import World

SELECTIONS: tuple[Selection, ...] = ("query", "batch_vote", "oracle")


class SpyConfig(FrozenHeadConfig):
    name: str = "spy"
    selection: Literal["query", "batch_vote", "oracle"] = "query"


class Spy(FrozenHead[SpyConfig]):
    """Selects the true task wherever it is told, the first where not, and remembers what it was told."""

    summary = "uses the true task if it can"
    selections: ClassVar[tuple[Selection, ...]] = SELECTIONS
    trained: ClassVar[list[Tensor | None]] = []
    told: ClassVar[list[list[int] | None]] = []

    def loss(self, batch: Batch) -> Tensor:
        self.trained.append(batch.task)
        return super().loss(batch)

    def predict(self, batch: Batch, selection: Selection | None = None) -> Prediction:
        self.told.append(None if batch.task is None else batch.task.tolist())
        selected = torch.zeros_like(batch.labels) if batch.task is None else batch.task
        return replace(super().predict(batch, selection), selected=selected)


class ReadsBack(Spy):
    """As a method that cannot be recorded as a CUDA graph."""

    capturable: ClassVar[bool] = False


@pytest.fixture(params=[Spy, ReadsBack])
def spy(request: pytest.FixtureRequest) -> Iterator[type[Spy]]:
    METHODS.names()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(METHODS, "_things", dict(METHODS._things))
        METHODS.register("spy")(request.param)
        Spy.trained.clear()
        Spy.told.clear()
        yield request.param


@pytest.mark.parametrize("selection", SELECTIONS)
def test_the_true_task_reaches_nobody_but_the_oracle(
    spy: type[Spy], selection: Selection, world: World, tmp_path: Path
) -> None:
    overrides = {"method.name": "spy", "method.selection": selection, "evaluate.ahead": 0}
    config = group.plan([compose(str(world.preset), None, overrides)], baseline=False)[0].config
    setup = prepare(config)
    assert type(setup.method) is spy
    run = Run.create(tmp_path / "run", config, setup.stream, setup.weights, setup.precision)
    result = train(setup, run)
    truth = [[task] * size for seen in (1, 2, 3) for task in range(seen) for size in (4, 4, 1)]
    blind = [None] * len(truth)
    assert spy.told.pop() == ([0] if selection == "oracle" else None), "one image, to count what a prediction takes"
    assert spy.told == (truth if selection == "oracle" else blind)
    assert spy.trained
    assert set(spy.trained) == {None}
    assert result["matching_matrix"][-1] == ([100.0] * 3 if selection == "oracle" else [100.0, 0.0, 0.0])
    for other in SELECTIONS:  # judged again by another, it is that one that counts
        spy.told.clear()
        again = evaluate_again(setup, run, other)
        assert spy.told == (truth if other == "oracle" else blind)
        assert again["selection"] == other
    spy.told.clear()
    assert evaluate_again(setup, run, None) == result
    assert spy.told == (truth if selection == "oracle" else blind)


class Says(FrozenHead):
    """Answers what the image's first pixel says, surer the brighter the second; selects what the third says."""

    selections: ClassVar[tuple[Selection, ...]] = ("query",)

    def predict(self, batch: Batch, selection: Selection | None = None) -> Prediction:
        assert not self.training
        assert not torch.is_grad_enabled(), "what is judged needs no graph"
        said = (batch.images[:, :, 0, 0] * 255).round().long()
        logits = torch.nn.functional.one_hot(said[:, 0], 6) * said[:, 1:2].float() / 10
        return Prediction(logits, said[:, 2])


ANSWERS = [  # of each image of two tasks: its class, and the class, sureness and task that are said
    [(0, 0, 20, 0), (1, 0, 30, 1), (0, 0, 10, 0), (1, 1, 40, 3), (0, 5, 10, 5)],
    [(2, 2, 20, 1), (3, 0, 20, 0), (2, 2, 20, 1)],
]


def saying() -> list[Subset]:
    subsets = []
    for answers in ANSWERS:
        pixels = np.zeros((len(answers), SIDE, SIDE, 3), np.uint8)
        pixels[:, 0, 0] = [answer[1:] for answer in answers]
        subsets.append(subset_of(pixels, [answer[0] for answer in answers]))
    return subsets


def feed(batch_size: int) -> Feed:
    values = {"benchmark": {"dataset": "x"}, "evaluate": {"batch_size": batch_size}}
    view = View(SIDE, (0.0,) * 3, (1.0,) * 3, "bilinear", "resize", "none")
    return Feed(RunConfig.model_validate(values), view, tiny_vit(), Fabric(accelerator="cpu", devices=1))


@pytest.mark.parametrize("batch_size", [1, 2, 3, 8])
def test_counts_and_answers_by_hand(batch_size: int) -> None:
    method, subsets, shows = Says(FrozenHeadConfig(), tiny_vit()), saying(), feed(batch_size)
    method.begin_task(task_view(0, 4))
    method.train()
    answers = Answers(subsets, [(0, 1), (2, 3, 4, 5)], shows.fabric.device)
    scores = evaluate(method, shows, subsets, answers=answers)
    # Tasks that are not judged, the fourth and the sixth, count for none of the judged.
    assert scores == [Score(5, 3, 2, [2, 1]), Score(3, 2, 2, [1, 2])]
    assert [score.accuracy for score in scores] == pytest.approx([60, 200 / 3])
    assert [score.matching for score in scores] == pytest.approx([40, 200 / 3])
    found, said = answers.gathered(lambda own: own), [answer for task in ANSWERS for answer in task]
    for name, place in (("answer", 1), ("selected", 3)):
        assert getattr(found, name).tolist() == [answer[place] for answer in said], name
    # Of another task's class nothing is left, and the first of equals is answered.
    assert found.task_known_answer.tolist() == [0, 0, 0, 1, 0, 2, 2, 2]
    sure = np.exp([answer[2] / 10 for answer in said])
    np.testing.assert_allclose(found.probability, sure / (sure + 5), rtol=1e-6)


@pytest.mark.parametrize("batch_size", [1, 2, 8])
def test_images_to_come_are_answered_and_counted_nowhere(batch_size: int) -> None:
    method, (first, second), shows = Says(FrozenHeadConfig(), tiny_vit()), saying(), feed(batch_size)
    answers = Answers([first, second], [range(6)], shows.fabric.device, ahead=torch.tensor([5, 7]))
    assert evaluate(method, shows, [first], answers=answers) == [Score(5, 3, 2, [2])]
    found = answers.gathered(lambda own: own)
    assert found.answer.tolist() == [0, 0, 0, 1, 5, 2, -1, 2]
    assert found.selected.tolist() == [0, 1, 0, 3, 5, 1, -1, 1]
    assert found.task_known_answer.tolist() == [0, 0, 0, 1, 5, -1, -1, -1]
    assert found.probability[6] == 0
    assert found.probability[5] == found.probability[7] > 0.5


def test_the_images_of_one_dataset_in_two_tasks_are_told_apart() -> None:
    """Tasks that share their images share a recorded step, too."""
    first, second = saying()
    both = Subset(first.images, torch.tensor([3, 1, 0]), first.labels[[3, 1, 0]])
    method, shows = Says(FrozenHeadConfig(), tiny_vit()), feed(2)
    answers = Answers([first, both, second], [range(6)] * 3, shows.fabric.device)
    scores = evaluate(method, shows, [first, both, second], answers=answers)
    assert scores[1] == Score(3, 2, 1, [1, 1, 0])
    assert answers.gathered(lambda own: own).answer.tolist() == [0, 0, 0, 1, 5, 1, 0, 0, 2, 0, 2]


def test_without_a_choice_there_is_no_matching(world: World, tmp_path: Path) -> None:
    config = group.plan([compose(str(world.preset), None, {"method.name": "frozen-head"})], baseline=False)[0].config
    setup = prepare(config)
    run = Run.create(tmp_path / "run", config, setup.stream, setup.weights, setup.precision)
    result = train(setup, run)
    assert (result["matching_accuracy"], result["matching_matrix"], result["matching_confusion"]) == (None, None, None)
    assert evaluate_again(setup, run, None) == result
    assert json.loads((run.folder / "result.json").read_text()) == result
