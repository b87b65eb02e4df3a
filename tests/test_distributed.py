"""Two processes learn and judge what one does: every image once, the same prompts, one voice."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dualprompt.methods.base import METHODS
from dualprompt.run import predictions
from dualprompt.run.checkpoint import Checkpoints
from dualprompt.training.distributed import local_part
from plugins import installed, write_distribution
from sandbox import Life, World, call, elsewhere, shell, start

# 13 training images a task in batches of 3: shares of 1 and 2, and a last batch of a single image for two processes.
# 9 test images a task in batches of 4: one process judges 4 + 1, the other 4.
OPTIONS = ("--recipe", "augmented", "--train.batch_size", "3")


@given(count=st.integers(0, 200), processes=st.integers(1, 20))
def test_shares(count: int, processes: int) -> None:
    things = list(range(count))
    parts = [things[local_part(count, rank, processes)] for rank in range(processes)]
    assert list(chain(*parts)) == things
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.fixture(scope="module")
def alone(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of a single process."""
    folder = tmp_path_factory.mktemp("alone")
    life = start(folder / "log", "run", world.preset, "--out", folder / "run", *OPTIONS)
    assert life.end() == 0, life.text
    return folder / "run"


def assert_same(found: Path, alone: Path) -> None:
    for one, other in ((found, alone), (found / "baseline", alone / "baseline")):
        result, expected = (json.loads((run / "result.json").read_text()) for run in (one, other))
        sure, truly = (each.pop("calibration") for each in (result, expected))  # prompts differ by 1e-5
        for name in ("images", "confidence", "accuracy"):
            assert sure[name] == pytest.approx(truly[name], abs=1e-3)
        assert result.pop("calibration_error") == pytest.approx(expected.pop("calibration_error"), abs=1e-3)
        own = {"run_dir": "", "seconds": {}}
        assert result | own == expected | own
        lines, wanted = log_of(one), log_of(other)
        assert [line.get("images") for line in lines if line["event"] == "task"] == [[9], [9, 9], [9, 9, 9]]
        losses = [line.pop("loss") for line in lines if line["event"] == "epoch"]
        assert losses == pytest.approx([line.pop("loss") for line in wanted if line["event"] == "epoch"], abs=1e-5)
        assert lines == wanted
        state, truth = (Checkpoints(run / "checkpoints").after_task(2) for run in (one, other))
        assert state.keys() == truth.keys()
        for name, value in truth.items():
            torch.testing.assert_close(state[name], value, rtol=0, atol=1e-5, msg=lambda text, n=name: f"{n}: {text}")
        answers, answered = (predictions.read(run / "predictions.npz") for run in (one, other))
        for name in ("truth", "answer", "task_known_answer", "selected", "filename"):
            assert np.array_equal(getattr(answers, name), getattr(answered, name)), name
        np.testing.assert_allclose(answers.probability, answered.probability, rtol=0, atol=1e-4)


def log_of(run: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "seconds"} for line in lines]


def assert_one_voice(err: str) -> None:
    assert [line.split("(")[0].strip() for line in err.splitlines() if not line.startswith("[")] == [
        f"after task {task}" for task in (1, 2, 3)
    ] * 2
    assert err.count("dualprompt, seed 0") == 1


def test_two_processes(world: World, alone: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    done = elsewhere("run", world.preset, "--out", out, "--device", "cpu", "--devices", 2, "--json", *OPTIONS)
    assert done.code == 0, done.err
    assert_same(out, alone)
    assert done.json["run_dir"] == str(out)
    assert_one_voice(done.err)


def test_torchrun(world: World, alone: Path, tmp_path: Path) -> None:
    """`torchrun` decides how many processes there are; `--devices` need not repeat it."""
    out = tmp_path / "run"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launcher, "-m", "dualprompt.cli", "run", str(world.preset), "--out", str(out), "--json", *OPTIONS],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert_same(out, alone)
    assert json.loads(done.stdout)["run_dir"] == str(out)
    assert_one_voice(done.stderr)


