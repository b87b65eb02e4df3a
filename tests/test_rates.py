"""Learning rates: a head that has one of its own keeps to it, through the schedule and a resumption."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from dualprompt.config import RunConfig, TrainConfig, parse
from dualprompt.errors import DualPromptError
from dualprompt.methods.base import METHODS, Batch, Method, Phase, method_config
from dualprompt.methods.finetune import FineTuneConfig, FineTuneSequential
from dualprompt.run.checkpoint import Checkpoints, Position, restore_optimisers
from dualprompt.training.optimise import make_optimiser, recipe_of, set_rates
from helpers import random_images, task_view, tiny_vit

FINE_TUNERS = [name for name in METHODS.names() if issubclass(METHODS[name].Config, FineTuneConfig)]
STEPS = 6


def begun(name: str = "ft-seq", phase: int = 0, **options: Any) -> Method:
    """A method in a phase of its second task."""
    method = METHODS[name](method_config({"name": name, **options}), tiny_vit())
    for index in range(2):
        method.begin_task(task_view(index))
    view = task_view(1)
    method.begin_phase(method.phases(view)[phase], view)
    return method


def gradients(method: Method, step: int) -> None:
    """Give every trained parameter the gradient of a batch of random images."""
    images = random_images(6, seed=step)
    method.zero_grad()
    method.loss(Batch(lambda: images, torch.arange(6))).backward()


def by_hand(parameters: list[nn.Parameter], config: TrainConfig, lr: float) -> torch.optim.Optimizer:
    if config.optimiser == "sgd":
        return torch.optim.SGD(parameters, lr=lr, momentum=0.9, weight_decay=config.weight_decay)
    if config.weight_decay:
        return torch.optim.AdamW(parameters, lr=lr, betas=config.betas, weight_decay=config.weight_decay)
    return torch.optim.Adam(parameters, lr=lr, betas=config.betas)


@pytest.mark.parametrize("schedule", ["constant", "cosine"])
@pytest.mark.parametrize("kind", [{}, {"weight_decay": 0.1}, {"optimiser": "sgd", "weight_decay": 0.1}])
@pytest.mark.parametrize("phase_lr", [None, 3e-4])
def test_head_and_backbone_step_at_their_own_rates(schedule: str, kind: dict[str, Any], phase_lr: float | None) -> None:
    config = TrainConfig.model_validate({"lr": 1e-3, "batch_size": 128, "lr_scale": "batch/256", **kind})
    config = config.model_copy(update={"schedule": schedule})
    ours, twin = begun(head_lr=0.02), begun(head_lr=0.02)
    optimiser = make_optimiser(ours, config, phase_lr)
    rates = {"backbone": 5e-4 if phase_lr is None else phase_lr, "head": 0.02}
    twins = [(by_hand(list(getattr(twin, part).parameters()), config, lr), lr) for part, lr in rates.items()]
    for step in range(STEPS):
        set_rates(optimiser, config, step / STEPS)
        gradients(ours, step)
        optimiser.step()
        gradients(twin, step)
        for each, lr in twins:
            if schedule == "cosine":
                each.param_groups[0]["lr"] = lr * (1 + math.cos(math.pi * step / STEPS)) / 2
            each.step()
    moved = {name: value for name, value in begun().state().items() if not torch.equal(value, ours.state()[name])}
    assert moved.keys() == ours.trainable().keys(), "a step that moves nothing shows nothing"
    for name, value in twin.state().items():
        assert torch.equal(ours.state()[name], value), name


def test_restarts_make_each_cosine_twice_as_long_as_the_one_before() -> None:
    """By hand, from the definition of SGDR: every cosine goes from the whole rate to almost nothing."""
    config = TrainConfig(lr=1e-3, schedule="cosine")
    optimiser = make_optimiser(begun(), config)
    for steps in (1, 3, 7, 10):  # of an epoch
        expected = []
        for length in (1, 2, 4, 8, 16, 32, 64, 128):
            expected += [(1 + math.cos(math.pi * n / (length * steps))) / 2 * 1e-3 for n in range(length * steps)]
        found = []
        for step in range(255 * steps):
            set_rates(optimiser, config, step / (255 * steps), cycles=8)
            found.append(optimiser.param_groups[0]["lr"])
        assert found == pytest.approx(expected, abs=1e-9)


def followed(config: TrainConfig, epochs: int, steps: int) -> list[float]:
    """The rates of every step of a phase."""
    optimiser, found = make_optimiser(begun(), config), []
    for step in range(epochs * steps):
        set_rates(optimiser, config, step / (epochs * steps), epochs=epochs)
        found.append(optimiser.param_groups[0]["lr"])
    return found


@pytest.mark.parametrize("steps", [1, 3, 7])
@pytest.mark.parametrize("warmup", [0, 3])
def test_a_rate_falls_at_each_milestone_and_rises_before(steps: int, warmup: int) -> None:
    config = TrainConfig(lr=0.1, schedule="steps", milestones=(29, 57, 99), gamma=0.5, warmup_epochs=warmup)
    expected = []
    for epoch in range(100):
        for step in range(steps):
            rate = 0.1 * 0.5 ** ((epoch >= 29) + (epoch >= 57) + (epoch >= 99))
            expected.append(0.1 * (epoch * steps + step) / (warmup * steps) if epoch < warmup else rate)
    assert followed(config, 100, steps) == pytest.approx(expected, rel=1e-9)


def test_other_schedules_begin_after_the_warm_up() -> None:
    steady = followed(TrainConfig(lr=0.1, warmup_epochs=2), 5, 2)
    assert steady == pytest.approx([0, 0.025, 0.05, 0.075, *[0.1] * 6])
    cosine = followed(TrainConfig(lr=0.1, schedule="cosine", warmup_epochs=2), 5, 2)
    assert cosine[:4] == pytest.approx(steady[:4])
    assert cosine[4:] == pytest.approx([0.05 * (1 + math.cos(math.pi * n / 6)) for n in range(6)])
    assert followed(TrainConfig(lr=0.1, warmup_epochs=9), 3, 1) == pytest.approx([0, 0.1 / 9, 0.2 / 9])


@pytest.mark.parametrize("nesterov", [False, True])
def test_sgd_step_by_step(nesterov: bool) -> None:
    """From the equations: v ← μ v + g + λ w, and w ← w − lr v, or w − lr (g + λ w + μ v)."""
    lr, momentum, decay = 0.1, 0.8, 0.3
    config = TrainConfig(optimiser="sgd", lr=lr, momentum=momentum, nesterov=nesterov, weight_decay=decay)
    method = begun()
    optimiser = make_optimiser(method, config)
    weight = method.trainable()["head.weight.0"]
    expected, speed = weight.detach().clone(), torch.zeros_like(weight)
    for step in range(4):
        gradients(method, step)
        assert weight.grad is not None
        gradient = weight.grad + decay * expected
        speed = momentum * speed + gradient
        expected = expected - lr * (gradient + momentum * speed if nesterov else speed)
        optimiser.step()
        torch.testing.assert_close(weight.detach(), expected)


@pytest.mark.parametrize("decay", ["decoupled", "l2"])
def test_adams_weight_decay_is_added_to_the_gradient_or_kept_apart(decay: str) -> None:
    lr, strength = 0.1, 0.3
    config = TrainConfig.model_validate({"lr": lr, "weight_decay": strength, "decay": decay})
    method = begun()
    optimiser = make_optimiser(method, config)
    weight = next(iter(method.trainable().values()))
    before = weight.detach().clone()
    gradients(method, 0)
    assert weight.grad is not None
    gradient = weight.grad + (strength * before if decay == "l2" else 0)
    optimiser.step()
    # The first step of Adam is the sign of what it is given.
    kept = before if decay == "l2" else before * (1 - lr * strength)
    torch.testing.assert_close(weight.detach(), kept - lr * gradient / (gradient.abs() + 1e-8))


def test_a_phase_may_have_a_schedule_of_its_own() -> None:
    config = TrainConfig(lr=0.1, schedule="cosine", weight_decay=0.2)
    assert recipe_of(Phase(), config) is config
    own = recipe_of(Phase(recipe={"schedule": "steps", "milestones": (15,)}), config)
    assert own == TrainConfig(lr=0.1, schedule="steps", milestones=(15,), weight_decay=0.2)
    with pytest.raises(ValueError, match="milestones"):
        recipe_of(Phase(recipe={"schedule": "steps"}), config)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"momentum": 1.0}, "less than 1"),
        ({"nesterov": True, "momentum": 0}, "momentum > 0"),
        ({"milestones": [3, 2]}, "rising order"),
        ({"milestones": [2, 2]}, "rising order"),
        ({"milestones": [0]}, "greater than or equal to 1"),
        ({"schedule": "steps"}, "needs train.milestones"),
        ({"gamma": 0}, "greater than 0"),
        ({"warmup_epochs": -1}, "greater than or equal to 0"),
        ({"rotation": 181}, "less than or equal to 180"),
        ({"jitter": [0, 0, 0, 0.6]}, "less than or equal to 0.5"),
        ({"jitter": [0, 0, 1.1, 0]}, "less than or equal to 1"),
    ],
)
def test_a_recipe_out_of_range_is_refused(values: dict[str, Any], said: str) -> None:
    with pytest.raises(DualPromptError, match=said):
        parse(RunConfig, {"benchmark": {"dataset": "mini"}, "train": values})


@pytest.mark.parametrize("name", FINE_TUNERS)
def test_every_fine_tuner_has_a_rate_for_its_head(name: str) -> None:
    phase = 1 if name == "co2l" else 0  # its head has a phase to itself
    rates = {"backbone": 1e-4, "head": 0.02}
    for options in ({}, {"train_backbone": False}):
        method = begun(name, phase, head_lr=0.02, **options)
        found = rates_of(make_optimiser(method, TrainConfig(lr=1e-4)))
        assert any(part.startswith("head.") for part in found)
        assert found == {part: rates[part.split(".")[0]] for part in method.trainable()}
    # Without it there is one rate, and one group: what was run before the option existed comes out the same.
    method = begun(name, phase, head_lr=None)
    (group,) = make_optimiser(method, TrainConfig(lr=1e-4)).param_groups
    assert (group["lr"], group["param_names"]) == (1e-4, list(method.trainable()))


def rates_of(optimiser: torch.optim.Optimizer) -> dict[str, float]:
    return {name: group["lr"] for group in optimiser.param_groups for name in group["param_names"]}


def test_only_the_head_has_the_heads_rate() -> None:
    features = begun("co2l", phase=0, projector_lr=0.003)  # backbone and projector
    own = {"backbone": 1e-4, "projector": 0.003}
    found = rates_of(make_optimiser(features, TrainConfig(lr=1e-4)))
    assert found == {name: own[name.split(".")[0]] for name in features.trainable()}


class Scattered(FineTuneSequential):
    """Every third parameter is fast, so that groups do not follow the order of the parameters."""

    def own_lr(self, name: str) -> float | None:
        """Return a rate by the name's place."""
        return 0.01 if [each for each, _ in self.named_parameters()].index(name) % 3 == 1 else None


