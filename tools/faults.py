"""The fault campaign against a real server: `python tools/faults.py [NAME …] [--out faults.json]`. Its parts:

requests  malformed requests: from the OpenAPI schema (schemathesis), damaged and hostile images, multipart bodies, zips
          and bytes that are no HTTP. No answer may be a 5xx, the server must live, and no file may appear anywhere but
          in the model's directory.
kills     SIGKILL of the server or of the process that learns, at seeded moments while it learns and while it switches.
          What the next server finds must be the old model or the new one, complete.
disk      files may only grow to a limit, as on a full disk: the job says so, and the old model stays and answers.
files     so many mutations (--files) of every kind of file that we read back: a model's facts and tensors, the papers
          and checkpoints of a run, the cache, presets, weights and what lies beside them. Each must be read as
          something whole or refused in one line (tests/test_hostile_files.py, with more examples).
folders   models from a stranger, whose records and links point at other folders. Nothing there may change.
pictures  small files that decode to many pixels, from several clients: others are answered, memory is bounded, and
          SIGTERM ends the server in the middle of it.
crowd     silent, half-said, stalled and deaf connections, also where few files may be open: health is told all the
          time, others are answered soon, the log stays small.

Everything is seeded and bounded. The summary is one JSON object.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import json
import os
import random
import resource
import shutil
import signal
import socket
import stat
import struct
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
from PIL import Image

from dualprompt.learner import ContinualLearner
from dualprompt.serve.limits import Limits
from dualprompt.serve.load import demo_model, peak_megabytes, picture

PARTS = ("requests", "kills", "disk", "folders", "pictures", "crowd", "files")
WAIT_SECONDS = 180
NEW = "violet"
ROUNDS = 5  # schemathesis runs out of ideas for simple operations; another seed has more


@dataclass
class Server:
    """A server in a process of its own, whose home, temporary and current folders are watched."""

    model: Path
    watched: Path
    limit: int | None = None  # bytes of a file
    files: int | None = None  # open at a time
    process: subprocess.Popen[str] | None = None
    address: str = ""
    token: str = ""

    def __enter__(self) -> Server:
        places = {"HOME": "home", "TMPDIR": "tmp", "XDG_CACHE_HOME": "cache", "DUALPROMPT_CACHE": "cache"}
        for name in {*places.values(), "here"}:
            (self.watched / name).mkdir(parents=True, exist_ok=True)
        environment = os.environ | {key: str(self.watched / name) for key, name in places.items()}
        environment["PYTHONDONTWRITEBYTECODE"] = "1"
        command = [sys.executable, "-m", "dualprompt.cli", "serve", str(self.model), "--port", "0", "--json"]
        with self.log_file.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, "--device", "cpu"],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=environment,
                cwd=self.watched / "here",
                preexec_fn=self._restrict if self.limit or self.files else None,
            )
        assert self.process.stdout
        text = ""
        while not text.endswith("}\n"):
            line = self.process.stdout.readline()
            if not line:
                self.kill()
                raise RuntimeError(f"the server did not start: {self.log_file.read_text()[-2000:]}")
            text += line
        told = json.loads(text)
        self.address, self.token = told["url"], told["token"]
        return self

    @property
    def log_file(self) -> Path:
        """What it writes to its standard error."""
        return self.watched.with_name(f"{self.watched.name}.log")

    def _restrict(self) -> None:
        if self.limit:
            resource.setrlimit(resource.RLIMIT_FSIZE, (self.limit, self.limit))
        if self.files:
            resource.setrlimit(resource.RLIMIT_NOFILE, (self.files, self.files))

    def __exit__(self, *_: object) -> None:
        if self.alive:
            assert self.process
            self.process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(20)
        self.kill()

    @property
    def alive(self) -> bool:
        """Whether it still runs."""
        return self.process is not None and self.process.poll() is None

    def kill(self) -> None:
        """Kill it as the system's out-of-memory killer does."""
        if self.process:
            self.process.kill()
            self.process.wait()

    def learner(self) -> int | None:
        """Return the id of the process that learns."""
        assert self.process
        with contextlib.suppress(OSError):
            children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
            return int(children[0]) if children else None
        return None

    def client(self) -> httpx.Client:
        """Return a client."""
        return httpx.Client(base_url=self.address, timeout=60, headers={"authorization": f"Bearer {self.token}"})

    def strays(self) -> list[str]:
        """Return files that appeared outside of the model's directory."""
        return [str(path.relative_to(self.watched)) for path in self.watched.rglob("*") if path.is_file()]


