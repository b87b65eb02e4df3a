"""A tiny world for life-cycle tests: a backbone, images and a preset in a folder, and ways to run the command in it.

`call` runs the command in this process. `start` runs it in a process of its own that can be killed; these are forked
from a server that has imported and done once what most commands need (see `warm`), so that twenty lives take seconds.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from safetensors.torch import save_file

from dualprompt.backbones.base import BACKBONES
from dualprompt.backbones.vit import VisionTransformer, ViTConfig
from dualprompt.cli import main
from dualprompt.methods.base import METHODS
from dualprompt.run.checkpoint import Checkpoints

VIT = ViTConfig(image_size=16, patch_size=8, dim=16, depth=3, heads=2, mlp_dim=32)
HEADER = {
    "num_heads": "2",
    "input_size": "16",
    "mean": "0.5,0.5,0.5",
    "std": "0.5,0.5,0.5",
    "interpolation": "bilinear",
}
# Methods that take no ViT, with a network that they take.
NETWORKS: dict[str, dict[str, Any]] = {
    "dualnet": {"backbone.name": "resnet18-cifar-pool-nf4", "backbone.input_size": 32},
    "supsup": {"backbone.name": "resnet18-cifar-nf4", "backbone.input_size": 16},
}
CLASSES = ("ash", "birch", "cedar", "elm", "fir", "hazel")
TRAIN, TEST = (6, 7), (5, 4)  # images of even and odd classes: 13 = 3 · 4 + 1 and 9 = 2 · 4 + 1 a task
# An exit code can be read once. Starting a process also asks after all others, so without this lock two threads may
# read one process's code at a time; Python then takes 255 for the second's.
READING = threading.Lock()
COMMAND = str(Path(sys.executable).with_name("dualprompt"))


@dataclass(frozen=True)
class World:
    """Where things are."""

    folder: Path
    preset: Path
    weights: Path
    images: Path

    def preset_with(self, name: str, **changes: Any) -> Path:
        """Write the preset anew under another name, with top-level keys changed."""
        path = self.folder / name
        values = yaml.safe_load(self.preset.read_text())
        path.write_text(yaml.safe_dump(values | changes))
        return path


def pictures(world: World, name: str, split: str = "train") -> list[Path]:
    """The images of a class of the world."""
    return sorted((world.images / split / name).iterdir())


def make_world(folder: Path) -> World:
    """Fill a folder: six classes of small images, a random ViT, and a preset that cuts them into three tasks."""
    world = World(folder, folder / "tiny.yaml", folder / "vit.safetensors", folder / "trees")
    write_weights(world.weights)
    write_images(world.images)
    plain = {"epochs": 2, "batch_size": 4, "lr": 0.02}
    preset = {
        "title": "tiny",
        "benchmark": {"name": "tiny", "dataset": str(world.images), "tasks": 3},
        "backbone": {"name": str(world.weights)},
        "device": "cpu",
        "evaluate": {"batch_size": 4},
        "recipe": "plain",
        "recipes": {
            "plain": {"train": plain},
            "augmented": {
                "train": {**plain, "clip": 1.0, "augment": "random_resized_crop"},
                "evaluate": {"view": "centre_crop"},
            },
        },
        "methods": {"dualprompt": {"g_layers": [1], "e_layers": [2, 3], "g_length": 2, "e_length": 3}},
    }
    world.preset.write_text(yaml.safe_dump(preset))
    return world


def write_weights(path: Path, config: ViTConfig = VIT, seed: int = 3) -> None:
    """Save a random network under timm's names."""
    generator = torch.Generator().manual_seed(seed)
    state = VisionTransformer(config).state_dict()
    tensors = {name: 0.3 * torch.randn(value.shape, generator=generator) for name, value in state.items()}
    norms = {name: 1 + value for name, value in tensors.items() if "norm" in name and name.endswith("weight")}
    save_file(tensors | norms, path, HEADER)


def write_images(folder: Path) -> None:
    """Draw noisy images whose colour tells their class, in several sizes."""
    rng = np.random.default_rng(1)
    for number, name in enumerate(CLASSES):
        colour = rng.integers(40, 216, size=3)
        for split, counts in (("train", TRAIN), ("test", TEST)):
            (folder / split / name).mkdir(parents=True)
            for i in range(counts[number % 2]):
                height, width = rng.integers(16, 30, size=2)
                pixels = colour + rng.normal(0, 10, size=3) + rng.normal(0, 40, size=(height, width, 3))
                Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8)).save(folder / split / name / f"{i}.png")


@dataclass(frozen=True)
class Outcome:
    """What a command left: exit code and both streams."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The one JSON value on stdout."""
        return json.loads(self.out)

    @property
    def error(self) -> str:
        """The message of a refused command: one line, nothing else on stderr."""
        assert self.code == 2, self
        assert self.err.startswith("dualprompt: error: "), self.err
        assert self.err.count("\n") == 1, self.err
        assert self.err.endswith("\n")
        assert "Traceback" not in self.err
        return self.err.removeprefix("dualprompt: error: ").rstrip("\n")


def call(*arguments: object) -> Outcome:
    """Run the command in this process, on one thread as the others, for sums depend on how they are cut."""
    out, err = io.StringIO(), io.StringIO()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main([str(argument) for argument in arguments])
    finally:
        torch.set_num_threads(threads)
    return Outcome(code, out.getvalue(), err.getvalue())


def shell(*arguments: object, timeout: float = 100, **environment: str) -> Outcome:
    """Run the installed command as a user does."""
    done = subprocess.run(
        [COMMAND, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
    )
    return Outcome(done.returncode, done.stdout, done.stderr)


def elsewhere(*arguments: object, timeout: float = 100, **environment: str) -> Outcome:
    """Run the command in a process of its own, as `shell` does but without seconds of imports."""
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder) / "out", Path(folder) / "err"
        life = Life(forked(_speak, list(map(str, arguments)), str(out), str(err), environment), err)
        return Outcome(life.end(timeout), out.read_text(), err.read_text())