def test_an_optimiser_in_groups_goes_on_where_it_was_saved(tmp_path: Path) -> None:
    config = TrainConfig(lr=1e-3, schedule="cosine")

    def steps(method: Method, optimiser: torch.optim.Optimizer, first: int, last: int) -> None:
        for step in range(first, last):
            set_rates(optimiser, config, step / STEPS)
            gradients(method, step)
            optimiser.step()

    def fresh() -> Method:
        method = Scattered(FineTuneConfig(), tiny_vit())
        for index in range(2):
            method.begin_task(task_view(index))
        return method

    truth = fresh()
    steps(truth, make_optimiser(truth, config), 0, STEPS)

    stopped = fresh()
    optimiser = make_optimiser(stopped, config)
    assert [name for group in optimiser.param_groups for name in group["param_names"]] != list(stopped.trainable())
    steps(stopped, optimiser, 0, 3)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save_progress(Position(), stopped.state(), {}, {"": optimiser}, torch.zeros(()))

    _, work = checkpoints.last()
    assert work is not None
    for name, parameter in stopped.trainable().items():
        assert torch.equal(work.optimisers[""][f"{name}/exp_avg"], optimiser.state[parameter]["exp_avg"]), name
    resumed = fresh()
    resumed.load_state(work.method)
    optimiser = make_optimiser(resumed, config)
    restore_optimisers({"": optimiser}, work.optimisers)
    steps(resumed, optimiser, 3, STEPS)
    for name, value in truth.state().items():
        assert torch.equal(resumed.state()[name], value), name


