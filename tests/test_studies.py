"""Every study, end to end on a tiny world: what is run on which images, and whether tables and pictures say it."""

from __future__ import annotations

import csv
import itertools
import json
import shutil
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from safetensors.numpy import load_file

from dualprompt.config import compose
from dualprompt.errors import DualPromptError
from dualprompt.report.prompt_map import Prompts, collect, plane
from dualprompt.run.folder import Run
from dualprompt.studies import STUDIES
from dualprompt.studies.diversity import within_class
from dualprompt.studies.layers import around_e, around_g
from dualprompt.studies.prompts_tsne import movement
from dualprompt.studies.study import HELD_OUT, Context, load, spread_out
from dualprompt.studies.words import span
from dualprompt.sweeps import paper
from sandbox import VIT, World, call, contents, make_world, write_weights

SHORT = ("--train.epochs", 1)


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> World:
    """A world whose backbone has enough layers for the paper's choices."""
    return deep_world(tmp_path_factory.mktemp("deep"))


def deep_world(folder: Path) -> World:
    world = make_world(folder)
    write_weights(world.weights, replace(VIT, depth=6))
    return world


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The store that the studies of this file share."""
    return tmp_path_factory.mktemp("studies") / "runs"


def study(name: str, world: World, root: Path, *options: object) -> tuple[Any, Path]:
    done = call("study", name, world.preset, "--runs", root, *SHORT, *options, "--json")
    assert done.code == 0, done.err
    folder = Path(done.json["folder"])
    assert folder.name.startswith(f"study-{name}-tiny")
    assert json.loads((folder / "study.json").read_text()) == done.json
    check_rows(done.json, folder)
    shown = call("show", folder, "--json").json
    assert (shown["finding"], shown["tables"]) == (done.json["finding"], done.json["tables"])
    return done.json, folder


def result_of(run: str | Path) -> Any:
    return json.loads((Path(run) / "result.json").read_text())


def config_of(run: str | Path) -> Any:
    return json.loads((Path(run) / "manifest.json").read_text())["config"]


def check_rows(value: Any, folder: Path) -> None:
    """Every number of every row is the mean of its runs', in JSON, CSV and Markdown."""
    for row in value["rows"]:
        assert not row["errors"]
        for key in ("average_accuracy", "forgetting", "matching_accuracy"):
            numbers = [result_of(run)[key] for run in row["runs"]]
            if None not in numbers:
                assert row[key] == pytest.approx(statistics.mean(numbers))
                assert row[f"{key}_std"] == (pytest.approx(statistics.stdev(numbers)) if len(numbers) > 1 else None)
        configs = [config_of(run)["benchmark"] for run in row["runs"]]
        wanted = ("validation", 0.2) if row["judged_on"] == "validation" else ("test", 0.0)
        assert {(config["evaluate_on"], config["validation"]) for config in configs} == {wanted}
    if value["rows"]:
        written = list(csv.DictReader((folder / "table.csv").open()))
        assert [float(row["average_accuracy"]) for row in written] == [row["average_accuracy"] for row in value["rows"]]
        markdown = (folder / "table.md").read_text()
        assert value["finding"] in markdown
        for verdict in value["verdicts"]:
            assert verdict["sentence"] in value["finding"]
            assert f"{verdict['claim']} {verdict['word']} here" in verdict["sentence"]
        tables = "".join(line for line in markdown.splitlines() if line.startswith("| "))
        explained = "± is the standard deviation over " in markdown
        assert explained == (" ± " in tables) == (value["seeds"] > 1)
        assert value["finding"] in (folder / "table.txt").read_text()
        for row in value["rows"] if value["study"] not in ("matching", "prompts-tsne", "auto") else []:
            mean = f"{row['average_accuracy']:.2f}" + (
                f" ± {row['average_accuracy_std']:.2f}" if value["seeds"] > 1 else ""
            )
            assert any(row["setting"] in line and mean in line for line in markdown.splitlines()), row
    for name in value["pictures"]:
        assert (folder / f"{name}.svg").read_text().startswith("<?xml")


