"""From uploads, or from the queue of pictures that people looked at, to jobs."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass, replace
from pathlib import Path

from starlette.requests import Request

from dualprompt.hosted.jobs import Job, Jobs
from dualprompt.hosted.model import ServedModel
from dualprompt.hosted.review import Item, Review, Reviewed
from dualprompt.hosted.teach import JobKind, Lesson
from dualprompt.inbound.limits import Limits, Refusal
from dualprompt.inbound.pictures import Picture, check_label, level, open_picture, short, split_names, unpack
from dualprompt.inbound.uploads import Allowance, Part, read

FIELDS: dict[JobKind, set[str]] = {
    "learn": {"name", "epochs", "again", "skip_bad", "nested"},
    "more": {"name", "skip_bad", "nested"},
    "check": {"name", "nested"},
}
YES, NO = ("true", "1", "on", "yes"), ("false", "0", "off", "no", "")


class Lessons:
    """Takes pictures with their classes and queues what is to be done with them."""

    def __init__(self, model: ServedModel, jobs: Jobs, review: Review, limits: Limits) -> None:
        self.model, self.jobs, self.review, self.limits = model, jobs, review, limits
        self._reviewing = asyncio.Lock()  # or two lessons would take the same pictures

    async def take(self, request: Request, kind: JobKind) -> Job:
        """Take an upload: new classes to learn, more pictures of known ones, or pictures to be checked."""
        async with self.jobs.room() as folder:
            fields = FIELDS[kind]
            allowed = Allowance(self.limits.teach_bytes, self.limits.teach_body_seconds)
            parts = await read(request, self.limits, allowed, fields, self._sink(folder))
            values = {part.field: part.text.strip() for part in parts if part.filename is None}
            name = check_label(values["name"], self.limits) if values.get("name") else None
            epochs = self._epochs(values.get("epochs", ""))
            again, skip_bad, nested = (as_bool(name, values.get(name, "")) for name in ("again", "skip_bad", "nested"))
            upload = await asyncio.to_thread(self._upload, folder, [part for part in parts if part.path])
            if kind != "check":
                upload.refuse(skip_bad, nested)
            labels = {picture.label for picture in upload.pictures}
            if kind == "more":
                self._refuse_unknown(labels)
            elif kind == "learn":
                if not again:
                    self._refuse_known(labels)
                self._refuse_taken(name)
            lesson = Lesson(name, epochs, again, {}, kind, skip_bad)
            if kind == "check":
                lesson = replace(
                    lesson,
                    left_out=upload.left_out,
                    unreadable=upload.unreadable,
                    level=None if nested else upload.level,
                )
            return self.jobs.add(folder, upload.pictures, lesson)

    async def learn_reviewed(self) -> Job:
        """Queue all pictures of the review queue that somebody has named, as more pictures of their classes."""
        self.review.refuse_off()
        async with self._reviewing, self.jobs.room() as folder:
            items = self._named()

            def copy() -> list[Picture]:
                pictures = []
                for item, label in items:
                    path = folder / "images" / f"{item.id % 1_000_000:06}.img"
                    path.write_bytes(self.review.read(item))
                    pictures.append(Picture(label, item.called, path))
                return pictures

            pictures = await asyncio.to_thread(copy)
            reviewed = [Reviewed(item.id, item.added, label) for item, label in items]
            return self.jobs.add(folder, pictures, Lesson(None, None, False, {}, "more", reviewed=reviewed))

    def _named(self) -> list[tuple[Item, str]]:
        """Return the pictures that a lesson of the review queue takes, with what they show; not those of another."""
        named = [(item, item.label) for item in self.review.items() if item.label is not None]
        if not named:
            raise Refusal(409, "no picture of the queue has been named yet")
        known = self.model.learner.classes
        if strange := next(((item, label) for item, label in named if label not in known), None):
            said = f"{strange[0].called} is named '{short(strange[1])}', which the model does not know"
            raise Refusal(409, f"{said}; name it again or remove it")
        taken = {(each.id, each.added, each.label) for each in self.jobs.waiting_reviewed()}
        if not (left := [(item, label) for item, label in named if (item.id, item.added, label) not in taken]):
            raise Refusal(409, "the pictures that were named are being learned already", {"Retry-After": "10"})
        return left

    def _sink(self, folder: Path):  # noqa: ANN202 (a closure of the kind `inbound.uploads.Sink`)
        count = 0

        def sink(name: str, filename: str) -> Path:
            nonlocal count
            if name == "archive":
                if (folder / "archive.zip").exists():
                    raise Refusal(422, "send one archive")
                return folder / "archive.zip"
            if name != "images":
                raise Refusal(422, f"unknown field '{name[:50]}'; send files as 'images' or one zip as 'archive'")
            count += 1
            if count > self.limits.task_images:
                raise Refusal(413, f"at most {self.limits.task_images} images are taken for a task")
            return folder / "images" / f"{count:06}{suffix(filename)}"

        return sink

    def _epochs(self, text: str) -> int | None:
        if not text:
            return None
        few = text.isascii() and text.isdecimal() and len(text) < 10  # of thousands of digits int makes nothing
        if not (few and 1 <= int(text) <= self.limits.epochs):
            raise Refusal(422, f"epochs takes a number from 1 to {self.limits.epochs}, found '{text[:20]}'")
        return int(text)

    def _upload(self, folder: Path, parts: list[Part]) -> Upload:
        archive = folder / "archive.zip"
        left_out: list[tuple[str, str]] = []
        if archive.exists():
            if len(parts) > 1:
                raise Refusal(422, "send either one archive or images, not both")
            pictures, left_out = unpack(archive, folder / "images", self.limits)
            archive.unlink()
        else:
            labels = split_names(part.filename or "" for part in parts)
            pictures = [
                Picture(labels[part.filename], part.filename, part.path)
                for part in parts
                if part.filename and part.path
            ]
        if not pictures:
            raise Refusal(422, "the upload holds no images in class folders")
        classes = {picture.label: check_label(picture.label, self.limits) for picture in pictures}
        if len(classes) > self.limits.task_classes:
            raise Refusal(413, f"the upload has {len(classes)} classes; at most {self.limits.task_classes} are taken")
        good, unreadable, refusal = [], [], None
        for picture in pictures:
            try:
                open_picture(picture.path.read_bytes(), picture.name, self.limits).close()
                good.append(Picture(classes[picture.label], picture.name, picture.path))
            except Refusal as problem:
                refusal = refusal or problem
                unreadable.append((short(picture.name), problem.message))
                picture.path.unlink()
        if refusal and not good:
            raise refusal
        others = [(short(name), why) for name, why in left_out]
        told = level([picture.name for picture in pictures])
        empty = sorted(set(classes.values()) - {picture.label for picture in good})
        return Upload(good, others, unreadable, told, refusal, empty)

    def _refuse_known(self, labels: set[str]) -> None:
        known = sorted(labels & set(self.model.learner.classes))
        if known:
            listed = ", ".join(f"'{label}'" for label in known[:10])
            remedy = "send again=true to learn more images for them, or leave them out"
            raise Refusal(409, f"the model knows {listed} already; {remedy}")

    def _refuse_unknown(self, labels: set[str]) -> None:
        if strange := sorted(labels - set(self.model.learner.classes)):
            listed = ", ".join(f"'{label}'" for label in strange[:10])
            raise Refusal(409, f"the model does not know {listed}; teach new classes with POST /tasks")

    def _refuse_taken(self, name: str | None) -> None:
        waiting = [job.name for job in self.jobs.jobs.values() if job.state in ("queued", "running")]
        if name is not None and name in [*waiting, *(task.name for task in self.model.learner.tasks)]:
            raise Refusal(409, f"a task is called '{name}' already; give this one another name")


@dataclass(frozen=True)
class Upload:
    """Pictures that came, and what else is to be told of them."""

    pictures: list[Picture]  # that can be opened
    left_out: list[tuple[str, str]]  # files that are no pictures, with the reason
    unreadable: list[tuple[str, str]]  # pictures that cannot be opened
    level: str | None  # why the folders seem to be the wrong ones
    refusal: Refusal | None  # of the first picture that cannot be opened
    empty: list[str]  # classes without a picture that can be opened

    def refuse(self, skip_bad: bool, nested: bool) -> None:
        """Refuse what is to be learned as it is, unless whoever sent it has said what they mean."""
        if self.level and not nested:
            raise Refusal(422, self.level)
        if self.refusal and not skip_bad:
            more = f" (and {len(self.unreadable) - 1} more)" if len(self.unreadable) > 1 else ""
            remedy = "skip_bad=true leaves out what cannot be read"
            raise Refusal(self.refusal.status, f"{self.refusal.message}{more}; {remedy}")
        if self.empty:
            raise Refusal(422, f"class '{self.empty[0]}' has no image that can be read; give some or leave it out")


def as_bool(name: str, text: str) -> bool:
    """Read a yes or no."""
    if text.lower() not in YES + NO:
        raise Refusal(422, f"{name} takes true or false, found '{text[:20]}'")
    return text.lower() in YES


def suffix(filename: str) -> str:
    """Return how a file's name ends, if it is harmless."""
    end = os.path.splitext(filename)[1].lower()  # noqa: PTH122 (it need not be a path that this system knows)
    return end if end.isascii() and end[1:].isalnum() and len(end) < 6 else ".img"
