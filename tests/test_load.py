"""The load test asks real servers, counts what it saw, and its tables are made of that. Nothing here is timed."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from dualprompt.bench import machine, passes, serving
from dualprompt.bench.load import Tally, ask, engines, picture
from dualprompt.inbound.limits import Limits
from dualprompt.learner import ContinualLearner
from dualprompt.report import blocks, publication
from sandbox import CLASSES, World
from sandbox import pictures as pictures_of

pytest.importorskip("fastapi", reason="the extra 'serve' is not installed")
from serving import listening

LINUX = pytest.mark.skipif(not Path("/proc/stat").exists(), reason="no /proc")


@pytest.fixture(scope="module")
def learner(world: World) -> ContinualLearner:
    learner = ContinualLearner(str(world.weights), "lda", device="cpu")
    learner.learn({name: pictures_of(world, name)[:3] for name in CLASSES[:2]})
    return learner


@pytest.mark.anyio
async def test_clients_ask_as_often_as_they_are_told_and_errors_count(
    learner: ContinualLearner, tmp_path: Path
) -> None:
    async with listening(learner.save(tmp_path / "model"), Limits()) as wire:
        address = f"http://127.0.0.1:{wire.port}"
        found = await ask(address, picture(40, 30), 3, 10, 30)
        assert (len(found.seconds), found.errors) == (10, 0)
        assert 0 < max(found.seconds) <= found.usage.wall
        broken = await ask(address, b"no picture", 2, 4, 30)
        assert (len(broken.seconds), broken.errors) == (4, 4)
    gone = await ask(address, picture(40, 30), 2, 4, 30)
    assert gone.errors == 2  # each client once
    assert (found + broken).figures()["requests"] == 14


@LINUX
def test_processor_time_is_told_apart() -> None:
    meter = machine.Meter(os.getpid())
    until = time.process_time() + 0.3
    while time.process_time() < until:
        pass
    used = meter.usage()
    assert used.own is not None
    assert used.others_share is not None
    assert 0.25 < used.own < used.wall + 1
    assert 0 <= used.others_share <= 1.1
    nobody = machine.Meter(2**22 + 1).usage()
    assert (nobody.own, nobody.others_share) == (None, None)
    both = used + nobody
    assert both.own is None
    assert both.wall == used.wall + nobody.wall


def test_every_way_of_passing_is_measured_in_turns(learner: ContinualLearner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    shown: list[int] = []
    real = learner.predict_pixels
    monkeypatch.setattr(learner, "predict_pixels", lambda pixels, top: shown.append(len(pixels)) or real(pixels, top))
    found = passes.measure(learner, 1, (1, 4))
    assert [each["what"] for each in found] == [
        "1 at a time, one core",
        "1 at a time, 2 cores share it",
        "4 at a time, 2 cores share it",
        "4 at a time, 2 parts, a core each",
    ]
    assert shown == [1, 1, 4, 2, 2] * 2  # once to warm up
    assert all(each["per_second"] > 0 for each in found)


def figures(per_second: float, p50: float, others: float | None = 1.0) -> dict[str, Any]:
    asked = {"requests": 100, "errors": 0, "per_second": per_second, "p50_ms": p50, "p95_ms": 2 * p50}
    return asked | {"cpu_ms": None if others is None else 40.0, "others_percent": others}


def server(engine: str, batched: bool, loaded: float, p50: float, agreement: Any = None) -> dict[str, Any]:
    idle = figures(1000 / p50, p50, None) if batched else None
    return {"engine": engine, "batched": batched, "idle": idle, "loaded": figures(loaded, 500), "agreement": agreement}


def test_the_publication_is_made_of_what_was_found(tmp_path: Path) -> None:
    agreement = {"images": 100, "changed": 2, "before": 91.0, "after": 90.0}
    alone = [
        {"what": "one", "batch": 1, "per_second": 30.0, "cpu_ms": 40.0, "cores_used": 1.5},
        {"what": "many", "batch": 8, "per_second": 45.0, "cpu_ms": 35.0, "cores_used": 2.0},
    ]
    found = {
        "cores": 2,
        "clients": 32,
        "model": {"backbone": "embedded", "side": 224},
        "passes": alone,
        "servers": [
            server("torch", True, 48, 60),
            server("torch", False, 30, 60),
            server("int8", True, 120, 20, agreement),
            server("int8", False, 100, 20, agreement),
        ],
    }
    told = serving.finding(found)
    assert "PyTorch, 32 clients: batching answers 1.60 times as many." in told
    assert "many pictures at a time are 1.50 times as fast as one" in told
    assert "int8 is 3.0 times as fast as PyTorch for one client (p50), 2.5 times for many" in told
    assert "accuracy 91.0 % before, 90.0 % after, on 100 pictures" in told
    path = tmp_path / "serving.json"
    value = serving.publication(found, ["--requests", "100", "--publish", "/home/me/serving.json"])
    path.write_text(json.dumps(value))
    assert publication.read(path)["command"] == "python -m dualprompt.bench.load --requests 100"
    page = tmp_path / "page.md"
    page.write_text("<!-- published serving.json table -->\n<!-- /published -->\n")
    blocks.fill(page)
    lines = [line for line in page.read_text().splitlines() if line.startswith("| PyTorch")]
    assert lines == [
        "| PyTorch | 1 | yes | 16.7 | 60.0 | 120.0 | – | 0 of 100 | – |",
        "| PyTorch | 32 | yes | 48.0 | 500.0 | 1000.0 | 40.0 | 0 of 100 | 1 |",
        "| PyTorch | 32 | no | 30.0 | 500.0 | 1000.0 | 40.0 | 0 of 100 | 1 |",
    ]


def test_figures_of_nothing_and_engines_by_name() -> None:
    assert Tally().figures()["p50_ms"] is None
    assert engines("int8, torch,int8") == ["int8", "torch"]
    with pytest.raises(Exception, match="'tensorrt' is none of torch, onnx, int8"):
        engines("tensorrt")


def test_threads_of_a_command_sleep_while_they_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless the user says otherwise; and not where a program calls the command."""
    from dualprompt import cli

    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    assert cli.main(["list", "presets"]) == 0
    assert "OMP_WAIT_POLICY" not in os.environ
    monkeypatch.setattr(sys, "argv", ["dualprompt", "list", "presets"])
    assert cli.main() == 0
    assert os.environ["OMP_WAIT_POLICY"] == "passive"
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    assert cli.main() == 0
    assert os.environ["OMP_WAIT_POLICY"] == "active"
