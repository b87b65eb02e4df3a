"""However often a run is killed, and wherever, resuming it ends in what the undisturbed run ends in, bit for bit."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from sandbox import COMMAND, Life, World, contents, remains, start

ALWAYS = ("--checkpoint.every_seconds", "0")
ALONE = ("--no-baseline",)
VARIANTS: dict[str, tuple[str, ...]] = {
    "plain": (),
    "plain, a checkpoint a step": (*ALWAYS, *ALONE),
    "augmented": ("--recipe", "augmented"),
    "augmented, a checkpoint a step": ("--recipe", "augmented", *ALWAYS),
    "mean keys, unmasked": ("--method.keys", "mean", "--method.training_logits", "unmasked", *ALWAYS, *ALONE),
}


@dataclass(frozen=True)
class Undisturbed:
    """What a run comes to when nobody kills it."""

    remains: dict[str, Any]
    changes: list[str]  # what it does to the file system, in order
    seconds: float


@pytest.fixture(scope="module")
def undisturbed(world: World, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Undisturbed]:
    folder = tmp_path_factory.mktemp("undisturbed")
    found = {}
    for variant, options in VARIANTS.items():
        out, log, began = folder / variant, folder / f"{variant}.log", time.monotonic()
        life = start(log, "run", world.preset, "--out", out, *options, watch=out)
        assert life.end() == 0, life.text
        seconds = time.monotonic() - began
        found[variant] = Undisturbed(remains(out), life.changes, seconds)
    return found


def survive(out: Path, log: Path, beginning: list[object], deaths: list[dict[str, Any]]) -> int:
    """Live until done, dying as told on the way; return how often it really died."""

    def live(change: int | None = None, seconds: float | None = None) -> int:
        begun = (out / "group.json").is_file()
        life = start(log, *(["resume", out] if begun else beginning), watch=out, at=change)
        if seconds is not None:
            life.wait(seconds)
            life.process.kill()
        code = life.end()
        assert code in (0, -signal.SIGKILL), f"{deaths}: {life.text}"
        return code

    died = sum(live(**death) != 0 for death in deaths)
    assert live() == 0
    return died


def plan_deaths(
    undisturbed: dict[str, Undisturbed], lives: int, draw: random.Random
) -> list[tuple[str, list[dict[str, Any]]]]:
    """Spread deaths over the whole life: half at the n-th change of a file, half at a moment."""
    plans = []
    seconds = min(twin.seconds for twin in undisturbed.values())
    for number in range(lives):
        variant = list(VARIANTS)[number % len(VARIANTS)]
        twin = undisturbed[variant]
        place = (number + draw.random()) / lives
        if number % 2:
            deaths: list[dict[str, Any]] = [{"change": 1 + int(place * len(twin.changes))}]
        else:
            deaths = [{"seconds": place * seconds}]
        if number % 3 == 0:  # what is left to do is shorter now, so these may come too late to kill
            deaths += [{"change": 1 + int(draw.random() * 40)}, {"seconds": draw.random() * seconds / 2}]
        plans.append((variant, deaths))
    return plans


@pytest.mark.parametrize("lives", [12, pytest.param(48, marks=pytest.mark.slow)])
def test_killed_anywhere(lives: int, world: World, undisturbed: dict[str, Undisturbed], tmp_path: Path) -> None:
    plans = plan_deaths(undisturbed, lives, random.Random(20))

    def one(number: int) -> int:
        variant, deaths = plans[number]
        out, log = tmp_path / str(number), tmp_path / f"{number}.log"
        died = survive(out, log, ["run", world.preset, "--out", out, *VARIANTS[variant]], deaths)
        assert remains(out) == undisturbed[variant].remains, f"{variant}, killed at {deaths}"
        assert not list(out.rglob(".*.partial"))
        return died

    with ThreadPoolExecutor(2) as pool:
        deaths = list(pool.map(one, range(len(plans))))
    assert sum(died > 0 for died in deaths) >= lives * 5 / 6, deaths
    assert sum(deaths) >= lives, deaths


@pytest.mark.parametrize(
    ("moment", "change", "occurrence", "number"),
    [
        ("in an epoch", "os.rename checkpoints/.progress", 5, signal.SIGTERM),
        ("in an epoch", "os.rename checkpoints/.progress", 5, signal.SIGINT),
        ("at an epoch's end", "open metrics.jsonl", 3, signal.SIGINT),
        ("in the last evaluation", "open metrics.jsonl", -1, signal.SIGTERM),
        ("in the baseline", "open baseline/metrics.jsonl", 0, signal.SIGINT),
    ],
)
def test_asked_to_stop(
    moment: str,
    change: str,
    occurrence: int,
    number: signal.Signals,
    world: World,
    undisturbed: dict[str, Undisturbed],
    tmp_path: Path,
) -> None:
    variant = "augmented, a checkpoint a step"
    twin = undisturbed[variant]
    at = [n for n, name in enumerate(twin.changes, start=1) if name.startswith(change)][occurrence]
    out, log = tmp_path / "run", tmp_path / "log"
    life = start(log, "run", world.preset, "--out", out, *VARIANTS[variant], watch=out, at=at, by=number)
    assert life.end() == 130, life.text
    line = f"dualprompt: error: stopped by {number.name}; nothing is lost, continue with: dualprompt resume {out}"
    assert life.text.splitlines()[-1] == line
    assert not (out / "comparison.json").exists()
    assert (out / "result.json").exists() == (moment == "in the baseline")
    again = start(log, "resume", out)
    assert again.end() == 0, again.text
    assert remains(out) == twin.remains


def wait_for(path: Path, life: Life) -> None:
    deadline = time.monotonic() + 30
    while not path.exists():
        assert life.code is None, life.text
        assert time.monotonic() < deadline, f"{path} does not appear: {life.text}"
        time.sleep(0.001)


def test_the_installed_command(world: World, undisturbed: dict[str, Undisturbed], tmp_path: Path) -> None:
    """As a user meets it: a run in a shell is killed, and `dualprompt resume` brings it to its end."""
    out = tmp_path / "run"
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [COMMAND, "run", str(world.preset), "--out", str(out), "--recipe", "augmented"],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 60
    while not (out / "checkpoints" / "task-0001.safetensors").exists():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    assert not (out / "result.json").exists()
    done = subprocess.run([COMMAND, "resume", str(out)], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert remains(out) == undisturbed["augmented"].remains


@pytest.fixture(scope="module")
def in_the_third_task(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was killed in the middle of its third task."""
    folder = tmp_path_factory.mktemp("killed")
    out, log = folder / "run", folder / "log"
    life = start(log, "run", world.preset, "--out", out, *ALWAYS)
    wait_for(out / "checkpoints" / "task-0002.safetensors", life)
    finished = (out / "checkpoints" / "progress.safetensors").stat().st_ino
    deadline = time.monotonic() + 30
    while (out / "checkpoints" / "progress.safetensors").stat().st_ino == finished and time.monotonic() < deadline:
        time.sleep(0.001)
    life.process.kill()
    life.end()
    assert not (out / "checkpoints" / "task-0003.safetensors").exists()
    return out


