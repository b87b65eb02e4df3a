"""Where a model looks: heat maps from the attention of the very pass that gives the answer."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from dualprompt.errors import DualPromptError
from dualprompt.learner import ContinualLearner
from dualprompt.model.explain import Attending, _last_pass, _rollout, heat, heat_map
from helpers import seeded
from sandbox import World, call, pictures

METHODS: dict[str, dict[str, Any]] = {
    "dualprompt": {"g_layers": [1], "e_layers": [2, 3], "g_length": 2, "e_length": 3},
    "pro-t": {"g_layers": [1], "e_layers": [2, 3], "g_length": 2, "e_length": 3, "prompting": "pro-t"},
    "late": {"g_layers": [3], "e_layers": [3], "g_length": 2, "e_length": 3},
    "l2p": {"pool_size": 4, "top_n": 2, "length": 2},
    "simple-cil": {},
}


def taught(world: World, name: str) -> ContinualLearner:
    method = name if name in ("l2p", "simple-cil") else "dualprompt"
    learner = ContinualLearner(str(world.weights), method, options=METHODS[name], device="cpu")
    learner.learn({label: pictures(world, label) for label in ("ash", "birch")}, epochs=1)
    learner.learn({label: pictures(world, label) for label in ("cedar", "elm")}, epochs=1)
    return learner


@pytest.mark.parametrize("name", list(METHODS))
def test_the_attention_shown_is_that_of_the_answer(world: World, name: str) -> None:
    """Attention computed step by step gives the same logits; the map is a share for each of the 2 × 2 patches."""
    learner = taught(world, name)
    image = pictures(world, "ash", "test")[0]
    pixels = torch.from_numpy(learner.pixels(image))[None]
    with torch.inference_mode():
        plain = learner.network()(pixels)[0]
        with Attending() as attending:
            by_hand = learner.network()(pixels)[0]
    assert len(attending.layers) >= 3
    torch.testing.assert_close(by_hand, plain, atol=1e-5, rtol=1e-5)
    found = heat(learner, image)
    assert found.shape == (2, 2)
    assert found.sum() == pytest.approx(1)
    assert (found > 0).all()
    assert not np.allclose(found, heat(learner, pictures(world, "elm", "test")[0]), atol=1e-4)


def test_layers_that_two_passes_share_are_counted_once() -> None:
    layers = [torch.tensor([float(n)]) for n in range(6)]  # 2 shared, 2 of the query, 2 with prompts; depth 4
    assert [int(each) for each in _last_pass(layers, 4)] == [0, 1, 4, 5]
    assert [int(each) for each in _last_pass(layers[:4], 4)] == [0, 1, 2, 3]
    assert [int(each) for each in _last_pass(layers, 3)] == [3, 4, 5]
    with pytest.raises(DualPromptError, match="one or two passes"):
        _last_pass(layers, 2)


def test_rollout_by_hand() -> None:
    """Two layers, two tokens, and a prompt of one token that is left out."""
    first = torch.rand(1, 2, 2, 3, generator=seeded(0)).softmax(dim=-1)  # a prefix before the keys
    last = torch.rand(1, 2, 1, 3, generator=seeded(1)).softmax(dim=-1)
    reads = last[0].mean(dim=0)[0, 1:]
    own = first[0].mean(dim=0)[:, 1:]
    own = own / own.sum(dim=1, keepdim=True)
    expected = 0.5 * reads @ own + 0.5 * reads
    torch.testing.assert_close(_rollout([first, last], 2), expected)


def test_a_map_has_the_shape_of_the_image(world: World, saved: Path, tmp_path: Path) -> None:
    learner = ContinualLearner.load(saved, "cpu")
    Image.new("RGB", (3000, 1500), "red").save(tmp_path / "wide.jpg")
    assert heat_map(learner, tmp_path / "wide.jpg").size == (1024, 512)
    assert heat_map(learner, pictures(world, "ash")[0]).size == Image.open(pictures(world, "ash")[0]).size


def test_a_backbone_without_attention_is_refused(world: World) -> None:
    learner = ContinualLearner("resnet18-cifar-nf4", "simple-cil", input_size=16, device="cpu")
    learner.learn({label: pictures(world, label) for label in ("ash", "birch")}, epochs=1)
    with pytest.raises(DualPromptError, match="has none; take a ViT"):
        heat_map(learner, pictures(world, "ash")[0])


def test_the_command_draws_one_image(world: World, saved: Path, tmp_path: Path) -> None:
    image, out = pictures(world, "ash", "test")[0], tmp_path / "heat.png"
    plain = call("predict", saved, image, "--device", "cpu", "--json").json
    assert call("predict", saved, image, "--device", "cpu", "--json", "--explain", out).json == plain
    assert Image.open(out).size == Image.open(image).size
    folder = world.images / "test" / "ash"
    assert "--explain draws one image, found 5" in call("predict", saved, folder, "--explain", out).error
    assert "give a name that ends in .png" in call("predict", saved, image, "--explain", tmp_path / "a.jpg").error


def test_an_image_from_stdin(world: World, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    image = pictures(world, "ash", "test")[0]
    with image.open() as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        done = call("predict", saved, "-", "--device", "cpu", "--csv")
    assert done.code == 0, done.err
    header, answer = done.out.splitlines()
    label = ContinualLearner.load(saved, "cpu").predict(image).label
    assert (header.split(",")[:2], answer.split(",")[:2]) == (["path", "label"], ["-", label])


@pytest.mark.parametrize(("content", "told"), [(b"", "nothing came from stdin"), (b"no image", "it is no image")])
def test_what_is_no_image_from_stdin(saved: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, told: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
    assert told in call("predict", saved, "-").error
    assert "give - once" in call("predict", saved, "-", "-").error


def test_only_scores_that_matter_are_shown(world: World, saved: Path, tmp_path: Path) -> None:
    learner = ContinualLearner.load(saved, "cpu")
    shown = call("predict", saved, world.images / "test", "--device", "cpu").out
    for answer in learner.predict(world.images / "test"):
        [line] = [each for each in shown.splitlines() if f" {answer.path} " in each]
        told = line.split("│")[-2]
        for score in answer.top[1:3]:
            assert (score.label in told) == (score.probability >= 0.01)
    assert " 0 %" not in shown