def lesson(count: int = 6, side: int = 64) -> list[tuple[str, tuple[str, bytes]]]:
    """Pictures of a new class."""
    return [("images", (f"{NEW}/{n}.jpg", picture(side, side, n, (120, 0, 180)))) for n in range(count)]


def until(done: Callable[[], Any], seconds: float = WAIT_SECONDS) -> Any:
    """Wait until something is so; return it."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if found := done():
            return found
        time.sleep(0.01)
    raise TimeoutError("it never came")


def state_of(client: httpx.Client, job: int) -> dict[str, Any]:
    """Return a job."""
    return client.get(f"/jobs/{job}").json()


def ended(client: httpx.Client, job: int) -> dict[str, Any]:
    """Wait for a job's end."""
    return until(lambda: (found := state_of(client, job))["state"] in ("done", "failed") and found)


# Malformed requests


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


def images(rng: random.Random) -> Iterator[bytes]:
    """Damaged, hostile and misnamed images, without end."""
    good = {kind: _encoded(kind) for kind in ("JPEG", "PNG", "GIF", "WEBP", "BMP", "TIFF", "PPM")}
    huge = [
        _png_header(60_000, 60_000),
        _png_header(2**31 - 1, 2**31 - 1),
        b"P6 99999 99999 255\n" + bytes(100),
        b"GIF89a" + struct.pack("<HH", 65535, 65535) + b"\x80\0\0\0\0\0\xff\xff\xff,\0\0\0\0\xff\xff\xff\xff\0\x02\0;",
        b"BM" + struct.pack("<IHHIIiiHHIIiiII", 100, 0, 0, 54, 40, 2**30, 2**30, 1, 24, 0, 0, 0, 0, 0, 0),
        _bomb(),
    ]
    others = [
        b"",
        b"\0" * 1000,
        b"<svg onload=alert(1)>",
        b"%PDF-1.7",
        b"%!PS-Adobe-3.0 EPSF-3.0\n",
        b"PK\x03\x04",
        b"{}",
    ]
    while True:
        source = bytearray(rng.choice(list(good.values())))
        kind = rng.randrange(6)
        if kind == 0:
            yield bytes(source[: rng.randrange(len(source))])
        elif kind == 1:
            for _ in range(rng.choice((1, 3, 30, 300))):
                source[rng.randrange(len(source))] = rng.randrange(256)
            yield bytes(source)
        elif kind == 2:  # a polyglot: two files in one
            yield bytes(source) + rng.choice([*good.values(), *others, archive({"a/b.png": bytes(source)})])
        elif kind == 3:
            yield rng.choice(huge)
        elif kind == 4:
            yield rng.choice(others)
        else:
            at = rng.randrange(len(source))
            yield bytes(source[:at]) + rng.randbytes(rng.choice((4, 4000))) + bytes(source[at:])


def _encoded(kind: str) -> bytes:
    file = io.BytesIO()
    Image.open(io.BytesIO(picture(48, 40))).save(file, kind)
    return file.getvalue()


def _chunk(name: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))


def _png_header(width: int, height: int) -> bytes:
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", header) + _chunk(b"IDAT", zlib.compress(bytes(1000)))


def _bomb() -> bytes:
    """A small file that says it holds few pixels and text that grows a thousandfold."""
    text = _chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(80_000_000)))
    return b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", struct.pack(">IIBBBBB", 9, 9, 8, 2, 0, 0, 0)) + text