def data_of(folder: Path, name: str) -> list[dict[str, str]]:
    return list(csv.DictReader((folder / f"{name}.csv").open()))


def parts(value: Any) -> dict[str, list[Any]]:
    return {part: list(rows) for part, rows in itertools.groupby(value["rows"], key=lambda row: row["part"])}


def winner(rows: list[Any]) -> Any:
    return max(rows, key=lambda row: (row["average_accuracy"], -row["forgetting"]))


@pytest.fixture(scope="module")
def positions(deep: World, root: Path) -> tuple[Any, Path]:
    return study("positions", deep, root, "--budget", 3)


def test_positions_sweep_e_alone_and_then_g_beside_the_best(positions: tuple[Any, Path]) -> None:
    value, folder = positions
    (_, e_rows), (_, g_rows), (_, tested) = parts(value).items()
    assert len(e_rows) == len(g_rows) == 3
    for row in e_rows:
        method = config_of(row["runs"][0])["method"]
        assert (method["g_layers"], len(method["e_layers"])) == ([], 1)
    best_e = winner(e_rows)
    for row in g_rows:
        method = config_of(row["runs"][0])["method"]
        assert method["e_layers"] == best_e["options"]["method.e_layers"]
        assert len(method["g_layers"]) == 1
    best = winner(g_rows)
    assert value["chosen"] == best["options"] == tested[0]["options"]
    assert tested[-1]["options"] == {"method.g_layers": [2], "method.e_layers": [5]}
    for kind, rows in (("e", e_rows), ("g", g_rows)):
        drawn = [row for row in data_of(folder, "positions") if row["line"] == rows[0]["part"]]
        assert [float(row["layer"]) for row in drawn] == [row["options"][f"method.{kind}_layers"][0] for row in rows]
        assert [float(row["average accuracy A (%)"]) for row in drawn] == [row["average_accuracy"] for row in rows]
    for rows, kind in ((e_rows, "e"), (g_rows, "g")):
        highest = max(row["average_accuracy"] for row in rows)
        top = [row["options"][f"method.{kind}_layers"][0] for row in rows if row["average_accuracy"] == highest]
        names = ", ".join(f"layer {layer}" for layer in top)
        assert f"{names} {'is best' if len(top) == 1 else 'are equal'} (A = {highest:.2f})" in value["finding"]
    (choice, *_), claims = value["verdicts"], [verdict["claim"] for verdict in value["verdicts"]]
    assert claims == [
        "the paper's choice, G 2, E 5, is the best",
        "G belongs in a shallower layer than E",
        "the top layer is the worst place of E",
        "the top layer is the worst place of G",
    ]
    if len(tested) == 2:
        gap = tested[1]["average_accuracy"] - tested[0]["average_accuracy"]
        assert choice["difference"]["mean"] == pytest.approx(gap)
    assert ">layer</text>" in (folder / "positions.svg").read_text()


def test_runs_that_are_older_than_a_metric_have_it_too(positions: tuple[Any, Path], tmp_path: Path) -> None:
    run = Path(positions[0]["rows"][0]["runs"][0])
    shutil.copytree(run, tmp_path / "old")
    now = Run(run).result()
    later = ("judged_images", "image_weighted_accuracy", "mean_over_steps")
    old = {key: value for key, value in now.items() if key not in later}
    old["anytime_average_accuracy"] = now["mean_over_steps"]
    (tmp_path / "old" / "result.json").write_text(json.dumps(old))
    assert Run(tmp_path / "old").result() == now
    assert sum(now["judged_images"]) == 6  # of 13 a task, a fifth of each class


def test_finished_runs_are_reused(positions: tuple[Any, Path], deep: World, root: Path) -> None:
    value, _ = positions
    runs = {run for row in value["rows"] for run in row["runs"]}
    before = {run: contents(Path(run)) for run in runs}
    again, _ = study("positions", deep, root, "--budget", 3)
    assert again == value
    assert {run: contents(Path(run)) for run in runs} == before


