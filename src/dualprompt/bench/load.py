"""The load test: `python -m dualprompt.bench.load [--model DIR] [--engines torch,int8] [--publish FILE.json]`.

For each engine two servers with the same model run on this machine, one that batches and one that does not; clients on
the loopback interface ask all of them in turns, so that whatever else the machine does hits all. How much else it did
is measured too. Everything is bounded in count and time.
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
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from PIL import Image

from dualprompt.bench.machine import Meter, Usage
from dualprompt.threads import wait_asleep

BOUNDARY = "dualprompt-load"
START_SECONDS = 300
ENGINES = {"torch": ("--engine", "torch"), "onnx": ("--engine", "onnx"), "int8": ("--engine", "onnx", "--int8")}
TAUGHT = ("mini-fruit", "mini-leaves")  # real pictures that come with the package
EACH, CHECKED = 10, 5  # of them a class: taught, and asked to see whether an engine changes answers


@dataclass
class Tally:
    """What some requests to one server took."""

    seconds: list[float] = field(default_factory=list)
    errors: int = 0
    usage: Usage = field(default_factory=Usage)  # of the server

    def figures(self) -> dict[str, Any]:
        """Return requests a second, percentiles in milliseconds, errors, and what the processors did."""
        milliseconds = sorted(1000 * each for each in self.seconds)
        wall, own, others = self.usage.wall, self.usage.own, self.usage.others_share
        return {
            "requests": len(milliseconds),
            "errors": self.errors,
            "per_second": round(len(milliseconds) / wall, 1) if wall else 0.0,
            "p50_ms": round(statistics.median(milliseconds), 1) if milliseconds else None,
            "p95_ms": round(milliseconds[int(0.95 * (len(milliseconds) - 1))], 1) if milliseconds else None,
            "cpu_ms": round(1000 * own / len(milliseconds), 1) if milliseconds and own is not None else None,
            "others_percent": None if others is None else round(100 * others, 1),
        }

    def __add__(self, more: Tally) -> Tally:
        return Tally(self.seconds + more.seconds, self.errors + more.errors, self.usage + more.usage)


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


def real_model(folder: Path) -> tuple[Path, Path]:
    """Teach a new model real pictures; return its directory, and a folder of pictures that it was not taught."""
    from dualprompt.data.sources import DATASETS, ArraySource
    from dualprompt.learner import ContinualLearner

    learner, asked = ContinualLearner(device="cpu"), folder / "asked"
    for name in TAUGHT:
        dataset = DATASETS[name].load(Path())
        taught: dict[str, list[np.ndarray]] = {}
        for split, most in ((dataset.train, EACH), (dataset.test, CHECKED)):
            assert isinstance(split.source, ArraySource)
            for number, label in enumerate(dataset.classes):
                rows = [split.source.pixels[i] for i in np.flatnonzero(split.labels == number)[:most]]
                if split is dataset.train:
                    taught[label] = rows
                    continue
                (asked / label).mkdir(parents=True)
                for place, row in enumerate(rows):
                    Image.fromarray(row).save(asked / label / f"{place}.png")
        learner.learn(taught, name, prompts="never")
    return learner.save(folder / "model"), asked


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
    tally.usage = Usage(time.perf_counter() - began, None, None)
    return tally


def peak_megabytes(process: int) -> float | None:
    """Return the most memory a process ever held, where the system tells."""
    with contextlib.suppress(OSError, StopIteration, ValueError):
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
        return round(int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) / 1024, 1)
    return None


@dataclass
class Asked:
    """A server, and what its clients saw."""

    engine: str
    batched: bool
    address: str
    process: int
    idle: Tally = field(default_factory=Tally)
    loaded: Tally = field(default_factory=Tally)

    def turn(self, image: bytes, clients: int, requests: int, seconds: float) -> Tally:
        """Let clients ask for a while, and count what this process, the server and others used meanwhile."""
        meter = Meter(self.process, beside=[os.getpid()])
        tally = asyncio.run(ask(self.address, image, clients, requests, seconds))
        tally.usage = meter.usage()
        return tally

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        with urllib.request.urlopen(f"{self.address}/model") as reply:
            agreement = json.loads(reply.read())["engine"]["agreement"]
        return {
            "engine": self.engine,
            "batched": self.batched,
            "idle": self.idle.figures() if self.idle.seconds else None,
            "loaded": self.loaded.figures(),
            "agreement": agreement and {key: agreement[key] for key in ("images", "changed", "before", "after")},
            "peak_memory_mb": peak_megabytes(self.process),
        }


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run the servers and the clients; return all figures."""
    from dualprompt.bench import passes
    from dualprompt.learner import ContinualLearner

    source, check = (options.model, options.check) if options.model else real_model(folder)
    image = options.image.read_bytes() if options.image else picture(*options.size)
    learner = ContinualLearner.load(source, device="cpu")
    alone = passes.measure(learner, options.passes) if options.passes else []
    with contextlib.ExitStack() as stack:
        asked: list[Asked] = []
        for engine in options.engines:
            for batched in (True, False):
                copy = shutil.copytree(
                    source, folder / f"{engine}-{batched}", ignore=shutil.ignore_patterns(".serve", "versions")
                )
                words = [*ENGINES[engine], *([] if batched else ["--max-batch", "1"])]
                words += ["--check", str(check)] if check and engine != "torch" else []
                asked.append(Asked(engine, batched, *stack.enter_context(server(Path(copy), *words))))
        for each in asked:
            each.turn(image, 4, 40, 30)  # the first passes are slower
        for _ in range(options.rounds):
            for each in asked:
                if each.batched:
                    each.idle += each.turn(image, 1, options.idle_requests // options.rounds, options.seconds)
                share = options.requests // options.rounds
                each.loaded += each.turn(image, options.clients, share, options.seconds)
        servers = [each.to_dict() for each in asked]
    facts = learner.info()
    return {
        "cores": os.cpu_count(),
        "clients": options.clients,
        "image_bytes": len(image),
        "model": {
            "backbone": facts["backbone"]["name"],
            "side": learner.side,
            "method": facts["method"]["name"],
            "classes": len(learner.classes),
        },
        "passes": alone,
        "servers": servers,
    }


def engines(given: str) -> list[str]:
    """Return the engines that a list with commas names."""
    found = list(dict.fromkeys(name.strip() for name in given.split(",")))
    if strange := [name for name in found if name not in ENGINES]:
        raise argparse.ArgumentTypeError(f"'{strange[0]}' is none of {', '.join(ENGINES)}")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and publish if asked to; return 1 if any request failed."""
    parser = argparse.ArgumentParser(prog="python -m dualprompt.bench.load", description=__doc__)
    parser.add_argument("--model", type=Path, help="a saved model (default: a small one with the embedded backbone)")
    parser.add_argument("--check", type=Path, help="with --model: class folders, to see what an engine changes")
    parser.add_argument("--image", type=Path, help="what clients send (default: a made-up JPEG)")
    parser.add_argument("--size", type=int, nargs=2, default=(320, 240), help="of the made-up JPEG")
    parser.add_argument("--engines", type=engines, default=["torch", "int8"], help="of torch,onnx,int8")
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--requests", type=int, default=1600, help="to each server, under load")
    parser.add_argument("--idle-requests", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=4, help="turns of each server")
    parser.add_argument("--seconds", type=float, default=60, help="at most, for each turn")
    parser.add_argument("--passes", type=int, default=12, help="turns of the network's pass alone; 0: leave it out")
    parser.add_argument("--publish", type=Path, metavar="FILE", help="write tables and all figures to this .json")
    parser.add_argument("--json", action="store_true")
    words = list(sys.argv[1:] if arguments is None else arguments)
    options = parser.parse_args(words)
    wait_asleep()  # as the servers do
    from dualprompt.bench import serving
    from dualprompt.files import write_json
    from dualprompt.report import publication

    publication.check_target(options.publish)
    with tempfile.TemporaryDirectory() as folder:
        found = measure(options, Path(folder))
    if options.publish:
        write_json(options.publish, serving.publication(found, words))
    sys.stdout.write(json.dumps(found, indent=2) + "\n" if options.json else serving.summary(found))
    figures = [part for each in found["servers"] for part in (each["idle"], each["loaded"]) if part]
    return 1 if any(part["errors"] for part in figures) else 0


if __name__ == "__main__":
    raise SystemExit(main())
