"""Small files that decode to many pixels: others are answered, memory is bounded, SIGTERM ends the server."""

from __future__ import annotations

import contextlib
import io
import random
import struct
import subprocess
import time
import zlib
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
from PIL import Image
from tools.faults.common import Server, copied

from dualprompt.bench.load import peak_megabytes, picture


def bombs() -> list[bytes]:
    """Small files that are costly to decode."""
    blank = {mode: Image.new(mode, (5600, 5600)) for mode in ("RGB", "RGBA", "L")}
    made = [
        _saved(blank["RGB"], "WEBP", lossless=True, method=0),
        _saved(blank["RGBA"], "WEBP", lossless=True, method=0),
        _saved(Image.new("RGB", (8000, 7990)), "WEBP", lossless=True, method=0),
        _saved(blank["RGBA"], "PNG"),
        _saved(blank["L"].convert("I;16"), "PNG"),
        _saved(blank["L"], "GIF"),
        _saved(blank["RGB"], "TIFF", compression="tiff_lzw"),
        large_tile(20_000),
    ]
    return [*made, many_scans(made_from=_saved(Image.new("L", (7900, 7900)), "JPEG", progressive=True))]


def _saved(image: Image.Image, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def large_tile(side: int) -> bytes:
    """A TIFF of 16 × 16 pixels that lies in a tile which is far larger."""
    content = zlib.compress(bytes(side * side), 9)
    tags = {256: 16, 257: 16, 258: 8, 259: 8, 262: 1, 277: 1, 322: side, 323: side, 324: 134, 325: len(content)}
    table = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items())
    return b"II*\0" + struct.pack("<IH", 8, len(tags)) + table + bytes(4) + content


def many_scans(made_from: bytes, times: int = 300) -> bytes:
    """A progressive JPEG whose last scan comes again and again: each time all of it is gone through."""
    at = made_from.rindex(b"\xff\xda")
    return made_from[:-2] + made_from[at:-2] * times + made_from[-2:]


def campaign_pictures(source: Path, folder: Path, rounds: int) -> dict[str, Any]:
    """Send costly pictures from several clients; return how others fared, and the server's memory."""
    costly, problems = bombs(), []
    seen: Counter[str] = Counter()
    waits: list[float] = []
    with Server(copied(source, folder / "pictures"), folder / "watched-pictures") as server:

        def attack(seed: int, seen: Counter[str]) -> None:
            rng = random.Random(seed)
            with server.client() as client, contextlib.suppress(httpx.HTTPError):
                for _ in range(rounds):
                    parts = [("images", ("a.png", rng.choice(costly))) for _ in range(6)]
                    seen[str(client.post("/predict", files=parts).status_code)] += 1

        with ThreadPoolExecutor(4) as pool, server.client() as client:
            attackers = [pool.submit(attack, seed, seen) for seed in range(4)]
            while not all(attacker.done() for attacker in attackers):
                began = time.monotonic()
                if (status := client.post("/predict", files={"images": picture(320, 240)}).status_code) != 200:
                    problems.append(f"an ordinary picture was answered {status}")
                waits.append(time.monotonic() - began)
                if client.get("/healthz").status_code != 200:
                    problems.append("no health")
                time.sleep(0.1)
        assert server.process
        memory = peak_megabytes(server.process.pid)
        with ThreadPoolExecutor(4) as pool:
            attackers = [pool.submit(attack, 10 + seed, Counter()) for seed in range(4)]
            time.sleep(2)
            began = time.monotonic()
            server.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.process.wait(60)
            ended_in = time.monotonic() - began
            if server.alive:
                server.kill()
    if set(seen) - {"200", "503"}:
        problems.append(f"costly pictures were answered {dict(seen)}")
    if ended_in > 15:
        problems.append(f"SIGTERM took {ended_in:.0f} s")
    if memory and memory > 2048:
        problems.append(f"it held {memory:.0f} MB")
    return {
        "file_bytes": [len(content) for content in costly],
        "statuses": dict(sorted(seen.items())),
        "ordinary_requests": len(waits),
        "median_seconds": round(sorted(waits)[len(waits) // 2], 2),
        "longest_seconds": round(max(waits), 2),
        "peak_memory_mb": memory,
        "sigterm_seconds": round(ended_in, 1),
        "problems": problems,
    }