@pytest.mark.parametrize(("name", "budget"), [("positions", 3), ("lengths", 4), ("auto", 4)])
def test_a_search_never_sees_the_test_images(name: str, budget: int, deep: World, root: Path, tmp_path: Path) -> None:
    (tmp_path / "world").mkdir()
    other = deep_world(tmp_path / "world")
    rng = np.random.default_rng(0)
    for path in (other.images / "test").rglob("*.png"):
        Image.fromarray(rng.integers(0, 256, (20, 20, 3), dtype=np.uint8)).save(path)
    options = ("--budget", budget, "--seeds", 1)
    one, _ = study(name, deep, root, *options)
    two, _ = study(name, other, tmp_path / "runs", *options)
    assert one["chosen"] == two["chosen"]
    searched, tested = ([[row["average_accuracy"] for row in value["rows"] if row["judged_on"] == where]
                         for value in (one, two)] for where in ("validation", "test"))  # fmt: skip
    assert searched[0] == searched[1]
    assert tested[0] != tested[1]  # or the noise would prove nothing


def test_spans_are_the_papers_pattern() -> None:
    assert set(around_e(5, 12)) == set(paper.E_SPANS)
    assert set(around_g(2, 12)) == set(paper.G_SPANS)
    for layer in range(1, 13):
        for first, last in (*around_e(layer, 12), *around_g(layer, 12)):
            assert 1 <= first <= last <= 12
        assert {(layer, layer), (3, 5), (1, 12)} <= set(around_e(layer, 12))


def test_layers_grow_around_the_best_single_ones(positions: tuple[Any, Path], deep: World, root: Path) -> None:
    value, folder = study("layers", deep, root, "--budget", 3)
    e_single, g_single, _ = parts(positions[0]).values()
    (_, e_rows), (_, g_rows), (_, tested) = parts(value).items()
    at = winner(e_single)["options"]["method.e_layers"][0]
    tried = [row["options"]["method.e_layers"] for row in e_rows]
    assert tried == [list(range(first, last + 1)) for first, last in around_e(at, 6)[:3]]
    at = winner(g_single)["options"]["method.g_layers"][0]
    tried = [row["options"]["method.g_layers"] for row in g_rows]
    assert tried == [list(range(first, last + 1)) for first, last in around_g(at, 6)[:3]]
    best_e = winner(e_rows)["options"]["method.e_layers"]
    assert {tuple(row["options"]["method.e_layers"]) for row in g_rows} == {tuple(best_e)}
    assert tested[0]["options"] == value["chosen"] == winner(g_rows)["options"]
    for name, rows, kind in (("e-spans", e_rows, "e"), ("g-spans", g_rows, "g")):
        drawn = data_of(folder, name)
        rows.sort(key=lambda row, option=f"method.{kind}_layers": row["options"][option])
        assert [row["layers"] for row in drawn] == [span(row["options"][f"method.{kind}_layers"]) for row in rows]
        assert [float(row["average accuracy A (%)"]) for row in drawn] == [row["average_accuracy"] for row in rows]


def test_lengths_are_a_grid(deep: World, root: Path) -> None:
    value, folder = study("lengths", deep, root, "--budget", 5)
    grid, tested = parts(value).values()
    pairs = [(row["options"]["method.g_length"], row["options"]["method.e_length"]) for row in grid]
    assert pairs == [(g, e) for g in (5, 20) for e in (5, 20)]
    drawn = data_of(folder, "lengths")
    assert [(int(row["length of the G-Prompt"]), int(row["length of the E-Prompt"])) for row in drawn] == pairs
    assert [float(row["average accuracy A (%)"]) for row in drawn] == [row["average_accuracy"] for row in grid]
    svg = (folder / "lengths.svg").read_text()
    for row in grid:
        assert f">{row['average_accuracy']:.2f}<" in svg
    assert value["chosen"] == winner(grid)["options"] == tested[0]["options"]
    assert tested[-1]["options"] == {"method.g_length": 5, "method.e_length": 20}


