"""What the campaigns share: a server in a process of its own, lessons, waiting."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from dualprompt.bench.load import picture

TESTS = Path(__file__).parents[2] / "tests"
WAIT_SECONDS = 180
NEW = "violet"


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


def copied(source: Path, target: Path) -> Path:
    """Return a copy of a model without what a server left there."""
    return Path(shutil.copytree(source, target, ignore=shutil.ignore_patterns(".serve")))


def kept_files(model: Path) -> dict[str, bytes]:
    """Return the model's own files."""
    return {path.name: path.read_bytes() for path in model.iterdir() if path.is_file() and path.name[0] != "."}


def left_over(model: Path) -> list[str]:
    """Return what is left of uploads."""
    return [str(path.relative_to(model)) for path in (model / ".serve" / "jobs").rglob("*") if path.is_file()]


def memory_mb(process: Path) -> float:
    """Return what a process, by its folder in /proc, holds of the memory now."""
    status = dict(line.split(":", 1) for line in (process / "status").read_text().splitlines())
    return int(status["VmRSS"].split()[0]) / 1024


def tested(file: str, *options: str, **environment: str) -> dict[str, Any]:
    """Run a file of our tests; return its summary, and what failed."""
    # The project's options have a -q already; a second would take pytest's summary away.
    command = [sys.executable, "-m", "pytest", str(TESTS / file), "-n0", *options]
    began = time.monotonic()
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=False)
    lines = done.stdout.strip().splitlines()
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return {
        "summary": lines[-1] if lines else done.stderr.strip()[-500:],
        "problems": failed or ([] if done.returncode == 0 else [f"pytest ended with code {done.returncode}"]),
        "seconds": round(time.monotonic() - began),
    }