@pytest.mark.parametrize("kind", ["adam", "sgd"])
def test_on_a_gpu_each_group_has_a_rate_that_a_recorded_step_can_read(kind: str) -> None:
    config = TrainConfig.model_validate({"lr": 1e-3, "schedule": "cosine", "optimiser": kind})
    device = torch.device("cuda")
    with FakeTensorMode():  # shapes and devices without a GPU
        method = begun(head_lr=0.02)
        for parameter in method.parameters():
            parameter.data = torch.empty_like(parameter, device=device)
        optimiser = make_optimiser(method, config, device=device)
        rates = [group["lr"] for group in optimiser.param_groups]
        assert all(isinstance(rate, torch.Tensor) and rate.device.type == "cuda" for rate in rates)
        assert len({id(rate) for rate in rates}) == 2
        set_rates(optimiser, config, 0.5)
        assert all(group["lr"] is rate for group, rate in zip(optimiser.param_groups, rates, strict=True))


@pytest.mark.parametrize("name", FINE_TUNERS)
@pytest.mark.parametrize("value", [0, -0.01])
def test_a_rate_must_be_above_zero(name: str, value: float) -> None:
    with pytest.raises(DualPromptError, match=r"'method\.head_lr'.*greater than 0"):
        method_config({"name": name, "head_lr": value})
