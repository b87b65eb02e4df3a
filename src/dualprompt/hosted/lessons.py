"""From uploads, or from the queue of pictures that people looked at, to jobs."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from starlette.requests import Request

from dualprompt.hosted.jobs import Job, Jobs
from dualprompt.hosted.model import ServedModel
from dualprompt.hosted.review import Review
from dualprompt.hosted.teach import JobKind, Lesson
from dualprompt.inbound.limits import Limits, Refusal
from dualprompt.inbound.pictures import Picture, check_label, open_picture, split_names, unpack
from dualprompt.inbound.uploads import Allowance, Part, read

YES, NO = ("true", "1", "on", "yes"), ("false", "0", "off", "no", "")


class Lessons:
    """Takes pictures with their classes and queues what is to be done with them."""

    def __init__(self, model: ServedModel, jobs: Jobs, review: Review, limits: Limits) -> None:
        self.model, self.jobs, self.review, self.limits = model, jobs, review, limits

    async def take(self, request: Request, kind: JobKind) -> Job:
        """Take an upload: new classes to learn, more pictures of known ones, or pictures to be checked."""
        async with self.jobs.room() as folder:
            fields = {"name", "epochs", "again"} if kind == "learn" else {"name"}
            allowed = Allowance(self.limits.teach_bytes, self.limits.teach_body_seconds)
            parts = await read(request, self.limits, allowed, fields, self._sink(folder))
            values = {part.field: part.text.strip() for part in parts if part.filename is None}
            name = check_label(values["name"], self.limits) if values.get("name") else None
            epochs, again = self._epochs(values.get("epochs", "")), as_bool(values.get("again", ""))
            pictures = await asyncio.to_thread(self._pictures, folder, [part for part in parts if part.path])
            labels = {picture.label for picture in pictures}
            if kind == "more":
                self._refuse_unknown(labels)
            elif kind == "learn":
                if not again:
                    self._refuse_known(labels)
                self._refuse_taken(name)
            return self.jobs.add(folder, pictures, Lesson(name, epochs, again, {}, kind))

    async def learn_reviewed(self) -> Job:
        """Queue all pictures of the review queue that somebody has named, as more pictures of their classes."""
        self.review.refuse_off()
        named = [item for item in self.review.items() if item.label is not None]
        if not named:
            raise Refusal(409, "no picture of the queue has been named yet")
        self._refuse_unknown({item.label for item in named if item.label})
        async with self.jobs.room() as folder:

            def copy() -> list[Picture]:
                pictures = []
                for item in named:
                    path = folder / "images" / f"{item.id % 1_000_000:06}.img"
                    path.write_bytes(self.review.content(item.id))
                    pictures.append(Picture(item.label or "", item.name, path))
                return pictures

            pictures = await asyncio.to_thread(copy)
            job = self.jobs.add(folder, pictures, Lesson(None, None, False, {}, "more"))
        self.jobs.when_done(job, lambda: self.review.remove(item.id for item in named))
        return job

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

    def _pictures(self, folder: Path, parts: list[Part]) -> list[Picture]:
        archive = folder / "archive.zip"
        if archive.exists():
            if len(parts) > 1:
                raise Refusal(422, "send either one archive or images, not both")
            pictures = unpack(archive, folder / "images", self.limits)
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
        for picture in pictures:
            open_picture(picture.path, picture.name, self.limits).close()
        return [Picture(classes[picture.label], picture.name, picture.path) for picture in pictures]

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


def as_bool(text: str) -> bool:
    """Read a yes or no."""
    if text.lower() not in YES + NO:
        raise Refusal(422, f"again takes true or false, found '{text[:20]}'")
    return text.lower() in YES


def suffix(filename: str) -> str:
    """Return how a file's name ends, if it is harmless."""
    end = os.path.splitext(filename)[1].lower()  # noqa: PTH122 (it need not be a path that this system knows)
    return end if end.isascii() and end[1:].isalnum() and len(end) < 6 else ".img"
