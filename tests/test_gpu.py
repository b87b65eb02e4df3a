"""On a GPU all is as on the CPU: recorded steps, batches drawn ahead, pixels that lie there; `pytest -m gpu`.

The same tests are run on the CPU, where nothing is recorded or drawn ahead, so that they are known to be right.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning_fabric import Fabric
from torch import Tensor, nn

from dualprompt.config import RunConfig, compose
from dualprompt.data.images import Images
from dualprompt.data.specs import BatchSpec
from dualprompt.data.stream import Subset
from dualprompt.data.views import View
from dualprompt.methods.base import METHODS, Batch, Method, Phase, method_config
from dualprompt.run.answers import Answers
from dualprompt.run.folder import Run
from dualprompt.training import group
from dualprompt.training.evaluate import Score, evaluate
from dualprompt.training.feed import Feed
from dualprompt.training.loader import Loader
from dualprompt.training.loop import train
from dualprompt.training.optimise import make_optimiser, set_rates
from dualprompt.training.setup import prepare
from dualprompt.training.steps import carried_out
from helpers import SIDE, noise_pictures, ragged, seeded, subset_of, task_view, tiny_resnet, tiny_vit
from sandbox import World

SMALL: dict[str, dict[str, Any]] = {
    "dualprompt": {"g_layers": [1], "e_layers": [2, 3], "g_length": 2, "e_length": 3},
    "dualprompt-rp": {"g_layers": [1], "e_layers": [2, 3], "g_length": 2, "e_length": 3, "projection": 40},
    "l2p": {"pool_size": 4, "length": 2, "top_n": 2},
    "er": {"head_lr": 0.002},
    "bic": {},
}


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def fabric(request: pytest.FixtureRequest) -> Fabric:
    return Fabric(accelerator=request.param, devices=1)


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Notes each replay of a recorded step."""
    seen: list[int] = []
    replay = torch.cuda.CUDAGraph.replay

    def counted(graph: torch.cuda.CUDAGraph) -> None:
        seen.append(1)
        replay(graph)

    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", counted)
    return seen


class Elsewhere(Feed):
    """A feed on a device that has no room for the pixels of a dataset."""

    def resident(self, images: Images) -> Tensor | None:
        return None


def feed(fabric: Fabric, kind: type[Feed] = Feed, augment: Any = "none", size: int = 4, **train: Any) -> Feed:
    values = {
        "benchmark": {"dataset": "x"},
        "evaluate": {"batch_size": size},
        "train": {"batch_size": 4, "augment": augment, **train},
    }
    view = View(SIDE, (0.5,) * 3, (0.25,) * 3, "bilinear", "resize", augment)
    return kind(RunConfig.model_validate(values), view, tiny_vit().to(fabric.device), fabric)


