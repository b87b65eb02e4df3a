"""Several processes that answer from one model folder while another one teaches it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from dualprompt.learner import ContinualLearner
from sandbox import World, call, pictures

REPLICA = Path(__file__).parent.parent / "examples" / "replica.py"


def ask(port: int, body: bytes | None = None) -> Any:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/", body, timeout=20) as answer:
        return json.loads(answer.read())


def until(port: int, classes: list[str]) -> None:
    """Wait until a replica answers with these classes."""
    found, end = None, time.monotonic() + 90
    while found != classes:
        assert time.monotonic() < end, found
        time.sleep(0.1)
        try:
            found = ask(port)["classes"]
        except urllib.error.URLError:  # it has not begun to listen
            continue


@contextmanager
def replica(model: Path) -> Iterator[tuple[int, subprocess.Popen[bytes]]]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = subprocess.Popen([sys.executable, str(REPLICA), str(model), str(port)], env=os.environ)
    try:
        yield port, process
    finally:
        process.kill()
        process.wait()


def test_replicas_follow_the_one_who_teaches(world: World, tmp_path: Path) -> None:
    model, image = tmp_path / "model", pictures(world, "ash", "test")[0]
    learner = ContinualLearner(str(world.weights), device="cpu")
    learner.learn({name: pictures(world, name) for name in ("ash", "birch")})
    learner.save(model)
    with ExitStack() as stack:
        replicas = [stack.enter_context(replica(model)) for _ in range(2)]
        for port, _ in replicas:
            until(port, ["ash", "birch"])
            answer = ask(port, image.read_bytes())
            assert answer["top"][0]["probability"] == learner.predict(image).top[0].probability
        assert call("rename", model, "ash", "rowan").code == 0  # nobody holds the model
        for port, _ in replicas:
            until(port, ["rowan", "birch"])
        replicas[0][1].kill()
        assert call("forget", model, "rowan", "--purge").code == 0
        until(replicas[1][0], ["birch"])
        assert ask(replicas[1][0], image.read_bytes())["top"][0]["label"] == "birch"