@dataclass(frozen=True)
class Life:
    """A running command."""

    process: ForkServerProcess
    log: Path

    @property
    def code(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs."""
        with READING:
            return self.process.exitcode

    def wait(self, seconds: float) -> None:
        """Wait until it ends, but not longer than this."""
        wait([self.process.sentinel], seconds)

    def end(self, timeout: float = 60) -> int:
        """Wait until it ends; return its exit code."""
        self.wait(timeout)
        code = self.code
        if code is None:
            self.process.kill()
            raise AssertionError(f"the command hangs: {self.text}")
        return code

    @property
    def changes(self) -> list[str]:
        """What it changed in the file system, in order; written when it ends by itself."""
        return Path(f"{self.log}.changes").read_text().split("\n")

    @property
    def text(self) -> str:
        """What it wrote to stdout and stderr."""
        return self.log.read_text()


def start(
    log: Path,
    *arguments: object,
    watch: Path = Path("/"),
    at: int | str | tuple[str, int] | None = None,
    by: int = signal.SIGKILL,
) -> Life:
    """Start the command. The signal `by` hits it right before a change to files below `watch`.

    `at` is that change's number, or how the first such change begins: "os.rename checkpoints/.task-0002", or that
    and which one of those it is, counted from 1.
    """
    words = [str(argument) for argument in arguments]
    return Life(forked(_live, words, str(log), str(watch), at, by), log)


def forked(function: Callable[..., None], *arguments: Any) -> ForkServerProcess:
    """Call a function of a module in a process of its own, forked from the server."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["warm"])
    process = context.Process(target=_checked, args=(function, *arguments))
    paths = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    with READING, pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(paths))  # else Python 3.11's server would not find the module
        process.start()
    return process


def _checked(function: Callable[..., None], *arguments: Any) -> None:
    assert "warm" in sys.modules, "the server of forks could not import tests/warm.py"
    function(*arguments)


def _speak(arguments: list[str], out: str, err: str, environment: dict[str, str]) -> None:
    os.environ |= environment
    _as_command(arguments, out, err)
    sys.exit(main(arguments))


def _as_command(arguments: list[str], out: str, err: str) -> None:
    """Make this process, a fork, look like the command: its words, and where it writes to."""
    for path, stream in ((out, 1), (err, 2)):
        os.dup2(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND), stream)
    sys.argv = [COMMAND, *arguments]
    for registry in (METHODS, BACKBONES):  # the server looked before a test installed what it brings
        registry._discovered = False


def _live(arguments: list[str], log: str, watch: str, at: int | str | tuple[str, int] | None, by: int) -> None:
    _as_command(arguments, log, log)
    changes: list[str] = []

    def count(event: str, details: tuple[Any, ...]) -> None:
        # Python tells its audit hooks of every change to the file system, before it happens.
        if event not in ("open", "os.rename", "os.mkdir", "os.remove", "os.truncate"):
            return
        path = str(details[0])
        if not f"{path}/".startswith(f"{watch}/") or (event == "open" and details[1] in (None, "r", "rb")):
            return
        changes.append(f"{event} {path.removeprefix(f'{watch}/')}")
        begins, which = (at, 1) if isinstance(at, str) else at if isinstance(at, tuple) else ("", at)
        if changes[-1].startswith(begins) and sum(change.startswith(begins) for change in changes) == which:
            os.kill(os.getpid(), by)

    sys.addaudithook(count)
    code = main(arguments)
    Path(f"{log}.changes").write_text("\n".join(changes))
    sys.exit(code)


def interrupted(world: World, out: Path, *options: object) -> Path:
    """Return the folder of a run that was killed when its second task was learned, but not yet put on record."""
    return Path(shutil.copytree(_interrupted(world, options), out, copy_function=shutil.copy))


@functools.cache  # many tests begin with the same one, and a run's folder may be moved
def _interrupted(world: World, options: tuple[object, ...]) -> Path:
    out = Path(tempfile.mkdtemp(prefix="interrupted-", dir=world.folder)) / "run"
    log = out.with_name("log")
    life = start(log, "run", world.preset, "--out", out, *options, watch=out, at="os.rename checkpoints/.task-0002")
    assert life.end() == -signal.SIGKILL, life.text
    return out


def remains(run: Path) -> dict[str, Any]:
    """Return all that a finished group of runs leaves, but for what must differ: its place and how long it took."""
    left: dict[str, Any] = {}
    for folder in (run, *run.glob("baseline")):
        result = json.loads((folder / "result.json").read_text())
        assert result.pop("run_dir") == str(folder)
        assert result.pop("seconds").keys() == {"train", "evaluate"}
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        for line in lines:
            line.pop("seconds", None)
        checkpoints = Checkpoints(folder / "checkpoints")
        position, _ = checkpoints.last()
        state = checkpoints.after_task(len(result["accuracy_matrix"]) - 1)
        left[folder.name if folder != run else "."] = {
            "result": result,
            "log": lines,
            "state": {name: (str(t.dtype), tuple(t.shape), t.numpy().tobytes()) for name, t in state.items()},
            "progress": {k: v for k, v in asdict(position).items() if k != "log_bytes"},
            "tables": {p.name: p.read_text() for p in folder.iterdir() if p.suffix in (".csv", ".txt")},
            "pictures": sorted(p.name for p in folder.glob("*.png")),
        }
    return left


def contents(folder: Path) -> dict[str, bytes]:
    """Return every file below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