@pytest.fixture
def killed(in_the_third_task: Path, tmp_path: Path) -> Path:
    """A copy of it, for one test."""
    return Path(shutil.copytree(in_the_third_task, tmp_path / "run"))


def whole_files(run: Path) -> dict[str, bytes]:
    """All files but halves that a kill left, which whoever comes next may clear away."""
    return {name: content for name, content in contents(run).items() if not name.endswith(".partial")}


@pytest.mark.parametrize("name", ["progress", "task-0001", "task-0002"])
def test_a_damaged_checkpoint_is_named_and_can_be_deleted(
    name: str, killed: Path, undisturbed: dict[str, Undisturbed], tmp_path: Path
) -> None:
    path = killed / "checkpoints" / f"{name}.safetensors"
    path.write_bytes(path.read_bytes()[:-7])
    before = whole_files(killed)
    log = tmp_path / "again"
    refused = start(log, "resume", killed)
    assert refused.end() == 2
    assert f"dualprompt: error: checkpoint {path} cannot be read (" in refused.text
    assert "delete it to continue from the one before\n" in refused.text
    assert "Traceback" not in refused.text
    assert whole_files(killed) == before
    path.unlink()
    again = start(log, "resume", killed)
    assert again.end() == 0, again.text
    assert remains(killed) == undisturbed["plain"].remains


def test_a_run_that_goes_on_is_left_alone(world: World, tmp_path: Path) -> None:
    out = tmp_path / "run"
    life = start(tmp_path / "log", "run", world.preset, "--out", out, "--train.epochs", "5000", *ALWAYS)
    wait_for(out / "checkpoints" / "progress.safetensors", life)
    before = (out / "manifest.json").read_bytes()
    for words in (("resume", out), ("run", world.preset, "--out", out)):
        other = start(tmp_path / "other", *words)
        assert other.end() == 2
        assert "Traceback" not in other.text
    refused, filled = other.text.splitlines()
    asked = f"another process is working on {out}; wait until that one ends, or stop it first"
    assert refused == f"dualprompt: error: {asked}"
    assert f"{out} holds a run" in filled
    assert life.code is None
    assert (out / "manifest.json").read_bytes() == before
    life.process.kill()
    life.end()
    again = start(tmp_path / "again", "resume", out, watch=out, at="open metrics.jsonl")  # nobody holds it any more
    assert again.end() == -signal.SIGKILL, again.text


def test_a_member_of_a_group_that_goes_on_is_left_alone(world: World, tmp_path: Path) -> None:
    out = tmp_path / "run"
    life = start(tmp_path / "log", "run", world.preset, "--out", out, "--seeds", "2", "--train.epochs", "5000", *ALWAYS)
    wait_for(out / "seed-0" / "checkpoints" / "progress.safetensors", life)
    other = start(tmp_path / "other", "resume", out / "seed-0")
    assert other.end() == 2
    assert f"another process is working on {out / 'seed-0'}; wait" in other.text
    life.process.kill()
    life.end()


def test_half_written_files_are_ignored(killed: Path, undisturbed: dict[str, Undisturbed], tmp_path: Path) -> None:
    stale = [killed / f".{name}.123.partial" for name in ("result.json", "group.json", "comparison.png")]
    stale.append(killed / "checkpoints" / ".progress.safetensors.123.partial")
    for path in stale:
        path.write_bytes(b"\x00half")
    again = start(tmp_path / "again", "resume", killed)
    assert again.end() == 0, again.text
    assert remains(killed) == undisturbed["plain"].remains
    assert not any(path.exists() for path in stale)


def test_a_folder_with_half_a_beginning_can_be_run_in(world: World, tmp_path: Path) -> None:
    out = tmp_path / "run"
    out.mkdir()
    (out / ".group.json.123.partial").write_text("{")
    life = start(tmp_path / "log", "run", world.preset, "--out", out)
    assert life.end() == 0, life.text
    assert not (out / ".group.json.123.partial").exists()
