"""What the routes share: answers in batches, and changes of the model one at a time."""

from __future__ import annotations

import asyncio
import io
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from PIL import Image
from starlette.requests import Request

from dualprompt.data.folder import one_form
from dualprompt.errors import DualPromptError
from dualprompt.hosted.drift import Drift, is_unsure
from dualprompt.hosted.jobs import Jobs
from dualprompt.hosted.lessons import Lessons
from dualprompt.hosted.model import ServedModel, Versioned
from dualprompt.hosted.review import Review
from dualprompt.inbound.decoding import Decoders
from dualprompt.inbound.guard import Rules
from dualprompt.inbound.limits import Limits, Refusal, busy
from dualprompt.inbound.pictures import short
from dualprompt.inbound.uploads import Allowance, Part, read
from dualprompt.learner import Answer, ContinualLearner
from dualprompt.model import versions
from dualprompt.model.explain import heat_map
from dualprompt.model.names import Kind
from dualprompt.progress import counted
from dualprompt.serve.batching import Batcher
from dualprompt.serve.metrics import Metrics

log = logging.getLogger("dualprompt.serve")
Done = TypeVar("Done")


def _ignore(_: set[str]) -> None:
    pass


@dataclass(frozen=True)
class Settings:
    """How to serve; the default is for one machine."""

    rules: Rules
    limits: Limits = field(default_factory=Limits)
    largest_batch: int = 16
    batch_wait: float = 0.004
    review_days: float | None = None  # how long pictures to look at are kept; None: none is