def pictures(labels: list[int], seed: int = 0, equal: bool = True) -> Subset:
    """Noise around a colour a class, so that there is something to learn; of one size or of several."""
    shapes = [(20, 20) if equal else (18 + i % 5, 24 - i % 3) for i in range(len(labels))]
    drawn = noise_pictures(shapes, seed)
    drawn = [(noise // 2 + 20 * label).astype(np.uint8) for noise, label in zip(drawn, labels, strict=True)]
    if equal:
        return subset_of(np.stack(drawn), labels)
    return Subset(ragged(drawn), torch.arange(len(labels)), torch.tensor(labels))


def shown(loader: Loader, epoch: int = 0, start: int = 0) -> list[Batch]:
    device = loader.feed.fabric.device
    return [loader.batch(local.spec.to(device)) for local in loader.epoch(epoch, start)]


def parts(batch: Batch, views: int = 1) -> dict[str, Tensor]:
    """Return all that a batch holds, with what it replays, on the CPU."""
    found = {"images": batch.images, "labels": batch.labels} | ({"second": batch.second} if views == 2 else {})
    found |= {name: getattr(batch, name) for name in ("frozen", "query", "noted", "noise")}
    for number, replay in enumerate(batch.replay):
        found |= {f"replay{number}.{name}": value for name, value in parts(replay, views).items()}
    return {name: value.cpu() for name, value in found.items() if value is not None}


def assert_alike(found: list[Batch], truth: list[Batch], views: int = 1) -> None:
    assert len(found) == len(truth) > 0
    for one, other in zip(found, truth, strict=True):
        mine, theirs = parts(one, views), parts(other, views)
        assert mine.keys() == theirs.keys()
        for name, value in theirs.items():
            torch.testing.assert_close(mine[name], value, rtol=1e-3, atol=1e-3, msg=lambda text, n=name: f"{n}: {text}")


PHASES = {
    "replay and noise": Phase(replay=2, noise=3),
    "two views": Phase(views=2, augment="random_resized_crop", replay=1),
}


@pytest.mark.parametrize("phase", PHASES.values(), ids=list(PHASES))
@pytest.mark.parametrize("equal", [True, False], ids=["one size", "many sizes"])
@pytest.mark.parametrize("kind", [Feed, Elsewhere], ids=["pixels there", "pixels elsewhere"])
def test_batches_are_those_of_the_cpu_wherever_pixels_lie(
    fabric: Fabric, kind: type[Feed], equal: bool, phase: Phase
) -> None:
    task = pictures([0, 1, 2] * 5, 1, equal)
    buffer = replace(pictures([7, 8, 9], 2, equal), notes=torch.arange(6.0).view(3, 2))
    loaders = [
        Loader(made, task, 0, phase, buffer=buffer)
        for made in (feed(fabric, kind), feed(Fabric(accelerator="cpu", devices=1)))
    ]
    for epoch, start in ((0, 0), (1, 2)):
        assert_alike(*(shown(loader, epoch, start) for loader in loaders), views=phase.views)
    assert [len(batch.labels) for batch in shown(loaders[0])] == [4, 4, 4, 3]


def test_drawing_ahead_changes_no_batch(fabric: Fabric) -> None:
    task, buffer = pictures([0, 1, 2] * 7, 1), pictures([7, 8, 9], 2)
    made = feed(fabric, augment="random_resized_crop")
    loader = Loader(made, task, 0, Phase(replay=1, noise=2), buffer=buffer)
    for epoch, start in ((0, 0), (1, 3)):
        order = loader._order(epoch)
        at_once = [loader._finish(loader._draw(order, epoch, step)).spec for step in range(start, loader.steps)]
        ahead = [local.spec for local in loader.epoch(epoch, start)]
        assert len(ahead) == loader.steps - start
        for one, other in zip(ahead, at_once, strict=True):
            assert one.key == other.key
            assert all(torch.equal(a, b) for (_, a), (_, b) in zip(one.named(), other.named(), strict=True))


def learned(
    world: World, folder: Path, device: str, name: str, recorded: bool
) -> tuple[list[float], dict[str, Tensor], set[str]]:
    """Return losses, state and the names of what is trained, of a whole run with recorded or with plain steps."""
    overrides = {f"method.{key}": value for key, value in SMALL[name].items()} | {"method.name": name}
    overrides |= {"device": device, "precision": "fp32", "compile": "off", "train.lr": 1e-3}
    overrides |= {"train.epochs": 4, "train.schedule": "cosine", "train.clip": 1.0}
    config = group.plan([compose(str(world.preset), None, overrides)], baseline=False)[0].config
    setup = prepare(config)
    run = Run.create(folder, config, setup.stream, setup.weights, setup.precision)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DUALPROMPT_RECORD", "1" if recorded else "0")  # the pass of frozen features is recorded too
        train(setup, run)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if line["event"] == "epoch"]
    state = {key: value.cpu().clone() for key, value in setup.method.state().items()}
    return losses, state, {key for key, _ in setup.method.named_parameters()}


@pytest.mark.parametrize("name", SMALL)
def test_recorded_steps_learn_what_plain_ones_do(
    name: str, fabric: Fabric, world: World, tmp_path: Path, replays: list[int]
) -> None:
    device = fabric.device.type
    losses, weights, trained = learned(world, tmp_path / "plain", device, name, recorded=False)
    assert not replays
    found, state, _ = learned(world, tmp_path / "recorded", device, name, recorded=True)
    assert bool(replays) == (device == "cuda")
    assert len(losses) >= 3 * 4
    assert found == pytest.approx(losses, abs=2e-3)
    assert state.keys() == weights.keys()
    for key, value in weights.items():  # on average: Adam makes a whole step of a rounding where the gradient is zero
        gap = (state[key].double() - value.double()).abs().mean() / (1 + value.double().abs().mean())
        assert float(gap) < (2e-4 if key in trained else 1e-2), key  # what is solved for magnifies roundings


def epochs_of(method: Method, made: Feed, subset: Subset) -> Callable[[int], None]:
    """Return what trains one epoch of a method's task by steps that are recorded where that is possible."""
    loader = Loader(made, subset, 0, Phase(), frozen=method.uses_frozen)
    optimiser = make_optimiser(method, made.config.train, device=made.fabric.device)

    def step(spec: BatchSpec) -> None:
        optimiser.zero_grad(set_to_none=True)
        method.loss(loader.batch(spec)).backward()
        optimiser.step()

    carried = carried_out(step, made.fabric, made.config.train.batch_size, method.capturable)
    method.train()  # once: an evaluation in between must leave things as they were

    def epoch(number: int) -> None:
        for local in loader.epoch(number):
            set_rates(optimiser, made.config.train, number / 4)
            carried(local.spec)

    return epoch


def evaluated(method: Method, made: Feed, subsets: list[Subset], recorded: bool) -> tuple[list[Score], Tensor, Tensor]:
    """Return scores, answers and how sure they were."""
    answers = Answers(subsets, [subset.labels.unique().tolist() for subset in subsets], made.fabric.device)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(method), "capturable", recorded)
        scores = evaluate(method, made, subsets, answers=answers)
    found = answers.gathered(lambda own: own)
    return scores, torch.from_numpy(found.answer), torch.from_numpy(found.probability)