def test_prompting_compares_pro_t_and_pre_t(deep: World, root: Path) -> None:
    value, folder = study("prompting", deep, root, "--seeds", 2)
    pro, pre = value["rows"]
    assert [config_of(row["runs"][0])["method"]["prompting"] for row in (pro, pre)] == ["pro-t", "pre-t"]
    accuracy = [[result_of(run)["average_accuracy"] for run in row["runs"]] for row in (pro, pre)]
    gaps = [b - a for a, b in zip(*accuracy, strict=True)]
    assert f"{statistics.mean(gaps):+.2f} ± {statistics.stdev(gaps):.2f} points over 2 seeds" in value["finding"]
    assert "the paper: +2.70 on split-cifar100" in value["finding"]
    assert "the paper: -0.78 on split-cifar100" in value["finding"]
    # The t quantile of two seeds is 12.71.
    margin = 12.706 * statistics.stdev(gaps) / 2**0.5
    word = "cannot be told" if abs(statistics.mean(gaps)) <= margin else "holds" if sum(gaps) > 0 else "does not hold"
    assert value["verdicts"][0]["word"] == word
    assert f"That Pre-T beats Pro-T {word} here" in value["finding"]
    drawn = [row for row in data_of(folder, "accuracy") if row["line"] == "Pre-T"]
    assert float(drawn[-1]["average accuracy A (%)"]) == pytest.approx(pre["average_accuracy"])
    assert float(drawn[-1]["spread"]) == pytest.approx(pre["average_accuracy_std"])


def test_ablation_has_the_papers_seven_rows(deep: World, root: Path) -> None:
    value, folder = study("ablation", deep, root, "--seeds", 1)
    methods = [config_of(row["runs"][0])["method"] for row in value["rows"]]
    assert methods[0]["name"] == "frozen-head"
    schedules = [config_of(row["runs"][0])["train"] | {"recipe": ""} for row in value["rows"]]
    assert all(schedule == schedules[0] for schedule in schedules)
    assert [(m["g_layers"], m["e_layers"]) for m in methods[1:]] == [
        ([2], []), ([], [5]), ([2], [5]), ([1, 2], []), ([], [3, 4, 5]), ([1, 2], [3, 4, 5]),
    ]  # fmt: skip
    table = [line for line in (folder / "table.md").read_text().splitlines() if line.startswith("| ")][2:]
    assert [float(line.split("|")[-3]) for line in table] == [27.01, 63.41, 65.10, 66.77, 63.85, 66.91, 68.13]
    accuracy = [row["average_accuracy"] for row in value["rows"]]
    results = [result_of(row["runs"][0]) for row in value["rows"]]
    for (better, worse), verdict in zip(((1, 0), (2, 1), (3, 2), (6, 3)), value["verdicts"], strict=True):
        gap = accuracy[better] - accuracy[worse]
        error = sum(
            share * (100 - share) / 9 for each in (better, worse) for share in results[each]["accuracy_matrix"][-1]
        )
        margin = 2 * error**0.5 / 3
        word = "cannot be told" if abs(gap) <= margin else "holds" if gap > 0 else "does not hold"
        assert verdict["word"] == word
        assert f"{gap:+.2f} points on one seed (two standard errors: {margin:.2f})" in verdict["sentence"]
    assert "the paper: +1.69" in value["verdicts"][1]["sentence"]
    assert all(result["judged_images"] == [9, 9, 9] for result in results)
    without_e = [line for line in table if "E" not in line.split("|")[1]]
    assert [line.split("|")[4].strip() for line in without_e] == ["–"] * 3
    assert all((row["matching_accuracy"] is None) == ("E" not in row["setting"]) for row in value["rows"])


