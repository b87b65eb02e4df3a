"""The store of runs: the same question finds the same answer, however often it is asked or stopped, in any jobs."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from dualprompt.config import RunConfig, compose
from dualprompt.console import words
from dualprompt.errors import DualPromptError
from dualprompt.progress import Began, Event, Progress, Remarked
from dualprompt.run.folder import Run
from dualprompt.run.identity import config_digest, digest_of
from dualprompt.sweeps import store
from dualprompt.sweeps.obtained import BUSY, Obtained, complain
from dualprompt.sweeps.store import obtain
from dualprompt.training import group
from sandbox import COMMAND, World, call, contents, make_world, start, write_weights


class Notes(Progress):
    """A listener that keeps every line."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def receive(self, event: Event) -> None:
        if not isinstance(event, Began | Remarked) and (text := words(event)):
            self.lines.append(text)


def configs(world: World, *methods: str, **changes: Any) -> list[RunConfig]:
    overrides = {key.replace("__", "."): value for key, value in changes.items()}
    return [compose(str(world.preset), None, overrides | {"method.name": name}) for name in methods]


def numbers(found: list[Obtained]) -> list[dict[str, Any]]:
    return [{k: v for k, v in each.run.result().items() if k not in ("run_dir", "seconds")} for each in found]


@pytest.fixture(scope="module")
def filled(world: World, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Obtained]]:
    """A store with a run of each of two methods."""
    root = tmp_path_factory.mktemp("store")
    return root, obtain(configs(world, "dualprompt", "frozen-head"), root)


def test_runs_are_what_the_run_command_makes(world: World, filled: tuple[Path, list[Obtained]], tmp_path: Path) -> None:
    root, found = filled
    assert [each.error for each in found] == [None, None]
    for each, config in zip(found, configs(world, "dualprompt", "frozen-head"), strict=True):
        assert each.run.folder.parent == root
        assert each.run.folder.name.startswith(f"{config.method['name']}-")
        alone = group.start(group.plan([config], baseline=False), tmp_path / config.method["name"])
        assert alone[0].result()["accuracy_matrix"] == each.run.result()["accuracy_matrix"]
        tasks = [json.loads(line) for line in each.run.metrics_path.read_text().splitlines()]
        assert each.seconds == pytest.approx(sum(t["seconds"]["train"] for t in tasks if t["event"] == "task"))


def test_finished_runs_are_reused(world: World, filled: tuple[Path, list[Obtained]]) -> None:
    root, found = filled
    before, notes = contents(root), Notes()
    # In another order, twice, saved more often: the same runs.
    again = obtain(configs(world, "frozen-head", "dualprompt", "frozen-head", checkpoint__every_seconds=1), root, notes)
    assert [each.run.folder for each in again] == [found[n].run.folder for n in (1, 0, 1)]
    assert contents(root) == before
    assert notes.lines == [f"2 of 2 runs are in {root} already"]


@pytest.mark.parametrize("change", ["seed", "option", "images", "weights"])
def test_what_decides_the_result_decides_the_folder(change: str, world: World, tmp_path: Path) -> None:
    here = make_world(_empty(tmp_path / "world"))
    asked = {"train__epochs": 1}
    first = obtain(configs(here, "frozen-head", **asked), tmp_path / "runs")[0]
    if change == "images":
        Image.fromarray(np.zeros((20, 20, 3), np.uint8)).save(here.images / "train" / "ash" / "0.png")
    elif change == "weights":
        write_weights(here.weights, seed=4)
    else:
        asked = {"train__epochs": 1, "seed": 1} if change == "seed" else {"train__epochs": 2}
    second = obtain(configs(here, "frozen-head", **asked), tmp_path / "runs")[0]
    assert first.run.folder != second.run.folder
    assert first.run.finished
    assert second.run.finished
    assert first.run.manifest()["identity"] != second.run.manifest()["identity"]


def _empty(folder: Path) -> Path:
    folder.mkdir()
    return folder


