"""Lessons whose images are looked at elsewhere: the model is that of one process."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from dualprompt.errors import DualPromptError
from dualprompt.learner import ContinualLearner
from dualprompt.lessons import sharded
from sandbox import CLASSES, World, call, elsewhere, pictures

FIRST, SECOND = CLASSES[:3], CLASSES[3:]


def lesson(world: World, names: tuple[str, ...]) -> dict[str, list[Path]]:
    return {name: pictures(world, name) for name in names}


def made(world: World, method: str = "dualprompt-lda") -> ContinualLearner:
    return ContinualLearner(str(world.weights), method, device="cpu")


def logits(learner: ContinualLearner, world: World) -> torch.Tensor:
    images = [image for name in CLASSES for image in pictures(world, name, "test")]
    with torch.inference_mode():
        return learner.network()(torch.from_numpy(np.stack([learner.pixels(path) for path in images])))[0]


def test_shards_add_up_to_the_model_of_one_pass(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    alone, apart = made(world), made(world)
    monkeypatch.setattr(sharded, "SHARD", 4)  # which divides no class
    for names in (FIRST, SECOND):
        expected = alone.learn(lesson(world, names), "lesson " + names[0], prompts="never")
        found = apart.learn(lesson(world, names), "lesson " + names[0], over=map)
        assert (found.images, found.held, found.correct) == (expected.images, expected.held, expected.correct)
        assert found.prompts is not None
        assert not found.prompts.used
    assert apart.classes == alone.classes
    assert apart.threshold == pytest.approx(alone.threshold, abs=1e-3)
    torch.testing.assert_close(logits(apart, world), logits(alone, world), rtol=1e-4, atol=1e-4)
    state, other = alone._model.state, apart._model.state
    for name in ("discriminant.scatter", "discriminant.means.0", "discriminant.counts.1"):
        torch.testing.assert_close(other[name], state[name], rtol=1e-5, atol=1e-5)


def test_what_cannot_be_read_elsewhere_is_named_here(world: World, tmp_path: Path) -> None:
    data = lesson(world, FIRST)
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"no image")
    data["ash"] = [*data["ash"], broken]
    learner = made(world)
    with pytest.raises(DualPromptError, match=r"1 of 20 images cannot be used: .*broken.png cannot be read"):
        learner.learn(data, over=map)
    assert not learner.classes
    assert learner.learn(data, over=map, skip_bad=True).images == 19


def test_methods_that_must_see_the_images_are_refused(world: World) -> None:
    with pytest.raises(DualPromptError, match="method 'l2p' must see the images itself"):
        made(world, "l2p").learn(lesson(world, FIRST), over=map)


def test_another_backbone_elsewhere_is_refused(world: World) -> None:
    learner = made(world)

    def stranger(see: object, shards: Iterable[sharded.Shard]) -> Iterator[sharded.Seen]:
        for shard in shards:
            yield sharded.Seen(np.zeros((len(shard.images), 32), np.float32), {}, "0" * 64)

    with pytest.raises(DualPromptError, match="another backbone"):
        learner.learn(lesson(world, FIRST), over=stranger)


@pytest.mark.slow  # a cluster of its own takes minutes to start beside other tests
@pytest.mark.xdist_group("ray")
def test_ray_makes_the_same_model(world: World, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    token = tmp_path / "token"  # Ray would make one in the user's home
    token.write_text(secrets.token_hex(32))
    folder, common = world.images / "train", ("--backbone", world.weights, "--device", "cpu")
    alone, apart = tmp_path / "alone", tmp_path / "apart"
    assert call("learn", alone, folder, *common, "--prompts", "never").code == 0
    told = elsewhere(
        "learn", apart, folder, *common, "--json", "--ray", RAY_AUTH_MODE="token", RAY_AUTH_TOKEN_PATH=str(token)
    )
    assert told.code == 0, told.err
    assert told.json["learned"]["images"] == 39
    one, other = ContinualLearner.load(alone, "cpu"), ContinualLearner.load(apart, "cpu")
    torch.testing.assert_close(logits(other, world), logits(one, world), rtol=1e-4, atol=1e-4)
    assert "--prompts always cannot go with --ray" in call("learn", apart, folder, "--prompts", "always", "--ray").error