def test_matching_judges_the_same_runs_twice(deep: World, root: Path) -> None:
    strong = ("--method.init", "wide", "--method.e_init", "fresh", "--method.e_layers", "1,2,3,4,5,6")
    value, folder = study("matching", deep, root, "--seeds", 2, *strong)
    (row,) = value["rows"]
    before = {run: contents(Path(run) / "checkpoints") for run in row["runs"]}
    gaps, shares = [], []
    for run in map(Path, row["runs"]):
        asked, told = result_of(run), json.loads((run / "eval-oracle.json").read_text())
        judged = call("eval", run, "--selection", "oracle", "--json").json
        assert told["accuracy_matrix"] == judged["accuracy_matrix"]
        assert told["matching_accuracy"] == 100
        gaps.append(told["average_accuracy"] - asked["average_accuracy"])
        confusion = np.array(asked["matching_confusion"])
        assert confusion.sum(axis=1).tolist() == [9, 9, 9]
        assert (100 * confusion.diagonal() / 9).tolist() == pytest.approx(asked["matching_matrix"][-1])
        assert np.array(told["matching_confusion"]).tolist() == (9 * np.eye(3, dtype=int)).tolist()
        shares.append(100 * confusion / 9)
    assert any(gaps)
    told = f"{statistics.mean(gaps):+.2f} ± {statistics.stdev(gaps):.2f} points over 2 seeds"
    assert f"here: {told}" in value["verdicts"][0]["sentence"]
    far = f"{statistics.mean(gaps) - 3.84:+.2f} ± {statistics.stdev(gaps):.2f} points over 2 seeds"
    assert f"here: {far}" in value["verdicts"][1]["sentence"]
    drawn = [float(each["share (%)"]) for each in data_of(folder, "confusion")]
    assert drawn == pytest.approx(np.mean(shares, axis=0).ravel().tolist())
    assert "perfect match" in (folder / "table.md").read_text()
    again, _ = study("matching", deep, root, "--seeds", 2, *strong)
    assert again == value
    assert {run: contents(Path(run) / "checkpoints") for run in row["runs"]} == before


def test_buffers_draws_curves_and_levels(deep: World, root: Path) -> None:
    value, folder = study("buffers", deep, root, "--methods", "er,dualprompt", "--buffers", "8,4")
    small, large, dualprompt = value["rows"]
    assert [config_of(row["runs"][0])["method"].get("buffer_size") for row in value["rows"]] == [4, 8, None]
    curve = [row for row in data_of(folder, "buffers") if row["line"] == "er"]
    assert [(row["images kept (buffer size)"], float(row["average accuracy A (%)"])) for row in curve] == [
        ("4", small["average_accuracy"]),
        ("8", large["average_accuracy"]),
    ]
    (level,) = [row for row in data_of(folder, "buffers") if row["line"] == "dualprompt"]
    assert float(level["average accuracy A (%)"]) == dualprompt["average_accuracy"]
    assert f"A = {dualprompt['average_accuracy']:.2f}" in value["finding"]
    for size in (4, 8):
        assert f"{size} ({size / 39:.0%})" in value["finding"]
    (shrinking,) = value["verdicts"]
    assert shrinking["claim"] == "er loses accuracy as its buffer shrinks from 8 to 4 images"
    assert shrinking["difference"]["mean"] == pytest.approx(large["average_accuracy"] - small["average_accuracy"])


def test_prompts_come_from_the_checkpoints(deep: World, root: Path) -> None:
    value, folder = study("prompts-tsne", deep, root)
    run = Run(Path(value["rows"][0]["runs"][0]))
    prompts = collect(run)
    assert prompts is not None
    files = [load_file(run.checkpoints.task_path(task)) for task in range(3)]
    for task, tensors in enumerate(files):
        assert np.array_equal(prompts.e[task].ravel(), tensors[f"bank.e_prompt.{task}"].ravel())
        assert np.array_equal(prompts.g[task].ravel(), tensors["bank.g_prompt"].ravel())  # it moves in every task
    assert prompts.e.shape == (3, 2 * 2 * 3, 16)
    assert prompts.g.shape == (3, 1 * 2 * 2, 16)
    apart = [np.linalg.norm(prompts.e[a, i] - prompts.e[b, i]) for a, b in ((0, 1), (0, 2), (1, 2)) for i in range(12)]
    length = np.mean([np.linalg.norm(vector) for task in prompts.e for vector in task])
    assert movement(prompts.e) == pytest.approx(np.mean(apart) / length)
    assert f"lie {movement(prompts.e):.2f} of their length apart" in value["finding"]
    drawn = data_of(folder, "prompts-tsne")
    assert [row["group"] for row in drawn] == [
        f"{kind}, task {task}" for kind, count in (("E", 12), ("G", 4)) for task in (1, 2, 3) for _ in range(count)
    ]
    assert plane(prompts) == plane(prompts)


