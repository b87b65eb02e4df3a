"""Runs on a Ray cluster: the same table as anywhere, whatever happens to the workers."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dualprompt.config import RunConfig, compose
from dualprompt.errors import DualPromptError
from dualprompt.sweeps.cluster import cluster, work
from dualprompt.sweeps.obtained import complain
from dualprompt.sweeps.store import obtain
from sandbox import COMMAND, VIT, World, call, contents, elsewhere, make_world, remains, write_weights

ALWAYS = ("--checkpoint.every_seconds", 0)  # a checkpoint a step

pytestmark = pytest.mark.xdist_group("ray")  # one cluster is enough for two cores


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> World:
    """A world whose backbone has enough layers for the paper's choices."""
    world = make_world(tmp_path_factory.mktemp("deep"))
    write_weights(world.weights, replace(VIT, depth=6))
    return world


@pytest.fixture(scope="module", autouse=True)
def _own_token(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Give Ray's clusters a token of their own; it would make one in the user's home."""
    token = tmp_path_factory.mktemp("token") / "token"
    token.write_text(secrets.token_hex(32))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_AUTH_MODE", "token")
        patch.setenv("RAY_AUTH_TOKEN_PATH", str(token))
        yield


@pytest.fixture(scope="module")
def address(_own_token: None) -> Iterator[str]:
    """The address of a Ray cluster of two CPUs, to which this process is connected too."""
    ray = pytest.importorskip("ray")
    before = signal.getsignal(signal.SIGTERM)
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # a path that is short enough for a socket's
    small = {"num_cpus": 2, "object_store_memory": 80 * 2**20, "include_dashboard": False}
    started = ray.init("local", log_to_driver=False, logging_level="ERROR", _temp_dir=folder, **small)
    yield started.address_info["gcs_address"]
    ray.shutdown()
    signal.signal(signal.SIGTERM, before)  # Ray has put its own in the place
    shutil.rmtree(folder, ignore_errors=True)


def config(world: World, method: str = "frozen-head", **changes: Any) -> RunConfig:
    overrides = {key.replace("__", "."): value for key, value in changes.items()}
    return compose(str(world.preset), None, {"train.epochs": 1, "method.name": method} | overrides)


def start(*arguments: object) -> subprocess.Popen[str]:
    """Start the installed command."""
    words = [COMMAND, *map(str, arguments)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        words,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        # Tests that were started in the background ignore it, and so would the command.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def until(found: Callable[[], Any], command: subprocess.Popen[str]) -> Any:
    """Return what is found, as soon as there is something."""
    deadline = time.monotonic() + 120
    while not (value := found()):
        assert command.poll() is None, command.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.005)
    return value


def under_way(root: Path) -> dict[int, Path]:
    """Return the runs that are between two checkpoints of a task, by the process that holds their lock."""
    found = {}
    for lock in root.glob("*/.lock"):
        if (lock.parent / "checkpoints" / "progress.safetensors").is_file():
            found |= dict.fromkeys(holders(lock), lock.parent)
    return found


def holders(file: Path) -> list[int]:
    """Return the processes that have a file open."""
    found = []
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):  # it has been closed since
            if link.readlink() == file:
                found.append(int(link.parts[2]))
    return found


def free(folder: Path) -> bool:
    with (folder / ".lock").open() as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


@pytest.mark.slow
def test_a_study_loses_nothing_with_its_workers(deep: World, address: str, tmp_path: Path) -> None:
    options = ["study", "prompting", deep.preset, "--seeds", 2, "--train.epochs", 5, "--json"]
    alone = call(*options, "--runs", tmp_path / "alone")
    assert alone.code == 0, alone.err
    root = tmp_path / "cluster"
    command = start(*options, *ALWAYS, "--runs", root, "--ray", address)
    process, killed = until(lambda: under_way(root), command).popitem()
    os.kill(process, signal.SIGKILL)
    assert not (killed / "result.json").exists()
    begun = (killed / "manifest.json").read_bytes()
    others = until(lambda: {k: v for k, v in under_way(root).items() if v != killed}, command)
    process, stopped = others.popitem()
    os.kill(process, signal.SIGTERM)  # as a machine does that is about to be switched off
    assert not (stopped / "result.json").exists()
    out, err = command.communicate(timeout=120)
    assert command.returncode == 0, err
    assert "failed" not in err
    assert (killed / "manifest.json").read_bytes() == begun  # it went on, it did not start again
    assert "dualprompt study prompting" in json.loads(begun)["command"]

    def anywhere(text: str, runs: Path) -> str:
        return text.replace(str(runs), "RUNS")

    assert json.loads(anywhere(out, root)) == json.loads(anywhere(alone.out, tmp_path / "alone"))
    folders = sorted(path.parent.name for path in root.glob("*/result.json"))
    assert len(folders) == 4
    assert {killed.name, stopped.name} <= set(folders)
    assert folders == sorted(path.parent.name for path in (tmp_path / "alone").glob("*/result.json"))
    for name in folders:
        assert remains(root / name) == remains(tmp_path / "alone" / name)
        assert not list((root / name).rglob(".*.partial"))
    for name in ("table.md", "table.csv", "table.txt", "accuracy.csv"):
        tables = [(runs / "study-prompting-tiny" / name, runs) for runs in (root, tmp_path / "alone")]
        assert len({anywhere(table.read_text(), runs) for table, runs in tables}) == 1


@pytest.mark.usefixtures("address")
def test_a_failure_is_put_on_record_and_the_others_go_on(world: World, tmp_path: Path) -> None:
    configs = [config(world), config(world, "dualprompt", train__lr=1e30), config(world, "dualprompt")]
    with cluster() as workers:
        found = obtain(configs, tmp_path / "runs", jobs=workers)
        assert [each.error is None for each in found] == [True, False, True]
        assert "is not finite; lower train.lr" in str(found[1].error)
        record = json.loads((found[1].run.folder / "failure.json").read_text())
        assert record["error"] == found[1].error
        with pytest.raises(DualPromptError, match=r"1 of 3 runs failed.*is not finite"):
            complain(found)
        before = contents(tmp_path / "runs")
        good = [configs[0], configs[2]]
        again = obtain(good, tmp_path / "runs", jobs=workers)
    assert contents(tmp_path / "runs") == before  # what is finished is reused
    alone = obtain(good, tmp_path / "alone")
    for one, other in zip(again, alone, strict=True):
        assert remains(one.run.folder) == remains(other.run.folder)


@pytest.mark.usefixtures("address")
def test_what_no_machine_has(world: World, tmp_path: Path) -> None:
    with cluster(cpus=1000) as workers, pytest.raises(DualPromptError, match=r"no machine .* has 1000 CPU for a run"):
        obtain([config(world)], tmp_path / "runs", jobs=workers)
    with cluster(gpus=1) as workers, pytest.raises(DualPromptError, match=r"no machine .* 1 CPU and 1 GPU for a run"):
        obtain([config(world)], tmp_path / "runs", jobs=workers)


@pytest.mark.slow  # a cluster of its own takes minutes to start beside other tests
def test_stopped_it_stops_its_workers_and_leaves_nothing(world: World, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    root = tmp_path / "runs"
    options = ["--benchmark", world.preset, "--methods", "frozen-head", "--seeds", 3, "--runs", root]
    command = start("table", "main", *options, "--train.epochs", 10000, *ALWAYS, "--ray")
    until(lambda: under_way(root), command)
    command.send_signal(signal.SIGINT)
    out, err = command.communicate(timeout=60)
    assert (command.returncode, out) == (130, "")
    assert err == "dualprompt: error: stopped; nothing is lost, go on with the same command\n"
    assert all(free(lock.parent) for lock in root.glob("*/.lock"))
    assert not list(root.rglob("failure.json"))
    assert list(root.rglob("progress.safetensors"))
    assert not list(Path("/tmp").glob(f"ray-*/session_*_{command.pid}"))


def test_a_worker_waits_for_the_lock_of_a_lost_one(world: World, tmp_path: Path) -> None:
    found = obtain([config(world)], tmp_path / "once")[0]
    folder = tmp_path / "runs" / found.run.folder.name
    folder.mkdir(parents=True)
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        release = threading.Timer(0.5, lambda: fcntl.flock(lock, fcntl.LOCK_UN))
        release.start()
        assert work(str(folder), found.config.model_dump(mode="json"), 1, sys.argv) == (None, "")
        release.join()
    assert remains(folder) == remains(found.run.folder)


def test_a_worker_refuses_what_is_not_the_same_there(tmp_path: Path) -> None:
    here = make_world(tmp_path)
    found = obtain([config(here)], tmp_path / "once")[0]
    folder, values = tmp_path / "runs" / found.run.folder.name, found.config.model_dump(mode="json")
    error, _ = work(str(folder), values, 1, sys.argv)
    assert error
    assert f"does not see {folder}; --runs must be a folder that every machine shares" in error
    assert not folder.exists()
    folder.mkdir(parents=True)
    write_weights(here.weights, seed=4)
    error, _ = work(str(folder), values, 1, sys.argv)
    assert error
    assert "are not those that the run was asked for" in error
    assert [path.name for path in folder.iterdir()] == [".lock"]


def test_without_ray_the_extra_is_named(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    for command in (
        ("study", "ablation", world.preset),
        ("table", "main", "--benchmark", world.preset),
        ("sweep", world.preset, "--methods", "frozen-head"),
    ):
        refused = call(*command, "--runs", tmp_path / "runs", "--ray").error
        assert "--ray needs the extra 'cluster'" in refused
        assert refused.endswith("pip install 'dualprompt[cluster]'")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--ray", "mini"], "'mini' is not HOST:PORT or auto; without an address, put --ray last"),
        (["--ray-cpus", 2], "--ray-cpus and --ray-gpus go with --ray"),
        (["--ray", "--ray-cpus", 0], "--ray-cpus must be at least 1, found 0"),
        (["--ray", "--ray-gpus", 2], "--ray-gpus takes a number from 0 to 1, since a run has one device; found 2"),
        (["--ray", "--jobs", 2], "--jobs counts processes of this machine"),
    ],
)
def test_refusals(options: list[object], told: str, world: World, tmp_path: Path) -> None:
    assert told in call("study", "ablation", world.preset, "--runs", tmp_path / "runs", *options).error
    assert not (tmp_path / "runs").exists()


def test_nobody_at_the_address(world: World, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    options = ("--benchmark", world.preset, "--methods", "frozen-head", "--runs", tmp_path / "runs")
    refused = elsewhere("table", "main", *options, "--ray", "127.0.0.1:1").error
    assert "nothing listens at 127.0.0.1:1" in refused
    assert "ray start --head" in refused
    assert not (tmp_path / "runs").exists()


def test_a_cluster_that_does_not_start(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ray = pytest.importorskip("ray")

    def late(*_: object, **__: object) -> None:
        raise Exception("The current node timed out during startup.\nmore")  # as Ray does, no other class

    monkeypatch.setattr(ray, "init", late)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)  # by another test of this process
    options = ("--benchmark", world.preset, "--methods", "frozen-head", "--runs", tmp_path / "runs")
    refused = call("table", "main", *options, "--ray").error
    assert "cannot use the Ray cluster 'local': Exception: The current node timed out during startup." in refused
