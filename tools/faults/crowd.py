"""Silent, half-said, stalled and deaf connections: health is told, others are answered soon, the log stays small."""

from __future__ import annotations

import contextlib
import socket
import time
from collections import Counter
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
from tools.faults.common import Server, copied, until

from dualprompt.bench.load import picture
from dualprompt.inbound.limits import Limits


def campaign_crowd(source: Path, folder: Path) -> dict[str, Any]:
    """Open connections that ask nothing, half, or take nothing; return how the server fared."""
    rows: dict[str, Any] = {}
    problems: list[str] = []
    request = b"GET /static/app.js HTTP/1.1\r\nHost: localhost\r\n\r\n"
    upload = b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: 67108864\r\n"
    upload += b"Content-Type: multipart/form-data; boundary=x\r\n\r\n"
    part = b'--x\r\nContent-Disposition: form-data; name="images"; filename="a"\r\n\r\n'
    most = Limits()
    whole = (part + bytes(most.image_bytes - 1000) + b"\r\n") * 2  # so that four and a bit fill the memory
    rest = part + bytes(most.memory_bytes - 4 * len(whole) - 1000)
    kinds = {
        "silent": (1100, [b""]),
        "half a request": (1100, [b"GET / HTTP/1.1\r\nHost: "]),
        "stalled bodies": (1100, [upload + part]),
        "stalled bodies that fill the memory": (5, [upload + whole] * 4 + [upload + rest]),
        "deaf": (50, [request * 2000]),
    }
    for files in (None, 160):
        model, watched = copied(source, folder / f"crowd-{files}"), folder / f"watched-crowd-{files}"
        with Server(model, watched, files=files) as server:
            for kind, (count, said) in kinds.items():
                rows[f"{kind}, {files or 'many'} files"] = crowd(server, count, said, problems)
            size = server.log_file.stat().st_size
            rows[f"log, {files or 'many'} files"] = size
            if size > 100_000:
                problems.append(f"the log has {size} bytes")
            if not server.alive:
                problems.append("the server is gone")
    return {"rounds": rows, "problems": problems}


def crowd(server: Server, count: int, said: list[bytes], problems: list[str]) -> dict[str, Any]:
    """Open so many connections that say something, in turns, and then wait; return how soon others are answered."""
    place = urlsplit(server.address)
    health: Counter[str] = Counter()
    wires: list[socket.socket] = []
    with contextlib.ExitStack() as stack:
        for number in range(count):
            wire = stack.enter_context(socket.socket())
            wire.settimeout(2)
            with contextlib.suppress(OSError):
                wire.connect((place.hostname, place.port))
                wire.sendall(said[number % len(said)])
            wires.append(wire)
            if number % max(1, count // 10) == 0:
                health[str(httpx.get(f"{server.address}/healthz", timeout=20).status_code)] += 1
        began = time.monotonic()
        with server.client() as client:
            until(lambda: client.post("/predict", files={"images": picture(64, 64)}).status_code == 200, 60)
            waited = time.monotonic() - began
            health[str(client.get("/healthz").status_code)] += 1
    if set(health) != {"200"}:
        problems.append(f"health: {dict(health)}")
    if waited > 30:
        problems.append(f"others waited {waited:.0f} s")
    return {"connections": count, "health": dict(health), "others_wait_seconds": round(waited, 1)}
