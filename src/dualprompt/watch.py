"""Watching a folder: what new pictures show is noted in a CSV file, and copies are sorted into folders if asked.

What is about to be noted is first written into the state (`pending`), then done, then the state says that it is done.
So whoever is killed in between does the rest of it the next time: no picture is noted twice, and none is lost.
"""

from __future__ import annotations

import codecs
import contextlib
import csv
import errno
import io
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Annotated, Any

import numpy as np
from pydantic import AfterValidator, Field

from dualprompt import files
from dualprompt.config import Count, Record, read_record
from dualprompt.data.folder import images_in
from dualprompt.errors import DualPromptError
from dualprompt.files import disk_errors, sha256, with_home, write_json
from dualprompt.learner import Answer, ContinualLearner
from dualprompt.model.saved import MODEL
from dualprompt.texts import in_csv, path_in_csv

BATCH = 64  # pictures that are noted at once
SETTLED = 2.0  # seconds without a change, after which a picture counts as written
MOST = 1_000_000  # pictures in the folder; of those that are gone nothing is kept
DAYS = 400  # of which the share of unsure answers is kept
UNSURE = 0.5  # probability of the best class, below which an answer is called unsure
NONE = "none of these"
COLUMNS = ("time", "path", "label", "probability", "task", "similarity", "unsure", "problem")
HEADER = ",".join(COLUMNS).encode()
LONGEST_NAME = 255  # bytes
# A name is too long, or a file lies where a folder of that name must be, or the other way round.
_NO_PLACE = (errno.ENAMETOOLONG, errno.ENOTDIR, errno.EEXIST, errno.EISDIR)
REMEDY = "remove it to label all pictures anew"


class _Day(Record):
    """How many pictures were labelled on a day."""

    images: Count = 0
    unsure: Count = 0


def _below(name: str) -> str:
    """Check the name of a file below a folder, whose bytes are written as characters: any name can be kept so."""
    parts = PurePosixPath(name).parts
    if not parts or name.startswith("/") or ".." in parts or any(ord(c) > 255 for c in name):
        raise ValueError("it is not the name of a picture below the folder")
    return name


class _Pending(Record):
    """A picture that is about to be noted."""

    path: Annotated[str, AfterValidator(_below)]  # below the watched folder
    mark: str  # its size and date
    row: Annotated[list[str], Field(min_length=len(COLUMNS), max_length=len(COLUMNS))]

    @property
    def place(self) -> Path:
        """Where it lies below the folder."""
        return Path(os.fsdecode(self.path.encode("latin-1")))


class _State(Record):
    """What `state.json` holds."""

    folder: str
    seen: Annotated[dict[str, str], Field(max_length=MOST)] = Field(default_factory=dict)  # marks, by path
    days: Annotated[dict[str, _Day], Field(max_length=DAYS)] = Field(default_factory=dict)
    bytes: Count = 0  # of the CSV file before what is pending
    pending: Annotated[list[_Pending], Field(max_length=BATCH)] = Field(default_factory=list)


@dataclass(frozen=True)
class Watched:
    """What a look at the folder did."""

    labelled: int = 0
    unsure: int = 0
    unreadable: int = 0
    waiting: int = 0  # pictures that are still being written
    days: dict[str, dict[str, int]] = field(default_factory=dict)  # pictures and unsure answers of each day

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return asdict(self)


