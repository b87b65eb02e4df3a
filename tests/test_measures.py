"""Metrics of single answers, by hand; what learning and predicting take, counted; and results that are older."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import dualprompt
from dualprompt.backbones.passes import Passes, counted
from dualprompt.research import FinishedRun
from dualprompt.run.folder import Run
from dualprompt.run.measures import NAMES, UNKNOWN, measured, of_file
from dualprompt.run.predictions import Evaluation, Predictions
from helpers import random_images, tiny_resnet, tiny_vit
from sandbox import World, call, interrupted, remains
from test_domains import draw_domain
from test_predictions import small


def told(answer: list[int], probability: list[float], known: list[int] | None = None) -> Evaluation:
    values = np.array(answer)
    return Evaluation(values, np.array(known or answer), np.full(len(values), -1), np.array(probability, np.float32))


def three_tasks() -> Predictions:
    """Two images a task, of two classes each; of those to come some are shown."""
    found = small(3)
    found = found.added(0, told([0, 0, 1, -1, 0, -1], [0.9, 0.5, 0.6, 0, 0.5, 0], [0, 1, -1, -1, -1, -1]))
    found = found.added(1, told([0, 3, 2, 3, 2, 3], [0.9, 0.5, 0.6, 0.8, 0.7, 0.2], [0, 1, 2, 3, -1, -1]))
    return found.added(2, told([5, 1, 2, 2, 4, 4], [0.37, 1.0, 0.78, 0.78, 0.9, 0.3], [0, 1, 2, 2, 4, 4]))


def test_by_hand() -> None:
    found = measured(three_tasks())
    assert found.keys() == set(NAMES)
    assert found["task_known_matrix"] == [[100], [100, 100], [100, 50, 50]]
    assert found["task_known_accuracy"] == pytest.approx(200 / 3)
    # After task 1: 0.9 beats 0.6 and 0.5, 0.5 loses to one and ties with the other. After task 2 of 8 pairs 6 are won:
    # 0.9 and 0.8 beat 0.7 and 0.2, 0.5 and 0.6 beat 0.2.
    assert found["unseen_auroc_over_tasks"] == pytest.approx([100 * 2.5 / 4, 75])
    assert found["unseen_auroc"] == pytest.approx((62.5 + 75) / 2)
    assert found["forward_transfer"] is None, "no answer can be right"
    assert found["class_accuracy"] == {"k0": 0, "k1": 100, "k2": 100, "k3": 0, "k4": 100, "k5": 0}
    bins = found["calibration"]
    assert [(place, n) for place, n in enumerate(bins["images"]) if n] == [(4, 1), (5, 1), (11, 2), (13, 1), (14, 1)]
    assert bins["accuracy"][11] == 50
    gaps = 30 + 37 + 2 * (78 - 50) + (100 - 90) + 0
    assert found["calibration_error"] == pytest.approx(gaps / 6, abs=1e-4)


def test_known_classes_in_the_next_task_have_a_forward_transfer() -> None:
    blank = small(2)
    domains = Predictions(**vars(blank) | {"classes_seen": np.array([2, 2]), "truth": np.array([0, 1, 0, 1])})
    domains = Predictions(**vars(domains) | {"classes": blank.classes[:2]})
    found = domains.added(0, told([0, 1, 0, 0], [0.9] * 4)).added(1, told([0, 1, 0, 1], [0.9] * 4))
    assert measured(found)["forward_transfer"] == pytest.approx(50 - 100 / 2)
    assert measured(found)["unseen_auroc"] is None
    unasked = domains.added(0, told([0, 1, -1, -1], [0.9] * 4)).added(1, told([0, 1, 0, 1], [0.9] * 4))
    assert measured(unasked)["forward_transfer"] is None


def test_a_single_task_and_a_file_that_is_not_there(tmp_path: Path) -> None:
    alone = measured(small(1).added(0, told([0, 0], [0.5, 1.0])))
    assert (alone["unseen_auroc"], alone["forward_transfer"], alone["task_known_accuracy"]) == (None, None, 50)
    assert of_file(tmp_path / "none") == UNKNOWN


@pytest.fixture(scope="module")
def domains(tmp_path_factory: pytest.TempPathFactory, world: World) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("measured")
    names = [draw_domain(folder / f"domain-{number}", number) for number in range(3)]
    benchmark = {"name": "domains", "dataset": names, "stream": "domain"}
    preset = world.preset_with("measured.yaml", benchmark=benchmark)
    done = call("run", preset, "--method", "lda", "--no-baseline", "--out", folder / "run")
    assert done.code == 0, done.err
    return json.loads((folder / "run" / "result.json").read_text()) | {"folder": folder / "run"}


def test_domains_have_forward_transfer_and_nothing_unseen(domains: dict[str, Any]) -> None:
    with np.load(domains["folder"] / "predictions.npz") as file:
        answer, truth, task = file["answer"], file["truth"], file["task"]
    ahead = [100 * (answer[after] == truth)[task == after + 1].mean() - 100 / 3 for after in range(2)]
    assert domains["forward_transfer"] == pytest.approx(np.mean(ahead))
    assert domains["unseen_auroc"] is None
    assert domains["task_known_matrix"] == domains["accuracy_matrix"], "every task has every class"
    assert len(set(np.load(domains["folder"] / "predictions.npz")["dataset"])) == 3


def test_passes_are_counted_by_the_share_that_is_computed() -> None:
    vit, images = tiny_vit(), random_images(3)
    with counted() as passes:
        tokens = vit.stem(images, 1)
        assert passes.forward == pytest.approx(3 / 4)
        vit.rest(tokens, 1)
        assert passes.forward == pytest.approx(3)
        with counted() as inner:
            vit(images)
        assert (inner.forward, passes.forward) == (pytest.approx(3), pytest.approx(3))
    assert passes.operations == pytest.approx(3 * vit.operations)
    vit(images)
    assert passes.forward == pytest.approx(3), "nobody counts any more"


def test_going_back_counts_once_for_prompts_and_twice_for_weights() -> None:
    vit, images = tiny_vit(), random_images(2)
    leaf = vit.stem(images, 1).requires_grad_()
    with counted() as prompted:
        vit.rest(leaf, 1)
    assert prompted.operations == pytest.approx(2 * 2 * 3 / 4 * vit.operations)
    vit.unfreeze()
    with counted() as trained:
        vit(images)
    assert trained.operations == pytest.approx(3 * 2 * vit.operations)
    with counted() as judged, torch.no_grad():
        vit(images)
    assert judged.operations == pytest.approx(2 * vit.operations)


def test_a_resnet_counts_maps_and_features_once() -> None:
    resnet, images = tiny_resnet(), random_images(2)
    for look in (resnet, resnet.maps, resnet.features):
        with counted() as passes:
            look(images)
        assert passes.forward == 2
    assert (Passes(1, 2) + Passes(1, 1)) * 2 == Passes(4, 6)


# Two epochs. A frozen feature is one pass, whatever is done with it; the query of a prompted image is one more.
TRAIN = {"frozen-head": 1, "simple-cil": 1, "dualprompt": 2 + 1, "l2p": 2 + 1, "ft-seq": 2}
PREDICT = {"frozen-head": 1, "simple-cil": 1, "dualprompt": 2, "l2p": 2, "ft-seq": 1}


@pytest.fixture(scope="module")
def costs(world: World, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("costs") / "run"
    done = call("run", world.preset, "--methods", ",".join(TRAIN), "--out", out, "--no-baseline")
    assert done.code == 0, done.err
    return {name: json.loads((out / name / "result.json").read_text())["cost"] for name in TRAIN} | {"out": out}


@pytest.mark.parametrize("name", list(TRAIN))
def test_what_learning_and_predicting_take(name: str, costs: dict[str, Any]) -> None:
    cost = costs[name]
    assert cost["train"]["passes"] == pytest.approx(TRAIN[name])
    assert cost["predict"]["passes"] == pytest.approx(PREDICT[name])
    once = cost["predict"]["gflops"] / PREDICT[name]
    # Forward and back: prompts take one pass back an epoch, weights two.
    back = {"dualprompt": 2, "l2p": 2, "ft-seq": 4}.get(name, 0)
    assert cost["train"]["gflops"] == pytest.approx((TRAIN[name] + back) * once, rel=1e-4)


def test_a_run_that_was_killed_counts_everything_once(world: World, tmp_path: Path) -> None:
    options = ("--no-baseline", "--checkpoint.every_seconds", 0)
    assert call("run", world.preset, "--out", tmp_path / "whole", *options).code == 0
    killed = interrupted(world, tmp_path / "killed", *options)
    assert call("resume", killed).code == 0
    mine, other = remains(killed)["."], remains(tmp_path / "whole")["."]
    assert mine["result"]["cost"] == other["result"]["cost"]
    assert mine["progress"]["spent"] == other["progress"]["spent"]


def test_results_from_before_are_read_and_shown(world: World, costs: dict[str, Any], tmp_path: Path) -> None:
    old = Path(shutil.copytree(costs["out"] / "l2p", tmp_path / "old"))
    now = json.loads((old / "result.json").read_text())
    later = (*NAMES, "cost", "seconds", "coda_forgetting")
    (old / "result.json").write_text(json.dumps({key: value for key, value in now.items() if key not in later}))
    (old / "predictions.npz").unlink()
    result = Run(old).result()
    assert result["coda_forgetting"] == pytest.approx(now["coda_forgetting"])
    assert [result[name] for name in NAMES] == [None] * len(NAMES)
    for command in (("show", old), ("show", old, "--columns", "all"), ("show", old, "--json"), ("report", old)):
        assert call(*command).code == 0, command


def test_shown_and_reported(costs: dict[str, Any]) -> None:
    shown = call("show", costs["out"], "--columns", "A,task-known,AUROC,train-passes,MB-trained").out
    for name in TRAIN:
        result = json.loads((costs["out"] / name / "result.json").read_text())
        [line] = [line for line in shown.splitlines() if line.startswith(f"│ {name} ")]
        keys = ("average_accuracy", "task_known_accuracy", "unseen_auroc")
        assert [cell.strip() for cell in line.strip("│").split("│")] == [
            name,
            "1",
            *(f"{result[key]:.2f}" for key in keys),
            f"{TRAIN[name]:.2f}",
            f"{result['parameters']['mb']:.2f}",
        ]
    assert "there is no column 'B'" in call("show", costs["out"], "--columns", "B").error
    assert call("report", costs["out"]).code == 0
    html = (costs["out"] / "report.html").read_text()
    for section in ("metrics", "calibration", "classes"):
        assert f'<section id="{section}">' in html
    assert (costs["out"] / "report-files" / "calibration.csv").read_text().count("\nft-seq,") >= 1


def test_python_has_them(costs: dict[str, Any]) -> None:
    found = dualprompt.load_run(costs["out"] / "dualprompt")
    assert isinstance(found, FinishedRun)
    assert found.class_accuracy.keys() == set(found.predictions.classes)
    assert found.result["cost"] == costs["dualprompt"]
