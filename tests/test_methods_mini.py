"""Every method on a little of `mini`, with the preset's values for it: it learns, and FT-seq forgets more."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

from dualprompt.backbones import weights
from dualprompt.config import compose
from dualprompt.methods.base import METHODS
from dualprompt.run.folder import Run
from dualprompt.training import group
from dualprompt.training.evaluate import evaluate
from dualprompt.training.loop import train
from dualprompt.training.setup import Setup, prepare

# Two tasks of three classes, 16 images of each to learn from and 20 to be judged on, 15 steps a task.
LITTLE: dict[str, Any] = {
    "benchmark.dataset": "mini-fruit",
    "benchmark.tasks": [["apple-golden", "pear", "apple-granny-smith"], ["plum", "apple-braeburn", "orange"]],
    "benchmark.train_per_class": 16,
    "backbone.input_size": 48,
    "train.epochs": 5,
    "train.batch_size": 16,
    "device": "cpu",
}
OWN: dict[str, dict[str, Any]] = {
    "anacp": {"method.projection": 200, "method.strength": 10.0},
    "aper": {"train.epochs": 3, "method.first_factor": 1},
    "co2l": {"train.epochs": 3, "method.head_epochs": 6},
    "coda-prompt": {"train.epochs": 7},
    "ease": {"train.epochs": 2},
    "er": {"train.epochs": 8},
    # What is learned so surely has little Fisher information. Its head goes at the backbone's rate, as its control's,
    # which is high, so that there is something to prevent.
    "ewc": {"method.ewc_lambda": 3e6, "method.head_lr": None, "train.lr": 5e-4},
    "gdumb": {"method.cycles": 3},
    "hide-prompt": {"train.lr": 0.02},
    "inflora": {"train.lr": 0.005, "train.epochs": 7},
    "klda": {"method.projection": 200},
    "l2p": {"method.length": 2, "method.top_n": 2, "method.pool_size": 5, "train.lr": 0.002},
    "ranpac": {"method.projection": 200},
    "dualprompt-rp": {"method.projection": 200, "method.e_layers": [3, 4, 5]},
}
# Who is not held to FT-seq, and why.
ELSEWHERE = {
    "dualprompt-pool": "it is for streams without tasks: test_online",
    "lae": "its slow average has no time to form in 15 steps: test_methods_adapters",
    "lora": "nothing but the mask keeps it from forgetting, so it forgets as much: it is the control of inflora",
    "lwf": "its first gradients are rounding, of which Adam makes full steps; in 15 of them the last digit decides: "
    "test_methods_regularised",
    "s-prompts": "a task has no time to be learned by plain SGD in 15 steps: test_methods_online",
    "sd-lora": "its sums of changes are inflora's, but for magnitudes: test_methods_adapters",
    "single-prompt": "it is for streams without tasks: test_online",
    "slca": "so soon its accuracy jumps with every epoch: test_methods_adapters",
}
# Whose measure is held to a control that has all of the method but it, trained alike.
CONTROLS = {"ewc": ("ft++", {"method.head_lr": None}), "inflora": ("lora", {})}
# Methods that train a network from scratch, in a test of their own: FT-seq has no network that they could be held to.
FROM_SCRATCH: dict[str, dict[str, Any]] = {
    "dualnet": {
        "backbone.name": "resnet18-cifar-pool-nf4",
        "train.epochs": 6,
        "train.batch_size": 6,
        "method.outer": 1,
        "method.slow_batch": 8,
    },
    "dynaer": {
        "backbone.name": "resnet18-cifar-nf8",
        "train.epochs": 8,
        "train.batch_size": 8,
        "train.lr": 0.05,
        "method.buffer_size": 48,
        "method.warmup_epochs": 1,
        "method.classifier_epochs": 10,
    },
    "rpsnet": {
        "train.epochs": 13,
        "train.batch_size": 8,
        "train.lr": 0.002,
        "method.buffer_size": 48,
        "method.width": 4,
        "method.modules": 2,
        "method.tasks_per_path": 1,
    },
    "supsup": {"backbone.name": "resnet18-cifar-nf8", "train.epochs": 10, "train.lr": 0.01},
}
Learn = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def lower_half(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first six layers of the embedded backbone: enough to tell fruit by, at half the cost."""
    found = weights.read("embedded")
    upper = tuple(f"blocks.{layer}." for layer in range(6, 12))
    tensors = {name: value for name, value in found.tensors.items() if not name.startswith(upper)}
    header = {"num_heads": "3", "mean": "0.5,0.5,0.5", "std": "0.5,0.5,0.5", "interpolation": "bicubic"}
    path = tmp_path_factory.mktemp("lower") / "half.safetensors"
    save_file(tensors, path, header)
    return path


