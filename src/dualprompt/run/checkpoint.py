"""Checkpoints: single safetensors files that hold what was trained since the last task, and where the run stands."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field
from safetensors import SafetensorError
from safetensors.torch import load, save_file
from torch import Tensor
from torch.optim import Optimizer

from dualprompt.backbones.passes import Passes
from dualprompt.config import Count, Percent, recorded
from dualprompt.errors import DualPromptError
from dualprompt.files import atomic, parse_json, read_bytes
from dualprompt.methods.base import Method

State = dict[str, Tensor]
MOST_BYTES = 2**40
DELETE = "delete it to continue from the one before"
OPTIMISER = "optimiser"
BUFFER = "buffer/"  # what the names of the rehearsal buffer's tensors begin with


@dataclass(frozen=True)
class Position:
    """Where a run stands: the next step to do, and what was measured before it."""

    task: Annotated[int, Field(ge=0, lt=10**6)] = 0
    phase: Count = 0
    epoch: Count = 0
    step: Count = 0
    log_bytes: Count = 0  # length of metrics.jsonl at this moment; what a killed run wrote after it is cut off
    accuracy: list[list[Percent]] = field(default_factory=list)
    matching: list[list[Percent]] = field(default_factory=list)
    # Of an online stream, at each evaluation on the way: images so far, classes so far, accuracy on these.
    curve: list[tuple[Count, Count, Percent]] = field(default_factory=list)
    # Of the last evaluation: how many images of each task (row) used the E-Prompt of each task (column).
    confusion: list[list[Count]] = field(default_factory=list)
    spent: Passes = field(default_factory=Passes)  # on learning so far, of all images together

    def fits(self, first: int) -> bool:
        """Return whether what was measured is that of the tasks before this one, from the `first` on."""
        rows = range(first + 1, self.task + 1)  # which evaluate so many tasks each, or none
        lengths = [(len(a), len(m)) for a, m in zip(self.accuracy, self.matching, strict=False)]
        return (
            len(self.accuracy) == len(self.matching) == len(rows)
            and all({a, m} <= {0, n} and m <= a for (a, m), n in zip(lengths, rows, strict=True))
            and len(self.confusion) in (0, self.task)
            and all(len(row) == len(self.confusion[0]) for row in self.confusion)
        )


@dataclass(frozen=True)
class Unfinished:
    """What is kept of a task that is being learned."""

    method: State  # what the task has changed so far
    optimisers: dict[str, State]  # by name; one that has not stepped yet is not among them
    loss: Tensor  # summed over the steps of the epoch
    notes: Tensor | None = None  # of the images in the buffer, where they change from step to step


def write(path: Path, tensors: State, header: dict[str, Any]) -> None:
    """Write tensors and a JSON header as one safetensors file, atomically."""
    plain = {name: value.detach().to("cpu").contiguous() for name, value in tensors.items()}
    text = json.dumps(header)
    with atomic(path) as partial:
        partial.touch()
        mode = partial.stat().st_mode
        try:
            # One entry: the library writes several in any order, and equal checkpoints should be equal files.
            entry = {"header": text, "checksum": checksum(plain, text)}
            save_file(plain, partial, metadata={"dualprompt": json.dumps(entry)})
        except SafetensorError as error:  # the library wraps what the disk said
            raise OSError(*_disk_error(error)) from error
        with contextlib.suppress(OSError):  # the library lets nobody but the owner read it
            partial.chmod(mode)


def checksum(tensors: State, header: str) -> str:
    """Return a hash of all that a checkpoint says."""
    found = hashlib.sha256(header.encode())
    for name, value in sorted(tensors.items()):
        found.update(f"{name} {value.dtype} {tuple(value.shape)} ".encode())
        # One number may have any stride, and then cannot be seen as bytes.
        flat = value.contiguous().view(-1).as_strided((value.numel(),), (1,))
        found.update(flat.view(torch.uint8).numpy().data)
    return found.hexdigest()


def _disk_error(error: SafetensorError) -> tuple[int, str]:
    import errno

    full = "No space left" in str(error) or "os error 28" in str(error)
    return (errno.ENOSPC if full else errno.EIO, str(error))


def read(path: Path) -> tuple[State, Position]:
    """Return the tensors of a checkpoint, and where the run stood."""
    tensors, header = read_tensors(path)
    return tensors, recorded(Position, header, f"checkpoint {path}", DELETE)


def read_tensors(path: Path) -> tuple[State, str]:
    """Return the tensors in a file that `write` made, and its header; what is not whole is refused."""
    try:
        # Not as a map of the file, which would change with it, or end the process where it is cut.
        content = read_bytes(path, MOST_BYTES)
        tensors = load(content)
        size = int.from_bytes(content[:8], "little")
        said = parse_json(content[8 : 8 + size])["__metadata__"]["dualprompt"]
        entry = parse_json(said)
        if "task" in entry:  # the header itself, as in checkpoints of before there were checksums
            entry = {"header": said, "checksum": checksum(tensors, said)}
        header = str(entry["header"])
        whole = entry["checksum"] == checksum(tensors, header)
    except FileNotFoundError:
        raise DualPromptError(f"checkpoint {path} is missing; restore it or start a new run") from None
    except (SafetensorError, KeyError, ValueError, TypeError, OSError, RuntimeError, AttributeError) as error:
        raise DualPromptError(f"checkpoint {path} cannot be read ({error}); {DELETE}") from None
    if not whole:
        raise DualPromptError(f"checkpoint {path} cannot be read (its checksum is wrong); {DELETE}")
    return tensors, header


@contextlib.contextmanager
def fitting(folder: Path) -> Iterator[None]:
    """Refuse tensors that a method cannot take over: whole files, but of another run or another version."""
    try:
        yield
    except (LookupError, ValueError, TypeError, AttributeError, RuntimeError) as error:
        said = str(error).strip().partition("\n")[0][:200]
        raise DualPromptError(
            f"the checkpoints in {folder} are not those of this run ({type(error).__name__}: {said}); "
            "restore them or start a new run"
        ) from error


def restore(method: Method, state: State, folder: Path) -> None:
    """Have a method take over a state from a run's folder, all of it: else the run would go on as another one."""
    with fitting(folder):
        method.load_state(state)
    found = method.state()
    lost = [name for name, value in state.items() if name not in found or _forgotten(value, found[name])]
    if lost:
        raise DualPromptError(
            f"method '{method.config.name}' does not take over '{lost[0]}' of its own state; mend its load_state, "
            "which must restore all that state() returns"
        )


