"""Pictures that people should look at: unsure answers and corrections, kept only where the operator turned it on.

They lie in the server's own folder, for a stated time at most. What a lesson has learned is deleted with it; a server
that is started without the queue deletes what an earlier one kept.
"""

from __future__ import annotations

import logging
import math
import re
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from dualprompt.errors import DualPromptError
from dualprompt.files import disk_errors, read_bytes, reason, write_json
from dualprompt.hosted.places import LAST_JOB, make_own, read_record
from dualprompt.inbound.limits import Limits, Refusal
from dualprompt.inbound.pictures import short

log = logging.getLogger("dualprompt.serve")
DAY = 24 * 3600
_NAME = re.compile(r"[0-9]{6,9}\.(json|image)")
Why = Literal["unsure", "wrong"]
REMEDY = "remove it with DELETE /review/ID"


Number = Annotated[int, Field(ge=1, le=LAST_JOB)]
Seconds = Annotated[float, Field(ge=0, lt=2**53, allow_inf_nan=False)]  # since 1970


@dataclass
class Item:
    """A picture in the queue: what was answered, and what people say it is."""

    id: Number
    added: Seconds
    why: Why
    name: str  # the sender's
    answered: str | None  # None: none of these
    label: str | None = None  # what it is; None: nobody has said so yet

    @property
    def called(self) -> str:
        """What messages call it; several may have one name."""
        return f"picture {self.id} to look at ('{short(self.name)}')"


@dataclass
class Reviewed:
    """A picture of the queue that a lesson has, as it was then; `added` tells it from a later one of its number."""

    id: Number
    added: Seconds
    label: str


_ITEM = TypeAdapter(Item)


class Review:
    """The queue of one model. `days` is how long a picture stays; None: none is ever kept."""

    def __init__(
        self, folder: Path, limits: Limits, days: float | None, clock: Callable[[], float] = time.time
    ) -> None:
        self.folder, self.limits, self.days, self._clock = folder, limits, days, clock
        self._items: dict[int, Item] = {}
        self._bytes: dict[int, int] = {}
        self._next = 1

    def start(self) -> None:
        """Find what an earlier server kept; delete it where this one keeps nothing, or where its time is over."""
        if self.days is None:
            self._remove_files()
            return
        with disk_errors(self.folder):
            self.folder.mkdir(exist_ok=True)
        for path in sorted(self.folder.glob("*.json")):
            try:
                item = read_record(path, _ITEM)
                picture = self._picture(item.id)
                if path != self._record(item.id) or not picture.is_file():
                    continue
            except DualPromptError:
                continue
            self._items[item.id], self._bytes[item.id] = item, picture.stat().st_size
            self._next = max(self._next, item.id + 1)
        self._remove_files(keep=set(self._items))
        self.tidy()

    def refuse_off(self) -> None:
        """Refuse where no picture is kept."""
        if self.days is None:
            raise Refusal(409, "this server keeps no pictures; start it with --review DAYS to keep those to look at")

    def items(self) -> list[Item]:
        """Return what is in the queue, the oldest first."""
        self.tidy()
        return list(self._items.values())

    def item(self, number: int) -> Item:
        """Return one of them."""
        self.tidy()
        if number not in self._items:
            raise Refusal(404, f"there is no picture {number} to look at")
        return self._items[number]

    def content(self, number: int) -> bytes:
        """Return a picture as it was sent."""
        return self.read(self.item(number))

    def read(self, item: Item) -> bytes:
        """Return a picture of the queue; refuse one that is no longer as we wrote it. Any thread may ask."""
        try:
            return read_bytes(self._picture(item.id), self.limits.image_bytes)
        except OSError as error:
            raise Refusal(422, f"{item.called} cannot be read ({reason(error)}); {REMEDY}") from None

    def add(self, content: bytes, why: Why, name: str, answered: str | None, label: str | None = None) -> Item | None:
        """Keep a picture; where there is no room, one that is merely unsure is let go, and None is returned."""
        self.tidy()
        full = len(self._items) >= self.limits.review_images
        if full or sum(self._bytes.values()) + len(content) > self.limits.review_bytes:
            if why == "unsure":
                return None
            raise Refusal(429, "the queue of pictures to look at is full; learn or remove some first")
        item = Item(self._next, self._clock(), why, name, answered, label)
        self._next += 1
        with disk_errors(self.folder):
            self._picture(item.id).write_bytes(content)
        write_json(self._record(item.id), asdict(item))
        self._items[item.id], self._bytes[item.id] = item, len(content)
        return item

    def say(self, number: int, label: str | None) -> Item:
        """Note what a picture shows; None: it is not known after all."""
        item = self.item(number)
        self._write(item, label)
        item.label = label
        return item

    def rename(self, labels: Collection[str], new: str | None) -> None:
        """Call what has one of these labels otherwise, as the model does now; None: it is to be named again."""
        for item in [item for item in self._items.values() if item.label in labels]:
            item.label = new
            try:
                self._write(item, new)
            except DualPromptError as problem:  # a full disk; the model is changed all the same
                log.warning("%s", problem)

    def forget(self, labels: Collection[str], purge: bool) -> None:
        """Have what shows a forgotten class named again; with `purge`, delete it."""
        if purge:
            self.remove([item.id for item in self._items.values() if item.label in labels])
        else:
            self.rename(labels, None)

    def learned(self, pictures: Iterable[Reviewed]) -> None:
        """Delete what a lesson has learned, but nothing that was called otherwise meanwhile, which is learned anew."""
        for each in pictures:
            item = self._items.get(each.id)
            if item is not None and (item.added, item.label) == (each.added, each.label):
                self.remove([each.id])

    def remove(self, numbers: Iterable[int]) -> None:
        """Delete pictures."""
        for number in [number for number in numbers if number in self._items]:
            with disk_errors(self.folder):
                self._picture(number).unlink(missing_ok=True)
                self._record(number).unlink(missing_ok=True)
            del self._items[number], self._bytes[number]

    def tidy(self) -> None:
        """Delete what has been kept long enough."""
        if self.days is not None:
            oldest = self._clock() - self.days * DAY
            try:
                self.remove([number for number, item in self._items.items() if item.added < oldest])
            except DualPromptError as problem:  # the others are there all the same
                log.warning("%s", problem)

    def _write(self, item: Item, label: str | None) -> None:
        write_json(self._record(item.id), asdict(item) | {"label": label})

    def _record(self, number: int) -> Path:
        return self.folder / f"{number:06}.json"

    def _picture(self, number: int) -> Path:
        return self.folder / f"{number:06}.image"

    def _remove_files(self, keep: Collection[int] = ()) -> None:
        for path in self.folder.iterdir() if self.folder.is_dir() else ():
            if _NAME.fullmatch(path.name) and path.is_file() and int(path.stem) not in keep:
                path.unlink()


def purged(work: Path, labels: Collection[str]) -> int:
    """Delete what people called so of the pictures in the folder of a server that is not running; return how many."""
    if not (work / "review").is_dir():
        return 0
    make_own(work)
    queue = Review(work / "review", Limits(), days=math.inf)  # how long the others stay is the server's to say
    queue.start()
    before = len(queue.items())
    queue.forget(labels, purge=True)
    return before - len(queue.items())
