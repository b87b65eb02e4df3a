"""The load test: `python -m dualprompt.bench.load [--model DIR] [--engine onnx] [--int8] [--json]`.

Two servers with the same model run on this machine, one that batches and one that does not; clients on the loopback
interface ask both in turns, so that whatever else the machine does hits both. Everything is bounded in count and time.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from PIL import Image

BOUNDARY = "dualprompt-load"
START_SECONDS = 120


@dataclass
class Tally:
    """What some requests to one server took."""

    seconds: list[float] = field(default_factory=list)
    errors: int = 0
    wall: float = 0.0

    def figures(self) -> dict[str, Any]:
        """Return requests a second, percentiles in milliseconds, and errors."""
        milliseconds = sorted(1000 * each for each in self.seconds)
        return {
            "requests": len(milliseconds),
            "errors": self.errors,
            "per_second": round(len(milliseconds) / self.wall, 1) if self.wall else 0.0,
            "p50_ms": round(statistics.median(milliseconds), 1) if milliseconds else None,
            "p95_ms": round(milliseconds[int(0.95 * (len(milliseconds) - 1))], 1) if milliseconds else None,
        }


def picture(width: int, height: int, seed: int = 0, colour: tuple[int, int, int] = (120, 90, 60)) -> bytes:
    """Return a JPEG with the detail of a photo: smooth shapes and some noise around a colour."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 120, (8, 8, 3), dtype=np.uint8)).resize(
        (width, height), Image.Resampling.BICUBIC
    )
    pixels = np.asarray(coarse) + np.array(colour) + rng.normal(0, 6, (height, width, 3))
    file = io.BytesIO()
    Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8)).save(file, "JPEG", quality=88)
    return file.getvalue()


def demo_model(folder: Path, backbone: str = "embedded") -> Path:
    """Teach a new model six made-up classes in two tasks; return its directory."""
    from dualprompt.learner import ContinualLearner

    learner = ContinualLearner(backbone, device="cpu")
    for task in range(2):
        colours = {f"colour {3 * task + n}": (200 * (n == 0), 100 * task, 200 * (n == 2)) for n in range(3)}
        data = {name: [picture(160, 120, seed, colour) for seed in range(8)] for name, colour in colours.items()}
        learner.learn(data, f"task {task + 1}", epochs=1)
    return learner.save(folder)


def request_for(image: bytes, host: str) -> bytes:
    """Return the bytes of one request to /predict."""
    head = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="images"; filename="a.jpg"\r\n\r\n'.encode()
    body = head + image + f"\r\n--{BOUNDARY}--\r\n".encode()
    lines = (
        "POST /predict?top_k=1 HTTP/1.1",
        f"Host: {host}",
        f"Content-Type: multipart/form-data; boundary={BOUNDARY}",
        f"Content-Length: {len(body)}",
    )
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


