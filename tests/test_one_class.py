"""Tasks of one class: learned by every method that can, and refused by the others with what would help."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest

from dualprompt.config import compose
from dualprompt.errors import DualPromptError
from dualprompt.methods.base import METHODS
from dualprompt.run.folder import Run
from dualprompt.training import group
from dualprompt.training.loop import train
from dualprompt.training.setup import prepare
from sandbox import NETWORKS, World

PROMPTS = {"g_layers": [1], "e_layers": [2, 3], "g_length": 2, "e_length": 3}
SMALL: dict[str, dict[str, Any]] = {
    "anacp": {"projection": 40, "heads": 2, "samples": 8},
    "hide-prompt": {"e_layers": [2, 3], "e_length": 3, "align_epochs": 2},
    "lae": {"layers": [1, 2]},
    "slca": {"align_epochs": 2},
    "coda-prompt": {"layers": [1, 2], "components": 2, "length": 2},
    "dualprompt": PROMPTS | {"align_steps": 20},
    "dualprompt-pool": PROMPTS | {"pool_size": 3},
    "dualprompt-rp": PROMPTS | {"projection": 40},
    "dualnet": {"slow_batch": 4, "outer": 1},
    "dynaer": {"warmup_epochs": 1, "classifier_epochs": 2},
    "gdumb": {"cycles": 1},
    "klda": {"projection": 40},
    "l2p": {"pool_size": 4, "length": 2, "top_n": 2},
    "ranpac": {"projection": 40},
    "rpsnet": {"width": 2, "modules": 3, "tasks_per_path": 1},
    "s-prompts": {"length": 3, "keys": 2},
    "single-prompt": {"length": 3},
}
# Who compares the classes of a task with nothing else by default; and how they learn one class all the same.
REMEDIES: dict[str, tuple[dict[str, Any], ...]] = {
    "coda-prompt": ({"training_logits": "unmasked"},),
    "dualprompt": ({"training_logits": "unmasked"}, {"head": "gaussian"}, {"head": "ridge"}),
    "ewc": ({"training_logits": "unmasked"},),
    "frozen-head": ({"training_logits": "unmasked"},),
    **{name: ({"training_logits": "unmasked"},) for name in ("inflora", "lae", "lora", "sd-lora")},
    **{name: ({"training_logits": "unmasked"},) for name in ("dualprompt-pool", "single-prompt")},
    "ft++": (),
    "l2p": ({"training_logits": "unmasked"},),
    "lwf": ({"training_logits": "unmasked"},),
    "supsup": (),
}
ABLE = [
    *((name, {}) for name in METHODS.names() if name not in REMEDIES),
    *((name, options) for name, found in REMEDIES.items() for options in found),
    *((name, {"training_logits": "masked"}) for name in ("simple-cil", "ridge", "lda")),  # which train no logits
    ("ranpac", PROMPTS | {"first_session": "prompts"}),
    ("s-prompts", {"classifier": "shared", "training_logits": "unmasked"}),
]


def accuracies(name: str, options: dict[str, Any], world: World, folder: Path) -> list[list[float]]:
    """Learn tasks of one, two, one and two classes; return the accuracy matrix."""
    rehearses = "buffer_size" in METHODS[name].Config.model_fields
    own = SMALL.get(name, {}) | ({"buffer_size": 12} if rehearses else {}) | options
    overrides = {"method.name": name, "benchmark.tasks": [1, 2, 1, 2], "train.lr": 0.002, "train.epochs": 1}
    overrides |= NETWORKS.get(name, {})
    overrides |= {f"method.{key}": value for key, value in own.items()}
    preset = world.preset_with("singles.yaml", methods={})
    config = group.plan([compose(str(preset), None, overrides)], baseline=False)[0].config
    setup = prepare(config)
    run = Run.create(folder, config, setup.stream, setup.weights, setup.precision)
    return train(setup, run)["accuracy_matrix"]


@pytest.mark.parametrize(("name", "options"), ABLE, ids=str)
def test_one_class_is_learned(name: str, options: dict[str, Any], world: World, tmp_path: Path) -> None:
    matrix = accuracies(name, options, world, tmp_path / "run")
    assert matrix[0] == [100.0]  # the only class there is
    assert [len(row) for row in matrix] == [1, 2, 3, 4]
    assert all(math.isfinite(value) for row in matrix for value in row)


@pytest.mark.parametrize("name", REMEDIES)
def test_one_class_is_refused_where_its_logits_are_masked(name: str, world: World, tmp_path: Path) -> None:
    with pytest.raises(DualPromptError, match=re.escape(f"from which '{name}' cannot learn")) as refused:
        accuracies(name, {}, world, tmp_path / "run")
    advised = re.findall(r"set method\.(\w+): (\w+)", str(refused.value))
    assert [{key: value} for key, value in advised] == list(REMEDIES[name][:2])
    assert not (tmp_path / "run").exists()
