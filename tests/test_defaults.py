"""A method is trained as it must be on any preset, and a table says who set what."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from dualprompt.config import compose, compose_beside, load_preset, origins
from dualprompt.methods.base import METHODS, method_config
from dualprompt.methods.finetune import FineTuneConfig
from sandbox import World, call

OWN = {
    "benchmark": {"name": "mine", "dataset": "x", "tasks": 2},
    "recipe": "mine",
    "recipes": {"mine": {"train": {"epochs": 3, "lr": 0.005, "lr_scale": "batch/256", "clip": 1.0}}},
}
FINE_TUNERS = [name for name in METHODS.names() if issubclass(METHODS[name].Config, FineTuneConfig)]


def preset(folder: Path, **changes: Any) -> str:
    path = folder / "mine.yaml"
    path.write_text(yaml.safe_dump(OWN | changes))
    return str(path)


@pytest.mark.parametrize("name", FINE_TUNERS)
def test_on_a_preset_that_never_heard_of_them_fine_tuners_keep_their_rates(name: str, tmp_path: Path) -> None:
    config = compose(preset(tmp_path), None, {"method.name": name})
    train, options = config.train, method_config(config.method)
    assert (train.lr, train.lr_scale, train.schedule) == (1e-4 if name == "gdumb" else 5e-5, "none", "cosine")
    assert isinstance(options, FineTuneConfig)
    assert options.head_lr == 0.005
    assert (train.epochs, train.clip, train.recipe) == (3, 1.0, "mine"), "the rest is the recipe's"


def test_what_has_no_values_of_its_own_follows_the_recipe(tmp_path: Path) -> None:
    for name in ("dualprompt", "frozen-head"):
        train = compose(preset(tmp_path), None, {"method.name": name}).train
        assert (train.lr, train.lr_scale, train.schedule) == (0.005, "batch/256", "constant")


def test_a_preset_is_read_anew_for_each_who_asks(tmp_path: Path) -> None:
    path = preset(tmp_path)
    first = load_preset(path)
    first["recipes"]["mine"]["train"]["lr"] = 7.0
    assert load_preset(path)["recipes"]["mine"]["train"]["lr"] == 0.005
    preset(tmp_path, benchmark=OWN["benchmark"] | {"tasks": 4})
    assert load_preset(path)["benchmark"]["tasks"] == 4


def test_each_layer_stands_above_the_one_before(tmp_path: Path) -> None:
    er = {"method.name": "er"}
    path = preset(tmp_path, methods={"er": {"head_lr": 0.1, "train": {"lr": 3e-4}}})
    config = compose(path, None, er)
    assert (config.train.lr, config.train.schedule, config.method["head_lr"]) == (3e-4, "cosine", 0.1)
    given = er | {"train.lr": 7e-4, "method.buffer_size": 5}
    assert compose(path, None, given).train.lr == 7e-4
    assert origins(path, None, given) == {
        "train.epochs": "recipe",
        "train.clip": "recipe",
        "train.lr_scale": "method",
        "train.schedule": "method",
        "method.head_lr": "preset",
        "train.lr": "command line",
        "method.buffer_size": "command line",
    }


def test_a_preset_made_for_one_method_means_its_training_values(tmp_path: Path) -> None:
    path = preset(tmp_path, method={"name": "er"})
    config = compose(path, None, {})
    assert (config.train.lr, config.train.lr_scale, config.train.schedule) == (0.005, "batch/256", "cosine")
    assert origins(path, None, {})["train.lr"] == "recipe"
    assert compose(path, None, {"method.name": "ewc"}).train.lr == 5e-5


def test_a_methods_own_rate_is_not_the_baselines(tmp_path: Path) -> None:
    given = {"method.name": "er", "train.lr": 1e-4, "train.epochs": 9}
    train = compose_beside(preset(tmp_path), None, given, "frozen-head").train
    assert (train.lr, train.epochs) == (0.005, 9)


def test_a_table_says_who_set_what(world: World, tmp_path: Path) -> None:
    methods = {"dualprompt": {"g_layers": [1], "e_layers": [2], "g_length": 2, "e_length": 3}}
    path = world.preset_with("setters.yaml", methods=methods | {"ft-seq": {"head_lr": 0.01}})
    options = ("--methods", "dualprompt,ft-seq,frozen-head:train.lr=0.1", "--seeds", 1, "--train.epochs", 1)
    command = ("table", "main", "--benchmark", path, *options, "--runs", tmp_path)
    rows = {row["method"]: row["settings_from"] for row in call(*command, "--json").json["rows"]}
    assert rows["ft-seq"]["train.lr"] == rows["ft-seq"]["train.schedule"] == "method"
    assert rows["ft-seq"]["method.head_lr"] == rows["dualprompt"]["method.g_layers"] == "preset"
    assert rows["dualprompt"]["train.lr"] == "recipe"
    assert {row["train.epochs"] for row in rows.values()} == {"command line"}
    shown = " ".join(call(*command).out.split())
    assert "not the recipe's, but the method's own: lr, lr_scale, schedule (ft-seq)" in shown
    assert "set by the preset: e_layers, e_length, g_layers, g_length (dualprompt); head_lr (ft-seq)" in shown
    assert "epochs, lr (frozen-head:train.lr=0.1)" in shown


@pytest.mark.parametrize("shape", ["recipe", "recipe with methods", "no recipe"])
def test_what_a_sweep_prints_works_where_it_says(shape: str, world: World, tmp_path: Path) -> None:
    values = yaml.safe_load(world.preset.read_text())
    if shape == "no recipe":
        values["train"] = values.pop("recipes")["plain"]["train"]
        del values["recipe"]
    elif shape == "recipe with methods":
        values["recipes"]["plain"]["methods"] = {"frozen-head": {"train": {"clip": 3.0}}, "er": {"buffer_size": 7}}
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(values, sort_keys=False))
    grid = ("--grid", "train.lr=1e-3,1e-1", "--train.epochs", 1, "--extend", 0)
    done = call("sweep", path, "--methods", "frozen-head", *grid, "--runs", tmp_path / "runs")
    assert done.code == 0, done.err
    where, lines = done.out[done.out.index("to put ") :].split(":\n", 1)
    text = path.read_text()
    if shape == "no recipe":
        assert where == "to put at the top level of the preset, in place of the methods there"
        start = text.index("methods:")
        pasted = text[:start] + lines
    else:
        replaced = ", in place of the methods there" if "methods" in shape else ""
        assert where == f"to put below recipes.plain{replaced}"
        without = yaml.safe_load(text)
        without["recipes"]["plain"].pop("methods", None)
        text = yaml.safe_dump(without, sort_keys=False)
        pasted = text.replace("  plain:\n", f"  plain:\n{lines.rstrip()}\n")
    path.write_text(pasted)
    best = call("sweep", world.preset, "--methods", "frozen-head", *grid, "--runs", tmp_path / "runs", "--json").json
    [lr] = [each["values"]["train.lr"] for each in best["tries"] if each["best"]]
    train = compose(str(path), None, {"method.name": "frozen-head"}).train
    assert train.lr == lr
    assert train.clip == (3.0 if shape == "recipe with methods" else None)
    if shape == "recipe with methods":
        assert compose(str(path), None, {"method.name": "er"}).method["buffer_size"] == 7
    assert compose(str(path), None, {}).method["g_layers"] == [1]
