"""Writing files so that a reader sees the old content or the new, never half of either; reading what others wrote."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import itertools
import json
import os
import secrets
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dualprompt.errors import DualPromptError

LOCK = ".lock"
ASSETS = Path(__file__).parent / "assets"
MOST_JSON = 512 * 2**20  # bytes; what is noted of a million images has less
INHERITED = "DUALPROMPT_LOCK"  # names the open lock file that a process was given by the one that started it


@contextlib.contextmanager
def atomic(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; on success it is flushed to disk and replaces `path`."""
    refuse_device(path)
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    # Nobody can foresee the name, so no link can wait there for what we write.
    partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}.partial")
    try:
        with disk_errors(path):
            yield partial
            with partial.open("rb+") as handle:
                os.fsync(handle.fileno())
            partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def refuse_device(path: Path) -> None:
    """Refuse to put a file in the place of a pipe or a device: /dev/null would be one for nobody any more."""
    try:
        kind = path.stat().st_mode
        device = not (stat.S_ISREG(kind) or stat.S_ISDIR(kind)) or path.parent.resolve() == Path("/dev")
    except OSError:  # there is nothing yet
        return
    if device:
        raise DualPromptError(f"{path} is a pipe or a device, which no file is put in the place of; name a file")


def is_partial(path: Path) -> bool:
    """Return whether a file is one that a killed process left half written; nobody ever reads it."""
    return path.name.startswith(".") and path.suffix == ".partial"


def sweep(folder: Path) -> None:
    """Remove what killed processes left half written below a folder."""
    for path in folder.rglob(".*.partial"):
        with contextlib.suppress(OSError):  # a folder, which is not ours, or what another process sweeps
            path.unlink()


def refuse_links(folder: Path, itself: bool = False) -> None:
    """Refuse a folder of ours that holds a link, a pipe or a device: through it we would write or delete elsewhere.

    The folder may be a link where the user named it, but not where we did (`itself`). What W&B puts into its own folder
    is W&B's: it links its logs.
    """
    if itself and folder.is_symlink():
        raise DualPromptError(f"{folder} {_STRANGE}")
    waiting = [folder] if folder.is_dir() else []
    while waiting:
        try:
            with os.scandir(waiting.pop()) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        waiting += [Path(entry.path)] if entry.name != "wandb" else []
                    elif not entry.is_file(follow_symlinks=False):
                        raise DualPromptError(f"{entry.path} {_STRANGE}")
        except OSError as error:
            raise DualPromptError(f"{error.filename} cannot be read ({reason(error)}); look what it is") from None


_STRANGE = "is a link, a pipe or a device, which we never make; look what it is, and remove it or put a copy there"


@contextlib.contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Make a folder that nobody else has: `path`, or with a number behind it. One that is left empty goes again."""
    names = itertools.chain([path], (path.with_name(f"{path.name}-{n}") for n in itertools.count(2)))
    folder = next(each for each in names if _made(each))
    try:
        yield folder
    finally:
        with contextlib.suppress(OSError):
            folder.rmdir()


def _made(folder: Path) -> bool:
    """Make a folder; return False if something of its name is there."""
    with disk_errors(folder):
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            if not os.path.lexists(folder):  # it is a parent that is no folder
                raise
            return False
    return True


@contextlib.contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn what the disk refuses (full, read-only, no permission, too large a file) into one clear message."""
    try:
        yield
    except OSError as error:
        remedy = "choose another place" + (" with $DUALPROMPT_CACHE" if _in_cache(path) else "")
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DualPromptError(
                f"the disk is full: {path} could not be written; free some space or {remedy} "
                "(what was there before is untouched)"
            ) from error
        reason = error.strerror or str(error)
        raise DualPromptError(f"{path} cannot be written ({reason}); {remedy}") from error


def _in_cache(path: Path) -> bool:
    try:
        return path.is_relative_to(cache_root())
    except DualPromptError:  # there is none
        return False


@contextlib.contextmanager
def held(folder: Path, busy: str, seconds: float = 0.0) -> Iterator[int]:
    """Hold a folder against all other processes that would change it; yield the file whose lock says so.

    Waits so many seconds for whoever holds it, then raises an error that says `busy`. The lock goes with the last
    process that has the file open, however that one ends. A process that was given the file holds the folder as well.
    """
    with disk_errors(folder):
        lock = os.open(folder / LOCK, os.O_CREAT | os.O_RDWR | getattr(os, "O_NOFOLLOW", 0), 0o600)
    try:
        until = time.monotonic() + seconds
        while not (_given(lock) or _locked(lock)):
            if time.monotonic() >= until:
                raise DualPromptError(busy)
            time.sleep(0.05)
        yield lock
    finally:
        os.close(lock)