def archive(entries: dict[str, bytes], change: dict[str, Any] | None = None) -> bytes:
    """A zip, whose table of contents may be changed to lie."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as opened:
        for name, content in entries.items():
            info = zipfile.ZipInfo(name)
            opened.writestr(info, content, zipfile.ZIP_DEFLATED)
            for key, value in (change or {}).items():
                setattr(info, key, value)
    return file.getvalue()


def archives(rng: random.Random) -> Iterator[bytes]:
    """Hostile and damaged zips, without end. None of them may teach anything."""
    image = _encoded("PNG")
    names = (
        "../x/a.png",
        "/etc/a.png",
        "a/../../b.png",
        "C:\\a\\b.png",
        "a\\..\\b.png",
        "loose.png",
        "\x01/a.png",
        "",
        "a/",
    )
    changes: list[dict[str, Any]] = [
        {"external_attr": (stat.S_IFLNK | 0o777) << 16},
        {"external_attr": stat.S_IFCHR << 16},
        {"flag_bits": 1},
        {"compress_type": zipfile.ZIP_LZMA},
        {"compress_type": 99},
        {"CRC": 7},
        {"file_size": 2**31},
        {"file_size": 3},
        {"compress_size": 2**31},
        {"header_offset": 2**31},
    ]
    bombs = [archive({"a/b.png": bytes(20_000_000)}), archive({f"a/{n}.txt": bytes(900_000) for n in range(300)})]
    nested = archive({"a/b.zip": archive({"a/b.png": image})})
    endless = archive({f"a/{'b' * 60_000}{n}.jpg": _encoded("JPEG")[:300] for n in range(5)})
    while True:
        kind = rng.randrange(6)
        if kind == 0:
            yield archive({rng.choice(names) or "x": image})
        elif kind == 1:
            yield archive({"a/b.png": image}, rng.choice(changes))
        elif kind == 2:
            yield rng.choice([*bombs, nested, endless])
        elif kind == 3:
            whole = archive({"a/b.png": image, "b/c.png": image})
            yield whole[: rng.randrange(len(whole) - 22)]
        elif kind == 4:  # damaged, and its pictures are none, so that nothing can be learned
            whole = bytearray(archive({"a/b.png": b"none", "b/c.png": b"none"}))
            for _ in range(rng.choice((1, 5, 50))):
                whole[rng.randrange(len(whole))] = rng.randrange(256)
            yield bytes(whole)
        else:
            yield rng.randbytes(rng.choice((0, 10, 3000)))


def bodies(rng: random.Random) -> Iterator[bytes]:
    """Multipart bodies that are cut, changed or nonsense, without end."""
    head = b'--faults\r\nContent-Disposition: form-data; name="images"; filename="a.png"\r\n\r\n'
    whole = head + _encoded("PNG")[:200] + b"\r\n--faults--\r\n"  # no changed name may make it one to learn
    while True:
        kind = rng.randrange(4)
        if kind == 0:
            yield whole[: rng.randrange(len(whole))]
        elif kind == 1:
            changed = bytearray(whole)
            for _ in range(rng.choice((1, 3, 10))):
                changed[rng.randrange(len(head) + 5)] = rng.randrange(256)
            yield bytes(changed)
        elif kind == 2:
            yield (
                b"--faults\r\n"
                + rng.choice((b"A: " + b"b" * 100_000, b"A: b\r\n" * 5000, b"\r\n" * 100, b": :\r\n\r\n"))
                + whole
            )
        else:
            yield rng.randbytes(rng.randrange(3000))


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


# Kills


def campaign_kills(source: Path, folder: Path, count: int, seed: int) -> dict[str, Any]:
    """Kill the server or what learns while it learns or switches; return what the next server found."""
    rng = random.Random(seed)
    probe = [picture(64, 64, n) for n in range(3)]
    old = ContinualLearner.load(source, "cpu")
    expected = [answer.to_dict() for answer in old.predict(probe)]
    tally: Counter[str] = Counter()
    problems: list[str] = []
    seconds = 6.0
    for number in range(count):
        victim = ("server", "learner")[number % 2]
        moment = ("learning", "switch")[number // 2 % 2]
        model, watched = copied(source, folder / f"kill-{number}"), folder / "watched-kills"
        with Server(model, watched) as server, server.client() as client:
            began = time.monotonic()
            job = client.post("/tasks", files=lesson(), data={"epochs": "2", "name": "new"}).json()["id"]
            mark = model / ".serve" / "jobs" / f"{job:06}" / "learned.json"
            if moment == "switch":
                until(
                    lambda mark=mark, client=client, job=job: mark.exists() or state_of(client, job)["state"] == "done"
                )
                time.sleep(rng.uniform(0, 0.03))
            else:
                time.sleep(rng.uniform(0, seconds))
            child = server.learner()
            if victim == "server":
                server.kill()
            elif child is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
                state = ended(client, job)["state"]
                tally[f"{moment}: learner killed, job {state}"] += 1
                check_model(model, old.classes, probe, expected, problems, number, tally)
            if moment == "learning" and number % 2 and child is not None:
                seconds = max(2.0, min(seconds, time.monotonic() - began))
        if victim == "server":
            with Server(model, watched) as server, server.client() as client:
                served = set(client.get("/model").json()["classes"])
                if served not in (set(old.classes), {*old.classes, NEW}):
                    problems.append(f"{number}: the server came back with {sorted(served)}")
                if client.post("/predict", files={"images": probe[0]}).status_code != 200:
                    problems.append(f"{number}: no answer after the restart")
                came_back = "new" if NEW in served else "old"
                state = ended(client, job)["state"]
                tally[f"{moment}: server killed, back with the {came_back} model, job {state}"] += 1
            check_model(model, old.classes, probe, expected, problems, number, tally)
        if left := left_over(model):
            problems.append(f"{number}: uploads left: {left[:3]}")
        shutil.rmtree(model)
    return {"kills": count, "outcomes": dict(sorted(tally.items())), "problems": problems}


def check_model(
    model: Path,
    known: tuple[str, ...],
    probe: list[bytes],
    expected: list[dict[str, Any]],
    problems: list[str],
    number: int,
    tally: Counter[str],
) -> None:
    """Load what is on disk as anybody would, and see whether it is the old model or the new."""
    learner = ContinualLearner.load(model, "cpu")
    if learner.classes == known:
        tally["models found: old"] += 1
        if [answer.to_dict() for answer in learner.predict(probe)] != expected:
            problems.append(f"{number}: the old model answers otherwise")
    elif learner.classes == (*known, NEW):
        tally["models found: new"] += 1
    else:
        problems.append(f"{number}: a mixture: {learner.classes}")


# A full disk


def campaign_disk(source: Path, folder: Path) -> dict[str, Any]:
    """Let files grow only so far; return what the server said and whether the old model stayed."""
    rows, problems = [], []
    largest = max(len(content) for content in kept_files(source).values())
    for share in (
        0.3,
        0.6,
        0.9,
        1.0,
        1.1,
        1.5,
        4.0,
    ):  # of what the old model's largest file takes; the new one is larger
        limit = int(share * largest)
        model = copied(source, folder / f"disk-{limit}")
        before = kept_files(model)
        with Server(model, folder / "watched-disk", limit) as server, server.client() as client:
            reply = client.post("/tasks", files=lesson(side=16), data={"epochs": "1", "name": "new"})
            row = {"largest_file": limit, "upload": reply.status_code, "said": reply.json().get("error", "")}
            if reply.status_code == 202:
                job = ended(client, reply.json()["id"])
                row |= {"job": job["state"], "said": job["error"] or ""}
            if row.get("job") != "done" and kept_files(model) != before:
                problems.append(f"{limit}: the model was changed")
            if row.get("job") != "done" and not row["said"]:
                problems.append(f"{limit}: no error was said")
            if client.post("/predict", files={"images": picture(64, 64)}).status_code != 200:
                problems.append(f"{limit}: no answer afterwards")
            if not server.alive:
                problems.append(f"{limit}: the server is gone")
        ContinualLearner.load(model, "cpu")
        if left := left_over(model):
            problems.append(f"{limit}: uploads left: {left[:3]}")
        rows.append(row)
    return {"rounds": rows, "problems": problems}


# Mutated files


def campaign_files(count: int, seed: int) -> dict[str, Any]:
    """Try mutations of every kind of file that is read back; return what was found."""
    tests = Path(__file__).parents[1] / "tests" / "test_hostile_files.py"
    command = [sys.executable, "-m", "pytest", str(tests), "-n0", "-q", f"--hypothesis-seed={seed}", "-k", "mutations"]
    began = time.monotonic()
    done = subprocess.run(
        command, env=os.environ | {"DUALPROMPT_EXAMPLES": str(count)}, capture_output=True, text=True, check=False
    )
    lines = done.stdout.strip().splitlines()
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return {
        "mutations_of_each": count,
        "summary": lines[-1] if lines else done.stderr.strip()[-500:],
        "problems": failed or ([] if done.returncode == 0 else [f"pytest ended with code {done.returncode}"]),
        "seconds": round(time.monotonic() - began),
    }


# Models from a stranger


def traps(model: Path, victim: Path) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield what a stranger may have put into a model's folder, each with a name."""
    serve = model / ".serve"
    jobs = serve / "jobs"

    def record(**changes: Any) -> Callable[[], object]:
        plain = {"id": 1, "name": None, "classes": ["x"], "images": 1, "state": "failed", "attempts": 9}
        text = json.dumps({"next": changes.pop("following", 2), "jobs": [plain | changes]})
        return lambda: (jobs.mkdir(parents=True), (serve / "jobs.json").write_text(text))

    def link(place: Path, target: Path) -> Callable[[], object]:
        return lambda: (place.parent.mkdir(parents=True, exist_ok=True), place.symlink_to(target))

    def lesson_of(file: str) -> Callable[[], object]:
        text = json.dumps({"name": None, "epochs": 1, "again": False, "pictures": {"x": [[file, "x"]]}})

        def put() -> None:
            record(state="queued", attempts=0)()
            (jobs / "000001" / "images").mkdir(parents=True)
            (jobs / "000001" / "lesson.json").write_text(text)

        return put

    for state in ("queued", "running", "done", "failed"):
        yield f"a {state} job that is a path", record(id=str(victim), state=state)
        yield f"a {state} job that leads outside", record(id=f"../../../{victim.name}", state=state)
    yield "a next job that is a path", record(following=str(victim))
    for place in (serve, jobs, jobs / "000001", jobs / "000001" / "images"):
        yield f"a link at {place.relative_to(model)}", link(place, victim)
    for place in (serve / "jobs.json", model / ".lock"):
        yield f"a link at {place.relative_to(model)}", link(place, victim / "letter.txt")
    yield "a pipe for a record", lambda: (serve.mkdir(), os.mkfifo(serve / "jobs.json"))
    yield "a record without end", lambda: (serve.mkdir(), (serve / "jobs.json").write_text("[" * 10**6))
    yield "a picture from outside", lesson_of(str(victim / "a.jpg"))
    yield "a picture further up", lesson_of(f"../../../../../{victim.name}/a.jpg")