@pytest.fixture(scope="module")
def learn(lower_half: Path, tmp_path_factory: pytest.TempPathFactory) -> Learn:
    """Return what trains a method, once; all share the images."""
    results: dict[str, dict[str, Any]] = {}
    setup: Setup | None = None
    little = LITTLE | {"backbone.name": str(lower_half)}

    def run(name: str, **options: Any) -> dict[str, Any]:
        nonlocal setup
        called = f"{name} {options}"
        if called not in results:
            own = {key if "." in key else f"method.{key}": value for key, value in options.items()}
            config = compose("mini", None, little | OWN.get(name, {}) | own | {"method.name": name})
            config = group.plan([config], baseline=False)[0].config
            setup = prepare(config, share=setup)
            folder = tmp_path_factory.mktemp("mini") / "run"
            results[called] = train(setup, Run.create(folder, config, setup.stream, setup.weights, setup.precision))
        return results[called]

    return run


def test_ft_seq_learns_each_task_and_loses_the_one_before(learn: Learn) -> None:
    (first,), (left, newest) = learn("ft-seq")["accuracy_matrix"]
    assert first > 75
    assert newest > 65
    assert left < 10


@pytest.mark.parametrize(
    "name", [name for name in METHODS.names() if name not in ("ft-seq", *ELSEWHERE, *FROM_SCRATCH)]
)
def test_ft_seq_forgets_more_than(name: str, learn: Learn) -> None:
    result, sequential = learn(name), learn("ft-seq")
    (first,), (_, newest) = result["accuracy_matrix"]
    assert first > 70, "there must be something to forget; chance is 33 %"
    assert newest > 20, "who does not learn does not forget; chance is 17 %"
    assert result["average_accuracy"] > sequential["average_accuracy"]
    assert result["forgetting"] < sequential["forgetting"] - 20
    if name in CONTROLS:  # its penalty or its directions, not only that its logits are masked
        control, options = CONTROLS[name]
        trained = {key: value for key, value in OWN[name].items() if key.startswith("train.")}
        masked = learn(control, **trained, **options)
        assert result["forgetting"] < masked["forgetting"] - 15
        assert result["average_accuracy"] > masked["average_accuracy"]


@pytest.mark.parametrize("name", FROM_SCRATCH)
def test_a_network_learns_from_scratch_by(name: str, tmp_path: Path) -> None:
    small = {"backbone.input_size": 32, "method.name": name}
    config = group.plan([compose("mini", None, LITTLE | small | FROM_SCRATCH[name])], baseline=False)[0].config
    setup = prepare(config)
    result = train(setup, Run.create(tmp_path / "run", config, setup.stream, setup.weights, setup.precision))
    (first,), (left, newest) = result["accuracy_matrix"]
    assert first > 60
    if name != "supsup":
        assert left > 40, "chance is 17 %"
        assert newest > 30
        return
    # Who is told the task has forgotten nothing; who has to find it may take one for the other.
    known = [score.accuracy for score in evaluate(setup.method, setup.feed, setup.evaluated(2), "oracle")]
    assert known[0] == first
    assert known[1] > 60
    assert left <= known[0]
    assert newest <= known[1]
