"""A model on disk: a folder with `model.json`, one safetensors file, and a README.md that people read.

`model.json` names the tensors' file, whose name is made from its content. Replacing `model.json` is the one moment
at which a new model takes the place of the old; whoever reads, or is killed, before or after it has a whole model.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import re
import secrets
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import AfterValidator, Field, model_validator
from safetensors import SafetensorError
from safetensors.torch import load

from dualprompt import files
from dualprompt.config import Count, Percent, Record, recorded
from dualprompt.data.folder import one_form
from dualprompt.errors import DualPromptError
from dualprompt.files import (
    MOST_JSON,
    disk_errors,
    is_partial,
    parse_json,
    read_bytes,
    reason,
    sha256,
    write_json,
    write_text,
)
from dualprompt.run import checkpoint
from dualprompt.run.checkpoint import State

log = logging.getLogger("dualprompt")
FORMAT = 1
MODEL, CARD = "model.json", "README.md"
RESTORE = "restore the model from a copy"
TRIES = 100  # of a reader whose model is replaced again and again under its hands
MOST_TENSORS = 2**36  # bytes
_TENSORS = re.compile(r"weights-[0-9a-f]{16}\.safetensors")
_Label = Annotated[str, AfterValidator(one_form)]
_Id = Annotated[int, Field(ge=1, lt=2**53)]


class TensorsRecord(Record):
    """The file of the tensors."""

    file: Annotated[str, Field(pattern=r"^weights-[0-9a-f]{16}\.safetensors$")]
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class BackboneRecord(Record):
    """The backbone that a model was made with."""

    name: Annotated[str, Field(min_length=1)]
    sha256: str
    input_size: int | None


class TaskRecord(Record):
    """What is known of a task."""

    id: _Id
    name: str
    classes: Annotated[list[_Label], Field(min_length=1)]
    images: Count
    learned: str
    bytes: Count
    accuracy: Percent | None
    measured: dict[_Id, Percent] = Field(default_factory=dict)


class ModelRecord(Record):
    """What `model.json` holds."""

    dualprompt: str
    backbone: BackboneRecord
    method: dict[str, Any]
    train: dict[str, Any]
    seed: Count
    threshold: float | None
    tasks: list[TaskRecord]
    rows: list[tuple[_Id, _Label] | None]  # of the head: the task that taught it and its label; None: forgotten
    next_id: _Id
    trust: list[tuple[_Id, dict[_Label, list[float]]]]
    tensors: TensorsRecord

    @model_validator(mode="after")
    def _consistent(self) -> ModelRecord:
        ids = [task.id for task in self.tasks]
        if len(set(ids)) < len(ids) or any(number >= self.next_id for number in ids):
            raise ValueError("the ids of its tasks are not those that it gave")
        taught = sorted((task.id, label) for task in self.tasks for label in task.classes)
        if sorted(row for row in self.rows if row is not None) != taught:
            raise ValueError("its rows are not those of its classes")
        known = set(taught)
        if any((number, label) not in known for number, own in self.trust for label in own):
            raise ValueError("its trust is not in its classes")
        return self


def is_model(path: Path) -> bool:
    """Return whether a model is kept in `path`."""
    return (path / MODEL).is_file()


def refuse_other(path: Path) -> None:
    """Refuse a place that holds something else than a model."""
    if path.exists() and not path.is_dir():
        raise DualPromptError(f"{path} is a file; give a folder for the model")
    if path.is_dir() and not is_model(path):
        others = [entry.name for entry in path.iterdir() if not is_partial(entry) and not _TENSORS.match(entry.name)]
        if others:
            raise DualPromptError(f"{path} holds no model, but '{others[0]}'; give a new folder for the model")


def held(path: Path, seconds: float = 0.0) -> contextlib.AbstractContextManager[int]:
    """Hold the model in `path` against all others who would change it, waiting so many seconds for them."""
    busy = f"{path} is being served, or changed by another command; stop that server, or wait, or use its page"
    return files.held(path, busy, seconds)


def write(path: Path, facts: dict[str, Any], state: State, card: str) -> None:
    """Keep a model in `path`, in place of the one that is there."""
    refuse_other(path)
    with disk_errors(path):
        path.mkdir(parents=True, exist_ok=True)
    drafted = path / f".weights.{secrets.token_hex(8)}.safetensors.partial"
    try:
        checkpoint.write(drafted, state, {})
        content = sha256(drafted)
        tensors = path / f"weights-{content[:16]}.safetensors"
        with disk_errors(tensors):
            drafted.replace(tensors)
    finally:
        drafted.unlink(missing_ok=True)
    try:
        write_json(path / MODEL, {"format": FORMAT, **facts, "tensors": {"file": tensors.name, "sha256": content}})
    except DualPromptError:
        if not _names(path, tensors.name):
            tensors.unlink(missing_ok=True)
        raise
    # From here on the new model is there, whatever goes wrong with what is only tidy.
    try:
        write_text(path / CARD, card)
    except DualPromptError as error:  # its card is for people, and the next save writes it
        log.warning("the model is saved, but its card is not: %s", error)
    with contextlib.suppress(OSError):  # what cannot be removed stays until the next time
        for old in list(path.iterdir()):
            if old != tensors and (_TENSORS.fullmatch(old.name) or is_partial(old)):
                with contextlib.suppress(OSError):
                    old.unlink()


def _names(path: Path, tensors: str) -> bool:
    """Return whether the model that is in `path` is the one with these tensors, or may be."""
    try:
        return not is_model(path) or _record(path).tensors.file == tensors
    except DualPromptError:
        return True


def read(path: Path) -> tuple[ModelRecord, State]:
    """Return the facts and tensors of the model in `path`, which others may replace at the same time."""
    facts = _record(path)
    for _ in range(TRIES):
        tensors = path / facts.tensors.file
        try:
            content = read_bytes(tensors, MOST_TENSORS)
            whole = hashlib.sha256(content).hexdigest() == facts.tensors.sha256
            fault = DualPromptError(f"{tensors} is damaged (wrong SHA-256); {RESTORE}")
        except OSError as error:
            whole, content = False, b""
            fault = DualPromptError(f"{tensors} cannot be read ({reason(error)}); {RESTORE}")
        if whole:
            return facts, _tensors(content, tensors)
        before, facts = facts, _record(path)
        if facts.tensors == before.tensors:
            raise fault
    raise DualPromptError(f"{path} is replaced faster than it can be read; try again")


def _tensors(content: bytes, path: Path) -> State:
    try:
        state = load(content)
    except (SafetensorError, ValueError, TypeError, LookupError, RuntimeError, AttributeError) as error:
        raise DualPromptError(f"{path} is damaged ({str(error)[:200]}); {RESTORE}") from None
    for name, value in state.items():
        if value.is_floating_point() and not bool(torch.isfinite(value).all()):
            raise DualPromptError(f"{path} is damaged ('{name}' holds NaN or infinity); {RESTORE}")
    return state


def _record(path: Path) -> ModelRecord:
    if not path.is_dir():
        found = "is not a folder" if path.exists() else "does not exist"
        raise DualPromptError(f"model {path} {found}; make one with `dualprompt learn {path} FOLDER`")
    if not is_model(path):
        raise DualPromptError(f"{path} holds no model (it has no {MODEL}); make one with `dualprompt learn`")
    try:
        content = read_bytes(path / MODEL, MOST_JSON)
        found = parse_json(content)
    except (OSError, ValueError) as error:
        raise DualPromptError(f"{path / MODEL} is damaged ({reason(error)}); {RESTORE}") from None
    if not isinstance(found, dict) or "format" not in found:
        raise DualPromptError(f"{path / MODEL} is of another program (it has no 'format'); give a model's folder")
    if found["format"] != FORMAT or isinstance(found["format"], bool):
        raise DualPromptError(
            f"{path} has format {found['format']!r:.20}, this version of dualprompt reads {FORMAT}; use another version"
        )
    return recorded(ModelRecord, content, str(path / MODEL), RESTORE)