class Watch:
    """Labels the pictures that come into a folder; the originals are never moved or changed.

    `model` is a model's folder, read again when it changes. The rows go to `table`, a CSV file; with `sorted_into`,
    a copy of each picture, or with `link` a hard link to it, goes into the folder of its label there.
    """

    def __init__(
        self, model: Path, folder: Path, table: Path, sorted_into: Path | None = None, link: bool = False
    ) -> None:
        self.model, self.folder, self.table = model, with_home(folder), with_home(table)
        self.sorted_into, self.link = sorted_into, link
        self._home = self.table.with_name(f".{self.table.name}.watch")  # our own folder, beside the table
        self._seen_before: dict[str, tuple[str, float]] = {}  # marks of unsettled pictures, and since when
        self._learner: ContinualLearner | None = None
        self._version = ""
        if not self.folder.is_dir():
            raise DualPromptError(f"{self.folder} is not a folder; give the one that pictures come into")
        if self.table.is_dir():
            raise DualPromptError(f"{self.table} is a folder; give a file, or sort into it with --sort")
        if not self._home.is_dir() and _other_file(self.table):  # in one of ours people may write what they like
            raise DualPromptError(f"{self.table} is there already, and is no table of `watch`; give another file")
        if sorted_into is not None and _overlap(sorted_into, self.folder):
            raise DualPromptError(f"{sorted_into} and {self.folder} lie in each other; sort into a folder elsewhere")

    @contextlib.contextmanager
    def opened(self, device: str = "auto") -> Iterator[Watch]:
        """Hold the table against other watchers, and finish what one that was killed had begun."""
        with disk_errors(self._home):
            self._home.mkdir(parents=True, exist_ok=True)
        files.refuse_links(self._home, itself=True)
        files.sweep(self._home)
        with files.held(self._home, f"{self.table} is written by another watch; stop that one, or name another file"):
            self._device = device
            state = self._read()
            if state.folder != str(self.folder.absolute()):
                raise DualPromptError(f"{self.table} is of the folder {state.folder}; name another file for this one")
            self._state = self._finished(state)
            yield self

    def look(self, known: Watched | None = None) -> Watched:
        """Label all pictures that are new and wholly written; `known` is what earlier looks did."""
        found = known or Watched()
        try:
            present = self._present()
        except FileNotFoundError:  # a folder has gone while it was looked through: the next look sees what is left
            return replace(found, waiting=0)
        new = {path: mark for path, mark in present.items() if self._state.seen.get(_kept(path)) != mark}
        ready = [path for path, mark in new.items() if self._settled(path, mark)]
        here = set(map(_kept, present))
        kept = {path: mark for path, mark in self._state.seen.items() if path in here}
        self._state = self._state.model_copy(update={"seen": kept})
        self._seen_before = {path: value for path, value in self._seen_before.items() if path in new}
        for start in range(0, len(ready), BATCH):
            found = self._label([(path, new[path]) for path in ready[start : start + BATCH]], found)
        days = {day: {"images": own.images, "unsure": own.unsure} for day, own in self._state.days.items()}
        return replace(found, waiting=len(new) - len(ready), days=days)

    def _present(self) -> dict[str, str]:
        try:
            paths = images_in(self.folder)
        except FileNotFoundError:
            if self.folder.is_dir():
                raise
            raise DualPromptError(f"{self.folder} has gone; the watch ends") from None
        except OSError as error:
            raise DualPromptError(f"{error.filename or self.folder} cannot be read ({error.strerror})") from None
        if len(paths) > MOST:
            raise DualPromptError(f"{self.folder} holds {len(paths):,} pictures, more than {MOST:,}; take some away")
        marks = ((path.relative_to(self.folder).as_posix(), _mark(path)) for path in paths)
        return {path: mark for path, mark in marks if mark}

    def _settled(self, path: str, mark: str) -> bool:
        """Return whether a picture has not changed for a while: by its date, or by what earlier looks saw."""
        now = time.time()
        age = now - int(mark.partition(" ")[2]) / 1e9
        before, since = self._seen_before.get(path, (mark, now))
        self._seen_before[path] = (mark, since if before == mark else now)
        return age >= SETTLED or (before == mark and now - since >= SETTLED)

    def _label(self, pictures: Sequence[tuple[str, str]], found: Watched) -> Watched:
        learner = self._current()
        pixels: list[np.ndarray] = []
        problems: dict[str, str] = {}
        good: list[str] = []
        for path, mark in pictures:
            try:
                pixels.append(learner.pixels(self.folder / path))
            except DualPromptError as error:
                problems[path] = str(error)
            else:
                good.append(path)
            if _mark(self.folder / path) != mark:  # it was written to meanwhile: the next look takes it
                pictures = [each for each in pictures if each[0] != path]
        answers = dict(zip(good, learner.predict_pixels(np.stack(pixels), 1) if good else [], strict=True))
        rows = [
            _Pending(path=_kept(path), mark=mark, row=_row(path, answers.get(path), problems.get(path, "")))
            for path, mark in pictures
        ]
        self._note(rows)
        unsure = sum(each.row[6] == "1" for each in rows)
        bad = sum(bool(each.row[7]) for each in rows)
        return replace(
            found,
            labelled=found.labelled + len(rows) - bad,
            unsure=found.unsure + unsure,
            unreadable=found.unreadable + bad,
        )

    def _current(self) -> ContinualLearner:
        """Return the model as it is now."""
        with contextlib.suppress(OSError):  # then loading says what is wrong
            version = _mark(self.model / MODEL)
            if self._learner is not None and version == self._version:
                return self._learner
            self._version = version
        self._learner = ContinualLearner.load(self.model, self._device)
        return self._learner

    def _note(self, rows: list[_Pending]) -> None:
        """Put what was found into the table and the folders, in a way that a kill cannot do by half."""
        size = self.table.stat().st_size if self.table.exists() else 0
        self._keep(self._state.model_copy(update={"pending": rows, "bytes": size}))
        self._state = self._finished(self._state)

    def _finished(self, state: _State) -> _State:
        """Carry out what is pending, as far as it is not done; return the state after it."""
        if not state.pending:
            return state
        for each in state.pending:
            self._sort(each)
        self._append(state)
        days = dict(state.days)
        for each in state.pending:
            day = each.row[0][:10]
            before = days.get(day, _Day())
            good, unsure = int(not each.row[7]), int(each.row[6] == "1")
            days[day] = _Day(images=before.images + good, unsure=before.unsure + unsure)
        seen = state.seen | {each.path: each.mark for each in state.pending}
        kept = dict(sorted(days.items())[-DAYS:])
        return self._keep(state.model_copy(update={"seen": seen, "days": kept, "pending": []}))

    def _append(self, state: _State) -> None:
        """Write the rows after the first `bytes` of the table, where a killed process may have written some of them."""
        rows = [each.row for each in state.pending]
        with disk_errors(self.table):
            self.table.touch()
            with self.table.open("rb+") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(min(size, state.bytes))
                begun = file.read()
                ours = size >= state.bytes and _csv(rows, header=state.bytes == 0).startswith(begun)
                start = state.bytes if ours else size  # else someone has changed it since: what they wrote stays
                file.seek(max(0, start - 1))
                broken = start > 0 and file.read(1) != b"\n"
                file.seek(start)
                file.write((b"\n" if broken else b"") + _csv(rows, header=start == 0))
                file.flush()
                os.fsync(file.fileno())

    def _sort(self, pending: _Pending) -> None:
        if self.sorted_into is None or pending.row[7]:
            return
        source, folder = self.folder / pending.place, self.sorted_into / _folder_name(pending.row[2] or NONE)
        if os.path.lexists(folder) and not folder.is_dir():  # a file of the label's name, which stays as it is
            folder = folder.with_name(f"{folder.name} (pictures)")
        try:
            content = sha256(source)
        except OSError:  # it has gone, or is closed to us by now; its row stays
            return
        try:
            self._put_into(self.sorted_into, source, folder / pending.place, content)
        except DualPromptError as error:
            if getattr(error.__cause__, "errno", None) not in _NO_PLACE:
                raise
            # What stands in the way will not go away, and the watch must go on: under a name of ours.
            self._put_into(self.sorted_into, source, folder / f"{content[:16]}{source.suffix}", content)

    def _put_into(self, top: Path, source: Path, target: Path, content: str) -> None:
        if not target.parent.resolve().is_relative_to(top.resolve()):
            raise DualPromptError(f"{target.parent} leads out of {top}; remove the link")
        with disk_errors(target):
            self._put(source, target, content)

    def _put(self, source: Path, target: Path, content: str) -> None:
        if target.exists():
            if sha256(target) == content:
                return
            target = target.with_stem(f"{target.stem}-{content[:8]}")  # another picture of the same name, earlier
            if target.exists():
                return
        target.parent.mkdir(parents=True, exist_ok=True)
        if self.link:
            os.link(source, target)
            return
        # In our own folder, so that a kill leaves nothing in theirs.
        partial = self._home / f".{secrets.token_hex(8)}.partial"
        shutil.copy2(source, partial)
        partial.replace(target)

    def _read(self) -> _State:
        path = self._home / "state.json"
        if not path.exists():
            return _State(folder=str(self.folder.absolute()))
        return read_record(path, _State, REMEDY)

    def _keep(self, state: _State) -> _State:
        write_json(self._home / "state.json", state.model_dump(mode="json"))
        self._state = state
        return state


