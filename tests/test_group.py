"""Several methods in one group: the same runs as alone, in the order asked for, resumed and shown as any group."""

from __future__ import annotations

import csv
import json
import signal
import statistics
from pathlib import Path
from typing import Any

import pytest

from dualprompt import progress
from dualprompt.config import read_line
from dualprompt.console import duration, words
from dualprompt.errors import DualPromptError
from dualprompt.progress import Advanced, Bar, Event, Progress, RunBegan, Work
from dualprompt.run.checkpoint import Checkpoints
from dualprompt.training import group
from sandbox import Outcome, World, call, contents, start

WIDE = "dualprompt:init=wide:train.lr=0.01"
LINES = ("frozen-head", "dualprompt", WIDE)
FOLDERS = ("frozen-head", "dualprompt", "dualprompt-init=wide-train.lr=0.01")


@pytest.fixture(scope="module")
def made(world: World, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Outcome]:
    out = tmp_path_factory.mktemp("group") / "run"
    done = call("run", world.preset, "--methods", ",".join(LINES), "--seeds", 2, "--out", out)
    assert done.code == 0, done.err
    return out, done


def result_of(run: Path) -> Any:
    return json.loads((run / "result.json").read_text())


def state_of(run: Path) -> dict[str, bytes]:
    return {name: value.numpy().tobytes() for name, value in Checkpoints(run / "checkpoints").after_task(2).items()}


def test_one_run_a_method_and_seed_in_the_order_asked_for(made: tuple[Path, Outcome]) -> None:
    out, done = made
    members = group.members_of(out)
    assert [member.folder for member in members] == [f"seed-{seed}/{name}" for seed in (0, 1) for name in FOLDERS]
    assert [member.line for member in members] == [None, None, WIDE] * 2
    noted = [line for line in done.err.splitlines() if line.startswith("[")]
    assert [line.split("→")[0].rstrip() for line in noted] == [
        f"[{number + 1}/6] {line}, seed {number // 3}" for number, line in enumerate(LINES * 2)
    ]
    assert "left" not in noted[0]
    assert all("left)" in line for line in noted[1:])


def test_the_options_of_a_line_are_its_own(made: tuple[Path, Outcome]) -> None:
    plain, wide = (json.loads((made[0] / "seed-0" / name / "manifest.json").read_text()) for name in FOLDERS[1:])
    assert (plain["config"]["method"]["init"], wide["config"]["method"]["init"]) == ("uniform", "wide")
    assert (plain["config"]["train"]["lr"], wide["config"]["train"]["lr"]) == (0.02, 0.01)


def test_a_method_learns_beside_others_what_it_learns_alone(
    world: World, made: tuple[Path, Outcome], tmp_path: Path
) -> None:
    assert call("run", world.preset, "--seed", 1, "--out", tmp_path / "run").code == 0
    for name, alone in (("dualprompt", "."), ("frozen-head", "baseline")):
        together = made[0] / "seed-1" / name
        assert state_of(together) == state_of(tmp_path / "run" / alone)
        both = (result_of(together), result_of(tmp_path / "run" / alone))
        own = {"run_dir": "", "seconds": {}}
        assert both[0] | own == both[1] | own


def test_one_table_and_a_matrix_of_each(made: tuple[Path, Outcome]) -> None:
    out, done = made
    for line in LINES:
        assert f"accuracy matrix of {line}, seed 0 (%)" in done.out
        assert f"accuracy matrix of {line}, seed 1 (%)" not in done.out
    places = [done.out.rindex(f"│ {line} ") for line in LINES]
    assert places == sorted(places)
    for line, name in zip(LINES, FOLDERS, strict=True):
        numbers = [result_of(out / f"seed-{seed}" / name)["average_accuracy"] for seed in (0, 1)]
        row = next(row for row in done.out.splitlines() if row.startswith(f"│ {line} ") and "±" in row)
        assert f"{statistics.mean(numbers):.2f} ± {statistics.stdev(numbers):.2f}" in row
    rows = list(csv.DictReader((out / "comparison.csv").open()))
    assert [(row["method"], row["seed"]) for row in rows] == [(line, seed) for seed in "01" for line in LINES]


def test_json_has_the_numbers_of_each(made: tuple[Path, Outcome]) -> None:
    out, _ = made
    value = call("show", out, "--json").json
    assert [each["line"] for each in value["methods"]] == list(LINES)
    for each, name in zip(value["methods"], FOLDERS, strict=True):
        results = [result_of(out / f"seed-{seed}" / name) for seed in (0, 1)]
        assert each["average_accuracy"] == pytest.approx(statistics.mean(r["average_accuracy"] for r in results))
        assert each["accuracy_matrix"][2][0] == pytest.approx(
            statistics.mean(r["accuracy_matrix"][2][0] for r in results)
        )
    assert value["baseline"]["average_accuracy"] == value["methods"][0]["average_accuracy"]
    assert "average_accuracy" not in value  # which would be of several methods
    assert (value["run_dir"], len(value["runs"]), value["seed"]) == (str(out), 6, [0, 1])


def test_the_baseline_stands_beside_unless_it_is_not_wanted(world: World, tmp_path: Path) -> None:
    options = ("--train.epochs", 1, "--json")
    value = call("run", world.preset, "--methods", "dualprompt:keys=mean", "--out", tmp_path / "a", *options).json
    assert (value["line"], value["baseline"]["method"]) == ("dualprompt:keys=mean", "frozen-head")
    assert [Path(run).name for run in value["runs"]] == ["dualprompt-keys=mean", "frozen-head"]
    alone = ("--methods", "dualprompt", "--no-baseline", "--out", tmp_path / "b")
    value = call("run", world.preset, *alone, *options).json
    assert (value["run_dir"], value["runs"]) == (str(tmp_path / "b"), [str(tmp_path / "b" / "dualprompt")])
    assert (tmp_path / "b" / "comparison.txt").is_file()