def _given(lock: int) -> bool:
    given = os.environ.get(INHERITED, "")
    try:
        return given.isdigit() and os.path.sameopenfile(int(given), lock)
    except OSError:  # it is not open here
        return False


def _locked(lock: int) -> bool:
    if os.name != "posix":
        return True
    import fcntl

    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a network's file system that knows no locks
        return True
    return True


def beside(path: Path) -> Path:
    """Return a name for what lies at `path` to make way to: the first of NAME.1, NAME.2, … that is free."""
    return next(place for n in itertools.count(1) if not os.path.lexists(place := path.with_name(f"{path.name}.{n}")))


def write_text(path: Path, text: str) -> None:
    """Write `text` to `path` atomically."""
    with atomic(path) as partial:
        partial.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    """Write `value` to `path` as indented JSON, atomically."""
    write_text(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


@contextlib.contextmanager
def regular(path: Path) -> Iterator[io.BufferedReader]:
    """Open a file to read; what is no file raises an OSError, as a pipe or a device, which could keep us for ever."""
    # Without O_NONBLOCK, to open a pipe is to wait for someone who writes to it.
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0))
    with os.fdopen(handle, "rb") as file:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, "it is no file but a pipe, a device or the like", str(path))
        yield file


def is_file(path: Path) -> bool:
    """Return whether a file is there; one that nobody can look at, as its name is too long, is not."""
    try:
        return path.is_file()
    except OSError:
        return False


def read_bytes(path: Path, most: int) -> bytes:
    """Return the content of a file as it is now; one of more than `most` bytes raises an OSError, before it is read."""
    with regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise OSError(errno.EFBIG, f"it holds more than {most:,} bytes", str(path))
        return file.read(size)


def reason(error: OSError | ValueError) -> str:
    """Return why a file cannot be read, without its name."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def parse_json(content: bytes | str) -> Any:
    """Return the JSON value that someone wrote; a ValueError says what is wrong with it.

    It is nested at most 200 deep, and its texts can be written again.
    """
    from pydantic_core import from_json  # which takes a while to import

    return from_json(content, allow_inf_nan=False)


def read_json(path: Path, *keys: str) -> dict[str, Any]:
    """Return the JSON object in a file that `write_json` made, which must have these keys."""
    try:
        value = parse_json(read_bytes(path, MOST_JSON))
    except (OSError, ValueError) as error:
        raise DualPromptError(f"{path} is damaged ({reason(error)}); restore it or start a new run") from None
    if not isinstance(value, dict):
        raise DualPromptError(f"{path} is damaged (it holds no JSON object); restore it or start a new run")
    for key in keys:
        if key not in value:
            raise DualPromptError(f"{path} is damaged (it has no '{key}'); restore it or start a new run")
    return value


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file's bytes, in hex."""
    with regular(path) as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def packaged(name: str, checksum: str) -> Path:
    """Return a data file that comes with the package, whose SHA-256 must be `checksum`."""
    path = ASSETS / name
    try:
        fault = None if sha256(path) == checksum else "wrong SHA-256"
    except OSError as error:
        fault = error.strerror or str(error)
    if fault:
        raise DualPromptError(f"{path}, which comes with dualprompt, is damaged ({fault}); install dualprompt again")
    return path


def digest(value: Any) -> str:
    """Return the SHA-256 of a JSON-serialisable value in its canonical form."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def with_home(path: str | Path) -> Path:
    """Return a path with the home folder in the place of ~; a name that begins with ~ and is nobody's stays."""
    path = Path(path)
    try:
        return path.expanduser()
    except RuntimeError:  # no such user, or nobody here has a home
        return path


def cache_root() -> Path:
    """Return the folder for things that can be made again: `$DUALPROMPT_CACHE` or `~/.cache/dualprompt`."""
    found = with_home(os.environ.get("DUALPROMPT_CACHE") or "~/.cache/dualprompt")
    if found.parts[:1] == ("~",):
        raise DualPromptError("this user has no home folder to keep a cache in; name a folder with $DUALPROMPT_CACHE")
    return found


def data_root() -> Path:
    """Return the folder that holds datasets: `$DUALPROMPT_DATA` or `data` in the cache folder."""
    return with_home(os.environ.get("DUALPROMPT_DATA") or cache_root() / "data")


def runs_root() -> Path:
    """Return the folder that holds runs: `$DUALPROMPT_RUNS` or `runs` in the current directory."""
    return with_home(os.environ.get("DUALPROMPT_RUNS") or "runs")