def test_prompts_that_do_not_move_have_no_distance() -> None:
    still = np.tile(np.arange(1.0, 7).reshape(1, 2, 3), (4, 1, 1))
    assert movement(still) == 0
    assert movement(still[:1]) is None
    assert movement(still[:, :0]) is None
    many = plane(Prompts(np.random.default_rng(0).normal(size=(2, 900, 3)), still[:2]))
    assert [len(cloud.x) for cloud in many.clouds] == [400, 400, 2, 2]


def test_diversity_shows_the_most_diverse_classes(deep: World, root: Path) -> None:
    value, folder = study("diversity", deep, root)
    table = [line.split("|") for line in (folder / "table.md").read_text().splitlines() if line.startswith("| ")][2:]
    within = [float(row[4]) for row in table]
    assert within == sorted(within)
    drawn = [float(row["mean cosine"]) for row in data_of(folder, "diversity") if row["line"] == "same class"]
    assert drawn == pytest.approx(within, abs=5e-4)
    assert f"the most diverse class is {table[0][1].strip()} ({within[0]:.2f})" in value["finding"]
    picture = Image.open(folder / "diversity.png")
    assert picture.height < 4 * 90  # three rows
    assert value["photos"] == {"diversity.png": "training images of the most diverse classes of trees"}


def test_the_mean_cosine_of_two_images() -> None:
    vectors = np.random.default_rng(2).normal(size=(5, 4))
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    pairs = [unit[a] @ unit[b] for a in range(5) for b in range(5) if a != b]
    assert within_class(unit) == pytest.approx(np.mean(pairs))
    assert within_class(unit[:1]) == 1


def trials(folder: Path) -> list[tuple[Any, ...]]:
    import optuna

    storage = f"sqlite:///{folder / 'trials.db'}"
    (name,) = optuna.study.get_all_study_names(storage)
    found = optuna.load_study(study_name=name, storage=storage).get_trials()
    kept = [trial for trial in found if trial.state.name in ("COMPLETE", "PRUNED")]
    return [(trial.state.name, trial.params, trial.intermediate_values) for trial in kept]


def test_auto_stays_within_its_budget_and_goes_on_where_it_stopped(deep: World, tmp_path: Path) -> None:
    options = ("--seeds", 2, "--jobs", 1)
    at_once, folder = study("auto", deep, tmp_path / "once", "--budget", 10, *options)
    done = trials(folder)
    spent = sum(len(values) for _, _, values in done)
    assert spent <= 10
    assert done[0][1] == {
        "g_first": 1, "g_layers": 2, "e_first": 3, "e_layers": 3, "g_length": 5, "e_length": 20,
    }  # fmt: skip
    searched = [row for row in at_once["rows"] if row["judged_on"] == "validation"]
    assert sum(len(row["runs"]) for row in searched) == spent
    whole = [row for row in searched if len(row["runs"]) == 2]
    assert at_once["chosen"] == winner(whole)["options"]
    tested = [row for row in at_once["rows"] if row["judged_on"] == "test"]
    assert tested[0]["options"] == at_once["chosen"]
    assert [len(row["runs"]) for row in tested] == [2] * len(tested)
    for state, _, values in done:
        assert (state == "COMPLETE") == (len(values) == 2)
    drawn = [float(row["average accuracy A (%), validation"]) for row in data_of(folder, "search")]
    assert drawn[: len(searched)] == pytest.approx([row["average_accuracy"] for row in searched])

    study("auto", deep, tmp_path / "twice", "--budget", 4, *options)
    twice, folder = study("auto", deep, tmp_path / "twice", "--budget", 10, *options)
    assert trials(folder) == done
    assert twice["chosen"] == at_once["chosen"]