def test_killed_and_resumed_it_is_the_same(world: World, made: tuple[Path, Outcome], tmp_path: Path) -> None:
    out = tmp_path / "run"
    command = ("run", world.preset, "--methods", ",".join(LINES), "--out", out)
    life = start(tmp_path / "log", *command, watch=out, at="os.rename dualprompt/checkpoints/.task-0002")
    assert life.end() == -signal.SIGKILL, life.text
    assert not (out / FOLDERS[2]).exists()
    done = call("resume", out)
    assert done.code == 0, done.err
    assert [line.split(" →")[0] for line in done.err.splitlines() if line.startswith("[")] == [
        "[2/3] dualprompt, seed 0",
        f"[3/3] {WIDE}, seed 0",
    ]
    assert all(f"accuracy matrix of {line}, seed 0 (%)" in done.out for line in LINES)
    for name in FOLDERS:
        truth, kept = made[0] / "seed-0" / name, "predictions.npz"
        assert state_of(out / name) == state_of(truth)
        assert (out / name / kept).read_bytes() == (truth / kept).read_bytes()


def test_judging_again_tells_the_lines_apart(made: tuple[Path, Outcome]) -> None:
    shown = call("eval", made[0], "--selection", "oracle").out
    assert f"│ {WIDE} (oracle) │" in shown
    assert "│ frozen-head" in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--methods", "dualpromt"), "unknown method 'dualpromt'; did you mean 'dualprompt'?"),
        (("--methods", "dualprompt,frozen"), "unknown method 'frozen'; did you mean 'frozen-head'?"),
        (("--methods", "dualprompt:e_lenght=3"), "dualprompt:e_lenght=3: unknown key 'method.e_lenght'; did you mean"),
        (("--methods", "dualprompt:keys"), "write an option as name:option=value, found 'dualprompt:keys'"),
        (("--methods", " , "), "--methods names no method; see `dualprompt list methods`"),
        (("--methods", "er", "--method", "er"), "choose methods with --methods alone"),
        (("--methods", "frozen-head,dualprompt:e_layers=9"), "9"),  # known only beside the backbone
    ],
)
def test_a_mistake_in_any_line_is_refused_before_anything_is_written(
    arguments: tuple[str, ...], message: str, world: World, tmp_path: Path
) -> None:
    assert message in call("run", world.preset, "--out", tmp_path / "run", *arguments).error
    assert contents(tmp_path) == {}


def test_two_methods_are_no_side_of_a_comparison(made: tuple[Path, Outcome]) -> None:
    assert "several methods (dualprompt, dualprompt:init=wide" in call("compare", made[0], made[0]).error
    one = made[0] / "seed-0" / "dualprompt"
    assert call("compare", one, made[0] / "seed-0" / FOLDERS[2]).code == 0


def test_a_damaged_list_of_members_is_refused(made: tuple[Path, Outcome], tmp_path: Path) -> None:
    listing = json.loads((made[0] / "group.json").read_text())
    listing["members"][2]["line"] = ["no", "name"]
    (tmp_path / "group.json").write_text(json.dumps(listing))
    assert "is damaged ('members.2.line'" in call("show", tmp_path).error


def test_lines_are_read() -> None:
    assert read_line("er") == ("er", {})
    overrides = {"method.keys": "mean", "train.lr": 0.001, "method.e_layers": [4]}
    assert read_line("dualprompt:keys=mean:train.lr=1.0e-3:e_layers=[4]") == ("dualprompt", overrides)
    with pytest.raises(DualPromptError, match="name:option=value"):
        read_line("er:buffer_size")


def test_names_that_make_one_folder_get_two(world: World) -> None:
    from dualprompt.config import compose

    config = compose(str(world.preset), None, {})
    members = group.plan_lines({"dualprompt:keys=a": config, "dualprompt-keys=a": config, "er": config}, 1)
    assert [member.folder for member in members] == ["dualprompt-keys=a", "dualprompt-keys=a~2", "er"]


def test_the_time_left_goes_by_the_method(monkeypatch: pytest.MonkeyPatch) -> None:
    class Shown(Progress):
        def __init__(self) -> None:
            self.done, self.text = 0.0, ""

        def receive(self, event: Event) -> None:
            if isinstance(event, Advanced):
                self.done = event.done
            else:
                self.text = words(event)

    clock = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    bar = Shown()
    work = Bar(bar, Work("runs", 5, "runs"))
    watched = progress.Watch([("quick", 0), ("slow", 0), ("quick", 1), ("slow", 1)], 5, work)
    assert watched.begin(2).left is None
    assert bar.text == "run 2 of 5: quick, seed 0"
    for task in (1, 2):
        clock[0] += 10
        watched.learned(task)
    assert (bar.done, watched.left()) == (1.0, 6 * 10)
    assert words(RunBegan(watched.begin(2), "out")) == "[3/5] slow, seed 0 → out (about 60 s left)"
    clock[0] += 100
    watched.learned(1)
    assert (bar.done, watched.left()) == (1.5, 100 + 2 * 10 + 2 * 100)
    assert bar.text == "run 3 of 5: slow, seed 0"  # the time left has a column of its own
    assert (duration(89), duration(3600), duration(3 * 3600)) == ("89 s", "60 min", "3.0 h")
