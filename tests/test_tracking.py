"""Trackers: every value of the log and of the result, once, however the run went; and nothing that can stop a run."""

from __future__ import annotations

import importlib
import json
import shutil
import struct
import sys
import time
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import plugin_data_pb2

from dualprompt.config import RunConfig, compose
from dualprompt.progress import Advanced, Event, Note, Progress, TaskEvaluated
from dualprompt.run.identity import config_digest
from dualprompt.training import group
from sandbox import World, call, interrupted, remains

Series = dict[str, list[tuple[int, float]]]
TRACKERS = {"tensorboard", "wandb"}


def tracked_config(world: World, *trackers: str) -> RunConfig:
    return compose(str(world.preset), None, {"track": list(trackers)})


def logged(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def result_of(run: Path) -> dict[str, Any]:
    return json.loads((run / "result.json").read_text())


def expected(run: Path) -> Series:
    """What a tracker must show of a finished run of a method with one phase, by the paper's definitions."""
    lines, result = logged(run), result_of(run)
    tasks = [line for line in lines if line["event"] == "task"]
    losses = [line["loss"] for line in lines if line["event"] == "epoch"]
    series: Series = {"loss": list(enumerate(losses, start=1))}
    S = [line["accuracy"] for line in tasks]
    for t, row in enumerate(S):
        for task, value in enumerate(row):
            series.setdefault(f"accuracy/task_{task + 1}", []).append((t + 1, value))
        dropped = [max(S[i][task] for i in range(task, t)) - row[task] for task in range(t)]
        series.setdefault("average_accuracy", []).append((t + 1, sum(row) / len(row)))
        series.setdefault("forgetting", []).append((t + 1, sum(dropped) / len(dropped) if dropped else 0.0))
        if tasks[t]["matching"]:
            matching = tasks[t]["matching"]
            series.setdefault("matching_accuracy", []).append((t + 1, sum(matching) / len(matching)))
    for name in ("average_accuracy", "forgetting", "matching_accuracy"):
        if result[name] is not None:
            assert series[name][-1][1] == pytest.approx(result[name])
    for name in (
        "average_accuracy",
        "forgetting",
        "matching_accuracy",
        "image_weighted_accuracy",
        "mean_over_steps",
        "backward_transfer",
        "learning_accuracy",
        "coda_forgetting",
        "task_known_accuracy",
        "calibration_error",
        "unseen_auroc",
    ):
        if result[name] is not None:
            series[f"final/{name}"] = [(len(S), result[name])]
    return series


def shown(run: Path) -> EventAccumulator:
    accumulator = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0})
    accumulator.Reload()
    return accumulator


def series_of(events: EventAccumulator) -> Series:
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def assert_same(found: Series, truth: Series) -> None:
    assert found.keys() == truth.keys()
    for name, points in truth.items():
        assert [step for step, _ in found[name]] == [step for step, _ in points], name
        assert [value for _, value in found[name]] == pytest.approx([value for _, value in points], rel=1e-6), name


