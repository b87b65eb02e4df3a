"""What every method owes its callers, whichever it is."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import ClassVar, get_args

import numpy as np
import pytest
import torch
from lightning_fabric import Fabric
from torch import Tensor

from dualprompt.config import RunConfig
from dualprompt.data.views import View
from dualprompt.errors import DualPromptError
from dualprompt.export import export
from dualprompt.learner import ContinualLearner
from dualprompt.methods.base import METHODS, Batch, Method, Prediction, Selection, TaskView, method_config
from dualprompt.methods.frozen_head import FrozenHead, FrozenHeadConfig
from dualprompt.run.answers import Answers
from dualprompt.training.evaluate import evaluate
from dualprompt.training.feed import Feed
from helpers import SIDE, backbone_for, batch_of, random_images, seeded, subset_of, task_view, tiny_vit
from sandbox import World, pictures

# They answer from what a task's end solved for; s-prompts from the keys that it found, so of earlier domains alone.
SOLVED = {
    "anacp",
    "aper",
    "dualprompt-lda",
    "dualprompt-rp",
    "ease",
    "fecam",
    "klda",
    "lda",
    "ranpac",
    "ridge",
    "simple-cil",
    "s-prompts",
}


def make(name: str) -> Method:
    return METHODS[name](method_config({"name": name}), backbone_for(name))


class WarmConfig(FrozenHeadConfig):
    """Options of a method in a test."""

    warmth: float = 0.5


class Warm(FrozenHead[WarmConfig]):
    """Has said what its options are, once."""


def test_options_are_found_from_the_type_argument() -> None:
    assert Warm.Config is WarmConfig
    assert Warm(WarmConfig(warmth=2.0), tiny_vit()).config.warmth == 2.0

    class Warmer(Warm):
        """Says nothing, and has those of its parent."""

    class Other(FrozenHead[WarmConfig]):
        """Says otherwise."""

        Config = FrozenHeadConfig

    assert (Warmer.Config, Other.Config) == (WarmConfig, FrozenHeadConfig)
    assert {name: METHODS[name].Config.model_fields["name"].default for name in METHODS.names()} == {
        name: name for name in METHODS.names()
    }


@pytest.mark.parametrize("name", METHODS.names())
def test_a_selection_that_it_does_not_have_is_refused(name: str) -> None:
    method = make(name)
    method.begin_task(task_view(0, queries=torch.randn(6, 32, generator=seeded(0))))
    for selection in get_args(Selection):
        if selection in method.selections:
            method.check_selection(selection)
            continue
        with pytest.raises(DualPromptError, match=re.escape(f"method '{name}' has no selection '{selection}'")):
            method.predict(batch_of(random_images(1)), selection)
    method.check_selection(None)


@pytest.mark.parametrize("name", METHODS.names())
def test_answers_follow_weights_that_steps_changed_unseen(name: str) -> None:
    """A step that is replayed as a CUDA graph changes weights in place, and no line of `loss` is run."""
    images, labels = random_images(6), torch.arange(6) % 3
    method = make(name)
    queries = method.backbones.frozen()(images)
    for index in range(2):
        view = task_view(index, queries=queries, images=images, labels=labels + 3 * index)
        method.begin_task(view)
        for phase in method.phases(view):
            method.begin_phase(phase, view)
        if index == 0:
            method.end_task(view)
    method.eval()
    before = method.predict(batch_of(images)).logits
    for seed in (1, 2):
        method.train()
        with torch.no_grad():
            for parameter in method.trainable().values():
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=seeded(seed)))
        method.eval()
        now = method.predict(batch_of(images)).logits
        copy = make(name)
        copy.load_state({key: value.clone() for key, value in method.state().items()})
        torch.testing.assert_close(now, copy.eval().predict(batch_of(images)).logits)
        assert name in SOLVED or not torch.equal(now, before)
        before = now


PICTURES = np.random.default_rng(3).integers(0, 256, (18, SIDE, SIDE, 3), dtype=np.uint8)


@pytest.mark.parametrize("name", METHODS.names())
def test_an_evaluation_in_the_middle_of_a_task_sees_the_weights_of_that_moment(name: str) -> None:
    """Between two evaluations weights change in place, as by recorded steps: nobody tells the method that it trains."""
    view = View(SIDE, (0.5,) * 3, (0.25,) * 3, "bilinear", "resize", "none")
    config = RunConfig.model_validate({"benchmark": {"dataset": "x"}, "evaluate": {"batch_size": 5}})
    feed = Feed(config, view, backbone_for(name), Fabric(accelerator="cpu", devices=1))
    subsets = [subset_of(PICTURES[9 * index :][:9], torch.arange(9) % 3 + 3 * index) for index in range(2)]
    method = make(name)

    def begun(index: int) -> TaskView:
        subset = subsets[index]
        images = feed.batch(subset.images, feed.fixed(subset, torch.arange(9))).images
        task = task_view(index, queries=feed.features(subset), images=images, labels=subset.labels)
        method.begin_task(task)
        for phase in method.phases(task):
            method.begin_phase(phase, task)
        return task

    def check() -> Tensor:
        fresh = make(name)
        fresh.load_state({key: value.clone() for key, value in method.state().items()})
        found = []
        for each in (method, fresh):
            answers = Answers(subsets, [range(3), range(3, 6)], torch.device("cpu"))
            found.append((evaluate(each, feed, subsets, answers=answers), answers.probability))
        assert found[0][0] == found[1][0]
        torch.testing.assert_close(found[0][1], found[1][1])
        return found[0][1]

    method.end_task(begun(0))
    task = begun(1)
    method.train()
    seen = []
    for moment in range(3):
        seen.append(check())
        assert method.training, "what trains goes on training"
        generator = seeded(moment)
        with torch.no_grad():
            for parameter in method.trainable().values():
                parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
    method.eval()
    method.end_task(task)
    check()
    assert name in SOLVED or not any(torch.equal(one, other) for one, other in itertools.pairwise(seen))


class Adapting(FrozenHead):
    """Takes a gradient step on a copy of the head for each image, towards a surer answer, before it answers."""

    predicts_with_gradients: ClassVar[bool] = True

    def predict(self, batch: Batch, selection: Selection | None = None) -> Prediction:
        features = self.features(batch).float()
        weight = torch.cat(list(self.head.weight)).detach().expand(len(features), -1, -1).clone().requires_grad_()
        logits = (weight @ features[..., None])[..., 0]
        entropy = -(logits.softmax(dim=1) * logits.log_softmax(dim=1)).sum()
        (gradient,) = torch.autograd.grad(entropy, weight)
        return Prediction((((weight - 0.5 * gradient) @ features[..., None])[..., 0]), similarity=logits.amax(dim=1))


@pytest.fixture
def adapting(monkeypatch: pytest.MonkeyPatch) -> type[Adapting]:
    METHODS.names()
    monkeypatch.setattr(METHODS, "_things", {**METHODS._things, "frozen-head": Adapting})
    return Adapting


def test_gradients_in_prediction_leave_no_trace(adapting: type[Adapting]) -> None:
    """What is answered depends on the image alone: not on its batch, nor on what was asked before."""
    view = View(SIDE, (0.5,) * 3, (0.25,) * 3, "bilinear", "resize", "none")
    vit, images = tiny_vit(), torch.arange(18)
    method = adapting(FrozenHeadConfig(), vit)
    method.head.restore([torch.randn(6, 32, generator=seeded(4))], [torch.zeros(6)], train_old=False)
    before = {name: value.clone() for name, value in method.state().items()}
    found = []
    for size, order in ((18, images), (5, images), (1, images), (5, images.flip(0))):
        values = {"benchmark": {"dataset": "x"}, "evaluate": {"batch_size": size}}
        feed = Feed(RunConfig.model_validate(values), view, vit, Fabric(accelerator="cpu", devices=1))
        subsets = [subset_of(PICTURES[order.numpy()], order % 6)]
        answers = Answers(subsets, [range(6)], torch.device("cpu"))
        evaluate(method, feed, subsets, answers=answers)
        assert not answers.probability.requires_grad
        found.append(answers.probability[order])
    plain = method.head.predict(feed.features(subsets[0])).softmax(dim=1).amax(dim=1)[images.flip(0)]
    assert not torch.allclose(found[0], plain, atol=1e-3), "the step shows"
    for other in found[1:]:
        torch.testing.assert_close(other, found[0])
    assert all(torch.equal(value, before[name]) for name, value in method.state().items())
    assert all(parameter.grad is None for parameter in method.parameters())


def test_a_learner_asks_with_gradients_and_exports_none(adapting: type[Adapting], world: World, tmp_path: Path) -> None:
    learner = ContinualLearner(str(world.weights), "frozen-head", device="cpu")
    learner.learn({name: pictures(world, name) for name in ("ash", "birch")}, epochs=1)
    asked = [picture for name in ("ash", "birch") for picture in pictures(world, name, "test")]
    whole = [answer.probability for answer in learner.predict(asked)]
    assert [answer.probability for answer in learner.predict(asked[::-1], batch_size=2)][::-1] == pytest.approx(whole)
    loaded = ContinualLearner.load(learner.save(tmp_path / "model"), device="cpu")
    assert [loaded.predict(picture).probability for picture in asked] == pytest.approx(whole)
    with pytest.raises(DualPromptError, match="'frozen-head' takes gradients to predict"):
        export(learner, tmp_path / "model.pt2", "torch-export")
    assert not (tmp_path / "model.pt2").exists()