@dataclass(frozen=True)
class Gone:
    """What was forgotten, and the numbers of the versions that were removed with it."""

    name: str
    purged: tuple[int, ...]
    before: bool  # the model itself had forgotten it before


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
        self.review = Review(model.work / "review", settings.limits, settings.review_days)
        self.jobs = Jobs(model, settings.limits, self.switched, self.review.learned)
        self.metrics.queue.set_function(lambda: len(self.batcher))
        self.metrics.watch(model, self.jobs)
        self.decoders = Decoders(settings.limits)
        self.drift = Drift()
        self.lessons = Lessons(model, self.jobs, self.review, settings.limits)
        self._held = 0  # bytes of requests in memory
        self._explaining = 0  # requests in hand
        self._background: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def running(self, _: object) -> AsyncIterator[None]:
        """Work while the server runs."""
        self.review.start()
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
        async with self._received(request, self.limits.predict_images) as parts:
            return await while_here(request, self._answers(parts, top_k, threshold))

    async def explain(self, request: Request) -> bytes:
        """Return where the model looks on the one picture of a request, drawn over it, as PNG."""
        if self._explaining >= self.limits.explaining:
            raise busy("the server explains enough pictures already; try again soon")
        self._explaining += 1
        try:
            async with self._received(request, 1) as parts:
                return await while_here(request, self._explained(parts[0]))
        finally:
            self._explaining -= 1

    async def _explained(self, part: Part) -> bytes:
        learner = self.model.learner
        [pixels] = await self.decoders.decode([(part.filename or "image", part.take())], learner)
        if isinstance(pixels, Refusal):
            raise pixels

        def draw() -> bytes:
            file = io.BytesIO()
            heat_map(learner, Image.fromarray(pixels)).save(file, "PNG")
            return file.getvalue()

        return await asyncio.to_thread(draw)

    @asynccontextmanager
    async def _received(self, request: Request, most: int) -> AsyncIterator[list[Part]]:
        """Yield the pictures of a request, at most so many, for as long as an answer may take."""
        if not self.model.learner.classes:
            raise Refusal(409, "the model knows no class yet; teach it first")
        mine = images = 0

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
            if images > most:
                raise Refusal(413, f"at most {counted(most, 'image')} {'is' if most == 1 else 'are'} taken at once")

        allowed = Allowance(self.limits.predict_bytes, self.limits.predict_body_seconds)
        try:
            parts = await read(request, self.limits, allowed, set(), sink, count)
            if not parts:
                raise Refusal(422, "send at least one file in the field 'images'")
            async with asyncio.timeout(self.limits.predict_seconds):
                yield parts
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

        async def answer(part: Part, content: bytes, found: np.ndarray | Refusal) -> dict[str, Any]:
            if isinstance(found, Refusal):
                return {"path": part.filename or None, "error": found.message, "status": found.status}
            told = await self.batcher.ask(found, top_k)
            self._note(told.decided(), part.filename or "image", content)
            return told.decided(threshold).to_dict() | {"path": part.filename or None, "version": told.version}

        return await asyncio.gather(*map(answer, parts, (content for _, content in named), pixels))

    def _note(self, answer: Answer, name: str, content: bytes) -> None:
        """Count an answer; where the operator wants it, keep a picture that the model is unsure of."""
        unsure = is_unsure(answer)
        self.drift.count(unsure)
        self.metrics.answers.labels("unsure" if unsure else "sure").inc()
        if unsure and self.review.days is not None:
            try:
                self.review.add(content, "unsure", short(name), answer.label)
            except DualPromptError as problem:  # a full disk; who asked has the answer all the same
                log.warning("%s", problem)

    async def forget(self, what: int | str, kind: Kind, purge: bool = False) -> Gone:
        """Forget a task by its number or a class by its name.

        With `purge`, every earlier version that holds it is removed too, also where the model itself has forgotten it
        before.
        """
        what = one_form(what) if isinstance(what, str) else what
        if not (purge or self._knows(what, kind)):
            raise _unknown(what, kind)

        def work() -> Gone:
            path = self.model.path
            owners = versions.holders(path, what, kind) if purge else set[int]()
            if known := self._knows(what, kind):
                gone = self.model.change(lambda learner: learner.forget(what, kind))
                name = gone if isinstance(gone, str) else gone.name
            elif owners:
                name = what if isinstance(what, str) else f"task {what}"
            else:
                raise _unknown(what, kind)
            return Gone(name, versions.purge(path, owners) if purge else (), not known)

        gone = await self._changed(work, lambda lost: self.review.forget(lost, purge))
        if gone.before and kind == "class":
            self.review.forget({gone.name}, purge)
        return gone

    def _knows(self, what: int | str, kind: Kind) -> bool:
        learner = self.model.learner
        return what in ([task.id for task in learner.tasks] if kind == "task" else learner.classes)

    async def rollback(self, number: int | None) -> None:
        """Go back to an earlier version; None: the one before."""
        await self._changed(lambda: self.model.rollback(number))

    async def change(
        self, work: Callable[[ContinualLearner], Done], lost: Callable[[set[str]], None] = _ignore
    ) -> Done:
        """Change the model by `work`, which gets the saved one, and answer with what comes of it.

        `lost` is called with the names that no class has any more.
        """
        return await self._changed(lambda: self.model.change(work), lost)

    async def _changed(self, work: Callable[[], Done], lost: Callable[[set[str]], None] = _ignore) -> Done:
        if self.jobs.changing.locked() or self.jobs.count("queued"):
            raise Refusal(409, "a task is being learned; do this when it is done", {"Retry-After": "10"})
        async with self.jobs.changing:
            before = self.model.learner
            try:
                return await asyncio.to_thread(work)
            finally:
                (names, tasks), (names_left, tasks_left) = _known(before), _known(self.model.learner)
                self.jobs.forget(names - names_left, tasks - tasks_left)
                self._accelerate()
                lost(set(before.classes) - set(self.model.learner.classes))


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


def _unknown(what: int | str, kind: Kind) -> Refusal:
    said = f"there is no task {what}" if kind == "task" else f"the model knows no class '{short(str(what))}'"
    return Refusal(404, said)


def _known(learner: ContinualLearner) -> tuple[set[str], set[int]]:
    """Return the names of classes and tasks, and the tasks' numbers."""
    return {*learner.classes, *(task.name for task in learner.tasks)}, {task.id for task in learner.tasks}
