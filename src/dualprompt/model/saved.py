"""A model on disk: a folder with `model.json`, one safetensors file, and a README.md that people read.

`model.json` names the tensors' file, whose name is made from its content. Replacing `model.json` is the one moment
at which a new model takes the place of the old; whoever reads, or is killed, before or after it has a whole model.

Earlier versions are copies of their `model.json`, as `versions/000003.json`, which name their tensors' files in the
same way: versions of the same tensors share one file. A copy is made before `model.json` is replaced, and bears the
number that is in it, so that making it twice does no harm.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import secrets
import shlex
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load

from dualprompt import files
from dualprompt.config import recorded
from dualprompt.errors import DamagedError, DualPromptError
from dualprompt.files import (
    MOST_JSON,
    disk_errors,
    is_partial,
    parse_json,
    read_bytes,
    reason,
    refuse_links,
    sha256,
    write_json,
    write_text,
)
from dualprompt.model.records import KEPT, LAST, ModelRecord, VersionRecord
from dualprompt.run import checkpoint
from dualprompt.run.checkpoint import State

log = logging.getLogger("dualprompt")
FORMAT = 1
MODEL, CARD, VERSIONS = "model.json", "README.md", "versions"
DAMAGED = "model.json.damaged"  # what could not be read, and was set aside; a second one has .1 behind it
RESTORE = "restore the model from a copy"
TRIES = 100  # of a reader whose model is replaced again and again under its hands
MOST_TENSORS = 2**36  # bytes
_TENSORS = re.compile(r"weights-[0-9a-f]{16}\.safetensors")
_VERSION = re.compile(r"[0-9]{6,9}\.json")
_ASIDE = re.compile(re.escape(DAMAGED) + r"(\.[0-9]{1,9})?")
_NEXT_ID = re.compile(rb'"next_id"\s*:\s*([0-9]{1,16})\b')


def is_model(path: Path) -> bool:
    """Return whether a model is kept in `path`; one that has lost its `model.json` has its versions."""
    return (path / MODEL).is_file() or newest_copy(path) is not None


def newest_copy(path: Path, below: int = LAST) -> int | None:
    """Return the highest number `below` this one of an earlier version that can be read; None: there is none."""
    with contextlib.suppress(DualPromptError, OSError):
        for number in sorted(copies(path), reverse=True):
            with contextlib.suppress(DualPromptError):
                if number < below:
                    return record(path, number).version.number
    return None


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


def write(path: Path, facts: dict[str, Any], state: State, card: str, why: str = "", keep: int | None = None) -> None:
    """Keep a model in `path`, in place of the one that is there, which becomes an earlier version.

    Args:
        path: its folder.
        facts: what `model.json` says, but for the tensors and the version.
        state: its tensors.
        card: the text of its README.md.
        why: what was done, in a few words.
        keep: how many earlier versions stay; None: as many as before.
    """
    refuse_other(path)
    refuse_links(path / VERSIONS, itself=True)
    with disk_errors(path):
        path.mkdir(parents=True, exist_ok=True)
    tensors = _write_tensors(path, state)
    try:
        facts = {"format": FORMAT, **facts, "tensors": tensors}
        write_json(path / MODEL, facts | {"version": _next_version(path, facts, why, keep)})
    except DualPromptError:
        tidy(path)  # what was written for the new model, which is not there
        raise
    # From here on the new model is there, whatever goes wrong with what is only tidy.
    try:
        write_text(path / CARD, card)
    except DualPromptError as error:  # its card is for people, and the next save writes it
        log.warning("the model is saved, but its card is not: %s", error)
    tidy(path)


def _write_tensors(path: Path, state: State) -> dict[str, str]:
    """Write tensors to a file that is named by its content; return what `model.json` says of it."""
    drafted = path / f".weights.{secrets.token_hex(8)}.safetensors.partial"
    try:
        checkpoint.write(drafted, state, {})
        content = sha256(drafted)
        tensors = path / f"weights-{content[:16]}.safetensors"
        with disk_errors(tensors):
            drafted.replace(tensors)
    finally:
        drafted.unlink(missing_ok=True)
    return {"file": tensors.name, "sha256": content}


def _next_version(path: Path, facts: dict[str, Any], why: str, keep: int | None) -> dict[str, Any]:
    """Copy the model that is in `path` to its versions; return what the next one, of these facts, says of itself."""
    try:
        now = record(path).version
    except DualPromptError:  # there is none, or one that cannot be read
        last, kept = _set_aside(path)
    else:
        last, kept, content = now.number, now.keep, read_bytes(path / MODEL, MOST_JSON)
        if parse_json(content) | {"version": 0} == json.loads(json.dumps(facts)) | {"version": 0}:
            return now.model_dump() | {"keep": kept if keep is None else keep}  # nothing was changed
        write_text(_copy(path, last), content.decode())
    if last + 1 >= LAST:
        raise DualPromptError(f"{path} has had {last:,} versions, and no more are counted; save it to a new folder")
    when = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    return VersionRecord(number=last + 1, saved=when, why=why, keep=kept if keep is None else keep).model_dump()


def _set_aside(path: Path) -> tuple[int, int]:
    """Keep what cannot be read as a model; return its number, as far as it is known, and how many versions it kept."""
    if not is_model(path):
        return 0, KEPT
    aside = path / DAMAGED
    aside = files.beside(aside) if os.path.lexists(aside) else aside
    with disk_errors(aside):
        if not os.path.lexists(path / MODEL):  # it was lost; the tensors that it named are to stay all the same
            aside.touch()
        with contextlib.suppress(OSError):  # where the disk has no links
            if (path / MODEL).is_file():
                os.link(path / MODEL, aside, follow_symlinks=False)
        if not os.path.lexists(aside):
            (path / MODEL).replace(aside)
    newest = newest_copy(path)
    return max(copies(path), default=0) + 1, KEPT if newest is None else record(path, newest).version.keep


def asides(path: Path) -> list[Path]:
    """Return what was set aside of the model in `path`, because it could not be read."""
    return [entry for entry in path.iterdir() if _ASIDE.fullmatch(entry.name)]


def said_next_id(path: Path) -> int:
    """Return the highest id that a damaged `model.json` still says to be free; 0 if it says nothing."""
    with contextlib.suppress(OSError):
        return max((int(number) for number in _NEXT_ID.findall(read_bytes(path / MODEL, MOST_JSON))), default=0)
    return 0


def set_keep(path: Path, count: int) -> None:
    """Keep so many earlier versions of the model in `path` from now on; the caller holds it."""
    facts = parse_json(read_bytes(path / MODEL, MOST_JSON))
    write_json(path / MODEL, facts | {"version": record(path).version.model_dump() | {"keep": count}})
    tidy(path)


def copies(path: Path) -> dict[int, Path]:
    """Return the files of earlier versions by their numbers; one of the model itself may be among them."""
    folder = path / VERSIONS
    refuse_links(folder, itself=True)
    named = [file.name for file in folder.iterdir() if _VERSION.fullmatch(file.name)] if folder.is_dir() else []
    numbers = sorted({int(name.removesuffix(".json")) for name in named})
    return {number: file for number in numbers if (file := _copy(path, number)).name in named}


def _copy(path: Path, number: int) -> Path:
    return path / VERSIONS / f"{number:06}.json"


def tidy(path: Path) -> None:
    """Remove copies beyond those to be kept, tensors that no version names, and what was half written.

    As long as something lies there that was set aside, no tensors are removed: they may be its.
    """
    try:
        current = record(path)
        found = copies(path)
        earlier = [number for number in found if number < current.version.number]
        stay = earlier[max(len(earlier) - current.version.keep, 0) :]
        named = {current.tensors.file, *(record(path, number).tensors.file for number in stay)}
    except DualPromptError as error:
        if is_model(path):
            log.warning("nothing old was removed from %s: %s", path, error)
        return
    remove(file for number, file in found.items() if number not in stay)
    with contextlib.suppress(OSError):
        old = [entry for entry in path.iterdir() if _TENSORS.fullmatch(entry.name) and entry.name not in named]
        remove([*([] if asides(path) else old), *(entry for entry in path.iterdir() if is_partial(entry))])
        remove(entry for entry in (path / VERSIONS).iterdir() if is_partial(entry))
        if not stay:
            (path / VERSIONS).rmdir()


def remove(entries: Iterable[Path]) -> None:
    """Remove files; what cannot be removed stays until the next time."""
    for entry in entries:
        with contextlib.suppress(OSError):
            entry.unlink()


def remedy(path: Path, number: int = LAST) -> str:
    """Return what helps where a model is damaged: earlier versions have papers and tensors of their own.

    `number` is that of the version that is damaged, if it can still be read.
    """
    earlier = newest_copy(path, number)
    if earlier is None:
        return RESTORE
    return f"{RESTORE}, or go back to an earlier version with `dualprompt rollback {shlex.quote(str(path))} {earlier}`"


def read(path: Path, version: int | None = None) -> tuple[ModelRecord, State]:
    """Return the facts and tensors of a model, or of an earlier version; others may replace it at the same time."""
    facts = record(path, version)
    for _ in range(TRIES):
        tensors = path / facts.tensors.file
        try:
            content = read_bytes(tensors, MOST_TENSORS)
            whole = hashlib.sha256(content).hexdigest() == facts.tensors.sha256
            wrong = "is damaged (wrong SHA-256)"
        except OSError as error:
            whole, content = False, b""
            wrong = f"cannot be read ({reason(error)})"
        if whole:
            return facts, _tensors(content, tensors)
        before, facts = facts, record(path, version)
        if facts.tensors == before.tensors:
            raise DualPromptError(f"{tensors} {wrong}; {remedy(path, facts.version.number)}")
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


def record(path: Path, version: int | None = None) -> ModelRecord:
    """Return the facts of the model in `path`, or of an earlier version."""
    if not path.is_dir():
        found = "is not a folder" if path.exists() else "does not exist"
        raise DualPromptError(f"model {path} {found}; make one with `dualprompt learn {path} FOLDER`")
    if version is not None:
        return _recorded(path, _copy(path, version), version)
    if not (path / MODEL).exists():
        if newest_copy(path) is None:
            raise DualPromptError(f"{path} holds no model (it has no {MODEL}); make one with `dualprompt learn`")
        raise DamagedError(f"{path} has lost its {MODEL}; {remedy(path)}")
    try:
        return _recorded(path, path / MODEL)
    except DamagedError as error:
        raise DamagedError(str(error).removesuffix(RESTORE) + remedy(path)) from None


def _recorded(path: Path, file: Path, version: int | None = None) -> ModelRecord:
    help_by = RESTORE if version is None else "remove it; the other versions do not need it"
    try:
        content = read_bytes(file, MOST_JSON)
        found = parse_json(content)
    except PermissionError as error:
        raise DualPromptError(f"{file} cannot be read ({reason(error)}); see who may read it") from None
    except (OSError, ValueError) as error:
        raise DamagedError(f"{file} is damaged ({reason(error)}); {help_by}") from None
    if not isinstance(found, dict) or "format" not in found:
        if version is None and newest_copy(path) is None:
            raise DualPromptError(f"{file} is of another program (it has no 'format'); give a model's folder")
        raise DamagedError(f"{file} is damaged (it has no 'format'); {help_by}")
    if found["format"] != FORMAT or isinstance(found["format"], bool):
        raise DualPromptError(
            f"{path} has format {found['format']!r:.20}, this version of dualprompt reads {FORMAT}; use another version"
        )
    facts = recorded(ModelRecord, content, str(file), help_by)
    if version is not None and facts.version.number != version:
        raise DamagedError(f"{file} is damaged (it says that it is version {facts.version.number}); {help_by}")
    return facts