def _forgotten(value: Tensor, found: Tensor) -> bool:
    """Return whether a method has something else than a value that it was given, NaN being NaN.

    One of another size is what it made of an older version's, unless it is empty.
    """
    if found.shape != value.shape:
        return not found.numel()
    mine = value.to(found.device)
    return not ((mine == found) | ((mine != mine) & (found != found))).all()


def of_method(state: State) -> State:
    """Return a checkpoint's tensors without those of the rehearsal buffer."""
    return {name: value for name, value in state.items() if not name.startswith(BUFFER)}


def of_buffer(state: State) -> State:
    """Return the rehearsal buffer's tensors of a checkpoint."""
    return _below(BUFFER, state)


def changed(state: State, before: State) -> State:
    """Return what is new or different in `state`; a task adds its prompts, key and head rows and nothing else."""
    return {n: v for n, v in state.items() if n not in before or not torch.equal(v, before[n])}


class Checkpoints:
    """The checkpoints of one run: a file for each finished task, and one for the work in progress.

    A run may go on from a model that has learned `first` tasks and whose state was `begin`.
    """

    def __init__(self, folder: Path, first: int = 0, begin: State | None = None) -> None:
        self.folder = folder
        self.first, self.begin = first, begin or {}

    def task_path(self, task: int) -> Path:
        """Return the file of finished task `task` (0-based; files count from 1)."""
        return self.folder / f"task-{task + 1:04d}.safetensors"

    @property
    def progress_path(self) -> Path:
        """The file of the work in progress."""
        return self.folder / "progress.safetensors"

    def save_task(self, position: Position, state: State, before: State) -> None:
        """Keep what the task before `position` changed, and the position."""
        write(self.task_path(position.task - 1), changed(state, before), asdict(position))

    def after_task(self, task: int) -> State:
        """Return the method's state after task `task`; −1 is the empty state before the first."""
        state = dict(self.begin)
        for done in range(self.first, task + 1):
            state.update(read(self.task_path(done))[0])
        return state

    def save_progress(
        self,
        position: Position,
        state: State,
        before: State,
        optimisers: Mapping[str, Optimizer],
        loss: Tensor,
        notes: Tensor | None = None,
    ) -> None:
        """Keep the work in progress: see Unfinished; and the position."""
        tensors = {f"method/{name}": value for name, value in changed(state, before).items()}
        for own, optimiser in optimisers.items():
            names, place = _names(optimiser), f"{OPTIMISER}{own and f'.{own}'}"
            for index, values in optimiser.state_dict()["state"].items():
                tensors.update({f"{place}/{names[index]}/{key}": value for key, value in values.items()})
        tensors |= {"loss": loss} | ({} if notes is None else {"notes": notes})
        write(self.progress_path, tensors, asdict(position))

    def last(self) -> tuple[Position, Unfinished | None]:
        """Return where to go on: inside a task, with its work in progress, or at the beginning of one.

        Work in progress counts if it is of the task that comes after the finished ones; so a damaged file can be
        deleted, and the run goes on from the checkpoint before it.
        """
        finished = self.first
        while self.task_path(finished).exists():
            finished += 1
        if self.progress_path.exists():
            tensors, position = read(self.progress_path)
            if position.task == finished:
                self._check(self.progress_path, position, finished)
                loss = tensors.get("loss")
                if loss is None or loss.shape != ():
                    raise DualPromptError(f"checkpoint {self.progress_path} is damaged (it has no loss); {DELETE}")
                return position, Unfinished(
                    _below("method/", tensors), _optimisers(tensors), loss, tensors.get("notes")
                )
        if finished > self.first:
            position = read(self.task_path(finished - 1))[1]
            self._check(self.task_path(finished - 1), position, finished)
            return position, None
        return Position(task=self.first), None

    def _check(self, path: Path, position: Position, finished: int) -> None:
        if position.task != finished or not position.fits(self.first):
            raise DualPromptError(f"checkpoint {path} is damaged (it is not that of its task); {DELETE}")


def _below(prefix: str, tensors: State) -> State:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def _names(optimiser: Optimizer) -> list[str]:
    """Return the parameters' names in the order that the optimiser counts them in: group after group."""
    return [name for group in optimiser.param_groups for name in group["param_names"]]


def _optimisers(tensors: State) -> dict[str, State]:
    """Return what was kept of each optimiser, by its name; that of most methods has none, and is "optimiser/…"."""
    found: dict[str, State] = {}
    for name, value in tensors.items():
        place, _, rest = name.partition("/")
        if place.partition(".")[0] == OPTIMISER:
            found.setdefault(place.partition(".")[2], {})[rest] = value
    return found


def restore_optimisers(optimisers: Mapping[str, Optimizer], saved: Mapping[str, State]) -> None:
    """Give optimisers the state that `save_progress` kept; a name that is not among them is a KeyError."""
    for own, kept in saved.items():
        optimiser, state = optimisers[own], dict[int, dict[str, Tensor]]()
        names = _names(optimiser)
        for name, value in kept.items():
            parameter, _, key = name.rpartition("/")
            state.setdefault(names.index(parameter), {})[key] = value
        optimiser.load_state_dict({"state": state, "param_groups": optimiser.state_dict()["param_groups"]})
