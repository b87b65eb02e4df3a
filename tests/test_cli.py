"""The command, subcommand by subcommand: what it prints, what it writes, and what it need not load."""

from __future__ import annotations

import csv
import hashlib
import json
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from dualprompt import __version__
from dualprompt.cli import split_overrides
from dualprompt.config import BenchmarkConfig, RunConfig, compose, compose_beside
from dualprompt.data.cache import Store
from dualprompt.data.sources import GROUPS
from dualprompt.data.stream import build_stream
from dualprompt.report import tables
from dualprompt.run.folder import Run
from dualprompt.training import group
from dualprompt.values import read_value
from sandbox import CLASSES, COMMAND, World, call, contents, shell, start

HEAVY = ("torch", "numpy", "matplotlib", "sklearn", "scipy", "PIL", "pydantic", "rich", "lightning_fabric")


@pytest.fixture(scope="module")
def one(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run."""
    out = tmp_path_factory.mktemp("one") / "run"
    strong = ("--method.init", "wide", "--method.e_init", "fresh")  # so that it matters which prompt is selected
    assert call("run", world.preset, "--out", out, "--recipe", "augmented", *strong).code == 0
    return out


@pytest.fixture(scope="module")
def two(world: World, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """The folder of two finished seeds, and what the command printed of them."""
    out = tmp_path_factory.mktemp("two") / "run"
    done = call("run", world.preset, "--out", out, "--seeds", 2, "--seed", 5, "--json")
    assert done.code == 0, done.err
    return out, done.json


def result_of(run: Path) -> Any:
    return json.loads((run / "result.json").read_text())


@pytest.mark.parametrize("argument", ["--help", "--version"])
def test_quick_to_start(argument: str) -> None:
    program = (
        "import sys; from dualprompt.cli import main\n"
        f"try: main([{argument!r}])\n"
        f"finally: print([m for m in {HEAVY!r} if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_version_and_help() -> None:
    assert shell("--version").out == f"dualprompt {__version__}\n"
    told = shell("--help")
    assert told.code == 0
    assert "dualprompt run mini" in told.out


def test_run_prints_one_json_object(world: World, tmp_path: Path) -> None:
    done = call("run", world.preset, "--out", tmp_path / "run", "--json")
    assert done.code == 0, done.err
    value = done.json
    assert value["run_dir"] == str(tmp_path / "run")
    assert [len(row) for row in value["accuracy_matrix"]] == [1, 2, 3]
    assert value["average_accuracy"] == pytest.approx(statistics.mean(value["accuracy_matrix"][-1]))
    assert 0 <= value["matching_accuracy"] <= 100
    S = value["accuracy_matrix"]
    drops = [max(S[t][task] for t in range(task, 2)) - S[2][task] for task in range(2)]
    assert value["forgetting"] == pytest.approx(statistics.mean(drops))
    g, e, key, head = 1 * 2 * 2 * 16, 2 * 2 * 3 * 16, 16, 2 * 16 + 2
    assert value["parameters"]["trained"] == g + 3 * (e + key + head)
    assert value["parameters"]["mb"] == pytest.approx(value["parameters"]["trained"] * 4 / 1e6)
    backbone = value["parameters"]["backbone"]
    assert value["parameters"]["percent_of_backbone"] == pytest.approx(100 * value["parameters"]["trained"] / backbone)
    assert value["baseline"]["method"] == "frozen-head"
    assert value["baseline"]["matching_accuracy"] is None
    assert value["baseline"]["parameters"]["trained"] == 3 * head
    assert all(Path(picture).is_file() for picture in value["pictures"])
    assert done.err.count("after task") == 6


def test_without_baseline_or_as_the_baseline(world: World, tmp_path: Path) -> None:
    alone = call("run", world.preset, "--out", tmp_path / "alone", "--no-baseline", "--json").json
    assert alone["baseline"] is None
    assert not (tmp_path / "alone" / "baseline").exists()
    head = call("run", world.preset, "--out", tmp_path / "head", "--method", "frozen-head", "--json").json
    assert (head["method"], head["baseline"], head["matching_matrix"]) == ("frozen-head", None, None)
    assert not (tmp_path / "head" / "key_similarity.png").exists()
    assert "frozen-head" in (tmp_path / "head" / "table.txt").read_text()


def test_the_baseline_has_training_values_of_its_own(world: World, tmp_path: Path) -> None:
    own = {"er": {"buffer_size": 5, "train": {"lr": 0.001, "schedule": "cosine"}}}
    preset = world.preset_with("baseline.yaml", methods=own)
    options = ("--train.epochs", 1, "--train.lr", 0.003, "--method.buffer_size", 4, "--seeds", 2)
    assert call("run", preset, "--method", "er", "--out", tmp_path / "run", *options).code == 0
    for seed in (0, 1):
        er, head = (Run.open(tmp_path / "run" / f"seed-{seed}" / place).config() for place in (".", "baseline"))
        assert (er.seed, head.seed) == (seed, seed)
        assert (er.train.lr, er.train.schedule, er.train.epochs) == (0.003, "cosine", 1)
        assert (head.train.lr, head.train.schedule, head.train.epochs) == (0.02, "constant", 1)
        assert (er.method["training_logits"], head.method["training_logits"]) == ("unmasked", "masked")


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"train.lr": 0.1, "train.augment": "random_resized_crop", "evaluate.view": "centre_crop"},
        {"method.e_length": 4, "seed": 3},
        {"method.training_logits": "unmasked", "benchmark.tasks": 2, "backbone.input_size": 32},
    ],
)
@pytest.mark.parametrize("recipe", ["paper", "official"])
def test_the_baseline_of_dualprompt_is_trained_as_dualprompt_is(recipe: str, overrides: dict[str, Any]) -> None:
    config = compose("split-cifar100", recipe, overrides)
    beside = compose_beside("split-cifar100", recipe, overrides, group.BASELINE)
    method, baseline = (member.config for member in group.plan([config], beside))
    assert baseline.model_copy(update={"method": method.method}) == method
    logits = overrides.get("method.training_logits", "masked")
    assert baseline.method == {"name": "frozen-head", "training_logits": logits}
    assert [method, baseline] == [member.config for member in group.plan([config], baseline=True)]


def test_tasks_of_one_class_are_refused_for_the_baseline_too_before_anything_is_learned(
    world: World, tmp_path: Path
) -> None:
    command = ("run", world.preset, "--method", "er", "--out", tmp_path / "run", "--benchmark.tasks", "[1, 2, 3]")
    assert "has one class" in call(*command, "--train.lr", 0.001).error
    assert not (tmp_path / "run").exists()
    assert call(*command, "--train.lr", 0.001, "--method.training_logits", "unmasked").code == 0
    assert Run.open(tmp_path / "run" / "baseline").config().method["training_logits"] == "unmasked"


@pytest.mark.parametrize("options", [("dualprompt-rp", "projection", 60), ("dualprompt", "head", "ridge")])
def test_tasks_of_one_class_are_learned_where_the_head_is_solved_for(
    options: tuple[str, str, object], world: World, tmp_path: Path
) -> None:
    method, option, value = options
    command = (
        "run",
        world.preset,
        "--method",
        method,
        f"--method.{option}",
        value,
        "--method.e_layers",
        "2,3",
        "--benchmark.tasks",
        "[1, 2, 3]",
    )
    beside = call(*command, "--out", tmp_path / "run")
    assert "has one class, from which 'frozen-head' cannot learn with masked logits" in beside.error
    done = call(*command, "--no-baseline", "--train.epochs", 2, "--out", tmp_path / "run")
    assert done.code == 0, done.err
    run = Run.open(tmp_path / "run")
    trained = {line["task"] for line in run.lines() if line["event"] == "epoch"}
    assert trained == {2, 3}
    assert [len(row) for row in run.result()["accuracy_matrix"]] == [1, 2, 3]


def test_overrides_and_flags(world: World, tmp_path: Path) -> None:
    done = call(
        "run", world.preset, "--out", tmp_path / "run", "--no-baseline", "--seed", "7", "--train.epochs", "1",
        "--train.betas=0.8,0.9", "--method.e_layers", "[3]", "--method.g_layers", "1,2", "--benchmark.tasks", "4,2",
        "--method.prompting=pro-t", "--evaluate.batch_size=5", "--json",
    )  # fmt: skip
    assert done.code == 0, done.err
    config = json.loads((tmp_path / "run" / "manifest.json").read_text())["config"]
    assert config["seed"] == 7
    assert (config["train"]["epochs"], config["train"]["betas"]) == (1, [0.8, 0.9])
    assert (config["method"]["e_layers"], config["method"]["g_layers"]) == ([3], [1, 2])
    assert config["method"]["prompting"] == "pro-t"
    assert config["method"]["e_length"] == 3  # of the preset
    assert config["benchmark"]["tasks"] == [4, 2]
    assert config["evaluate"]["batch_size"] == 5
    assert [len(row) for row in done.json["accuracy_matrix"]] == [1, 2]


def test_own_options_of_a_preset_count(world: World, tmp_path: Path) -> None:
    preset = world.preset_with("own.yaml", method={"e_length": 1, "keys": "mean"})
    assert call("run", preset, "--out", tmp_path / "run", "--no-baseline", "--method.g_length", 4).code == 0
    method = json.loads((tmp_path / "run" / "manifest.json").read_text())["config"]["method"]
    assert (method["name"], method["e_length"], method["keys"]) == ("dualprompt", 1, "mean")
    assert (method["g_length"], method["g_layers"]) == (4, [1])


def test_values_are_read_as_yaml() -> None:
    texts = ("3", "0.5", "true", "null", "a", "1,2", "[1, 2]", "[[a, b], [c]]", "a,b", "'a, b'")
    values = [3, 0.5, True, None, "a", [1, 2], [1, 2], [["a", "b"], ["c"]], ["a", "b"], "a, b"]
    assert [read_value(text) for text in texts] == values
    taken, rest = split_overrides(["run", "my.yaml", "--a.b", "1", "--out=x.y", "--c.d=2,3", "--json"])
    assert taken == {"a.b": 1, "c.d": [2, 3]}
    assert rest == ["run", "my.yaml", "--out=x.y", "--json"]


def test_manifest(one: Path, world: World) -> None:
    manifest = json.loads((one / "manifest.json").read_text())
    assert manifest["dualprompt"] == __version__
    assert manifest["seed"] == 0
    assert manifest["config"]["train"]["augment"] == "random_resized_crop"
    assert manifest["config"]["method"]["selection"] == "query"
    assert manifest["identity"]["weights"] == hashlib.sha256(world.weights.read_bytes()).hexdigest()
    assert manifest["backbone"]["sha256"] == manifest["identity"]["weights"]
    assert manifest["backbone"]["mean"] == [0.5, 0.5, 0.5]
    assert len(manifest["identity"]["data"]) == 64
    assert manifest["versions"].keys() >= {"torch", "numpy", "safetensors", "python", "platform"}
    assert manifest["git"] is None or len(manifest["git"]["commit"]) == 40
    assert manifest["skipped_images"] == []
    assert manifest["precision"] == "float32"
    assert [task["classes"] for task in manifest["tasks"]] == [list(CLASSES[i : i + 2]) for i in (0, 2, 4)]
    assert [(task["train"], task["test"]) for task in manifest["tasks"]] == [(13, 9)] * 3


def test_the_manifest_has_the_command_line(world: World, tmp_path: Path) -> None:
    out = tmp_path / "a run"
    life = start(tmp_path / "log", "run", world.preset, "--out", out, "--no-baseline", "--train.epochs", 1)
    assert life.end() == 0, life.text
    command = json.loads((out / "manifest.json").read_text())["command"]
    assert command == f"{COMMAND} run {world.preset} --out '{out}' --no-baseline --train.epochs 1"


def test_tables_and_pictures(one: Path) -> None:
    for folder, name in ((one, "dualprompt"), (one / "baseline", "frozen-head")):
        result = result_of(folder)
        rows = list(csv.reader((folder / "accuracy_matrix.csv").open()))
        assert rows[0] == ["after_task", "task_1", "task_2", "task_3"]
        assert [[float(value) for value in row[1:]] for row in rows[1:]] == result["accuracy_matrix"]
        (row,) = csv.DictReader((folder / "metrics.csv").open())
        assert (row["method"], row["seed"]) == (name, "0")
        assert float(row["average_accuracy"]) == result["average_accuracy"]
        assert int(row["trained_parameters"]) == result["parameters"]["trained"]
        text = (folder / "table.txt").read_text()
        assert f"{result['average_accuracy']:.2f}" in text
        assert f"{result['accuracy_matrix'][1][1]:.1f}" in text
        for picture in ("accuracy_matrix.png", "curves.png"):
            assert_picture(folder / picture)
    assert_picture(one / "key_similarity.png")
    assert_picture(one / "comparison.png")
    assert [row["method"] for row in csv.DictReader((one / "comparison.csv").open())] == ["dualprompt", "frozen-head"]
    text = (one / "comparison.txt").read_text()
    assert "dualprompt" in text
    assert "frozen-head" in text
    together = json.loads((one / "comparison.json").read_text())
    assert together["baseline"]["accuracy_matrix"] == result_of(one / "baseline")["accuracy_matrix"]


def assert_picture(path: Path) -> None:
    with Image.open(path) as image:
        assert image.format == "PNG"
        image.load()
        assert min(image.size) > 150
        colours = image.convert("RGB").getcolors(1 << 20)
        assert colours is None or len(colours) > 10


def test_seeds(two: tuple[Path, Any]) -> None:
    out, value = two
    assert sorted(path.name for path in out.iterdir() if path.is_dir()) == ["seed-5", "seed-6"]
    results = [result_of(out / seed) for seed in ("seed-5", "seed-6")]
    assert [result["seed"] for result in results] == value["seed"] == [5, 6]
    assert results[0]["matching_matrix"] != results[1]["matching_matrix"]
    for key in ("average_accuracy", "forgetting", "matching_accuracy"):
        numbers = [result[key] for result in results]
        assert value[key] == pytest.approx(statistics.mean(numbers))
        assert value[f"{key}_std"] == pytest.approx(statistics.stdev(numbers))
    assert value["accuracy_matrix"][2][1] == pytest.approx(
        statistics.mean(result["accuracy_matrix"][2][1] for result in results)
    )
    assert value["baseline"]["seed"] == [5, 6]
    assert (
        f"{value['matching_accuracy']:.2f} ± {value['matching_accuracy_std']:.2f}"
        in (out / "comparison.txt").read_text()
    )


def test_show(one: Path, two: tuple[Path, Any]) -> None:
    before = contents(one)
    shown = call("show", one)
    assert (shown.code, shown.err) == (0, "")
    for text in ("accuracy matrix of dualprompt", "accuracy matrix of frozen-head", str(one / "comparison.png")):
        assert text in shown.out
    value = call("show", one, "--json").json
    assert value["accuracy_matrix"] == result_of(one)["accuracy_matrix"]
    assert value["baseline"]["average_accuracy"] == result_of(one / "baseline")["average_accuracy"]
    assert contents(one) == before
    out, printed = two
    assert call("show", out, "--json").json == printed
    single = call("show", out / "seed-6", "--json").json
    assert single["average_accuracy"] == result_of(out / "seed-6")["average_accuracy"]


def test_eval(one: Path) -> None:
    result = result_of(one)
    query = call("eval", one, "--selection", "query", "--json").json
    assert query == result
    assert call("eval", one, "--json").json == result
    oracle = call("eval", one, "--selection", "oracle", "--json").json
    assert oracle["matching_accuracy"] == 100
    assert oracle["matching_matrix"] == [[100.0] * n for n in (1, 2, 3)]
    assert oracle["selection"] == "oracle"
    assert oracle["accuracy_matrix"] != result["accuracy_matrix"]
    assert json.loads((one / "eval-oracle.json").read_text()) == oracle
    both = call("eval", one, "--selection", "oracle,batch_vote", "--json").json
    assert both["selections"]["oracle"] == oracle
    assert both["selections"]["batch_vote"]["selection"] == "batch_vote"
    printed = call("eval", one, "--selection", "batch_vote", "--device", "cpu").out
    assert "leaks the task" in printed
    assert result_of(one) == result


def test_eval_of_the_baseline_has_no_selection(one: Path) -> None:
    assert call("eval", one / "baseline", "--json").json == result_of(one / "baseline")
    error = call("eval", one / "baseline", "--selection", "oracle").error
    assert error == "method 'frozen-head' has no selection 'oracle'; it offers: none, it selects no prompt"
    assert "it offers: query, batch_vote, oracle" in call("eval", one, "--selection", "orcale").error


@pytest.mark.parametrize(
    ("what", "name"),
    [
        ("methods", "dualprompt"),
        ("methods", "frozen-head"),
        ("benchmarks", "cifar100"),
        ("benchmarks", "5-datasets"),
        ("benchmarks", "mini"),
        ("backbones", "embedded"),
        ("backbones", "vit-b16-in21k"),
        ("presets", "mini"),
        ("presets", "split-imagenet-r"),
    ],
)
def test_list(what: str, name: str) -> None:
    rows = call("list", what, "--json").json
    assert name in [row["name"] for row in rows]
    table = call("list", what)
    assert table.code == 0
    assert name in table.out


@pytest.mark.parametrize("form", [(), ("--json",)])
def test_the_output_may_be_cut_off(form: tuple[str, ...]) -> None:
    """As `dualprompt list presets | head -1` does."""
    command = [COMMAND, "list", "presets", *form]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout
        assert process.stderr
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode in (1, 141)  # rich answers a broken pipe by itself, with 1


def test_eval_of_a_group_judges_every_seed_beside_the_baseline(two: tuple[Path, Any]) -> None:
    folder, _ = two
    found = call("eval", folder, "--selection", "query,oracle", "--json").json["results"]
    assert [(result["seed"], result["selection"]) for result in found] == [
        (seed, selection) for seed in (5, 6) for selection in ("query", "oracle")
    ]
    for result in found:
        if result["selection"] == "query":
            truth = json.loads((folder / f"seed-{result['seed']}" / "result.json").read_text())
            assert result["accuracy_matrix"] == truth["accuracy_matrix"]
    table = call("eval", folder, "--selection", "oracle").out
    assert "accuracy matrix of dualprompt (oracle), seed 6" in table
    assert "frozen-head" in table


def test_a_group_that_is_not_finished_names_its_own_folder(two: tuple[Path, Any], tmp_path: Path) -> None:
    folder = tmp_path / "group"
    shutil.copytree(two[0], folder)
    (folder / "seed-6" / "baseline" / "result.json").unlink()
    before = contents(folder)
    for command in ("show", "eval"):
        assert call(command, folder).error.endswith(f"continue it with: dualprompt resume {folder}")
    assert contents(folder) == before


def test_a_changed_recipe_does_not_keep_its_name(world: World, tmp_path: Path) -> None:
    def label(*options: str) -> str:
        out = tmp_path / "-".join(["run", *options])
        return call("run", world.preset, "--out", out, "--no-baseline", "--json", *options).json["recipe"]

    assert label("--seed", "3", "--benchmark.skip_bad", "true") == "plain"
    assert label("--train.epochs", "1") == "plain, changed"
    assert label("--method.e_length", "1") == "plain, changed"


def test_precision_is_an_option_and_stays(world: World, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert call("run", world.preset, "--out", run, "--no-baseline", "--precision", "bf16").code == 0
    manifest = json.loads((run / "manifest.json").read_text())
    assert (manifest["config"]["precision"], manifest["precision"]) == ("bf16", "bfloat16")
    # A run that left the choice to the machine keeps what it began with when another machine continues it.
    auto = RunConfig.model_validate(manifest["config"] | {"precision": "auto"})
    assert group.elsewhere_config(run, auto, {"device": "cpu"}).precision == "bf16"


def test_a_run_begun_with_relative_paths_goes_on_from_any_directory(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(world.folder)
    preset = world.preset_with("relative.yaml", benchmark={"name": "r", "dataset": "trees", "tasks": 3})
    options = ("--backbone", world.weights.name, "--no-baseline", "--train.epochs", "1")
    done = call("run", preset.name, "--out", tmp_path / "run", *options, "--json")
    assert done.code == 0, done.err
    monkeypatch.chdir(tmp_path)
    again = call("eval", "run", "--selection", "query", "--json")
    assert again.code == 0, again.err
    assert again.json["accuracy_matrix"] == done.json["accuracy_matrix"]


def test_names_are_shown_as_they_are(world: World, tmp_path: Path) -> None:
    name = "my [/b] photos, $5 \\x $6"
    done = call("run", world.preset, "--out", tmp_path / "run", "--no-baseline", "--benchmark.name", f"'{name}'")
    assert done.code == 0, done.err
    assert name in done.out
    Image.open(tmp_path / "run" / "accuracy_matrix.png").verify()


def test_a_group_of_datasets_is_a_task_for_each_member(tmp_path: Path) -> None:
    config = BenchmarkConfig(dataset="mini", train_per_class=1)
    stream = build_stream(config, 0, Store(16, keep_aspect=False))
    assert [task.name for task in stream.experiences] == list(GROUPS["mini"])


def test_a_narrow_terminal_gets_fewer_columns(one: Path) -> None:
    result = result_of(one)
    assert tables.wide(tables.headline([result], brief=True)) <= 80
    assert f"{result['average_accuracy']:.2f}" in tables.text(tables.headline([result], brief=True))


def test_tasks_of_one_class_can_be_learned_unmasked_and_the_baseline_follows(world: World, tmp_path: Path) -> None:
    options = ("--benchmark.tasks", "[1, 2, 3]", "--method.training_logits", "unmasked")
    assert call("run", world.preset, "--out", tmp_path / "run", *options).code == 0
    manifest = json.loads((tmp_path / "run" / "baseline" / "manifest.json").read_text())
    assert manifest["config"]["method"] == {"name": "frozen-head", "training_logits": "unmasked"}


def test_runs_are_listed_with_what_they_came_to(world: World, tmp_path: Path) -> None:
    small = ["--train.epochs", "1", "--methods", "simple-cil,frozen-head"]
    assert call("run", world.preset, *small, "--seeds", "2", "--out", tmp_path / "runs" / "two").code == 0
    assert call("run", world.preset, "--method", "lda", "--no-baseline", "--out", tmp_path / "runs" / "one").code == 0
    (tmp_path / "runs" / "notes").mkdir()
    (tmp_path / "runs" / "broken").mkdir()
    (tmp_path / "runs" / "broken" / "manifest.json").write_text("{")
    listed = {entry["name"]: entry for entry in call("list", "runs", tmp_path / "runs", "--json").json}
    assert listed.keys() == {"one", "two", "broken"}
    assert listed["two"]["methods"] == ["simple-cil", "frozen-head"]
    assert [listed["two"][key] for key in ("seeds", "finished", "runs")] == [2, 4, 4]
    shown = call("show", tmp_path / "runs" / "one", "--json").json
    found = shown["results"][0] if "results" in shown else shown
    assert listed["one"]["average_accuracy"] == {"lda": found["average_accuracy"]}
    assert "manifest.json" in listed["broken"]["error"]
    told = call("list", "runs", tmp_path / "runs").out
    assert f"lda {found['average_accuracy']:.2f}" in told
    assert listed["one"]["date"][:16].replace("T", " ") in told
    assert call("list", "runs", tmp_path / "none").error.endswith("dualprompt list runs FOLDER")
    assert "takes no folder" in call("list", "methods", tmp_path).error


def test_layers_may_be_a_range(world: World, tmp_path: Path) -> None:
    asked = ("run", world.preset, "--no-baseline", "--train.epochs", "1", "--method.g_layers", "1")
    assert call(*asked, "--method.e_layers", "2-3", "--out", tmp_path / "run").code == 0
    assert json.loads((tmp_path / "run" / "manifest.json").read_text())["config"]["method"]["e_layers"] == [2, 3]
    assert "run backwards: write 2-3" in call(*asked, "--method.e_layers", "3-2", "--out", tmp_path / "other").error