def _other_file(table: Path) -> bool:
    """Return whether a file holds something else than a table of ours, to which rows would be appended."""
    with disk_errors(table):
        if not table.is_file():
            return False
        with table.open("rb") as file:
            line = file.readline(2 * len(HEADER))
    # A spreadsheet may have marked it and changed its line ends; who was killed may have begun it.
    return bool(line) and not HEADER.startswith(line.removeprefix(codecs.BOM_UTF8).rstrip(b"\r\n") or b"\0")


def _kept(path: str) -> str:
    """Return how the name of a file is kept: JSON cannot hold every name that a disk can."""
    return os.fsencode(path).decode("latin-1")


def _row(path: str, answer: Answer | None, problem: str) -> list[str]:
    now = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    path = path_in_csv(path.encode("utf-8", "backslashreplace").decode())
    if answer is None:
        return [now, path, "", "", "", "", "", problem]
    unsure = answer.label is None or answer.top[0].probability < UNSURE
    sure = "" if answer.label is None else f"{answer.top[0].probability:.6f}"
    return [now, path, answer.label or "", sure, answer.task or "", f"{answer.similarity:.6f}", f"{int(unsure)}", ""]


def _csv(rows: Sequence[Sequence[str]], header: bool) -> bytes:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    if header:
        writer.writerow(COLUMNS)
    writer.writerows(map(in_csv, row) for row in rows)
    return text.getvalue().encode()


def _mark(path: Path) -> str:
    """Return the size and date of a file; nothing, where it has gone."""
    try:
        status = path.stat()
    except OSError:
        return ""
    return f"{status.st_size} {status.st_mtime_ns}"


def _folder_name(label: str) -> str:
    """Return a label as the name of a folder on any disk, which cannot lead elsewhere."""
    name = re.sub(r'[\\/:*?"<>|\x00-\x1f]', "_", label).strip(". ")[:100]
    return name.encode()[:LONGEST_NAME].decode(errors="ignore").strip(". ") or "_"


def _overlap(one: Path, other: Path) -> bool:
    first, second = one.resolve(), other.resolve()
    return first.is_relative_to(second) or second.is_relative_to(first)
