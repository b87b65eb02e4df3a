"""The sweep chooses on validation images, gives every method the same number of tries, and says what to commit."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from dualprompt import metrics
from dualprompt.backbones.known import drawn_by_seed
from dualprompt.config import RunConfig, compose, load_preset, preset_names
from dualprompt.errors import DualPromptError
from dualprompt.methods.base import METHODS, method_config
from dualprompt.sweeps import paper
from dualprompt.sweeps.sweep import Sweep, beyond
from dualprompt.training.optimise import effective_lr
from sandbox import World, call, make_world

SEARCH = ("--grid", "train.lr=1e-3,2e-2,1e-1", "--train.epochs", 1, "--extend", 0)


@pytest.fixture(scope="module")
def swept(world: World, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """The folder of a finished sweep of two methods, and what it printed."""
    root = tmp_path_factory.mktemp("sweep")
    done = call("sweep", world.preset, "--methods", "dualprompt,frozen-head", *SEARCH, "--runs", root, "--json")
    assert done.code == 0, done.err
    return root, done.json


def test_every_try_is_judged_on_held_out_images(swept: tuple[Path, Any]) -> None:
    _, value = swept
    assert (value["judged_on"], value["validation"], value["budget"]) == ("validation", 0.2, 3)
    assert [(each["method"], each["values"]) for each in value["tries"]] == [
        (name, {"train.lr": lr}) for name in ("dualprompt", "frozen-head") for lr in (0.001, 0.02, 0.1)
    ]
    for each in value["tries"]:
        config = json.loads((Path(each["run_dir"]) / "manifest.json").read_text())["config"]
        assert (config["benchmark"]["evaluate_on"], config["benchmark"]["validation"]) == ("validation", 0.2)
        assert config["train"]["lr"] == each["values"]["train.lr"]
        result = json.loads((Path(each["run_dir"]) / "result.json").read_text())
        assert each["average_accuracy"] == result["average_accuracy"]
        assert each["forgetting"] == result["forgetting"]


def test_no_number_depends_on_the_test_images(swept: tuple[Path, Any], tmp_path: Path) -> None:
    (tmp_path / "world").mkdir()
    other = make_world(tmp_path / "world")
    rng = np.random.default_rng(0)
    for path in (other.images / "test").rglob("*.png"):
        Image.fromarray(rng.integers(0, 256, (20, 20, 3), dtype=np.uint8)).save(path)
    options = ("--methods", "dualprompt,frozen-head", *SEARCH, "--runs", tmp_path / "runs", "--json")
    found = call("sweep", other.preset, *options).json
    assert [each["average_accuracy"] for each in found["tries"]] == [
        each["average_accuracy"] for each in swept[1]["tries"]
    ]


def test_the_best_of_each_method_is_marked(swept: tuple[Path, Any]) -> None:
    for _, tries in itertools.groupby(swept[1]["tries"], key=lambda each: each["method"]):
        tried = list(tries)
        best = max(tried, key=lambda each: (each["average_accuracy"], -each["forgetting"]))
        assert [each for each in tried if each["best"]] == [best]
        assert len({each["average_accuracy"] for each in tried}) > 1  # so that there is something to choose


def test_what_it_prints_and_writes(swept: tuple[Path, Any], world: World, tmp_path: Path) -> None:
    root, value = swept
    assert json.loads((root / "sweep-tiny" / "sweep.json").read_text()) == value
    options = ("--methods", "dualprompt,frozen-head", *SEARCH, "--runs", root, "--out", tmp_path / "out")
    shown = call("sweep", world.preset, *options)
    assert shown.code == 0
    assert shown.err == f"6 of 6 runs are in {root} already\n"
    assert shown.out.count("best") == 2
    lines = shown.out[shown.out.index("methods:") :]
    assert yaml.safe_load(lines) == {"methods": value["methods"]}
    assert "to put below recipes.plain:" in shown.out
    written = (tmp_path / "out" / "sweep.md").read_text()
    rows = [line.split("|")[1:-1] for line in written.splitlines() if line.startswith("| ")][2:]
    assert [[cell.strip() for cell in row][:3] for row in rows] == [
        [each["method"], f"train.lr {each['values']['train.lr']:g}", f"{each['average_accuracy']:.2f}"]
        for each in value["tries"]
    ]
    assert lines.strip() in written
    shares = [json.loads((Path(each["run_dir"]) / "result.json").read_text()) for each in value["tries"]]
    most = max(metrics.variance(result["accuracy_matrix"], result["judged_images"]) for result in shares)
    assert f"difference of two tries are up to {2 * (2 * most) ** 0.5:.2f} points" in written


def test_another_sweep_does_not_overwrite_it(swept: tuple[Path, Any], world: World) -> None:
    root, value = swept
    options = (
        "--methods",
        "frozen-head",
        "--grid",
        "train.lr=1e-3,2e-2",
        "--train.epochs",
        1,
        "--runs",
        root,
        "--json",
    )
    other = call("sweep", world.preset, *options).json
    assert json.loads((root / "sweep-tiny" / "sweep.json").read_text()) == value
    beside = root / f"sweep-tiny-{other['question'][:8]}"
    assert json.loads((beside / "sweep.json").read_text()) == other
    assert (
        "holds a sweep with other options" in call("sweep", world.preset, *options, "--out", root / "sweep-tiny").error
    )


def test_equal_tries_have_no_winner(world: World, tmp_path: Path) -> None:
    grid = ("--grid", "method.match_weight=1,2", "--method.e_layers", "[]", "--train.epochs", 1, "--extend", 0)
    done = call("sweep", world.preset, "--methods", "dualprompt", *grid, "--runs", tmp_path)
    assert done.code == 0, done.err
    assert "best" not in done.out
    notes = [line.split("│")[-2].strip() for line in done.out.splitlines() if "match_weight" in line and "│" in line]
    assert notes == ["equal, taken", "equal"]


def test_the_printed_lines_make_the_winner_the_recipe(swept: tuple[Path, Any], world: World) -> None:
    _, value = swept
    preset = yaml.safe_load(world.preset.read_text())
    methods = preset["methods"]
    methods = {name: methods.get(name, {}) | value["methods"][name] for name in value["methods"]}
    path = world.preset_with("won.yaml", methods=methods)
    for name in ("dualprompt", "frozen-head"):
        best = next(each for each in value["tries"] if each["best"] and each["method"] == name)
        assert compose(str(path), None, {"method.name": name}).train.lr == best["values"]["train.lr"]


def test_a_methods_training_values_are_its_own(world: World) -> None:
    own = {"train": {"lr": 0.5, "schedule": "cosine"}, "e_length": 1}
    recipes = yaml.safe_load(world.preset.read_text())["recipes"]
    recipes["plain"]["methods"] = {"dualprompt": own}
    preset = str(world.preset_with("own-train.yaml", recipes=recipes))
    config = compose(preset, None, {"method.name": "dualprompt"})
    assert (config.train.lr, config.train.schedule, config.train.epochs) == (0.5, "cosine", 2)
    assert config.train.recipe == "plain"
    assert (config.method["e_length"], config.method["g_length"]) == (1, 2)
    assert "train" not in config.method
    assert compose(preset, None, {"method.name": "dualprompt", "train.lr": 0.1}).train.lr == 0.1
    other = compose(preset, None, {"method.name": "frozen-head"})
    assert (other.train.lr, other.train.schedule) == (0.02, "constant")
    assert compose(preset, "augmented", {"method.name": "dualprompt"}).train.lr == 0.02
    bad = str(world.preset_with("bad-train.yaml", methods={"dualprompt": {"train": 3}}))
    with pytest.raises(DualPromptError, match=r"'methods.dualprompt.train' must be a mapping of keys, found 3"):
        compose(bad, None, {})
    unknown = str(world.preset_with("unknown-train.yaml", methods={"dualprompt": {"train": {"rl": 3}}}))
    with pytest.raises(DualPromptError, match=r"unknown key 'train\.rl'"):
        compose(unknown, None, {})


def plan(world: World, methods: list[str], grid: dict[str, tuple[Any, ...]], budget: int | None, **rest: Any) -> Any:
    tries = Sweep(str(world.preset), None, methods, grid, budget, {}, **rest).configs()
    return {name: [values for values, _ in each] for name, each in tries.items()}


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=3), st.integers(1, 64))
def test_a_budget_takes_the_first_of_the_grid(world: World, lengths: list[int], budget: int) -> None:
    keys = ("train.batch_size", "train.epochs", "train.lr")
    grid = {key: tuple(range(1, length + 1)) for key, length in zip(keys, lengths, strict=False)}
    total = int(np.prod(lengths))
    if budget > total:
        with pytest.raises(DualPromptError, match=f"--budget must be 1 to {total}"):
            plan(world, ["frozen-head"], grid, budget)
        return
    found = plan(world, ["frozen-head", "dualprompt"], grid, budget)
    assert found["frozen-head"] == found["dualprompt"]
    # Counting in a mixed base whose lowest digit is the first option.
    for number, values in enumerate(found["frozen-head"]):
        digits = []
        for length in lengths:
            number, digit = divmod(number, length)
            digits.append(digit + 1)
        assert list(values.values()) == digits
    assert len(found["frozen-head"]) == budget


def test_without_a_grid_each_method_uses_its_own(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    own = {"method.e_length": (1, 2, 3), "train.lr": (0.1, 0.2)}
    monkeypatch.setattr(METHODS["dualprompt"], "grid", own)
    monkeypatch.delattr(METHODS["frozen-head"], "grid")
    found = plan(world, ["dualprompt", "frozen-head", "simple-cil"], {}, None)
    assert found["simple-cil"] == [{}], "nothing to choose"
    assert found["dualprompt"][:3] == [{"method.e_length": n, "train.lr": 0.1} for n in (1, 2, 3)]
    assert found["dualprompt"][3] == {"method.e_length": 1, "train.lr": 0.2}
    assert found["frozen-head"] == [{"train.lr": lr} for lr in (0.005, 0.01, 0.02, 0.04)]
    # The smallest grid decides, so that no method has more tries than another.
    monkeypatch.setattr(METHODS["dualprompt"], "grid", {"train.lr": (0.1, 0.2)})
    assert [len(tries) for tries in plan(world, ["dualprompt", "frozen-head"], {}, None).values()] == [2, 2]


@pytest.mark.parametrize("preset", preset_names())
def test_every_method_has_as_many_points_as_any_other(preset: str) -> None:
    for recipe in load_preset(preset)["recipes"]:
        tries = Sweep(preset, recipe, METHODS.names(), {}, None, {}).configs()
        assert {name: len(each) for name, each in tries.items() if len(each) != 4} == {"ridge": 1, "simple-cil": 1}
        for each in tries.values():
            assert len({json.dumps(values) for values, _ in each}) == len(each)


@pytest.mark.parametrize("preset", preset_names())
def test_presets_train_each_method_as_it_must_be(preset: str) -> None:
    for recipe, common in load_preset(preset)["recipes"].items():
        for name in METHODS.names():
            config = compose(preset, recipe, {"method.name": name})
            train, endless = config.train, config.benchmark.evaluate_every is not None  # nobody knows when it ends
            if drawn_by_seed(config.backbone.name) and name == "upper-bound":  # there is nothing to wreck
                assert (train.optimiser, train.lr, train.schedule) == ("sgd", 0.1, "steps")
            elif "train_backbone" in METHODS[name].Config.model_fields:  # a step of 0.005 would wreck the backbone
                assert 1e-5 <= effective_lr(train) <= 5e-4
                assert train.schedule == ("constant" if endless and not METHODS[name].needs_borders else "cosine")
            elif endless and not METHODS[name].needs_borders:
                assert train.schedule == "constant"
            elif not METHODS[name].defaults:
                expected = RunConfig.model_validate({"benchmark": {"dataset": "x"}, "train": common["train"]}).train
                assert train == expected.model_copy(update={"recipe": recipe})
            assert train.augment == common["train"]["augment"]
            small = name == "dualnet" and train.epochs == 1 and not endless
            assert train.batch_size == (10 if small else common["train"]["batch_size"])


def test_a_buffer_is_for_methods_that_rehearse(world: World) -> None:
    search = Sweep(str(world.preset), None, ["er", "dualprompt"], {"train.lr": (0.1,)}, None, {}, buffer=7)
    found = search.configs()
    assert found["er"][0][1].method["buffer_size"] == 7
    assert "buffer_size" not in found["dualprompt"][0][1].method


def test_a_failed_try_is_shown_and_never_wins(world: World, tmp_path: Path) -> None:
    grid = ("--grid", "train.lr=1e30,0.02", "--train.epochs", 1, "--extend", 0)
    done = call("sweep", world.preset, "--methods", "dualprompt", *grid, "--runs", tmp_path, "--json")
    assert done.code == 2
    assert done.err.splitlines()[-1].startswith("dualprompt: error: 1 of 2 runs failed, the next call tries them again")
    bad, good = done.json["tries"]
    assert (bad["average_accuracy"], bad["best"], good["best"]) == (None, False, True)
    assert "is not finite" in bad["error"]
    assert done.json["methods"] == {"dualprompt": {"train": {"lr": 0.02}}}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--benchmark.evaluate_on", "test"], ["evaluated on validation images only", "dualprompt table"]),
        (["--benchmark.validation", "0"], ["evaluate_on: validation needs benchmark.validation > 0"]),
        (["--grid", "train.lr"], ["--grid takes OPTION=VALUE,VALUE", "found 'train.lr'"]),
        (["--grid", "seed=1,2"], ["--grid takes options of train and method", "found 'seed'"]),
        (["--grid", "train.rl=1,2"], ["frozen-head: unknown key 'train.rl'", "lr"]),
        (["--grid", "method.alpha=1,2"], ["frozen-head: unknown key 'method.alpha'"]),
        (["--grid", "train.lr=0.1,0.2", "--budget", "3"], ["--budget must be 1 to 2", "found 3"]),
        (["--budget", "0"], ["--budget must be 1 to 4", "found 0"]),
        (["--extend", "-1"], ["--extend must be at least 0, found -1"]),
        (["--method.name", "er"], ["choose methods with --methods"]),
        (["--budgte", "3"], ["unknown option '--budgte'", "did you mean 'budget'?"]),
        (["--methods", "forzen-head"], ["unknown method 'forzen-head'", "did you mean 'frozen-head'?"]),
        (["--jobs", "0"], ["--jobs must be at least 1"]),
    ],
)
def test_mistakes_are_answered_with_the_remedy(
    options: list[str], words: list[str], world: World, tmp_path: Path
) -> None:
    error = call("sweep", world.preset, "--methods", "frozen-head", "--runs", tmp_path / "runs", *options).error
    for word in words:
        assert word in error
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("tried", "best", "further"),
    [
        ((1e3, 1e5, 10.0, 1e7), 10.0, 0.1),
        ((1e3, 1e5, 10.0, 1e7), 1e7, 1e9),
        ((1e3, 1e5, 10.0, 1e7), 1e3, None),  # inside
        ((5e-5, 2e-4), 5e-5, 1.25e-5),
        ((1, 2, 8), 8, 32),
        ((2, 5), 2, 1),  # 0.8: whole numbers stay whole
        ((1, 2), 1, None),  # and there is none below
        ((0.005, None), 0.005, None),  # one number has no factor
        ((0.005, None), None, None),
        ((0.0, 0.1, 0.2), 0.1, 0.05),  # zero is no edge that a factor leads to
        ((0.0, 0.1), 0.0, None),
        ((False, True), True, None),
        (("uniform", "wide"), "wide", None),
    ],
)
def test_what_lies_beyond_an_edge(tried: tuple[Any, ...], best: Any, further: Any) -> None:
    found = beyond(tried, best)
    assert (found, type(found)) == (further, type(further))


def test_a_winner_at_the_edge_extends_the_grid(world: World, tmp_path: Path) -> None:
    grid = ("--grid", "train.lr=1e-7,1e-6", "--train.epochs", 1)
    command = ("sweep", world.preset, "--methods", "ft-seq,frozen-head", *grid)
    done = call(*command, "--runs", tmp_path, "--json")
    assert done.code == 0, done.err
    for name in ("ft-seq", "frozen-head"):
        tries = [each for each in done.json["tries"] if each["method"] == name]
        rates = [each["values"]["train.lr"] for each in tries]
        assert rates[:2] == [1e-7, 1e-6]
        assert [each["beyond_the_grid"] for each in tries] == [False, False] + [True] * (len(tries) - 2)
        # Each of them is a factor of ten beyond the edge that the best of those before it was at.
        for number in range(2, len(tries)):
            best = max(tries[:number], key=lambda each: (each["average_accuracy"], -each["forgetting"]))
            edge = best["values"]["train.lr"]
            assert edge in (min(rates[:number]), max(rates[:number]))
            assert rates[number] == pytest.approx(edge * (10 if edge == max(rates[:number]) else 0.1))
        best = next(each["values"]["train.lr"] for each in tries if each["best"])
        assert len(tries) == 5 or min(rates) < best < max(rates), "until it is inside, or three more are tried"
        assert len(tries) > 2
    assert (done.json["budget"], done.json["beyond_the_grid"]) == (2, 3)
    shown = call(*command, "--runs", tmp_path).out
    beyond_grid = sum(each["beyond_the_grid"] for each in done.json["tries"])
    assert shown.count("beyond the grid") == beyond_grid
    limited = call(*command, "--runs", tmp_path, "--extend", 1, "--json").json
    assert sum(each["beyond_the_grid"] for each in limited["tries"]) == 2
    assert "still at an edge: " in call(*command, "--runs", tmp_path, "--extend", 0).out


def test_options_end_where_their_range_does(world: World, tmp_path: Path) -> None:
    options = ("--methods", "gdumb", "--grid", "method.cutmix=0.5,1", "--method.cycles", 1, "--method.buffer_size", 6)
    tries = call("sweep", world.preset, *options, "--runs", tmp_path, "--json").json["tries"]
    assert all(0 < each["values"]["method.cutmix"] <= 1 for each in tries)


@pytest.mark.parametrize("preset", preset_names())
def test_the_regime_of_the_table_is_the_default(preset: str) -> None:
    methods = [name for name in METHODS.names() if name not in paper.ARCHITECTURES]  # which are of another table
    search = Sweep(preset, None, methods, {}, None, {})
    assert search.departures() == {}
    table = compose(preset, None, {}).benchmark
    for tries in search.configs().values():
        for _, config in tries:
            same = {"validation": 0.0, "evaluate_on": "test"}  # the images that it is judged on are not the table's
            assert config.benchmark.model_copy(update=same) == table
            kept = getattr(method_config(config.method), "buffer_size", None)
            assert kept is None or not paper.buffers(table.name) or kept in paper.buffers(table.name)
    reduced = Sweep(preset, None, methods, {}, None, {"benchmark.train_per_class": 7}, buffer=33)
    assert reduced.departures() == {"train_per_class": 7, "buffer": 33}


def test_a_reduced_sweep_is_called_so(swept: tuple[Path, Any], world: World, tmp_path: Path) -> None:
    assert swept[1]["departs_from_the_table"] == {}
    options = ("--methods", "frozen-head", *SEARCH, "--runs", tmp_path, "--benchmark.train_per_class", 3)
    assert "reduced, not the regime of the main table: train_per_class 3" in call("sweep", world.preset, *options).out
    assert "reduced" not in call("sweep", world.preset, "--methods", "frozen-head", *SEARCH, "--runs", swept[0]).out