def test_auto_takes_up_a_trial_that_was_interrupted(deep: World, tmp_path: Path) -> None:
    import optuna

    options = ("--seeds", 1, "--budget")
    _, folder = study("auto", deep, tmp_path, *options, 1)
    storage = f"sqlite:///{folder / 'trials.db'}"
    (name,) = optuna.study.get_all_study_names(storage)
    left = optuna.load_study(study_name=name, storage=storage)
    asked = {"g_first": 2, "g_layers": 1, "e_first": 4, "e_layers": 2, "g_length": 10, "e_length": 40}
    left.enqueue_trial(asked)
    trial = left.ask()
    for kind in ("g", "e"):
        trial.suggest_int(f"{kind}_first", 1, 6)
        trial.suggest_int(f"{kind}_layers", 0 if kind == "g" else 1, 4)
        trial.suggest_categorical(f"{kind}_length", paper.LENGTHS)
    study("auto", deep, tmp_path, *options, 2)
    assert [params for _, params, _ in trials(folder)][1:] == [asked]


def test_auto_names_the_extra_that_it_needs(deep: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    error = call("study", "auto", deep.preset, "--runs", tmp_path / "runs").error
    assert "extra 'search'" in error
    assert "pip install 'dualprompt[search]'" in error


def test_other_options_do_not_overwrite_a_study(deep: World, tmp_path: Path) -> None:
    first, folder = study("prompts-tsne", deep, tmp_path)
    before = contents(folder)
    other, beside = study("prompts-tsne", deep, tmp_path, "--method.e_length", 4)
    assert folder.name == "study-prompts-tsne-tiny"
    assert beside.name == f"study-prompts-tsne-tiny-{other['question'][:8]}"
    assert contents(folder) == before
    assert study("prompts-tsne", deep, tmp_path, "--method.e_length", 4) == (other, beside)
    assert study("prompts-tsne", deep, tmp_path, "--device", "cpu") == (first, folder)  # the same question
    given = ("study", "prompts-tsne", deep.preset, "--runs", tmp_path, *SHORT, "--seeds", 2, "--out", folder)
    assert f"{folder} holds a study with other options; give another folder with --out" in call(*given).error
    assert contents(folder) == before


def test_a_failed_setting_is_shown_and_never_wins(deep: World, tmp_path: Path) -> None:
    options = ("--runs", tmp_path, *SHORT, "--train.lr", 1e30)
    done = call("study", "prompting", deep.preset, *options, "--seeds", 1, "--json")
    assert done.code == 2
    assert "2 of 2 runs failed" in done.err.splitlines()[-1]
    assert [row["average_accuracy"] for row in done.json["rows"]] == [None, None]
    assert "is not finite" in done.json["rows"][0]["errors"][0]
    search = call("study", "lengths", deep.preset, *options, "--budget", 4)
    assert "4 of 4 runs failed" in search.err.splitlines()[-1]
    # An odd length cannot be split into halves for K and V, so that only one of four settings can be run.
    options = ("--runs", tmp_path, *SHORT, "--method.length_counts", "split", "--budget", 4)
    some = call("study", "lengths", deep.preset, *options, "--json")
    assert some.json["chosen"] == {"method.g_length": 20, "method.e_length": 20}
    assert "4 of 6 runs failed" in some.err.splitlines()[-1]
    assert "L_g 5, L_e 20 failed" in some.json["finding"]
    assert some.json["verdicts"][0]["word"] == "cannot be told"
    assert "there are no runs to compare" in some.json["finding"]
    table = (tmp_path / "study-lengths-tiny" / "table.md").read_text()
    assert table.count("| failed |") == 4


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["position"], ["unknown study 'position'", "did you mean 'positions'?"]),
        (["prompting", "PRESET", "--budget", "3"], ["study prompting searches nothing", "leave --budget out"]),
        (["positions", "PRESET", "--budget", "0"], ["--budget must be at least 1", "found 0"]),
        (["lengths", "PRESET", "--budget", "3"], ["at least 4", "found 3"]),
        (["auto", "PRESET", "--budget", "1", "--seeds", "2"], ["--budget counts runs", "at least 2", "found 1"]),
        (["positions", "PRESET", "--buffers", "3"], ["are for study buffers"]),
        (["buffers", "PRESET", "--methods", "er"], ["must name dualprompt and a rehearsal method"]),
        (["buffers", "PRESET", "--methods", "dualprompt,re"], ["unknown method 're'"]),
        (["positions", "PRESET", "--benchmark.evaluate_on", "test"], ["searches on validation images only"]),
        (["prompting", "PRESET", "--seeds", "0"], ["--seeds must be at least 1", "found 0"]),
        (["prompting", "PRESET", "--seedz", "1"], ["unknown option '--seedz'", "did you mean"]),
        (["prompting", "PRESET", "--method.e_lenght", "1"], ["unknown key 'method.e_lenght'", "e_length"]),
        (["prompting", "minni"], ["unknown preset 'minni'", "did you mean 'mini'?"]),
    ],
)
def test_mistakes_are_answered_with_the_remedy(words: list[str], said: list[str], deep: World, tmp_path: Path) -> None:
    given = [str(deep.preset) if word == "PRESET" else word for word in words]
    error = call("study", *given, "--runs", tmp_path / "runs").error
    for part in said:
        assert part in error
    assert not list(tmp_path.rglob("manifest.json"))


