"""Orders of classes: as numbers, names, by seed and as other codes draw them; a larger first task; all on record."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from dualprompt.config import BenchmarkConfig, compose, parse
from dualprompt.data.stream import order_of
from dualprompt.errors import DualPromptError
from dualprompt.run.identity import config_digest, digest_of
from sandbox import CLASSES, World, call

PYCIL = [68, 56, 78, 8, 23, 84, 90, 65, 74, 76]  # how PyCIL's and iCaRL's order of CIFAR-100 begins


def config(**options: Any) -> BenchmarkConfig:
    return parse(BenchmarkConfig, {"dataset": "cifar100", **options}, "benchmark")


def ordered(count: int, seed: int = 0, **options: Any) -> list[int]:
    return order_of(config(**options), seed)(count).tolist()


def test_pilots_order_is_the_one_that_pycil_prints() -> None:
    assert ordered(100, class_order="pilot-1993")[:10] == PYCIL


@given(seed=st.integers(0, 2**32 - 1), count=st.integers(1, 60))
def test_orders_of_other_codes_are_those_of_their_global_generators(seed: int, count: int) -> None:
    np.random.seed(seed)
    assert ordered(count, seed, class_order="pilot") == np.random.permutation(count).tolist()
    assert ordered(count, 5, class_order="pilot", class_order_seed=seed) == ordered(count, seed, class_order="pilot")
    order = list(range(count))
    random.seed(seed)
    random.shuffle(order)  # what CODA-Prompt does, but for seed 0
    assert ordered(count, seed, class_order="coda") == (order if seed else list(range(count)))


def test_no_global_generator_is_touched() -> None:
    np.random.seed(3)
    random.seed(3)
    before = str(np.random.get_state()), random.getstate()
    ordered(50, 9, class_order="pilot")
    ordered(50, 9, class_order="coda")
    assert (str(np.random.get_state()), random.getstate()) == before


def test_a_pinned_order_ignores_the_runs_seed() -> None:
    for order in ("pilot-7", "coda-7"):
        assert ordered(30, 1, class_order=order) == ordered(30, 2, class_order=order)
        assert not config(class_order=order).order_follows_run
        kind = order.partition("-")[0]
        assert ordered(30, 7, class_order=kind) == ordered(30, 1, class_order=order) != ordered(30, 1, class_order=kind)
        assert config(class_order=kind).order_follows_run


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"class_order": "pilot1993"}, "class_order is fixed, shuffled, pilot-SEED, coda-SEED or a list"),
        ({"class_order": "random"}, "not 'random'"),
        ({"class_order": "pilot-1", "class_order_seed": 2}, "leave benchmark.class_order_seed empty"),
        ({"class_order": [0, 1], "class_order_seed": 2}, "leave benchmark.class_order_seed empty"),
        ({"class_order_seed": 2}, "would draw nothing: set class_order: shuffled"),
        ({"class_order": {"a": 1}}, "bad value for 'benchmark.class_order'"),
        ({"first": 50}, "set benchmark.tasks too"),
        ({"first": 50, "tasks": [50, 50]}, "set benchmark.tasks too"),
        ({"first": 0, "tasks": 2}, "greater than or equal to 1"),
    ],
)
def test_bad_orders_are_refused_at_the_start(options: dict[str, Any], said: str) -> None:
    with pytest.raises(DualPromptError) as caught:
        config(**options)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_list_has_every_class_once() -> None:
    assert ordered(3, class_order=[2, 0, 1]) == [2, 0, 1]
    for order in ([0, 1], [0, 1, 1], [0, 1, 3], [0, 1, 2, 3], ["a", "b", "c"]):
        with pytest.raises(DualPromptError, match="each number from 0 to 2 once"):
            ordered(3, class_order=order)
    with pytest.raises(DualPromptError, match="below 2³²"):
        ordered(3, 2**32, class_order="pilot")


def test_what_is_not_used_changes_no_identity() -> None:
    """Runs from before these options keep their names in the store."""
    run = compose("split-cifar100", None, {})
    values = run.model_dump(mode="json")
    before = {key: value for key, value in values["benchmark"].items() if key != "first"}
    assert digest_of(values | {"benchmark": before}) == config_digest(run)
    assert config_digest(compose("split-cifar100", None, {"benchmark.first": 50})) != config_digest(run)


def tasks(world: World, tmp_path: Path, *options: object) -> tuple[list[list[str]], dict[str, Any]]:
    """Return the classes of each task of a run, and its result."""
    done = call("run", world.preset, "--out", tmp_path / "run", "--no-baseline", "--method", "simple-cil", *options)
    assert done.code == 0, done.err
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    return [task["classes"] for task in manifest["tasks"]], json.loads((tmp_path / "run" / "result.json").read_text())


def test_a_run_says_which_order_it_had(world: World, tmp_path: Path) -> None:
    names = sorted(CLASSES)
    expected = [names[i] for i in np.random.RandomState(1993).permutation(6)]
    found, result = tasks(world, tmp_path, "--benchmark.class_order", "pilot-1993")
    assert result["class_order"] == expected == [name for task in found for name in task]


def test_names_and_a_first_task(world: World, tmp_path: Path) -> None:
    names = sorted(CLASSES, reverse=True)
    options = ("--benchmark.class_order", ",".join(names), "--benchmark.first", 4, "--benchmark.tasks", 2)
    found, result = tasks(world, tmp_path, *options)
    assert result["class_order"] == names
    assert [len(task) for task in found] == [4, 1, 1]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--benchmark.class_order", "oak,ash"), "benchmark.class_order: "),
        (("--benchmark.first", 6, "--benchmark.tasks", 2), "6 of 6 classes leave none"),
        (("--benchmark.first", 3, "--benchmark.tasks", 2), "3 classes cannot be cut into 2 equal tasks"),
    ],
)
def test_mistakes_get_one_line(world: World, tmp_path: Path, options: tuple[object, ...], said: str) -> None:
    done = call("run", world.preset, "--out", tmp_path / "run", "--method", "simple-cil", *options)
    assert said in done.error
    assert not (tmp_path / "run").exists()


def test_presets_take_more_tasks_and_a_large_first_one() -> None:
    preset = compose("split-cifar100", None, {"benchmark.first": 50, "benchmark.tasks": 10}).benchmark
    assert (preset.first, preset.tasks) == (50, 10)
    assert yaml.safe_load(yaml.safe_dump(preset.model_dump(mode="json")))["first"] == 50
