"""Several steps a batch, each with an optimiser of its own, in the real loop."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dualprompt.config import RunConfig, TrainConfig, compose
from dualprompt.methods.base import Batch, Phase, Prediction, Selection, Step
from dualprompt.methods.frozen_head import FrozenHead, FrozenHeadConfig
from dualprompt.run import checkpoint
from dualprompt.run.checkpoint import Checkpoints, Position
from dualprompt.run.folder import Run
from dualprompt.training.loop import train
from dualprompt.training.optimise import make_optimiser, make_optimisers
from dualprompt.training.setup import prepare
from helpers import tiny_vit
from sandbox import World

LR, SLOW = 0.05, 0.004


class Killed(BaseException):
    """What ends a run at once, as a signal would."""


class Dual(FrozenHead):
    """A slow map that learns to keep features, then a head that learns to classify what it made of them."""

    killed_at: int | None = None

    def __init__(self, config: FrozenHeadConfig, backbone: object) -> None:
        super().__init__(config, backbone)  # pyright: ignore[reportArgumentType]
        self.slow = nn.Linear(self.backbone.dim, self.backbone.dim, bias=False)
        nn.init.eye_(self.slow.weight)
        self.register_buffer("average", torch.zeros(self.backbone.dim, self.backbone.dim))
        self.seen: list[tuple[Tensor, Tensor]] = []

    def steps(self, phase: Phase) -> Sequence[Step]:
        return (
            Step(self.keep, ("slow",), name="slow", optimiser="sgd", lr=SLOW, clip=0.5, after=self.follow),
            Step(self.keep, ("slow",), name="slow", optimiser="sgd", lr=SLOW, clip=0.5),
            Step(self.loss, lambda name: name.startswith("head.")),
        )

    def keep(self, batch: Batch) -> Tensor:
        features = self.features(batch)
        return (self.slow(features).roll(1, dims=1) - features).square().mean()

    def follow(self) -> None:
        average = self.get_buffer("average")
        average.mul_(0.9).add_(self.slow.weight.detach(), alpha=0.1)

    def loss(self, batch: Batch) -> Tensor:
        self.seen.append((self.features(batch), batch.labels))
        if len(self.seen) == self.killed_at:
            raise Killed
        return self.classification_loss(self.slow(self.features(batch)), batch.labels)

    def predict(self, batch: Batch, selection: Selection | None = None) -> Prediction:
        with torch.no_grad():
            return super().predict(replace(batch, frozen=self.slow(self.features(batch))), selection)

    def load_state(self, state: dict[str, Tensor]) -> None:
        super().load_state(state)
        self.slow.weight.data.copy_(state["slow.weight"])
        self.get_buffer("average").copy_(state["average"])


def config_of(world: World) -> RunConfig:
    overrides = {"method.name": "frozen-head", "train.lr": LR, "train.schedule": "cosine", "train.epochs": 2}
    return compose(str(world.preset), None, overrides | {"checkpoint.every_seconds": 0})


def learn(world: World, folder: Path, killed_at: int | None = None) -> Dual:
    """Train it in a folder, from where it stands."""
    config = config_of(world)
    setup = prepare(config)
    method = Dual(FrozenHeadConfig(), setup.method.backbone)
    method.killed_at = killed_at
    there = folder.exists()
    run = Run(folder) if there else Run.create(folder, config, setup.stream, setup.weights, setup.precision)
    train(replace(setup, method=method), run)
    return method


@pytest.fixture(scope="module")
def learned(world: World, tmp_path_factory: pytest.TempPathFactory) -> Dual:
    return learn(world, tmp_path_factory.mktemp("steps") / "run")


def test_every_step_of_a_batch_has_its_own_loss_parameters_and_optimiser(learned: Dual) -> None:
    """The first task once more by hand, with plain PyTorch, on the same batches: the same bits."""
    steps = 2 * 4  # epochs of 13 images in batches of 4
    dim = learned.backbone.dim
    slow, average = torch.eye(dim).requires_grad_(), torch.zeros(dim, dim)
    weight, bias = torch.zeros(2, dim, requires_grad=True), torch.zeros(2, requires_grad=True)
    keeper, adam = torch.optim.SGD([slow], lr=SLOW, momentum=0.9), torch.optim.Adam([weight, bias], lr=LR)
    for number, (features, labels) in enumerate(learned.seen[:steps]):
        scale = (1 + math.cos(math.pi * number / steps)) / 2
        keeper.param_groups[0]["lr"], adam.param_groups[0]["lr"] = SLOW * scale, LR * scale
        for again in range(2):
            keeper.zero_grad()
            (F.linear(features, slow).roll(1, dims=1) - features).square().mean().backward()
            nn.utils.clip_grad_norm_([slow], 0.5)
            keeper.step()
            if again == 0:
                average.mul_(0.9).add_(slow.detach(), alpha=0.1)
        adam.zero_grad()
        F.cross_entropy(F.linear(F.linear(features, slow), weight, bias), labels).backward()
        adam.step()
    assert torch.equal(learned.head.weight[0], weight)
    assert torch.equal(learned.head.bias[0], bias)
    later = learned.seen[steps:]
    assert len(later) == 2 * steps, "and the slow map went on through two more tasks"
    assert not torch.equal(learned.slow.weight, slow)


@pytest.mark.parametrize("killed_at", [3, 8, 11])
def test_every_optimiser_goes_on_where_it_was_killed(
    killed_at: int, learned: Dual, world: World, tmp_path: Path
) -> None:
    with pytest.raises(Killed):
        learn(world, tmp_path / "run", killed_at)
    work = Checkpoints(tmp_path / "run" / "checkpoints").last()[1]
    assert work is not None
    assert {name: set(kept) for name, kept in work.optimisers.items()}["slow"] == {"slow.weight/momentum_buffer"}
    resumed = learn(world, tmp_path / "run")
    for name, value in learned.state().items():
        assert torch.equal(resumed.state()[name], value), name


def test_checkpoints_of_one_step_are_as_they_always_were(world: World, tmp_path: Path) -> None:
    """Written by hand, in the layout of before there were several."""
    kept = Checkpoints(tmp_path)
    moments = {"optimiser/head.bias.0/exp_avg": torch.ones(2), "optimiser/head.bias.0/step": torch.tensor(3.0)}
    checkpoint.write(kept.progress_path, moments | {"loss": torch.zeros(())}, asdict(Position()))
    work = kept.last()[1]
    assert work is not None
    assert work.optimisers.keys() == {""}
    assert work.optimisers[""].keys() == {"head.bias.0/exp_avg", "head.bias.0/step"}


def begun() -> Dual:
    method = Dual(FrozenHeadConfig(), tiny_vit())
    method.head.begin((0, 1), (0, 1), train_old=False)
    return method


def test_a_step_that_says_nothing_follows_the_recipe() -> None:
    method, recipe = begun(), TrainConfig(lr=0.1, weight_decay=0.02, betas=(0.5, 0.6))
    plain, own = make_optimisers(
        method,
        (Step(method.loss, ("head.bias.0",)), Step(method.loss, ("slow",), "x", betas=(0.1, 0.2), weight_decay=0.0)),
        recipe,
        lr=0.3,
    ).values()
    assert isinstance(plain, torch.optim.AdamW)
    assert not isinstance(own, torch.optim.AdamW)
    (group,) = plain.param_groups
    assert (group["lr"], group["betas"], group["param_names"]) == (0.3, (0.5, 0.6), ["head.bias.0"])
    (group,) = own.param_groups
    assert (group["lr"], group["betas"], group["param_names"]) == (0.3, (0.1, 0.2), ["slow.weight"])
    (group,) = make_optimiser(method, recipe).param_groups
    assert group["param_names"] == list(method.trainable())


def test_steps_that_share_an_optimiser_move_the_same_parameters() -> None:
    method = begun()
    with pytest.raises(ValueError, match="share an optimiser"):
        make_optimisers(method, (Step(method.loss), Step(method.loss, lr=0.1)), TrainConfig())
    with pytest.raises(ValueError, match="no slash"):
        Step(method.loss, name="a/b")
