"""The server's own folder inside the model's: what may lie there, what is read from it, and all that is ever deleted.

A model's folder may come from a stranger, and the server's folder with it. So nothing there is believed: only plain
files and folders are taken, records must be exactly of the kind that we write, and a job's folder is found by its
number alone, never by a name that a file tells.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

from pydantic import TypeAdapter, ValidationError

from dualprompt.errors import DualPromptError
from dualprompt.files import disk_errors
from dualprompt.inbound.limits import MEGABYTE

SERVE = ".serve"  # its name
RECORD_BYTES = 64 * MEGABYTE
LAST_JOB = 999_999_999
DEEPEST = 30  # folders in folders; deleting uses the stack
_NUMBER = re.compile(r"[0-9]{6,9}")

Kind = TypeVar("Kind")


def make_own(folder: Path) -> None:
    """Make the server's folder; refuse one that is or holds anything but plain files and folders."""
    with disk_errors(folder):
        if not folder.is_symlink():
            folder.mkdir(exist_ok=True)
            with contextlib.suppress(PermissionError):  # somebody else's, who let us write there
                folder.chmod(0o700)  # people's pictures lie there
        strange = next(_strange(folder), None)
    if strange is not None:
        remedy = f"look what it is, remove {folder}, and serve again"
        raise DualPromptError(f"{strange} is a link, a device or too deep, which no server of ours makes; {remedy}")


def _strange(top: Path) -> Iterator[Path]:
    """Yield what is neither a file nor a folder, at `top` and below, and folders far below; links are not followed."""
    waiting = [(top, 0)]
    while waiting:
        path, depth = waiting.pop()
        mode = path.lstat().st_mode
        if stat.S_ISDIR(mode) and depth < DEEPEST:
            waiting.extend((below, depth + 1) for below in path.iterdir())
        elif not stat.S_ISREG(mode):
            yield path


def read_record(path: Path, kind: TypeAdapter[Kind]) -> Kind:
    """Return what a file of the server says, which must be exactly of a kind."""
    try:
        if path.stat().st_size > RECORD_BYTES:
            raise DualPromptError(f"{path} has more than {RECORD_BYTES} bytes; remove it")
        return kind.validate_json(path.read_bytes(), strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise DualPromptError(f"{path} is damaged ({where}: {first['msg']}); remove it") from None
    except OSError as error:
        raise DualPromptError(f"{path} cannot be read ({error.strerror}); remove it") from error


class JobFolders:
    """The folders of jobs, by their numbers. Nothing else is ever deleted by the server."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def of(self, job: int) -> Path:
        """Return the folder of a job."""
        if type(job) is not int or not 0 < job <= LAST_JOB:
            raise ValueError(f"no job has the number {job!r}")
        return self.root / f"{job:06}"

    def make(self, job: int) -> Path:
        """Return the new, empty folder of a job."""
        self.remove(job)
        folder = self.of(job)
        (folder / "images").mkdir(parents=True)
        return folder

    def remove(self, job: int) -> None:
        """Delete the folder of a job and everything in it; links are neither followed nor deleted."""
        shutil.rmtree(self.of(job), ignore_errors=True)

    def numbers(self) -> list[int]:
        """Return the jobs that have a folder; what is called otherwise is not ours."""
        found = self.root.iterdir() if self.root.is_dir() else ()
        named = [int(path.name) for path in found if _NUMBER.fullmatch(path.name) and path.is_dir()]
        return [job for job in named if 0 < job <= LAST_JOB]
