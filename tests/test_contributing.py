"""The examples of CONTRIBUTING.md, pasted from the page: each is one file, and works."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from dualprompt.backbones import weights
from dualprompt.backbones.base import BACKBONES
from dualprompt.learner import ContinualLearner
from dualprompt.methods.base import METHODS
from plugins import installed, pasted, write_distribution
from sandbox import World, call, pictures, remains, start

ALWAYS = ("--checkpoint.every_seconds", 0)  # a checkpoint a step


@pytest.fixture
def lora(tmp_path: Path) -> Iterator[None]:
    """LoRA, installed as a distribution of its own."""
    source = pasted('METHODS.register("lora-qv")')
    assert len(source.splitlines()) < 80
    write_distribution(
        tmp_path / "site",
        "dualprompt-lora-qv",
        {"dualprompt_lora_qv": source},
        "dualprompt.methods",
        "lora-qv = dualprompt_lora_qv",
    )
    with installed(tmp_path / "site", METHODS):
        yield


def test_a_method_of_one_file_runs(world: World, tmp_path: Path) -> None:
    """As a file of the package is: imported, and there."""
    source = pasted('METHODS.register("cosine-head")')
    point = "cosine-head = cosine_head"
    write_distribution(tmp_path / "site", "one", {"cosine_head": source}, "dualprompt.methods", point)
    with installed(tmp_path / "site", METHODS):
        words = ("--method", "cosine-head", "--method.scale", 8, "--no-baseline", "--train.epochs", 1)
        done = call("run", world.preset, *words, "--out", tmp_path / "run")
        assert done.code == 0, done.err
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert manifest["config"]["method"] == {"name": "cosine-head", "scale": 8.0, "training_logits": "masked"}


@pytest.mark.usefixtures("lora")
def test_lora_trains_dies_and_comes_to_the_same_end(world: World, tmp_path: Path) -> None:
    command = ("run", world.preset, "--method", "lora-qv", "--method.rank", 2, "--no-baseline", *ALWAYS, "--out")
    whole, out, log = tmp_path / "whole", tmp_path / "run", tmp_path / "log"
    done = call(*command, whole)
    assert done.code == 0, done.err
    # In the middle of the second task's first epoch, then again after its last step.
    life = start(log, *command, out, watch=out, at=("os.rename checkpoints/.progress", 10))
    assert life.end() == -signal.SIGKILL, life.text
    assert [path.name for path in (out / "checkpoints").glob("task-*")] == ["task-0001.safetensors"]
    life = start(log, "resume", out, watch=out, at="os.rename checkpoints/.task-0002")
    assert life.end() == -signal.SIGKILL, life.text
    assert call("resume", out).code == 0
    mine, truth = remains(out)["."], remains(whole)["."]
    for what in ("result", "log", "state", "progress"):
        assert mine[what] == truth[what], what
    assert {"down", "up", "head.weight.2", "head.bias.2"} <= truth["state"].keys()
    assert call("eval", out, "--json").json["accuracy_matrix"] == truth["result"]["accuracy_matrix"]
    assert (
        truth["result"]["parameters"]["additional"]["count"] == 2 * 2 * 3 * 2 * 16
    )  # A and B, q and v, layers, r, dim


@pytest.mark.usefixtures("lora")
def test_lora_is_a_learners_method(world: World, tmp_path: Path) -> None:
    learner = ContinualLearner(str(world.weights), "lora-qv", device="cpu")
    for name, classes in (("first", ("ash", "birch")), ("second", ("cedar", "elm"))):
        learner.learn({label: pictures(world, label) for label in classes}, name, epochs=3)
    state = learner._model.state
    assert state["up"].abs().max() > 0, "the changes were trained"
    loaded = ContinualLearner.load(learner.save(tmp_path / "model"), device="cpu")
    asked = [picture for label in learner.classes for picture in pictures(world, label, "test")]
    assert loaded.predict(asked) == learner.predict(asked)
    assert loaded.shares_prompts
    loaded.forget("first")
    assert {answer.label for answer in loaded.predict(asked)} <= {"cedar", "elm"}
    assert torch.equal(loaded._model.state["up"], state["up"]), "what tasks share stays"


def test_a_backbone_of_one_file_runs(world: World, tmp_path: Path) -> None:
    site, out, log = tmp_path / "site", tmp_path / "run", tmp_path / "log"
    source = pasted('BACKBONES.register("patch-net")')
    write_distribution(site, "nets", {"patch_net": source}, "dualprompt.backbones", "patch-net = patch_net")
    command = ("run", world.preset, "--backbone", "patch-net", "--no-baseline", "--train.lr", 0.01, *ALWAYS, "--method")
    with installed(site, BACKBONES):
        (row,) = (row for row in call("list", "backbones", "--json").json if row["name"] == "patch-net")
        assert (row["licence"], row["needs_network"]) == ("Apache-2.0", False)
        assert call(*command, "ft-seq", "--out", tmp_path / "whole").code == 0
        life = start(log, *command, "ft-seq", "--out", out, watch=out, at=("os.rename checkpoints/.progress", 10))
        assert life.end() == -signal.SIGKILL, life.text
        assert call("resume", out).code == 0
        mine, truth = remains(out)["."], remains(tmp_path / "whole")["."]
        assert mine["state"] == truth["state"]
        assert mine["result"] == truth["result"]
        frozen = call(*command, "frozen-head", "--out", tmp_path / "frozen")
        assert frozen.code == 0, frozen.err
        assert "needs a backbone that takes prompts" in call(*command, "dualprompt", "--out", tmp_path / "none").error
        one, same, other = (weights.build(weights.read("patch-net", seed=seed)) for seed in (0, 0, 1))
        images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
        assert torch.equal(one(images), same(images))
        assert not torch.equal(one(images), other(images))
        learner = ContinualLearner("patch-net", "lda", device="cpu")
        learner.learn({label: pictures(world, label) for label in ("ash", "birch")})
        loaded = ContinualLearner.load(learner.save(tmp_path / "model"), device="cpu")
        asked = pictures(world, "ash", "test")
        assert loaded.predict(asked) == learner.predict(asked)
    (site / "patch_net.py").write_text(source + "\nUNSEEN = 1\n")
    for file in ("result.json", "checkpoints/task-0003.safetensors"):
        (out / file).unlink()
    with installed(site, BACKBONES):
        assert "made by other code" in call("resume", out).error
    assert "unknown backbone 'patch-net'" in call(*command, "ft-seq", "--out", tmp_path / "none").error