def campaign_folders(source: Path, folder: Path) -> dict[str, Any]:
    """Serve models from a stranger; return what became of a folder of ours, which must be nothing."""
    rows: dict[str, str] = {}
    problems: list[str] = []
    names = [name for name, _ in traps(folder, folder)]
    for number, name in enumerate(names):
        place = folder / f"stranger-{number}"
        victim, model = place / "victim", copied(source, place / "model")
        (victim / "000001" / "images").mkdir(parents=True)
        (victim / "a.jpg").write_bytes(picture(64, 64))
        (victim / "letter.txt").write_text("mine")
        before = {path: path.is_file() and path.read_bytes() for path in victim.rglob("*")}
        dict(traps(model, victim))[name]()
        try:
            with Server(model, place / "watched") as server, server.client() as client:
                until(lambda client=client: all(j["state"] in ("done", "failed") for j in client.get("/jobs").json()))
                known = client.get("/model").json()["classes"]
            rows[name] = "served"
            if "x" in known:
                problems.append(f"{name}: it learned a picture from outside")
        except RuntimeError as refused:
            rows[name] = f"refused: {str(refused).strip().splitlines()[-1].replace(str(place), '…')}"
        if {path: path.is_file() and path.read_bytes() for path in victim.rglob("*")} != before:
            problems.append(f"{name}: the folder was changed")
    return {"outcomes": rows, "problems": problems}


