"""Whole runs on a ResNet, what a frozen one keeps, and how often a run builds its backbone."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from dualprompt.backbones import weights
from dualprompt.backbones.base import Backbone, BackboneFactory, BackboneSource
from dualprompt.backbones.resnet import ResNet, ResNetConfig, draw
from dualprompt.config import compose
from dualprompt.errors import DualPromptError
from dualprompt.learner import ContinualLearner
from dualprompt.methods.base import MethodConfig
from dualprompt.methods.frozen_head import FrozenHead, FrozenHeadConfig
from dualprompt.run.checkpoint import of_method
from dualprompt.run.folder import Run
from dualprompt.training import group
from dualprompt.training.loop import train
from dualprompt.training.setup import prepare
from helpers import random_images, seeded, tiny_vit
from sandbox import HEADER, World, call, pictures, remains
from test_methods_life import TASKS, check_commands, check_loaded, killed_and_resumed, learn

DRAWN = "resnet18-cifar-nf4"
FROZEN: dict[str, dict[str, Any]] = {
    "frozen-head": {},
    "simple-cil": {},
    "lda": {},
    "ranpac": {"method.projection": 40},
    "er": {"method.train_backbone": False, "method.buffer_size": 8},
}
TRAINED: dict[str, dict[str, Any]] = {
    "ft-seq": {},
    "er": {"method.buffer_size": 8},
    "ewc": {"method.fisher_images": 4},  # its gradients of single images go through BatchNorm
    "co2l": {"method.buffer_size": 8},  # its last phase trains a head on a backbone that must not move
}


@pytest.fixture(scope="module")
def resnet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small ResNet in a file, whose statistics are not those of a fresh one."""
    path = tmp_path_factory.mktemp("resnet") / "resnet.safetensors"
    made = draw(ResNet(ResNetConfig(16, width=4, stem="cifar", pool=False)), seeded(4)).train()
    with torch.no_grad():
        for _ in range(8):
            made(random_images(16, seed=2))
    save_file(made.state_dict(), path, HEADER)
    return path