def in_second_task(world: World, tmp_path: Path) -> tuple[Path, Life, int]:
    """Start two processes and wait until they have learned a task; return the second one's id too."""
    out = tmp_path / "run"
    life = start(tmp_path / "log", "run", world.preset, "--out", out, "--devices", 2, *OPTIONS)
    deadline = time.monotonic() + 60
    while not (out / "checkpoints" / "task-0001.safetensors").exists():
        assert life.code is None, life.text
        assert time.monotonic() < deadline, life.text
        time.sleep(0.001)
    assert life.process.pid
    children = Path(f"/proc/{life.process.pid}/task/{life.process.pid}/children").read_text().split()
    assert len(children) == 1
    return out, life, int(children[0])


def gone(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True


def wait_until_gone(process: int) -> None:
    deadline = time.monotonic() + 20
    while not gone(process):
        assert time.monotonic() < deadline, "the other process lives on"
        time.sleep(0.01)


@pytest.mark.parametrize("lost", [pytest.param("first", marks=pytest.mark.slow), "second"])
def test_a_lost_process_ends_the_run(lost: str, world: World, alone: Path, tmp_path: Path) -> None:
    out, life, second = in_second_task(world, tmp_path)
    if lost == "first":
        life.process.kill()
        assert life.end() == -signal.SIGKILL
    else:
        os.kill(second, signal.SIGKILL)
        assert life.end() == 2
        assert life.text.splitlines()[-1] == (
            "dualprompt: error: another process of this run ended, so this one did; "
            f"continue from the last checkpoint with: dualprompt resume {out}"
        )
    wait_until_gone(second)
    assert "Traceback" not in life.text
    assert not (out / "result.json").exists()
    again = start(tmp_path / "log", "resume", out, "--devices", 1)
    assert again.end() == 0, again.text
    assert_same(out, alone)


def test_asked_to_stop(world: World, alone: Path, tmp_path: Path) -> None:
    """A signal to one process stops both at the same step; two go on where two stopped."""
    out, life, second = in_second_task(world, tmp_path)
    os.kill(second, signal.SIGTERM)
    assert life.end() == 130, life.text
    wait_until_gone(second)
    message = f"stopped by another process; nothing is lost, continue with: dualprompt resume {out}"
    assert life.text.splitlines()[-1] == f"dualprompt: error: {message}"
    assert life.text.count("dualprompt: error:") == 1
    again = start(tmp_path / "log", "resume", out)
    assert again.end() == 0, again.text
    assert_same(out, alone)


TWO_STEPS = """
import torch
from torch import nn
from dualprompt.methods.base import METHODS, MethodConfig, Step
from dualprompt.methods.frozen_head import FrozenHead

class TwoStepsConfig(MethodConfig):
    name: str = "two-steps"

@METHODS.register("two-steps")
class TwoSteps(FrozenHead[TwoStepsConfig]):
    summary = "a map that learns to turn features, and a head; no loss reaches both"

    def __init__(self, config, backbone):
        super().__init__(config, backbone)
        self.slow = nn.Linear(self.backbone.dim, self.backbone.dim, bias=False)
        nn.init.eye_(self.slow.weight)

    def steps(self, phase):
        slow = Step(self.turn, ("slow",), name="slow", optimiser="sgd", lr=0.01)
        return slow, Step(self.loss, ("head",)), slow

    def turn(self, batch):
        features = self.features(batch)
        return (self.slow(features).roll(1, dims=1) - features).square().mean()

    def load_state(self, state):
        super().load_state(state)
        self.slow.weight.data.copy_(state["slow.weight"])
"""


def test_two_processes_take_several_steps_a_batch_as_one_does(world: World, tmp_path: Path) -> None:
    site = tmp_path / "site"
    write_distribution(site, "two-steps", {"two_steps": TWO_STEPS}, "dualprompt.methods", "two-steps = two_steps")
    paths = os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])])
    words = ("run", world.preset, "--method", "two-steps", "--no-baseline", *OPTIONS)
    with installed(site, METHODS):
        one = call(*words, "--out", tmp_path / "one")
    two = shell(*words, "--devices", 2, "--out", tmp_path / "two", PYTHONPATH=paths)
    assert (one.code, two.code) == (0, 0), one.err + two.err
    alone, together = (Checkpoints(tmp_path / name / "checkpoints").after_task(2) for name in ("one", "two"))
    assert not torch.equal(alone["slow.weight"], torch.eye(len(alone["slow.weight"]))), "it was trained"
    for name, value in alone.items():
        torch.testing.assert_close(together[name], value, rtol=0, atol=1e-5, msg=lambda text, n=name: f"{n}: {text}")
