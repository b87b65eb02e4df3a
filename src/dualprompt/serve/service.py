"""What the routes do: predict in batches, take new tasks, forget."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from starlette.requests import Request

from dualprompt.errors import DualPromptError
from dualprompt.inbound.decoding import Decoders
from dualprompt.inbound.guard import Rules
from dualprompt.inbound.limits import Limits, Refusal, busy
from dualprompt.inbound.pictures import Picture, check_label, open_picture, split_names, unpack
from dualprompt.inbound.uploads import Allowance, Part, read
from dualprompt.learner import ContinualLearner
from dualprompt.model.names import Kind
from dualprompt.serve.batching import Batcher
from dualprompt.serve.jobs import Job, Jobs
from dualprompt.serve.metrics import Metrics
from dualprompt.serve.model import ServedModel, Versioned

YES, NO = ("true", "1", "on", "yes"), ("false", "0", "off", "no", "")

log = logging.getLogger("dualprompt.serve")
Done = TypeVar("Done")


@dataclass(frozen=True)
class Settings:
    """How to serve; the default is for one machine."""

    rules: Rules
    limits: Limits = field(default_factory=Limits)
    largest_batch: int = 16
    batch_wait: float = 0.004


class Service:
    """What the routes share."""

    def __init__(self, model: ServedModel, settings: Settings) -> None:
        self.model, self.settings, self.limits = model, settings, settings.limits
        self.metrics = Metrics()
        self.batcher: Batcher[Versioned] = Batcher(
            model.answers,
            settings.largest_batch,
            settings.batch_wait,
            settings.limits.queued_images,
            self.metrics.batches.observe,
        )
        self.jobs = Jobs(model, settings.limits, self.switched)
        self.metrics.queue.set_function(lambda: len(self.batcher))
        self.metrics.watch(model, self.jobs)
        self.decoders = Decoders(settings.limits)
        self._held = 0  # bytes of requests in memory
        self._background: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def running(self, _: object) -> AsyncIterator[None]:
        """Work while the server runs."""
        self.batcher.start()
        self.jobs.start()
        try:
            yield
        finally:
            self.decoders.stop()
            await self.jobs.stop()
            await self.batcher.stop()
            await asyncio.gather(*self._background, return_exceptions=True)
            self.model.close()

    async def switched(self) -> None:
        """Answer with the newly saved model from now on."""
        await asyncio.to_thread(self.model.reload)
        self._accelerate()

    def _accelerate(self) -> None:
        """Make the engine ready for the new model; meanwhile PyTorch answers, never the old model."""

        async def work() -> None:
            try:
                await asyncio.to_thread(self.model.accelerate)
            except DualPromptError as problem:
                log.warning("PyTorch answers on: %s", problem)

        if self.model.engine.name != "torch":
            self._background.add(task := asyncio.create_task(work()))
            task.add_done_callback(self._background.discard)

    async def predict(self, request: Request, top_k: int, threshold: float | None = None) -> list[dict[str, Any]]:
        """Return an answer for each picture of a request; a `threshold` takes the place of the model's."""
        if not self.model.learner.classes:
            raise Refusal(409, "the model knows no class yet; teach it first")
        mine = 0

        def count(size: int) -> None:
            nonlocal mine
            if self._held + size > self.limits.memory_bytes:
                raise busy("the server holds enough images in memory; try again soon")
            mine += size
            self._held += size

        def sink(name: str, filename: str) -> None:
            nonlocal images
            images += 1
            if name != "images":
                raise Refusal(422, f"unknown field '{name[:50]}'; send files in the field 'images'")
            if images > self.limits.predict_images:
                raise Refusal(413, f"at most {self.limits.predict_images} images are taken at once")

        images = 0
        allowed = Allowance(self.limits.predict_bytes, self.limits.predict_body_seconds)
        try:
            parts = await read(request, self.limits, allowed, set(), sink, count)
            if not parts:
                raise Refusal(422, "send at least one file in the field 'images'")
            async with asyncio.timeout(self.limits.predict_seconds):
                return await while_here(request, self._answers(parts, top_k, threshold))
        except TimeoutError:
            raise busy("the server is too busy to answer in time; try again soon", 5) from None
        finally:
            self._held -= mine

    async def _answers(self, parts: list[Part], top_k: int, threshold: float | None) -> list[dict[str, Any]]:
        """Return an answer for each picture; of several, those that cannot be read are answered with their error."""
        with self.batcher.expect(len(parts)):
            named = [(part.filename or "image", part.take()) for part in parts]
            pixels = await self.decoders.decode(named, self.model.learner)
        if len(pixels) == 1 and isinstance(pixels[0], Refusal):
            raise pixels[0]

        async def answer(part: Part, found: np.ndarray | Refusal) -> dict[str, Any]:
            if isinstance(found, Refusal):
                return {"path": part.filename or None, "error": found.message, "status": found.status}
            answer, version = await self.batcher.ask(found, top_k)
            if threshold is not None:
                answer = replace(answer, label=answer.top[0].label if answer.trust >= threshold else None)
            return answer.to_dict() | {"path": part.filename or None, "version": version}

        return await asyncio.gather(*map(answer, parts, pixels))

    async def teach(self, request: Request) -> Job:
        """Take pictures of new classes and queue their learning."""
        async with self.jobs.room() as folder:
            images = folder / "images"
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
                return images / f"{count:06}{suffix(filename)}"

            fields = {"name", "epochs", "again"}
            allowed = Allowance(self.limits.teach_bytes, self.limits.teach_body_seconds)
            parts = await read(request, self.limits, allowed, fields, sink)
            values = {part.field: part.text.strip() for part in parts if part.filename is None}
            name = check_label(values["name"], self.limits) if values.get("name") else None
            epochs, again = self._epochs(values.get("epochs", "")), as_bool(values.get("again", ""))
            pictures = await asyncio.to_thread(self._pictures, folder, [part for part in parts if part.path])
            if not again:
                self._refuse_known({picture.label for picture in pictures})
            self._refuse_taken(name)
            return self.jobs.add(folder, pictures, name, epochs, again)

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

    def _refuse_taken(self, name: str | None) -> None:
        waiting = [job.name for job in self.jobs.jobs.values() if job.state in ("queued", "running")]
        if name is not None and name in [*waiting, *(task.name for task in self.model.learner.tasks)]:
            raise Refusal(409, f"a task is called '{name}' already; give this one another name")

    async def forget(self, what: int | str, kind: Kind) -> str:
        """Forget a task by its number or a class by its name; return the name of what is gone."""
        if self.jobs.changing.locked() or self.jobs.count("queued"):
            raise Refusal(409, "a task is being learned; forget when it is done", {"Retry-After": "10"})
        async with self.jobs.changing:
            before = self.model.learner
            try:
                return await asyncio.to_thread(self.model.forget, what, kind)
            finally:
                (names, tasks), (names_left, tasks_left) = _known(before), _known(self.model.learner)
                self.jobs.forget(names - names_left, tasks - tasks_left)
                self._accelerate()


async def while_here(request: Request, work: Coroutine[Any, Any, Done]) -> Done:
    """Return what comes of some work; drop it as soon as whoever asked has left. The request must have been read."""
    doing, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_left(request))
    try:
        await asyncio.wait((doing, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not doing.done():
            raise Refusal(400, "the client has left")
        return doing.result()
    finally:
        for task in (doing, leaving):
            task.cancel()
        await asyncio.gather(doing, leaving, return_exceptions=True)


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _known(learner: ContinualLearner) -> tuple[set[str], set[int]]:
    """Return the names of classes and tasks, and the tasks' numbers."""
    return {*learner.classes, *(task.name for task in learner.tasks)}, {task.id for task in learner.tasks}


def as_bool(text: str) -> bool:
    """Read a yes or no."""
    if text.lower() not in YES + NO:
        raise Refusal(422, f"again takes true or false, found '{text[:20]}'")
    return text.lower() in YES


def suffix(filename: str) -> str:
    """Return how a file's name ends, if it is harmless."""
    end = os.path.splitext(filename)[1].lower()  # noqa: PTH122 (it need not be a path that this system knows)
    return end if end.isascii() and end[1:].isalnum() and len(end) < 6 else ".img"