def test_every_study_says_what_it_is() -> None:
    for name in STUDIES:
        found = load(name)
        assert found.name == name
        assert found.title
        assert found.summary
        assert found.searches == (found.mini_budget is not None)
    with pytest.raises(DualPromptError, match="unknown study"):
        load("tables")


def test_methods_of_a_reduced_benchmark_are_trained_as_its_preset_says(tmp_path: Path) -> None:
    context = Context("mini", None, {}, 1, None, tmp_path, lambda configs: [])
    for method in ("dualprompt", "frozen-head", "er", "gdumb"):
        found, usual = context.config({"method.name": method}), compose("mini", None, {"method.name": method})
        assert found.train == usual.train
        assert (found.benchmark.train_per_class, usual.benchmark.train_per_class) == (10, 20)
        assert found.backbone == usual.backbone


def test_a_setting_that_repeats_the_recipe_is_the_recipe(tmp_path: Path) -> None:
    context = Context("mini", None, {}, 1, None, tmp_path, lambda configs: [])
    repeats = {"method.prompting": "pre-t", "method.g_layers": [1, 2], "method.e_layers": [3, 4, 5]}
    assert context.config(repeats) == context.config({})
    assert context.config({}).train.recipe == "paper"
    other = context.config(repeats | {"method.prompting": "pro-t"})
    assert (other.train.recipe, other.method["prompting"]) == ("paper, changed", "pro-t")
    assert context.config(HELD_OUT).benchmark.evaluate_on == "validation"


@given(st.integers(1, 30), st.integers(1, 30), st.lists(st.integers(1, 30), max_size=2, unique=True))
def test_a_budget_spreads_over_the_layers(depth: int, budget: int, keep: list[int]) -> None:
    layers = range(1, depth + 1)
    found = spread_out(layers, budget, keep)
    assert found == sorted(set(found))
    assert len(found) == min(budget, depth)
    assert set(found) <= set(layers)
    there = [layer for layer in keep if layer in layers]
    assert set(there[:budget]) <= set(found)
    if budget >= 2 + len(there) and depth > 1:
        assert {1, depth} <= set(found)
    assert spread_out(layers, None) == list(layers)


def test_layers_are_written_as_in_the_paper() -> None:
    assert [span(layers) for layers in ((), (5,), (3, 4, 5), (1, 3))] == ["none", "5", "3–5", "1,3"]