@pytest.mark.parametrize("name", ["dualprompt", "l2p", "er"])
def test_evaluating_in_the_middle_of_a_task_sees_the_weights_of_that_moment(
    name: str, fabric: Fabric, replays: list[int]
) -> None:
    made, task = feed(fabric, lr=5e-3), pictures([0, 1, 2] * 6, 1)

    def begun() -> Method:
        options = method_config({"name": name, **SMALL[name]})
        method = METHODS[name](options, tiny_vit()).to(fabric.device)
        method.begin_task(task_view(0, 3, made.features(task)))
        return method

    method, twin = begun(), begun()
    learn, learn_twin = epochs_of(method, made, task), epochs_of(twin, made, task)
    seen = []
    for number in range(4):
        learn(number)
        learn_twin(number)
        if number % 2:  # the twin is not evaluated in between
            recorded, plain = (evaluated(method, made, [task], how) for how in (True, False))
            torch.testing.assert_close(recorded[2], plain[2], rtol=1e-4, atol=1e-4)
            assert recorded[1].equal(plain[1])
            assert recorded[0] == plain[0]
            copy = begun()  # knows the weights of this moment, and nothing that was remembered of others
            copy.load_state({key: value.clone() for key, value in method.state().items()})
            torch.testing.assert_close(recorded[2], evaluated(copy, made, [task], False)[2], rtol=1e-4, atol=1e-4)
            seen.append(recorded[2])
    assert not torch.allclose(seen[0], seen[1], atol=1e-3), "learning that changes nothing shows nothing"
    for key, value in twin.state().items():
        gap = (method.state()[key] - value).abs().mean()
        assert float(gap) < 2e-4, key
    assert bool(replays) == (fabric.device.type == "cuda")


def test_recording_can_be_switched_off(fabric: Fabric, replays: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    made, task = feed(fabric), pictures([0, 1, 2] * 6, 1)
    method = METHODS["er"](method_config({"name": "er"}), tiny_vit()).to(fabric.device)
    method.begin_task(task_view(0, 3))
    recorded = evaluated(method, made, [task], recorded=True)
    assert bool(replays) == (fabric.device.type == "cuda")
    count = len(replays)
    monkeypatch.setenv("DUALPROMPT_RECORD", "0")
    plain = evaluated(method, made, [task], recorded=True)
    assert len(replays) == count
    assert plain[0] == recorded[0]
    torch.testing.assert_close(plain[2], recorded[2], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["dualprompt", "dualprompt-rp", "l2p", "supsup"])
def test_answers_do_not_depend_on_the_batch_size(name: str, fabric: Fabric) -> None:
    backbone = tiny_resnet() if name == "supsup" else tiny_vit()
    method = METHODS[name](method_config({"name": name, **SMALL.get(name, {})}), backbone).to(fabric.device)
    subsets = [pictures([3 * task, 3 * task + 1, 3 * task + 2] * 6, task) for task in range(2)]
    for index, subset in enumerate(subsets):
        made = feed(fabric)
        images = made.batch(subset.images, made.fixed(subset, torch.arange(18)).to(fabric.device)).images
        view = task_view(index, 3, made.features(subset), images, subset.labels.to(fabric.device))
        method.begin_task(view)
        with torch.no_grad():
            for parameter in method.trainable().values():
                parameter.copy_(torch.randn(parameter.shape, generator=seeded(index)))
        method.end_task(view)
    scores, labels, sure = evaluated(method, feed(fabric, size=36), subsets, recorded=True)
    for size in (1, 5, 18):
        found = evaluated(method, feed(fabric, size=size), subsets, recorded=True)
        assert found[0] == scores
        assert found[1].equal(labels)
        torch.testing.assert_close(found[2], sure, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ["upper-bound", "rpsnet", "dualnet"])
def test_a_gpu_convolves_channels_last_and_finds_the_same(name: str, fabric: Fabric) -> None:
    method = METHODS[name](method_config({"name": name}), tiny_resnet(pool=name == "dualnet"))
    method.begin_task(task_view(0, 3))
    images, labels = torch.randn(8, 3, SIDE, SIDE, generator=seeded(0)), torch.zeros(8, dtype=torch.long)
    method.eval()
    with torch.no_grad():
        expected = method.predict(Batch(lambda: images, labels)).logits
    method.to(fabric.device)
    last = list[bool]()

    def look(module: nn.Module, images: tuple[Tensor]) -> None:
        last.append(images[0].is_contiguous(memory_format=torch.channels_last))

    for module in method.modules():
        if isinstance(module, nn.Conv2d):
            module.register_forward_pre_hook(look)
    with torch.no_grad():
        found = method.predict(Batch(lambda: images.to(fabric.device), labels.to(fabric.device))).logits
    assert len(last) > 8
    assert all(last) == (fabric.device.type == "cuda")
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-3, atol=1e-3)
