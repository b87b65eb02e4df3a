"""Malformed requests. No answer may be a 5xx, the server must live, no file may appear outside of the model."""

from __future__ import annotations

import contextlib
import itertools
import random
import socket
import time
from collections import Counter
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
from tools.faults.common import Server, copied, ended, kept_files, left_over, lesson
from tools.faults.hostile import archives, bodies, images

from dualprompt.bench.load import picture

ROUNDS = 5  # schemathesis runs out of ideas for simple operations; another seed has more


def from_schema(server: Server, count: int, seed: int) -> Counter[str]:
    """Ask what schemathesis makes of the OpenAPI schema, half of it right and half wrong."""
    import hypothesis
    import schemathesis
    from hypothesis import HealthCheck, given, settings
    from hypothesis.errors import Unsatisfiable
    from schemathesis import GenerationMode

    schema = schemathesis.openapi.from_dict(httpx.get(f"{server.address}/openapi.json").json())
    schema.config.generation.update(with_security_parameters=False)  # the token we show, or it would get no further
    operations: list[Any] = [found.ok() for found in schema.get_all_operations()]  # pyright: ignore
    operations.sort(key=lambda operation: operation.method.lower() == "delete")  # forget last
    slow = (HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much)
    seen: Counter[str] = Counter()
    each = max(1, count // (2 * len(operations)))
    modes = (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)
    for number, operation, mode in itertools.product(range(ROUNDS), operations, modes):
        if sum(seen.values()) < count:

            @hypothesis.seed(seed + number)
            @settings(max_examples=each, database=None, deadline=None, suppress_health_check=slow)
            @given(case=operation.as_strategy(generation_mode=mode))
            def ask(case: Any) -> None:
                response = case.call(base_url=server.address, headers={"authorization": f"Bearer {server.token}"})
                seen[str(response.status_code)] += 1

            with contextlib.suppress(Unsatisfiable):  # nothing can be wrong with it
                ask()
    return seen


def garbage(server: Server, rng: random.Random) -> str:
    """Send bytes that are no HTTP, or only its beginning; return the status, or how it ended."""
    starts = (
        b"",
        b"GET / HTTP/1.1\r\n",
        b"POST /tasks HTTP/1.1\r\nContent-Length: 99\r\n\r\n",
        b"GET /" + b"a" * 100_000,
    )
    place = urlsplit(server.address)
    assert place.hostname
    assert place.port
    with contextlib.suppress(OSError), socket.create_connection((place.hostname, place.port), 5) as wire:
        wire.sendall(rng.choice(starts) + rng.randbytes(rng.randrange(2000)))
        wire.shutdown(socket.SHUT_WR)
        answer = wire.recv(100)
        return answer[9:12].decode("latin-1") if answer.startswith(b"HTTP/1.1 ") else "closed"
    return "closed"


def made_by_hand(server: Server, count: int, seed: int) -> Counter[str]:
    """Ask with hostile images, zips, bodies and bytes."""
    rng = random.Random(seed)
    pictures, zips, forms = images(rng), archives(rng), bodies(rng)
    kind = {"content-type": "multipart/form-data; boundary=faults"}
    seen: Counter[str] = Counter()
    with server.client() as client:
        for number in range(count):
            choice = number % 10
            if choice < 4:
                response = client.post("/predict", files=[("images", ("a.png", next(pictures)))])
            elif choice < 6:  # a picture that could be learned would be; this one has a companion that cannot
                parts = [("images", ("new/a.png", next(pictures))), ("images", ("new/b.png", b"none"))]
                response = client.post("/tasks", files=parts)
            elif choice < 8:
                response = client.post("/tasks", files={"archive": ("a.zip", next(zips))})
            elif choice < 9:
                response = client.post(rng.choice(("/predict", "/tasks")), content=next(forms), headers=kind)
            else:
                seen[garbage(server, rng)] += 1
                continue
            seen[str(response.status_code)] += 1
            if response.status_code >= 400 and list(response.json()) != ["error"]:
                seen["an error that is not one line of JSON"] += 1
    return seen


def campaign_requests(source: Path, folder: Path, count: int, seed: int) -> dict[str, Any]:
    """Send malformed requests; return what came of them."""
    found: dict[str, Any] = {}
    for name, ask in (("schema", from_schema), ("by hand", made_by_hand)):
        model = copied(source, folder / name.replace(" ", "-"))
        before = kept_files(model)
        with Server(model, folder / f"watched-{name.replace(' ', '-')}") as server:
            began = time.monotonic()
            seen = ask(server, count // 2 if name == "schema" else count - found["schema"]["requests"], seed)
            with server.client() as client:
                good = client.post("/predict", files={"images": picture(64, 64)}).status_code
                jobs = [ended(client, job["id"]) for job in client.get("/jobs").json()]
                unchanged = kept_files(model) == before
                learned = [taught(client, parts) for parts in (undecodable(), lesson())]
            found[name] = {
                "requests": sum(seen.values()),
                "statuses": dict(sorted(seen.items())),
                "server_errors": sum(number for status, number in seen.items() if status.startswith("5")),
                "alive": server.alive,
                "answers_afterwards": good,
                "jobs": [job["state"] for job in jobs],
                "learns_afterwards": learned == ["failed", "done"],
                "files_outside": server.strays(),
                "uploads_left": left_over(model),
                "seconds": round(time.monotonic() - began),
            }
        if name == "by hand":
            found[name]["model_unchanged"] = unchanged
    return found


def undecodable() -> list[tuple[str, tuple[str, bytes]]]:
    """Pictures that begin well and cannot be decoded, under names as long as the server takes them."""
    return [("images", (f"cut/{n}{'x' * 250}.jpg", picture(64, 64, n)[:700])) for n in range(9)]


def taught(client: httpx.Client, parts: list[tuple[str, tuple[str, bytes]]]) -> str:
    """Teach pictures; return how that ended."""
    reply = client.post("/tasks", files=parts, data={"epochs": "1"})
    return ended(client, reply.json()["id"])["state"] if reply.status_code == 202 else str(reply.status_code)


def problems(found: dict[str, Any]) -> list[str]:
    """Return what went wrong in `campaign_requests`."""
    return [
        f"{name}: {key} is {part[key]}"
        for name, part in found.items()
        for key, good in (
            ("server_errors", 0), ("alive", True), ("learns_afterwards", True), ("files_outside", []),
            ("uploads_left", []),
        )
        if part[key] != good
    ]  # fmt: skip
