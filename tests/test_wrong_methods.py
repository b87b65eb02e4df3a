"""Methods that somebody wrote with a mistake in them: none gets a number, and each is told what to mend."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dualprompt.config import compose
from dualprompt.errors import DualPromptError
from dualprompt.methods.base import METHODS, Batch, Prediction, Selection
from dualprompt.methods.frozen_head import FrozenHead, FrozenHeadConfig
from dualprompt.progress import SILENT
from dualprompt.run.folder import Run
from dualprompt.training import group
from dualprompt.training.evaluate import evaluate_again
from dualprompt.training.loop import train
from dualprompt.training.setup import Setup, prepare
from sandbox import World
from test_online import Until


class Wrong(FrozenHead):
    """What a test makes of it."""

    summary = "wrong"
    seen: list[Tensor]
    change: Callable[[Prediction], Prediction]
    loss_of: Callable[[Tensor], Any]

    def loss(self, batch: Batch) -> Tensor:
        return type(self).loss_of(super().loss(batch))

    def predict(self, batch: Batch, selection: Selection | None = None) -> Prediction:
        self.seen.append(batch.labels)
        return type(self).change(super().predict(batch, selection))


class Forgetful(FrozenHead):
    """It scales features by numbers that it learns, and its `load_state` is that of the class it derives from."""

    summary = "forgets what it learned"

    def __init__(self, config: FrozenHeadConfig, backbone: Any) -> None:
        super().__init__(config, backbone)
        self.scale = nn.Parameter(torch.ones(self.backbone.dim))

    def features(self, batch: Batch) -> Tensor:
        return super().features(batch) * self.scale


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    METHODS.names()
    monkeypatch.setattr(METHODS, "_things", METHODS._things | {"frozen-head": Wrong})
    Wrong.seen = []
    Wrong.change = staticmethod(lambda prediction: prediction)
    Wrong.loss_of = staticmethod(lambda loss: loss)


def begun(world: World, folder: Path, **overrides: Any) -> tuple[Setup, Run]:
    dotted = {key.replace("__", "."): value for key, value in overrides.items()} | {"method.name": "frozen-head"}
    setup = prepare(group.plan([compose(str(world.preset), None, dotted)], baseline=False)[0].config)
    return setup, Run.create(folder, setup.config, setup.stream, setup.weights, setup.precision)


def test_no_label_reaches_who_answers(world: World, tmp_path: Path) -> None:
    setup, run = begun(world, tmp_path / "run")
    result = train(setup, run)
    assert evaluate_again(setup, run, None) == result
    assert len(torch.cat(Wrong.seen)) > 2 * 27
    assert set(torch.cat(Wrong.seen).tolist()) == {-1}


CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "one row for all": lambda logits: logits[:1],
    "answers": lambda logits: logits.argmax(dim=1),
    "a class too few": lambda logits: logits[:, :-1],
    "a class too many": lambda logits: torch.cat([logits, logits[:, :1]], dim=1),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("ahead", [0, 500])
def test_logits_of_another_shape_are_refused(change: str, ahead: int, world: World, tmp_path: Path) -> None:
    Wrong.change = staticmethod(lambda found: replace(found, logits=CHANGES[change](found.logits)))
    with pytest.raises(DualPromptError, match=r"'frozen-head' gives logits of shape .* for 4 images; its predict must"):
        train(*begun(world, tmp_path / "run", evaluate__ahead=ahead))


def test_logits_of_another_shape_are_refused_on_the_way_of_an_online_stream(world: World, tmp_path: Path) -> None:
    benchmark = {"name": "on", "dataset": str(world.images), "stream": "online", "evaluate_every": 8}
    recipes = {"plain": {"train": {"epochs": 1, "batch_size": 4, "lr": 0.02}}}
    preset = world.preset_with("wrong-online.yaml", benchmark=benchmark, recipes=recipes)
    Wrong.change = staticmethod(lambda found: replace(found, logits=found.logits[:, :-1]))
    with pytest.raises(DualPromptError, match="gives logits of shape"):
        train(*begun(replace(world, preset=preset), tmp_path / "run"))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_logits_that_are_no_numbers_are_refused(value: float, world: World, tmp_path: Path) -> None:
    Wrong.change = staticmethod(lambda found: replace(found, logits=torch.full_like(found.logits, value)))
    with pytest.raises(DualPromptError, match="'frozen-head' gives 9 of 9 images no probability"):
        train(*begun(world, tmp_path / "run"))


def test_the_prompt_of_a_task_that_there_is_not_is_refused(world: World, tmp_path: Path) -> None:
    Wrong.change = staticmethod(lambda found: replace(found, selected=torch.full((len(found.logits),), 3)))
    setup, run = begun(world, tmp_path / "run")
    with pytest.raises(DualPromptError, match="E-Prompt of task 4, but there are 3 tasks"):
        train(setup, run)
    assert not run.predictions_path.exists(), "what cannot be read is not written"


LOSSES: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "a number": (lambda loss: loss.item(), "found float"),
    "one of each image": (lambda loss: loss.expand(3), r"found a tensor of shape \(3,\);"),
    "without a gradient": (lambda loss: loss.detach(), r"found a tensor of shape \(\) without a gradient;"),
}


@pytest.mark.parametrize("loss", LOSSES)
def test_a_loss_that_cannot_be_lowered_is_refused(loss: str, world: World, tmp_path: Path) -> None:
    Wrong.loss_of, found = staticmethod(LOSSES[loss][0]), LOSSES[loss][1]
    with pytest.raises(DualPromptError, match=f"a loss must be one number with a gradient, {found}"):
        train(*begun(world, tmp_path / "run"))


@pytest.mark.parametrize("stop", [6, 8, 11])
def test_who_forgets_part_of_its_state_does_not_go_on_as_another(
    stop: int, monkeypatch: pytest.MonkeyPatch, world: World, tmp_path: Path
) -> None:
    monkeypatch.setitem(METHODS._things, "frozen-head", Forgetful)
    setup, run = begun(world, tmp_path / "run", checkpoint__every_seconds=0)
    with pytest.raises(KeyboardInterrupt):
        train(setup, run, progress=Until(stop))
    message = "method 'frozen-head' does not take over 'scale' of its own state; mend its load_state"
    with pytest.raises(DualPromptError, match=message):
        train(prepare(setup.config, share=setup), run, progress=SILENT)


def test_who_forgets_part_of_its_state_is_not_evaluated_as_another(
    monkeypatch: pytest.MonkeyPatch, world: World, tmp_path: Path
) -> None:
    monkeypatch.setitem(METHODS._things, "frozen-head", Forgetful)
    setup, run = begun(world, tmp_path / "run")
    train(setup, run)
    with pytest.raises(DualPromptError, match="does not take over 'scale'"):
        evaluate_again(prepare(setup.config, share=setup), run, None)