def test_an_interrupted_run_goes_on(world: World, filled: tuple[Path, list[Obtained]], tmp_path: Path) -> None:
    root = tmp_path / "runs"
    command = ("table", "main", "--benchmark", world.preset, "--seeds", 1, "--runs", root)
    command = (*command, "--methods", "frozen-head,dualprompt", "--json")
    frozen, prompted = (root / each.run.folder.name for each in reversed(filled[1]))
    at = f"os.rename {prompted.name}/checkpoints/.task-0002"
    life = start(tmp_path / "log", *command, watch=root, at=at)
    assert life.end() == -signal.SIGKILL, life.text
    assert (frozen / "result.json").is_file()
    assert not (prompted / "result.json").exists()
    begun = (prompted / "manifest.json").read_bytes()
    done = contents(frozen)
    assert call(*command).code == 0
    assert (prompted / "manifest.json").read_bytes() == begun
    assert contents(frozen) == done
    twins = [
        Obtained(store.Run(folder), each.config) for folder, each in zip((prompted, frozen), filled[1], strict=True)
    ]
    assert numbers(twins) == numbers(filled[1])


def test_asked_to_stop_it_says_how_to_go_on(world: World, tmp_path: Path) -> None:
    options = ("--benchmark", world.preset, "--methods", "frozen-head", "--seeds", 1, "--runs", tmp_path / "runs")
    life = start(tmp_path / "log", "table", "main", *options, watch=tmp_path / "runs", at=12, by=signal.SIGTERM)
    assert life.end() == 130, life.text
    last = "dualprompt: error: stopped by SIGTERM; nothing is lost, go on with the same command"
    assert life.text.splitlines()[-1] == last
    assert not list((tmp_path / "runs").rglob("failure.json"))
    assert call("table", "main", *options).code == 0


def failing(world: World) -> list[RunConfig]:
    """A run that must fail between two that must not."""
    good = configs(world, "frozen-head", "dualprompt", train__epochs=1)
    return [good[0], *configs(world, "dualprompt", train__epochs=1, train__lr=1e30), good[1]]


@pytest.mark.usefixtures("quick_python")
@pytest.mark.parametrize("jobs", [1, 2])
def test_a_failure_is_put_on_record_and_the_others_go_on(jobs: int, world: World, tmp_path: Path) -> None:
    root, notes = tmp_path / "runs", Notes()
    found = obtain(failing(world), root, notes, jobs)
    assert [each.error is None for each in found] == [True, False, True]
    bad = found[1]
    assert bad.error
    assert "is not finite; lower train.lr" in bad.error
    assert json.loads((bad.run.folder / "failure.json").read_text())["error"] == bad.error
    assert not bad.run.finished
    with pytest.raises(DualPromptError) as told:
        complain(found)
    line = f"1 of 3 runs failed, the next call tries them again: {bad.run.folder.name} (seed 0): {bad.error}"
    assert str(told.value) == line
    assert sorted(line[:5] for line in notes.lines if line.startswith("[")) == ["[1/3]", "[2/3]", "[3/3]"]
    assert sum("left)" in line for line in notes.lines) == 2  # after the last run nothing is left
    again = obtain(failing(world), root)
    assert [each.error for each in again] == [each.error for each in found]
    # However many processes: the same numbers.
    alone = obtain([failing(world)[n] for n in (0, 2)], tmp_path / "alone")
    assert numbers([found[0], found[2]]) == numbers(alone)


