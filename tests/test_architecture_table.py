"""Table 2: each line by its upper bound, last accuracy by last and mean by mean; what is not run says so."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dualprompt.config import compose, load_preset
from dualprompt.sweeps import architecture, main_table, paper
from sandbox import World, call

RESNET = "resnet18-cifar-nf2"
METHODS = "upper-bound,supsup,dualnet,rpsnet,dynaer,dualprompt"
SMALL = {
    "dualprompt": {"g_layers": [1], "e_layers": [2, 3], "g_length": 2, "e_length": 3},
    "rpsnet": {"width": 2, "modules": 2, "buffer_size": 6},
    "dualnet": {"buffer_size": 6, "outer": 1, "slow_steps": 1, "slow_batch": 4},
    "dynaer": {"warmup_epochs": 1, "classifier_epochs": 1, "buffer_size": 6, "train": {"lr": 0.01}},
    "upper-bound": {"head_lr": None, "train": {"optimiser": "sgd", "lr": 0.01}},
}


@pytest.fixture(scope="module")
def made(world: World, tmp_path_factory: pytest.TempPathFactory) -> tuple[tuple[object, ...], Any]:
    """A command that makes the table of two seeds, and what it printed."""
    plain = {"epochs": 1, "batch_size": 4}
    recipes = {"plain": {"train": plain | {"lr": 0.02}}, "scratch": {"train": plain | {"augment": "pad_crop"}}}
    benchmark = {"name": "tiny", "dataset": str(world.images), "tasks": 2}
    preset = world.preset_with("architecture.yaml", methods=SMALL, recipes=recipes, benchmark=benchmark)
    runs = tmp_path_factory.mktemp("table") / "runs"
    command = ("table", "architecture", "--benchmark", preset, "--recipe", "scratch", "--resnet", RESNET)
    command = (*command, "--methods", METHODS, "--seeds", 2, "--runs", runs)
    done = call(*command, "--json")
    assert done.code == 0, done.err
    return command, done.json


def entries_of_cifar() -> list[architecture.Entry]:
    methods = architecture.default_methods()
    return architecture.entries("split-cifar100", "short", methods, architecture.Backbones(), {})


def results(row: dict[str, Any]) -> list[dict[str, Any]]:
    return [json.loads((Path(run) / "result.json").read_text()) for run in row["runs"]]


def test_its_places_are_the_papers(made: tuple[tuple[object, ...], Any]) -> None:
    found = [(row["group"], row["method"], row["recipe"], len(row["seeds"])) for row in made[1]["rows"]]
    assert found == [
        ("ResNet-18", "upper-bound", "scratch", 2),
        ("ResNet-18", "supsup", "scratch", 2),
        ("ResNet-18", "dualnet", "scratch", 2),
        ("ResNet-18", "rpsnet", "scratch", 2),
        ("ResNet-18", "dynaer", "scratch", 2),
        ("ResNet-152", "upper-bound", None, 0),
        ("ResNet-152", "dynaer", None, 0),
        ("ViT", "upper-bound", "plain", 2),
        ("ViT", "dualprompt", "plain", 2),
    ]


def test_diff_is_like_with_like(made: tuple[tuple[object, ...], Any]) -> None:
    rows = {(row["group"], row["method"]): row for row in made[1]["rows"]}
    for (group, method), row in rows.items():
        bound = rows[group, "upper-bound"]
        if method == "upper-bound" or group == "ResNet-152":
            assert row["diff_last"] is None
            assert row["diff_mean"] is None
            continue
        mine, theirs = results(row), results(bound)
        for key, name in (("average_accuracy", "diff_last"), ("mean_over_steps", "diff_mean")):
            gaps = [b[key] - m[key] for b, m in zip(theirs, mine, strict=True)]
            assert row[name] == pytest.approx(sum(gaps) / 2)
            assert row[key] == pytest.approx(sum(m[key] for m in mine) / 2)
    assert rows["ResNet-18", "dynaer"]["diff_last"] != rows["ResNet-18", "dynaer"]["diff_mean"]


def test_what_is_added(made: tuple[tuple[object, ...], Any]) -> None:
    rows = {(row["group"], row["method"]): row for row in made[1]["rows"]}
    dynaer, first = rows["ResNet-18", "dynaer"], results(rows["ResNet-18", "dynaer"])[0]["parameters"]
    assert dynaer["added_mb"] == pytest.approx((first["backbone"] * 4 + first["kept"]["count"] * 4) / 1e6)
    assert dynaer["added_percent"] == pytest.approx(100 + 100 * first["kept"]["count"] / first["backbone"])
    assert dynaer["buffer_size"] == 6
    assert rows["ResNet-18", "upper-bound"]["added_mb"] is None
    prompts = results(rows["ViT", "dualprompt"])[0]["parameters"]["additional"]
    assert rows["ViT", "dualprompt"]["added_mb"] == pytest.approx(prompts["mb"])
    assert rows["ViT", "dualprompt"]["buffer_size"] == 0


def test_what_is_not_run_says_why_and_the_paper_stands_beside_it(made: tuple[tuple[object, ...], Any]) -> None:
    command, value = made
    missing = [row for row in value["rows"] if row["group"] == "ResNet-152"]
    assert all("ImageNet weights" in row["not_run"] for row in missing)
    assert [row["paper_accuracy"] for row in missing] == [88.54, 71.01]
    shown = call(*command, "--format", "markdown").out
    lines = [line for line in shown.splitlines() if "| ResNet-152 |" in line]
    assert len(lines) == 2
    assert all("| not run |" in line for line in lines)
    dynaer = next(line for line in shown.splitlines() if line.startswith(f"| dynaer | {RESNET}"))
    assert "| 74.64 | 5.77 | mean over steps | 2000 | 19.8 | 43.8 |" in dynaer
    assert "mix two metrics" in shown
    assert "like with like" in shown
    rows = list(csv.DictReader(call(*command, "--format", "csv").out.splitlines()))
    assert [row["method"] for row in rows] == [row["method"] for row in value["rows"]]


def test_accuracy_after_each_step_stands_below(made: tuple[tuple[object, ...], Any]) -> None:
    command, value = made
    shown = call(*command, "--format", "markdown").out.partition("**A after each step (%)**")[2]
    for row in value["rows"]:
        if not row["runs"]:
            assert row["steps"] == []
            continue
        first, last = (sum(result["accuracy_matrix"][step][0] for result in results(row)) / 2 for step in (0, 1))
        last = (last + sum(result["accuracy_matrix"][1][1] for result in results(row)) / 2) / 2
        assert row["steps"] == pytest.approx([first, last])
        assert row["steps"][-1] == pytest.approx(row["average_accuracy"])
        assert f"| {row['method']} | {row['backbone'].rpartition('/')[2]} | {first:.1f} | {last:.1f} | 2 |" in shown
    assert "authors" not in shown  # their log is of ten steps on CIFAR-100


def test_the_authors_steps_stand_beside_those_of_ten_steps_on_cifar() -> None:
    dynaer = next(each for each in entries_of_cifar() if each.method == "dynaer" and each.line)
    assert dynaer.line is not None
    result = {"accuracy_matrix": [[float(10 * step + task) for task in range(step + 1)] for step in range(10)]}
    runs = main_table.TableRow(dynaer.line, (), None)
    vars(runs)["results"] = [result]
    found = architecture.steps([architecture.Row(dynaer, runs, None)])
    assert found is not None
    ours, theirs = found.groups[0]
    assert ours[2:5] == ("0.0", "10.5", "21.0")
    assert theirs[2:-1] == tuple(f"{value:.1f}" for value in paper.DYNAER_STEPS)
    assert sum(paper.DYNAER_STEPS) / 10 == pytest.approx(75.36, abs=0.006)  # the mean and the last that they report
    benchmark = dynaer.line.config.benchmark
    supsup = next(each for each in entries_of_cifar() if each.method == "supsup")
    elsewhere: list[dict[str, Any]] = [{"dataset": "imagenet-r"}, {"train_per_class": 5}, {"tasks": 9, "first": 28}]
    for changed in ({}, *elsewhere):
        config = dynaer.line.config.model_copy(update={"benchmark": benchmark.model_copy(update=changed)})
        there = main_table.TableRow(replace(dynaer.line, config=config), (), None)
        vars(there)["results"] = [result]
        found = architecture.steps([architecture.Row(dynaer, there, None)])
        assert found is not None
        assert len(found.groups[0]) == (1 if changed else 2)
    found = architecture.steps([architecture.Row(supsup, runs, None)])
    assert found is not None
    assert len(found.groups[0]) == 1
    vars(runs)["results"] = [{"accuracy_matrix": [[50.0]]}]
    assert architecture.steps([architecture.Row(dynaer, runs, None)]) is None  # the table above has said it


def test_weights_of_a_resnet_152_are_used_where_they_are_given(world: World) -> None:
    lines = architecture.entries(
        "split-cifar100", "original", ["upper-bound", "dynaer"], architecture.Backbones(resnet152="./r152.pth"), {}
    )
    bound, dynaer = (each.line for each in lines if each.group == "ResNet-152")
    assert bound is not None
    assert dynaer is not None
    assert bound.config.backbone.name == dynaer.config.backbone.name == "./r152.pth"
    assert (bound.config.train.lr, bound.config.train.schedule, bound.config.train.warmup_epochs) == (0.01, "cosine", 0)
    assert dynaer.config.train.lr == 0.1


def test_each_method_has_the_network_of_its_authors() -> None:
    places = entries_of_cifar()
    found = {(each.group, each.label): each.line and each.line.config.backbone.name for each in places}
    assert found.keys() == paper.TABLE_2.keys()
    resnets = {method: name for (group, method), name in found.items() if group == "ResNet-18"}
    assert resnets == {
        "upper-bound": "resnet18-cifar",
        "supsup": "resnet18-cifar-nf20",
        "dualnet": "resnet18-cifar-pool",
        "rpsnet": "resnet18-cifar",
        "dynaer": "resnet18-cifar",
    }
    assert {name for (group, _), name in found.items() if group == "ViT"} == {"vit-b16-in21k"}


def test_the_lines_on_the_vit_can_be_left_out() -> None:
    methods, without = architecture.default_methods(), {"backbone.name": "none"}
    found = architecture.entries("split-cifar100", "short", methods, architecture.Backbones(), without)
    assert {each.group for each in found} == {"ResNet-18", "ResNet-152"}
    assert [each.method for each in found if each.line] == ["upper-bound", *paper.ARCHITECTURES]
    assert {each.line.config.backbone.name for each in found if each.line} >= {"resnet18-cifar", "resnet18-cifar-pool"}


def test_options_of_the_other_table_are_refused(world: World) -> None:
    refused = call("table", "architecture", "--buffers", "10")
    assert "--buffers, --against and --columns are for table main" in refused.error
    assert "has no method 'er'" in call("table", "architecture", "--methods", "er").error
    nothing = call("table", "architecture", "--methods", "dualprompt", "--backbone", "none").error
    assert "give other --methods, a ViT as --backbone" in nothing
    assert "for table architecture" in call("table", "main", "--resnet152", "x.pth", "--methods", "er").error


def test_the_papers_rows_add_up() -> None:
    """Its Diff is the bound's number less the method's, whatever the two are."""
    for (group, method), row in paper.TABLE_2.items():
        if method != "upper-bound":
            assert row.diff == pytest.approx(paper.TABLE_2[group, "upper-bound"].accuracy - row.accuracy, abs=0.006)
    assert not set(main_table.default_methods()) & set(paper.ARCHITECTURES)


@pytest.mark.parametrize("method", [*paper.ARCHITECTURES, "upper-bound"])
def test_short_is_a_tenth_of_original(method: str) -> None:
    long, short = (compose("split-cifar100", recipe, {"method.name": method}) for recipe in ("original", "short"))
    assert long.backbone.name == short.backbone.name == "resnet18-cifar"
    times = 1 if method == "dualnet" else 10  # that one sees each image once
    for key in ("epochs", "warmup_epochs"):
        assert getattr(long.train, key) == times * getattr(short.train, key)
    assert long.train.milestones == tuple(10 * each for each in short.train.milestones)
    same = {"epochs", "warmup_epochs", "milestones", "recipe"}
    assert long.train.model_dump(exclude=same) == short.train.model_dump(exclude=same)
    assert load_preset("split-cifar100")["recipe"] == "paper"
