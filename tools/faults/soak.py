"""A long time under a mixed load: memory, descriptors, threads and latency over time, and whether they grow."""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from tools.faults.common import Server, copied, ended, lesson, memory_mb

from dualprompt.bench.load import picture

# What a quantity may drift over the whole time before that is called growing or falling.
TOLERANCE = {"memory_mb": 25.0, "descriptors": 5.0, "threads": 3.0, "p50_ms": 20.0, "p95_ms": 60.0}
WARM_UP = 0.1  # share of the time that is left out: caches fill
SHORTEST = 1 / 6  # hours that must be observed to tell growth from warming up


@dataclass(frozen=True)
class Sample:
    """How the server is at a moment, and how it answered since the last."""

    minute: float
    memory_mb: float
    descriptors: int
    threads: int
    answers: int
    p50_ms: float
    p95_ms: float


@dataclass
class Load:
    """What the clients did so far."""

    latencies: list[float] = field(default_factory=list)  # ordinary pictures since the last sample, in ms
    large: int = 0
    taught: int = 0
    forgot: int = 0
    problems: list[str] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)


def campaign_soak(source: Path, folder: Path, minutes: float, out: Path | None) -> dict[str, Any]:
    """Ask, teach and forget for so long; return the samples, and a verdict on each quantity that the code computed."""
    load, samples = Load(), []
    every = min(60.0, 60 * minutes / 10)
    with Server(copied(source, folder / "soak"), folder / "watched-soak") as server:
        clients = [threading.Thread(target=work, args=(server, load)) for work in (_ask, _ask_large, _teach)]
        for client in clients:
            client.start()
        began = time.monotonic()
        sys.stderr.write("minute  memory MB  descriptors  threads  answers   p50 ms   p95 ms\n")
        while server.alive and time.monotonic() - began < 60 * minutes:
            time.sleep(every)
            samples.append(_sample(server, load, (time.monotonic() - began) / 60))
            now = samples[-1]
            sys.stderr.write(
                f"{now.minute:6.1f} {now.memory_mb:10.1f} {now.descriptors:12} {now.threads:8} {now.answers:8} "
                f"{now.p50_ms:8.1f} {now.p95_ms:8.1f}\n"
            )
            if out is not None:
                out.with_suffix(".samples.json").write_text(json.dumps([asdict(each) for each in samples], indent=1))
        load.over.set()
        for client in clients:
            client.join()
        if not server.alive:
            load.problems.append("the server is gone")
        strays = server.strays()
    verdicts = verdicts_of([asdict(each) for each in samples])
    grown = [f"{name}: {told}" for name, told in verdicts.items() if told.startswith("grows")]
    strange = [f"a file outside: {name}" for name in strays]
    return {
        "minutes": minutes,
        "answers": sum(each.answers for each in samples),
        "large_pictures": load.large,
        "taught": load.taught,
        "forgotten": load.forgot,
        "verdicts": verdicts,
        "samples": [asdict(each) for each in samples],
        "problems": load.problems + grown + strange,
    }


def verdicts_of(samples: list[dict[str, Any]]) -> dict[str, str]:
    """Return what samples say of each quantity."""
    hours = [each["minute"] / 60 for each in samples]
    return {name: verdict(hours, [each[name] for each in samples], TOLERANCE[name]) for name in TOLERANCE}


def verdict(hours: list[float], values: list[float], tolerance: float) -> str:
    """Return whether a quantity is flat (its slope is within two standard errors), or drifts, by little or by much."""
    skipped = int(np.ceil(WARM_UP * len(hours)))
    x, y = np.array(hours[skipped:]), np.array(values[skipped:], dtype=float)
    if len(x) < 4:
        return "cannot be told: fewer than four samples"
    (slope, start), centred = np.polyfit(x, y, 1), x - x.mean()
    rest = y - slope * x - start
    error = float(np.sqrt((rest**2).sum() / (len(x) - 2) / (centred**2).sum()))
    drift = slope * (x[-1] - x[0])
    told = f"{slope:+.1f} ± {error:.1f} an hour, {drift:+.1f} over the time observed"
    if x[-1] - x[0] < SHORTEST:
        return f"cannot be told in so short a time ({told})"
    if abs(slope) <= 2 * error:
        return f"flat ({told})"
    if abs(drift) <= tolerance:
        return f"drifts {'up' if slope > 0 else 'down'}, within {tolerance:g} ({told})"
    return f"{'grows' if slope > 0 else 'falls'} ({told})"


def _sample(server: Server, load: Load, minute: float) -> Sample:
    assert server.process
    place = Path(f"/proc/{server.process.pid}")
    load.latencies, waited = [], load.latencies
    half, most = (np.percentile(waited, share) for share in (50, 95)) if waited else (float("nan"), float("nan"))
    memory, threads = memory_mb(place), len(list((place / "task").iterdir()))
    open_files = len(list((place / "fd").iterdir()))
    return Sample(
        round(minute, 2),
        round(memory, 1),
        open_files,
        threads,
        len(waited),
        round(float(half), 1),
        round(float(most), 1),
    )


def _ask(server: Server, load: Load) -> None:
    """Send an ordinary picture every fifth of a second."""
    with server.client() as client:
        while not load.over.wait(0.2):
            began = time.monotonic()
            if _posted(client, load, picture(320, 240), "an ordinary picture"):
                load.latencies.append(1000 * (time.monotonic() - began))


def _ask_large(server: Server, load: Load) -> None:
    """Send a picture of twelve megapixels every five seconds."""
    large = picture(4000, 3000)
    with server.client() as client:
        while not load.over.wait(5):
            load.large += _posted(client, load, large, "a large picture")


def _posted(client: httpx.Client, load: Load, content: bytes, what: str) -> bool:
    try:
        status = client.post("/predict", files={"images": content}).status_code
    except httpx.HTTPError as error:
        status = type(error).__name__
    if status != 200:
        load.problems.append(f"{what} was answered {status}")
    return status == 200


def _teach(server: Server, load: Load) -> None:
    """Teach a class, and forget it, again and again."""
    with server.client() as client, contextlib.suppress(httpx.HTTPError):
        while not load.over.wait(2):
            reply = client.post("/tasks", files=lesson(), data={"epochs": "1", "name": "new"})
            if reply.status_code != 202:
                load.problems.append(f"a lesson was answered {reply.status_code}")
                continue
            job = ended(client, reply.json()["id"])
            if job["state"] != "done":
                load.problems.append(f"a lesson {job['state']}: {job['error']}")
                continue
            load.taught += 1
            if (status := client.delete(f"/tasks/{job['task']}").status_code) != 200:
                load.problems.append(f"forgetting was answered {status}")
            load.forgot += 1