def test_a_bug_in_one_run_does_not_cost_the_others(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dualprompt.methods.dualprompt import DualPrompt

    def broken(*_: Any) -> None:
        raise RuntimeError("CUDA out of memory\nmore words")

    asked = configs(world, "dualprompt", "frozen-head", train__epochs=1)
    with monkeypatch.context() as patch:
        patch.setattr(DualPrompt, "begin_task", broken)
        first, second = obtain(asked, tmp_path)
    assert (first.error, second.error) == ("RuntimeError: CUDA out of memory", None)
    record = first.run.folder / "failure.json"
    assert "in broken" in json.loads(record.read_text())["details"]
    assert [each.error for each in obtain(asked, tmp_path)] == [None, None]
    assert not record.exists()


def test_an_interrupted_run_goes_on_in_the_batches_it_began_with(world: World, tmp_path: Path) -> None:
    few, many = (configs(world, "frozen-head", evaluate__batch_size=size) for size in (3, 7))
    found = obtain(few, tmp_path)[0]
    assert obtain(many, tmp_path)[0].run.folder == found.run.folder  # how many are judged at a time decides nothing
    begun = group.elsewhere_config(found.run.folder, many[0], {"device": "cpu"})
    assert begun.evaluate == few[0].evaluate
    assert group.elsewhere_config(tmp_path / "new", many[0], {}).evaluate == many[0].evaluate


def test_a_run_of_before_an_option_came_can_be_opened(world: World, tmp_path: Path) -> None:
    folder = obtain(configs(world, "frozen-head"), tmp_path)[0].run.folder
    run, path = Run(folder), folder / "manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["config"]["train"]["momentum"], manifest["config"]["benchmark"]["stream"]
    manifest["identity"]["config"] = digest_of(manifest["config"])
    assert manifest["identity"]["config"] != config_digest(run.config())
    path.write_text(json.dumps(manifest))
    assert run.config().benchmark.stream == "class"
    assert call("show", folder).code == 0
    manifest["config"]["train"]["epochs"] += 1
    path.write_text(json.dumps(manifest))
    with pytest.raises(DualPromptError, match="was changed after the run began"):
        run.config()


@pytest.mark.parametrize("jobs", [1, 2])
def test_two_commands_do_not_work_on_one_run(jobs: int, world: World, tmp_path: Path) -> None:
    asked = configs(world, "frozen-head", train__epochs=1)
    folder = obtain(asked, tmp_path / "once")[0].run.folder.name
    (tmp_path / "runs" / folder).mkdir(parents=True)
    with (tmp_path / "runs" / folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        before = contents(tmp_path / "runs")
        assert obtain(asked, tmp_path / "runs", jobs=jobs)[0].error == BUSY
        assert contents(tmp_path / "runs") == before
    assert obtain(asked, tmp_path / "runs")[0].error is None


def test_jobs_stop_with_the_command_that_started_them(world: World, tmp_path: Path) -> None:
    root = tmp_path / "runs"
    options = ["--benchmark", world.preset, "--methods", "frozen-head,dualprompt", "--seeds", 1, "--runs", root]
    lasting = ["--train.epochs", 10000, "--checkpoint.every_seconds", 0, "--jobs", 2]
    words = [COMMAND, "table", "main", *map(str, [*options, *lasting])]
    command = subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    deadline = time.monotonic() + 90
    while len(list(root.rglob("progress.safetensors"))) < 2:
        assert command.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    command.send_signal(signal.SIGTERM)
    _, said = command.communicate(timeout=60)
    assert command.returncode == 130, said
    assert said == "dualprompt: error: stopped; nothing is lost, go on with the same command\n"
    for folder in root.iterdir():
        with (folder / ".lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # nobody works there any more
        assert "stopped by SIGTERM; nothing is lost" in (folder / "output.txt").read_text()


def test_refusals(world: World, filled: tuple[Path, list[Obtained]], tmp_path: Path) -> None:
    with pytest.raises(DualPromptError, match="one device: set devices and nodes to 1, and use --jobs"):
        obtain(configs(world, "frozen-head", devices=2), tmp_path)
    with pytest.raises(DualPromptError, match="--jobs must be at least 1, found 0"):
        obtain(configs(world, "frozen-head"), tmp_path, jobs=0)
    first, second = (each.run.folder for each in filled[1])
    shutil.copytree(second, tmp_path / first.name)
    with pytest.raises(DualPromptError, match=f"{first.name} holds another run than its name says"):
        obtain(configs(world, "dualprompt"), tmp_path)
    assert list(tmp_path.iterdir()) == [tmp_path / first.name]


def test_where_runs_lie(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DUALPROMPT_RUNS", str(tmp_path / "mine"))
    options = ("--benchmark", world.preset, "--methods", "frozen-head", "--seeds", 1, "--train.epochs", 1)
    assert call("table", "main", *options).code == 0
    assert [path.name.partition("-")[0] for path in (tmp_path / "mine").iterdir()] == ["frozen"]
    assert call("run", world.preset, "--no-baseline", "--train.epochs", 1).code == 0
    assert len(list((tmp_path / "mine").glob("tiny-dualprompt-*"))) == 1