@pytest.fixture(scope="module")
def finished(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("tracked") / "run"
    done = call("run", world.preset, "--out", out, "--track", "tensorboard")
    assert done.code == 0, done.err
    assert f"tensorboard: tensorboard --logdir {out}/tensorboard" in done.err.replace("\n", "")
    return out


def test_tensorboard_shows_the_log_and_the_result(finished: Path) -> None:
    assert len(logged(finished)) == 9  # three tasks of two epochs
    for run in (finished, finished / "baseline"):
        assert_same(series_of(shown(run)), expected(run))
    assert "matching_accuracy" in expected(finished)
    assert "matching_accuracy" not in expected(finished / "baseline")


def test_tensorboard_has_the_config_as_hyper_parameters(finished: Path) -> None:
    events = shown(finished)
    message: Any = plugin_data_pb2
    content = events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    told = message.HParamsPluginData.FromString(content).session_start_info.hparams
    assert told["method.name"].string_value == "dualprompt"
    assert told["train.lr"].number_value == 0.02
    assert told["method.e_layers"].string_value == "[2, 3]"
    assert told["benchmark.skip_bad"].bool_value is False
    content = events.SummaryMetadata("_hparams_/experiment").plugin_data.content
    metrics = message.HParamsPluginData.FromString(content).experiment.metric_infos
    assert {metric.name.tag for metric in metrics} == {tag for tag in expected(finished) if tag.startswith("final/")}


def test_a_killed_run_shows_nothing_twice(world: World, finished: Path, tmp_path: Path) -> None:
    run = interrupted(world, tmp_path / "run", "--track", "tensorboard")
    assert len(logged(run)) == 6  # of which the three of the second task are written again
    watching = shown(run)
    assert [step for step, _ in series_of(watching)["average_accuracy"]] == [1, 2]
    time.sleep(1)  # TensorBoard reads files in the order of their names, which hold the second
    assert call("resume", run).code == 0
    watching.Reload()  # as an open page does now and then
    for events in (watching, shown(run)):
        assert_same(series_of(events), expected(finished))
    assert remains(run) == remains(finished)


def test_a_tracker_that_comes_late_is_told_everything(world: World, finished: Path, tmp_path: Path) -> None:
    run = interrupted(world, tmp_path / "run")
    assert not (run / "tensorboard").exists()
    assert call("resume", run, "--track", "tensorboard").code == 0
    assert_same(series_of(shown(run)), expected(finished))


def test_a_resumed_run_may_have_another_clock(world: World, finished: Path, tmp_path: Path) -> None:
    run = interrupted(world, tmp_path / "run", "--track", "tensorboard")
    [old] = (run / "tensorboard").iterdir()
    old.rename(old.with_name("events.out.tfevents.9999999999.elsewhere"))  # so it is read after the new one
    assert call("resume", run).code == 0
    assert_same(series_of(shown(run)), expected(finished))


def test_a_tracker_can_be_left_out_of_a_resumed_run(world: World, tmp_path: Path) -> None:
    run = interrupted(world, tmp_path / "run", "--track", "tensorboard")
    assert call("resume", run, "--track", "none").code == 0
    assert (run / "result.json").exists()
    assert [step for step, _ in series_of(shown(run))["average_accuracy"]] == [1, 2]


def test_phases_have_losses_of_their_own(world: World, tmp_path: Path) -> None:
    out = tmp_path / "run"
    options = ("--method", "co2l", "--method.buffer_size", 6, "--no-baseline", "--track", "tensorboard")
    assert call("run", world.preset, "--out", out, *options).code == 0
    losses: dict[str, list[tuple[int, float]]] = {}
    for number, line in enumerate((line for line in logged(out) if line["event"] == "epoch"), start=1):
        losses.setdefault(f"loss/{line['phase']}" if "phase" in line else "loss", []).append((number, line["loss"]))
    assert len(losses) > 1
    found = series_of(shown(out))
    assert_same({tag: points for tag, points in found.items() if tag.startswith("loss")}, losses)


@pytest.mark.usefixtures("quick_python")
def test_runs_of_a_table_are_tracked_and_found_again(world: World, tmp_path: Path) -> None:
    table = ("table", "main", "--benchmark", world.preset, "--methods", "frozen-head", "--runs", tmp_path, "--json")
    done = call(*table, "--seeds", 1, "--jobs", 2, "--track", "tensorboard")  # in a process of its own
    assert done.code == 0, done.err
    [run] = [path.parent for path in tmp_path.glob("*/result.json")]
    assert_same(series_of(shown(run)), expected(run))
    again = call(*table, "--seeds", 1)
    assert again.json == done.json
    assert "1 of 1 runs are in" in again.err


def test_tracking_is_no_part_of_what_a_run_is(world: World) -> None:
    plain = compose(str(world.preset), None, {})
    assert plain.track == ()
    for track in (["tensorboard"], ["wandb"], ["tensorboard", "wandb"]):
        assert config_digest(tracked_config(world, *track)) == config_digest(plain)


def test_an_unknown_tracker(world: World, tmp_path: Path) -> None:
    error = call("run", world.preset, "--out", tmp_path / "run", "--track", "mlflow").error
    assert error == "bad value for 'track': input should be 'tensorboard' or 'wandb' (found 'mlflow')"
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_missing_package(name: str, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = interrupted(world, tmp_path / "begun")
    monkeypatch.setitem(sys.modules, name, None)  # as if it were not installed
    for command in (("run", world.preset, "--out", tmp_path / "run"), ("resume", run)):
        error = call(*command, "--track", name).error
        assert error.startswith(f"tracker '{name}' needs the extra '{name}' (")
        assert error.endswith(f": pip install 'dualprompt[{name}]', or leave it out with --track none")
    assert not (tmp_path / "run").exists()


class Imports(MetaPathFinder):
    """Finds nothing, but remembers what was looked for."""

    def __init__(self) -> None:
        self.seen: set[str] = set()

    def find_spec(self, fullname: str, path: object, target: object = None) -> None:
        self.seen.add(fullname.partition(".")[0])


def test_nothing_is_imported_unless_asked_for(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] in TRACKERS]:
        monkeypatch.delitem(sys.modules, name)
    imports = Imports()
    monkeypatch.setattr(sys, "meta_path", [imports, *sys.meta_path])
    assert call("run", world.preset, "--out", tmp_path / "run", "--no-baseline").code == 0
    assert not imports.seen & TRACKERS
    assert not (tmp_path / "run" / "tensorboard").exists()
    importlib.import_module("tensorboard")
    assert imports.seen & TRACKERS == {"tensorboard"}, "it would have been seen"


def test_a_tracker_that_cannot_write_costs_a_note(world: World, finished: Path, tmp_path: Path) -> None:
    run = interrupted(world, tmp_path / "run")
    (run / "tensorboard").write_text("in the way")
    done = call("resume", run, "--track", "tensorboard")
    assert done.code == 0
    assert done.err.count("tensorboard failed, the run goes on without it: ") == 1
    assert remains(run) == remains(finished)


class Nuisance(Progress):
    """Takes TensorBoard's folder away after the first task, and remembers what it was told."""

    def __init__(self, run: Path) -> None:
        self.run, self.told = run, []

    def receive(self, event: Event) -> None:
        if isinstance(event, Note):
            self.told.append(event.text)
        elif isinstance(event, TaskEvaluated) and event.task == 1:
            shutil.rmtree(self.run / "tensorboard")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # TensorBoard writes in a thread
def test_a_tracker_that_fails_on_the_way_costs_a_note(world: World, finished: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    nuisance = Nuisance(run)
    group.start(group.plan([tracked_config(world, "tensorboard")], baseline=False), run, nuisance)
    assert sum(text.startswith("tensorboard failed, the run goes on without it: ") for text in nuisance.told) == 1
    assert result_of(run)["accuracy_matrix"] == result_of(finished)["accuracy_matrix"]


class Falling(Progress):
    """Lets a run fall over after so many steps of training."""

    def __init__(self, steps: int) -> None:
        self.left = steps

    def receive(self, event: Event) -> None:
        if isinstance(event, Advanced) and event.work.kind == "training":
            self.left -= 1
            if self.left == 0:
                raise ZeroDivisionError


def rows_of(file: Path) -> tuple[dict[int, dict[str, Any]], dict[str, Any], dict[str, Any]]:
    """Read W&B's own file, a LevelDB log of protobufs: rows by step, the config, and the summary."""
    from wandb.proto import wandb_internal_pb2

    message: Any = wandb_internal_pb2
    data, block = file.read_bytes(), 32768
    assert data[:4] == b":W&B"
    rows: dict[int, dict[str, Any]] = {}
    config: dict[str, Any] = {}
    summary: dict[str, Any] = {}
    place, part = 7, b""
    while place + 7 <= len(data):
        if block - place % block < 7:  # no header fits into the rest of the block
            place += block - place % block
            continue
        _, length, kind = struct.unpack_from("<IHB", data, place)
        part += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind not in (1, 4):  # whole, or the last of several
            continue
        record, part = message.Record.FromString(part), b""
        if record.HasField("history"):
            row = {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            assert row["_step"] not in rows
            rows[row.pop("_step")] = {key: value for key, value in row.items() if not key.startswith("_")}
        config |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
        for item in record.summary.update:
            summary[item.key or ".".join(item.nested_key)] = json.loads(item.value_json)
    return rows, config, summary


def test_wandb_offline_holds_every_line_once(
    world: World, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import wandb

    monkeypatch.setenv("WANDB_MODE", "offline")
    for name in ("WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "wandb"))
    out = tmp_path / "run"
    plan = group.plan([tracked_config(world, "wandb")], baseline=False)
    with pytest.raises(ZeroDivisionError):
        group.start(plan, out, Falling(steps=15))  # in the last epoch of the second task, which has 2 · 4 steps
    assert len(logged(out)) == 4
    group.resume(out)
    wandb.teardown()
    files = sorted(out.glob("wandb/offline-run-*/run-*.wandb"))
    assert len(files) == 2
    assert len({file.name for file in files}) == 1  # one run's id
    (early, config, _), (late, _, summary) = map(rows_of, files)
    assert (sorted(early), sorted(late)) == ([1, 2, 3, 4], [5, 6, 7, 8, 9])
    found: Series = {}
    for row in (early | late).values():
        axis = "epoch" if "epoch" in row else "task"
        at = row.pop(axis)
        for name, value in row.items():
            found.setdefault(name, []).append((at, value))
    final = {name: [(3, value)] for name, value in summary.items() if name.startswith("final")}
    assert_same(found | final, expected(finished))
    assert config["train"]["lr"] == 0.02
