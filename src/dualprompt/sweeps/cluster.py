"""Many runs on a Ray cluster: a task each, tried again when its worker is lost.

Ray decides where and when a task runs. A worker gets the run's config and the path of its folder, which all machines
must see, and does there what any process would: it goes on from the last checkpoint, so a lost worker costs little.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import platform
import shutil
import socket
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from dualprompt.config import RunConfig, parse
from dualprompt.errors import DualPromptError, InterruptedRunError
from dualprompt.files import disk_errors, with_home
from dualprompt.progress import SILENT, Progress
from dualprompt.run.folder import Run
from dualprompt.sweeps.obtained import Count, Obtained, Workers, first_line
from dualprompt.sweeps.processes import sigterm_interrupts
from dualprompt.sweeps.store import one_by_one

LOCAL = "local"  # the address of a cluster that is started on this machine
RETRIES = 3  # of a run whose worker was lost
# What a network file system may take to show a new file on another machine, or to notice that the owner of a lock died.
LAG = 60.0
SAVING = 60.0  # seconds that workers may take to save themselves when the command is stopped
PATHS = ("DUALPROMPT_CACHE", "DUALPROMPT_DATA")
WORDS = ("WANDB_MODE", "WANDB_PROJECT")


@contextlib.contextmanager
def cluster(address: str = LOCAL, cpus: int = 1, gpus: float | None = None) -> Iterator[Workers]:
    """Yield workers on a Ray cluster, which is connected to when there is a run to carry out, until the `with` ends.

    `address` is HOST:PORT, `auto` for a cluster that this machine is part of, or `local` for a new one of this
    machine alone. A run has `cpus` CPUs, and `gpus` GPUs: by default one if its device is a GPU. A connection to Ray
    that this process has already is used instead of the address, and kept.
    """
    if cpus < 1:
        raise DualPromptError(f"--ray-cpus must be at least 1, found {cpus}")
    if gpus is not None and not 0 <= gpus <= 1:
        raise DualPromptError(f"--ray-gpus takes a number from 0 to 1, since a run has one device; found {gpus:g}")
    ray = _import_ray()
    with contextlib.ExitStack() as until_the_end:
        yield _Cluster(ray, address, cpus, gpus, until_the_end)


@dataclass(frozen=True)
class _Cluster:
    """See `cluster`."""

    ray: Any
    address: str
    cpus: int
    gpus: float | None
    until_the_end: contextlib.ExitStack

    def carry_out(self, missing: Sequence[Obtained], progress: Progress, count: Count) -> None:
        """Carry every run out; when this process is stopped, so are they, and save themselves."""
        self._connect()
        ray = self.ray
        tasks = {device: self._task(device, progress) for device in {each.config.device for each in missing}}
        waiting: dict[Any, Obtained] = {}
        with sigterm_interrupts():
            try:
                for asked in missing:
                    folder, config = asked.run.folder.resolve(), asked.config
                    with disk_errors(folder):
                        folder.mkdir(parents=True, exist_ok=True)  # so a worker that does not find it is a stranger
                    task = tasks[config.device]
                    waiting[task.remote(str(folder), config.model_dump(mode="json"), self.cpus, sys.argv)] = asked
                while waiting:
                    for ended in ray.wait(list(waiting), timeout=1)[0]:
                        asked = waiting.pop(ended)
                        count(asked, *self._end(asked, ended))
            finally:
                for left in waiting:
                    ray.cancel(left)
                if waiting:
                    ray.wait(list(waiting), num_returns=len(waiting), timeout=SAVING)

    def _connect(self) -> None:
        ray = self.ray
        if ray.is_initialized():
            return
        options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
        if self.address == LOCAL:
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
            # Not below $TMPDIR, which may be too long for the path of a socket.
            folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
            self.until_the_end.callback(shutil.rmtree, folder, ignore_errors=True)
            # Runs pass nothing through Ray's memory but their names: 80 MB is little more than the least that it takes.
            options |= {"include_dashboard": False, "_temp_dir": folder, "object_store_memory": 80 * 2**20}
        else:
            _refuse_silent(self.address)
        # Ray prints to stdout, where results go, that a worker was lost.
        self.until_the_end.enter_context(contextlib.redirect_stdout(io.StringIO()))
        try:
            ray.init(self.address, **options)
        except Exception as error:  # Ray raises no other where a node does not start in time
            raise DualPromptError(f"cannot use the Ray cluster '{self.address}': {first_line(error)}") from error
        self.until_the_end.callback(ray.shutdown)

    def _task(self, device: str, progress: Progress) -> Any:
        """Return the task that carries out a run on such a device; say so if no machine has what it needs."""
        gpus = self.gpus
        if gpus is None:
            any_gpu = self.ray.cluster_resources().get("GPU", 0) > 0
            gpus = 1 if device == "cuda" or (device == "auto" and any_gpu) else 0
        self._look_for_room({"CPU": self.cpus, "GPU": gpus}, progress)
        return self.ray.remote(work).options(
            num_cpus=self.cpus,
            num_gpus=gpus,
            max_retries=RETRIES,
            retry_exceptions=[InterruptedRunError],  # somebody else than we stops the worker, say to take its machine
            runtime_env={"env_vars": _environment() | ({} if gpus else {"CUDA_VISIBLE_DEVICES": ""})},
        )

    def _look_for_room(self, need: dict[str, float], progress: Progress) -> None:
        for node in self.ray.nodes():
            if node["Alive"] and all(node["Resources"].get(kind, 0) >= amount for kind, amount in need.items()):
                return
        wanted = " and ".join(f"{amount:g} {kind}" for kind, amount in need.items() if amount)
        lack = f"no machine of the Ray cluster has {wanted} for a run"
        if self.address == LOCAL:
            raise DualPromptError(f"{lack}; lower --ray-cpus or --ray-gpus")
        progress.note(f"{lack}; waiting for one to join")

    def _end(self, asked: Obtained, ended: Any) -> tuple[str | None, str]:
        """Return what went wrong with a task that ended, if anything, and the details."""
        errors = self.ray.exceptions
        try:
            error, details = self.ray.get(ended)
        except errors.RayTaskError as failure:
            return first_line(failure.cause), str(failure)
        except errors.RayError as failure:
            return f"its worker was lost {RETRIES + 1} times ({first_line(failure)})", str(failure)
        until = time.monotonic() + LAG
        while error is None and not asked.run.finished:
            if time.monotonic() > until:
                error = f"its result did not arrive in {asked.run.folder}, which every machine must share"
            time.sleep(0.1)
        return error, details


Given = TypeVar("Given")
Made = TypeVar("Made")


@contextlib.contextmanager
def shards_on(address: str = LOCAL, cpus: int = 1) -> Iterator[Callable[[Callable[[Any], Any], Iterable[Any]], Any]]:
    """Yield what maps a function over shards on a Ray cluster, in their order, as `map` does in this process.

    `address` and `cpus`, of a shard, are those of `cluster`.
    """
    ray = _import_ray()
    with contextlib.ExitStack() as until_the_end:
        _Cluster(ray, address, cpus, None, until_the_end)._connect()
        room = max(2, int(ray.cluster_resources().get("CPU", 1)) // cpus)

        def over(function: Callable[[Given], Made], shards: Iterable[Given]) -> Iterator[Made]:
            task = ray.remote(function).options(num_cpus=cpus, max_retries=RETRIES)
            waiting: deque[Any] = deque()
            for shard in shards:
                if len(waiting) >= 2 * room:  # no more in Ray's memory than is worked on
                    yield _shard(ray, waiting.popleft())
                waiting.append(task.remote(shard))
            while waiting:
                yield _shard(ray, waiting.popleft())

        yield over


def _shard(ray: Any, ended: Any) -> Any:
    try:
        return ray.get(ended)
    except ray.exceptions.RayTaskError as failure:
        raise DualPromptError(f"a shard failed: {first_line(failure.cause)}") from None
    except ray.exceptions.RayError as failure:
        raise DualPromptError(f"a shard's worker was lost {RETRIES + 1} times ({first_line(failure)})") from None


def work(folder: str, config: dict[str, Any], threads: int, command: list[str]) -> tuple[str | None, str]:
    """Carry one run out, in a worker; return what went wrong, if anything, and the details.

    `folder` and `config` are the run's, `threads` those it may use; `command` is what the user typed, for its manifest.
    """
    import torch

    run = Run(Path(folder))
    if not run.folder.is_dir():
        return f"{platform.node()} does not see {folder}; --runs must be a folder that every machine shares", ""
    torch.set_num_threads(threads)
    sys.argv = command  # which the run's manifest tells
    ends: list[tuple[str | None, str]] = []
    asked = Obtained(run, parse(RunConfig, config))
    one_by_one([asked], SILENT, lambda _, error, details: ends.append((error, details)), patience=LAG)
    return ends[0]


def _import_ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise DualPromptError(f"--ray needs the extra 'cluster' ({error}): pip install 'dualprompt[cluster]'") from None
    return ray


def _environment() -> dict[str, str]:
    """Return what workers take over from the environment of this process; paths hold from any directory."""
    paths = {name: str(with_home(os.environ[name]).resolve()) for name in PATHS if os.environ.get(name)}
    return paths | {name: os.environ[name] for name in WORDS if name in os.environ}


def _refuse_silent(address: str) -> None:
    """Refuse an address at which nobody listens; Ray would wait there for ten minutes."""
    host, _, port = address.rpartition("/")[2].rpartition(":")
    if host:
        try:
            socket.create_connection((host, int(port)), timeout=10).close()
        except (OSError, ValueError) as error:
            raise DualPromptError(
                f"nothing listens at {address} ({error}); start a cluster with `ray start --head`"
            ) from None
