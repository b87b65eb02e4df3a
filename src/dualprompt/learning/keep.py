"""A model on disk: a folder with `model.json`, one safetensors file, and a README.md that people read.

`model.json` names the tensors' file, whose name is made from its content. Replacing `model.json` is the one moment
at which a new model takes the place of the old; whoever reads, or is killed, before or after it has a whole model.
"""

from __future__ import annotations

import contextlib
import logging
import re
import secrets
import shutil
from pathlib import Path
from typing import Any

from dualprompt import files
from dualprompt.errors import DualPromptError
from dualprompt.files import disk_errors, is_partial, read_json, sha256, write_json, write_text
from dualprompt.training import checkpoint
from dualprompt.training.checkpoint import State

log = logging.getLogger("dualprompt")
FORMAT = 1
MODEL, CARD = "model.json", "README.md"
_TENSORS = re.compile(r"weights-[0-9a-f]{16}\.safetensors")


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
        if not is_model(path) or read_json(path / MODEL).get("tensors", {}).get("file") != tensors.name:
            tensors.unlink(missing_ok=True)
        raise
    shutil.copymode(path / MODEL, tensors)  # safetensors makes files that only their owner may read
    try:
        write_text(path / CARD, card)
    except DualPromptError as error:  # its card is for people, and the next save writes it
        log.warning("the model is saved, but its card is not: %s", error)
    for old in path.iterdir():
        if old != tensors and (_TENSORS.fullmatch(old.name) or is_partial(old)):
            with contextlib.suppress(OSError):  # someone else has removed it, or it stays until the next time
                old.unlink()


def read(path: Path) -> tuple[dict[str, Any], State]:
    """Return the facts and tensors of the model in `path`."""
    for last in (False, True):
        facts = _facts(path)
        tensors = path / facts["tensors"]["file"]
        if tensors.is_file() or last:
            break  # else it was replaced between our two looks
    try:
        whole = sha256(tensors) == facts["tensors"]["sha256"]
    except OSError as error:
        raise DualPromptError(f"{tensors} cannot be read ({error.strerror}); restore the model from a copy") from error
    if not whole:
        raise DualPromptError(f"{tensors} is damaged (wrong SHA-256); restore the model from a copy")
    return facts, checkpoint.read(tensors)[0]


def _facts(path: Path) -> dict[str, Any]:
    if not path.is_dir():
        found = "is not a folder" if path.exists() else "does not exist"
        raise DualPromptError(f"model {path} {found}; make one with `dualprompt learn {path} FOLDER`")
    if not is_model(path):
        raise DualPromptError(f"{path} holds no model (it has no {MODEL}); make one with `dualprompt learn`")
    facts = read_json(path / MODEL)
    if not isinstance(facts, dict) or "format" not in facts:
        raise DualPromptError(f"{path / MODEL} is of another program (it has no 'format'); give a model's folder")
    if facts["format"] != FORMAT:
        raise DualPromptError(
            f"{path} has format {facts['format']!r}, this version of dualprompt reads {FORMAT}; use another version"
        )
    damaged = DualPromptError(f"{path / MODEL} is damaged; restore the model from a copy")
    try:
        file = facts["tensors"]["file"]
        if not _TENSORS.fullmatch(file) or not isinstance(facts["tensors"]["sha256"], str):
            raise damaged
    except (KeyError, TypeError):
        raise damaged from None
    return facts