# Small files, many pixels


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


# Crowds


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


def copied(source: Path, target: Path) -> Path:
    """Return a copy of a model without what a server left there."""
    return Path(shutil.copytree(source, target, ignore=shutil.ignore_patterns(".serve")))


def kept_files(model: Path) -> dict[str, bytes]:
    """Return the model's own files."""
    return {path.name: path.read_bytes() for path in model.iterdir() if path.is_file() and path.name[0] != "."}


def left_over(model: Path) -> list[str]:
    """Return what is left of uploads."""
    return [str(path.relative_to(model)) for path in (model / ".serve" / "jobs").rglob("*") if path.is_file()]


def main() -> int:
    """Run the campaign; return 1 if anything went wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", default=list(PARTS), help=f"{', '.join(PARTS)} (default: all)")
    parser.add_argument("--files", type=int, default=2000, help="mutations of each kind of file")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=5, help="requests of each of four clients with costly pictures")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", type=Path, help="a saved model (default: a small one with the embedded backbone)")
    parser.add_argument("--out", type=Path, help="also write the summary here")
    options = parser.parse_args()
    found: dict[str, Any] = {}
    if "files" in options.what:
        found["files"] = campaign_files(options.files, options.seed)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        served = set(options.what) - {"files"}
        source = options.model or (demo_model(folder / "source") if served else folder)
        if "requests" in options.what:
            found["requests"] = campaign_requests(source, folder, options.requests, options.seed)
        if "kills" in options.what:
            found["kills"] = campaign_kills(source, folder, options.kills, options.seed)
        if "disk" in options.what:
            found["disk"] = campaign_disk(source, folder)
        if "folders" in options.what:
            found["folders"] = campaign_folders(source, folder)
        if "pictures" in options.what:
            found["pictures"] = campaign_pictures(source, folder, options.rounds)
        if "crowd" in options.what:
            found["crowd"] = campaign_crowd(source, folder)
    text = json.dumps(found, indent=2)
    sys.stdout.write(text + "\n")
    if options.out:
        options.out.write_text(text + "\n")
    asked = found.get("requests", {}).values()
    bad = any(
        part["server_errors"]
        or not (part["alive"] and part["learns_afterwards"])
        or part["files_outside"]
        or part["uploads_left"]
        for part in asked
    )
    bad = bad or any(found[name]["problems"] for name in PARTS[1:] if name in found)
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