def asked(world: World, method: str, backbone: str | Path, options: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """A preset of two tasks of three classes on 16-pixel images, and what is asked for on top."""
    benchmark = {"name": "tiny", "dataset": str(world.images), "tasks": TASKS}
    network = {"name": str(backbone), "input_size": 16}
    preset = world.preset_with("resnet.yaml", benchmark=benchmark, backbone=network)
    return str(preset), {"method.name": method, "train.lr": 0.002, "checkpoint.every_seconds": 0} | options


def statistics(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in state.items() if ".running_" in name}


def resumed(truth: Run, out: Path) -> Path:
    """Go on from what a run had after its first task, to the same end, bit for bit."""
    shutil.copytree(truth.folder, out)
    for name in ("checkpoints/task-0002.safetensors", "result.json"):
        (out / name).unlink()
    group.resume(out)
    mine, other = remains(out)["."], remains(truth.folder)["."]
    for what in ("result", "log", "state", "progress"):
        assert mine[what] == other[what], what
    return out


@pytest.mark.parametrize("method", FROZEN)
def test_a_life_on_a_frozen_resnet(method: str, world: World, resnet: Path, tmp_path: Path) -> None:
    arguments = asked(world, method, resnet, FROZEN[method])
    setup, truth = learn(arguments, tmp_path / "truth")
    setup.method.train()
    assert setup.method.backbone is setup.feed.backbone
    begun = weights.read(str(resnet)).tensors
    for name, value in setup.method.backbone.state_dict().items():
        assert torch.equal(value, begun[name]), name
    assert not any(name.startswith("backbone.") for name in truth.checkpoints.after_task(TASKS - 1))
    check_loaded(setup, truth)
    check_commands(resumed(truth, tmp_path / "again"), truth.result(), shown=False)


@pytest.mark.parametrize("method", TRAINED)
def test_a_life_of_a_resnet_that_is_trained(method: str, world: World, tmp_path: Path) -> None:
    arguments = asked(world, method, DRAWN, TRAINED[method])
    setup, truth = learn(arguments, tmp_path / "truth")
    begun = statistics(weights.read(DRAWN).tensors)
    found = statistics(of_method(truth.checkpoints.after_task(TASKS - 1)))
    assert found.keys() == {f"backbone.{name}" for name in begun}
    assert all(not torch.equal(value, begun[name.removeprefix("backbone.")]) for name, value in found.items())
    assert all(torch.equal(value, found[name]) for name, value in statistics(setup.method.state()).items())
    check_loaded(setup, truth)
    out = (
        killed_and_resumed(arguments, truth, tmp_path, often=False)
        if method == "er"
        else resumed(truth, tmp_path / "again")
    )
    check_commands(out, truth.result(), shown=False)


@pytest.mark.parametrize("method", ["dynaer", "rpsnet"])
def test_a_life_of_networks_that_grow(method: str, world: World, tmp_path: Path) -> None:
    small = {"dynaer": {"warmup_epochs": 1, "classifier_epochs": 2}, "rpsnet": {"width": 2, "tasks_per_path": 1}}
    options = {f"method.{key}": value for key, value in {"buffer_size": 8, **small[method]}.items()}
    arguments = asked(world, method, DRAWN, options)
    setup, truth = learn(arguments, tmp_path / "truth")
    first, last = (of_method(truth.checkpoints.after_task(task)) for task in range(TASKS))
    old = {"dynaer": "backbone.", "rpsnet": "backbone.layers."}[method]
    assert statistics({name: value for name, value in first.items() if name.startswith(old)})
    assert all(torch.equal(last[name], value) for name, value in first.items() if name.startswith(old))
    assert last.keys() - first.keys(), "the second task has added a network or modules"
    check_loaded(setup, truth)
    check_commands(killed_and_resumed(arguments, truth, tmp_path, often=False), truth.result(), shown=False)


def test_a_phase_that_trains_a_head_alone_moves_no_statistics(world: World, tmp_path: Path) -> None:
    """Co²L's, which comes last; its learning rates leave the rest to BatchNorm."""
    still = {"train.lr": 1e-12, "method.projector_lr": 1e-12, "method.head_epochs": 3, "method.buffer_size": 8}
    ends = []
    for epochs in (1, 3):
        options = still | {"method.head_epochs": epochs}
        _, run = learn(asked(world, "co2l", DRAWN, options), tmp_path / f"epochs-{epochs}")
        ends.append(statistics(of_method(run.checkpoints.after_task(0))))
    assert all(torch.equal(value, ends[1][name]) for name, value in ends[0].items())


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("dualprompt", ()),
        ("l2p", ()),
        ("coda-prompt", ()),
        ("dualprompt-rp", ()),
        ("ranpac", ("--method.first_session", "prompts")),
        ("ranpac", ("--method.reads", "class+patches")),
    ],
)
def test_a_method_that_needs_prompts_says_so(
    method: str, options: tuple[str, ...], world: World, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    refused = call("run", world.preset, "--method", method, "--backbone", DRAWN, "--out", out, *options)
    assert refused.error == f"method '{method}' needs a backbone that takes prompts (a ViT); '{DRAWN}' is none"
    assert not out.exists()


def test_a_member_of_a_group_that_needs_prompts_stops_the_group(world: World, resnet: Path, tmp_path: Path) -> None:
    lines = {
        name: compose(str(world.preset), None, {"method.name": name, "backbone.name": str(resnet)})
        for name in ("simple-cil", "dualprompt")
    }
    with pytest.raises(DualPromptError, match="method 'dualprompt' needs a backbone that takes prompts"):
        group.start(group.plan_lines(lines, seeds=1), tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


def test_a_learner_on_a_resnet(world: World, resnet: Path, tmp_path: Path) -> None:
    learner = ContinualLearner(str(resnet), method="simple-cil", device="cpu")
    learner.learn({name: pictures(world, name) for name in ("ash", "birch")}, "first")
    learner.learn({"cedar": pictures(world, "cedar")}, "second")
    shown = [pictures(world, name, "test")[0] for name in ("ash", "birch", "cedar")]
    mine = learner.predict(shown)
    again = ContinualLearner.load(learner.save(tmp_path / "model"), "cpu").predict(shown)
    assert mine == again
    assert {answer.top[0].label for answer in mine} <= {"ash", "birch", "cedar"}


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[Backbone]:
    """Every backbone that is built from here on."""
    found: list[Backbone] = []
    real = weights.build

    def build(*arguments: Any, **options: Any) -> Backbone:
        found.append(real(*arguments, **options))
        return found[-1]

    monkeypatch.setattr(weights, "build", build)
    return found


@pytest.mark.parametrize("method", ["dualprompt", "frozen-head", "ft-seq", "upper-bound"])
def test_a_run_builds_its_backbone_once(method: str, world: World, tmp_path: Path, built: list[Backbone]) -> None:
    config = group.plan([compose(str(world.preset), None, {"method.name": method})], baseline=False)[0].config
    setup = prepare(config)
    train(setup, Run.create(tmp_path / "run", config, setup.stream, setup.weights, setup.precision))
    assert built == [setup.method.backbone]


def test_the_runs_of_a_group_share_what_is_frozen(world: World, tmp_path: Path, built: list[Backbone]) -> None:
    methods = ("frozen-head", "simple-cil", "ft-seq", "lda")
    lines = {name: compose(str(world.preset), None, {"method.name": name}) for name in methods}
    group.start(group.plan_lines(lines, seeds=2), tmp_path / "runs")
    trained = [each for each in built if not each.frozen]
    assert len(trained) == 2  # one of its own for each seed
    assert len(built) == 3


def test_what_a_seed_draws_is_not_shared_with_another(world: World, tmp_path: Path, built: list[Backbone]) -> None:
    preset, options = asked(world, "simple-cil", DRAWN, {})
    lines = {"simple-cil": compose(preset, None, options | {"benchmark.class_order": "fixed"})}
    runs = group.start(group.plan_lines(lines, seeds=2), tmp_path / "runs")
    one, other = built
    assert not torch.equal(one.state_dict()["conv1.weight"], other.state_dict()["conv1.weight"])
    assert len({run.manifest()["backbone"]["sha256"] for run in runs}) == 2


class Pair(FrozenHead):
    """A method with a second backbone of its own."""

    Config = FrozenHeadConfig

    def __init__(self, config: MethodConfig, backbone: BackboneSource) -> None:
        super().__init__(config, backbone)
        self.fast = self.backbones.new()


@pytest.mark.parametrize("given", ["a factory", "a backbone"])
def test_a_method_may_hold_several(given: str) -> None:
    vit = tiny_vit()
    source = BackboneFactory(tiny_vit, tiny_vit) if given == "a factory" else vit
    pair = Pair(FrozenHeadConfig(), source)
    assert pair.backbone is not pair.fast
    assert all(torch.equal(value, pair.fast.state_dict()[name]) for name, value in pair.backbone.state_dict().items())
    assert not any(weight.requires_grad for weight in pair.backbone.parameters())
    assert all(weight.requires_grad for weight in pair.fast.parameters())
    assert set(pair.trainable()) == {f"fast.{name}" for name, _ in vit.named_parameters()}
    assert {f"fast.{name}" for name in vit.state_dict()} <= pair.state().keys()
    assert pair.backbones.frozen() is pair.backbone


def test_an_outline_takes_no_memory() -> None:
    outline = weights.factory(weights.read("embedded")).outline()
    assert {weight.device.type for weight in outline.parameters()} == {"meta"}
    assert (outline.dim, outline.input_size, outline.name) == (192, 224, "embedded")