@contextlib.contextmanager
def server(model: Path, *options: str) -> Iterator[tuple[str, int]]:
    """Run a server on a free port; yield its address and process id."""
    command = [sys.executable, "-m", "dualprompt.cli", "serve", str(model), "--port", "0", "--json", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout
        timer = time.monotonic() + START_SECONDS
        text = ""
        while not text.endswith("}\n") and time.monotonic() < timer:
            line = process.stdout.readline()
            if not line:
                raise SystemExit(f"the server did not start: {' '.join(command)}")
            text += line
        yield json.loads(text)["url"], process.pid
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


async def ask(address: str, image: bytes, clients: int, requests: int, seconds: float) -> Tally:
    """Let `clients` ask one after another until `requests` are answered or the time is over."""
    place = urlsplit(address)
    assert place.hostname
    message = request_for(image, place.netloc)
    tally, left = Tally(), requests
    until = time.perf_counter() + seconds

    async def client() -> None:
        nonlocal left
        reader, writer = await asyncio.open_connection(place.hostname, place.port)
        while left > 0 and time.perf_counter() < until:
            left -= 1
            began = time.perf_counter()
            writer.write(message)
            head = await reader.readuntil(b"\r\n\r\n")
            length = next(int(line[15:]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:"))
            await reader.readexactly(length)
            tally.seconds.append(time.perf_counter() - began)
            tally.errors += not head.startswith(b"HTTP/1.1 200")
        writer.close()

    began = time.perf_counter()
    for outcome in await asyncio.gather(*(client() for _ in range(clients)), return_exceptions=True):
        tally.errors += isinstance(outcome, BaseException)
    tally.wall = time.perf_counter() - began
    return tally


def peak_megabytes(process: int) -> float | None:
    """Return the most memory a process ever held, where the system tells."""
    with contextlib.suppress(OSError, StopIteration, ValueError):
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
        return round(int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) / 1024, 1)
    return None


def joined(tallies: list[Tally]) -> Tally:
    """Return several tallies as one."""
    return Tally(
        [each for tally in tallies for each in tally.seconds],
        sum(tally.errors for tally in tallies),
        sum(tally.wall for tally in tallies),
    )


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run both servers and the clients; return all figures."""
    source = options.model or demo_model(folder / "model")
    image = options.image.read_bytes() if options.image else picture(*options.size)
    places = {name: folder / name for name in ("batched", "unbatched")}
    for place in places.values():
        shutil.copytree(source, place, ignore=shutil.ignore_patterns(".serve"))
    engine = ["--engine", options.engine, *(["--int8"] if options.int8 else [])]
    alone = [*engine, "--max-batch", "1"]
    with server(places["batched"], *engine) as (batched, pid), server(places["unbatched"], *alone) as (unbatched, _):
        for address in (batched, unbatched):
            asyncio.run(ask(address, image, 4, 40, 30))  # the first passes are slower
        idle = asyncio.run(ask(batched, image, 1, options.idle_requests, options.seconds))
        rounds: dict[str, list[Tally]] = {"batched": [], "unbatched": []}
        for _ in range(options.rounds):
            for name, address in (("batched", batched), ("unbatched", unbatched)):
                each_round = options.requests // options.rounds
                rounds[name].append(asyncio.run(ask(address, image, options.clients, each_round, options.seconds)))
        memory = peak_megabytes(pid)
    loaded = {name: joined(tallies).figures() for name, tallies in rounds.items()}
    return {
        "cores": os.cpu_count(),
        "engine": options.engine,
        "int8": options.int8,
        "image_bytes": len(image),
        "clients": options.clients,
        "idle": idle.figures(),
        **loaded,
        "ratio": round(loaded["batched"]["per_second"] / max(loaded["unbatched"]["per_second"], 1e-9), 2),
        "peak_memory_mb": memory,
    }


def main(arguments: list[str] | None = None) -> int:
    """Measure and print; return 1 if any request failed."""
    parser = argparse.ArgumentParser(prog="python -m dualprompt.bench.load", description=__doc__)
    parser.add_argument("--model", type=Path, help="a saved model (default: a small one with the embedded backbone)")
    parser.add_argument("--image", type=Path, help="what clients send (default: a made-up JPEG)")
    parser.add_argument("--size", type=int, nargs=2, default=(320, 240), help="of the made-up JPEG")
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--requests", type=int, default=1600, help="to each server, under load")
    parser.add_argument("--idle-requests", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=4, help="turns of each server")
    parser.add_argument("--seconds", type=float, default=60, help="at most, for each turn")
    parser.add_argument("--engine", choices=("torch", "onnx"), default="torch", help="of both servers")
    parser.add_argument("--int8", action="store_true", help="with --engine onnx: 8-bit weights")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        found = measure(options, Path(folder))
    errors = sum(found[name]["errors"] for name in ("idle", "batched", "unbatched"))
    sys.stdout.write(json.dumps(found, indent=2) + "\n" if options.json else summary(found))
    return 1 if errors else 0


def summary(found: dict[str, Any]) -> str:
    """Return the figures in words."""
    idle, batched, unbatched = found["idle"], found["batched"], found["unbatched"]
    rows = [
        f"idle, 1 client:        p50 {idle['p50_ms']} ms, p95 {idle['p95_ms']} ms",
        f"batched, {found['clients']} clients:   {batched['per_second']}/s, p50 {batched['p50_ms']} ms, "
        f"p95 {batched['p95_ms']} ms",
        f"unbatched, {found['clients']} clients: {unbatched['per_second']}/s, p50 {unbatched['p50_ms']} ms, "
        f"p95 {unbatched['p95_ms']} ms",
        f"ratio {found['ratio']}; errors {idle['errors'] + batched['errors'] + unbatched['errors']}; "
        f"peak memory {found['peak_memory_mb']} MB; {found['cores']} cores",
    ]
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    raise SystemExit(main())
