"""Decodes pictures of strangers, so that a few small files cannot take the machine.

What a picture costs is told by its header: the pixels that its decoder must hold. Large ones are decoded one at a time
in the whole server, small ones beside them, so that nobody's small picture waits for somebody's large one. What all
requests together have waiting is bounded. A decoder that takes too long, or whose client has left, is stopped when it
next reads.
"""

from __future__ import annotations

import asyncio
import io
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import numpy as np
from PIL import Image

from dualprompt.inbound.limits import Limits, Refusal, unavailable
from dualprompt.inbound.pictures import extent, is_jpeg, open_picture, short
from dualprompt.learner import ContinualLearner
from dualprompt.model.images import reduce_jpeg, upright

SMALL_AT_ONCE = 2
JPEG_BYTES = 8192  # read at a time: some ask for minutes of work in 64 KiB, and are stopped only in between

Found = TypeVar("Found")


class AbandonedError(Exception):
    """Nobody waits for this picture any more, or not for so long."""


class Source(io.BytesIO):
    """A picture's bytes, which can be read until nobody waits for them."""

    def __init__(self, content: bytes, stop: threading.Event) -> None:
        super().__init__(content)
        self._stop, self.until = stop, math.inf

    def read(self, size: int | None = -1, /) -> bytes:
        """Read on, unless it is over."""
        if self._stop.is_set() or time.monotonic() > self.until:
            raise AbandonedError
        return super().read(size)


def cost_of(picture: Image.Image, side: int) -> int:
    """Return how many pixels decoding holds; a JPEG is prepared to be decoded small, and counts as what that takes."""
    width, height = extent(picture)
    reduce_jpeg(picture, side)
    if not is_jpeg(picture):
        return width * height
    divisor = 4 if picture.info.get("progressive") else 16  # of one that is progressive, all is held until its end
    return max(picture.size[0] * picture.size[1], width * height // divisor)


class Decoders:
    """The threads that decode, and what waits for them."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.waiting = 0  # pixels of pictures that are to be decoded
        self._small = ThreadPoolExecutor(SMALL_AT_ONCE, thread_name_prefix="decode")
        self._large = ThreadPoolExecutor(1, thread_name_prefix="decode large")
        self._stops: set[threading.Event] = set()
        self._stopped = False

    def stop(self) -> None:
        """Give up whatever is being decoded, and wait for nothing."""
        self._stopped = True
        for stop in self._stops:
            stop.set()
        for pool in (self._small, self._large):
            pool.shutdown(wait=False, cancel_futures=True)

    async def decode(
        self, pictures: Sequence[tuple[str, bytes]], learner: ContinualLearner
    ) -> list[np.ndarray | Refusal]:
        """Return the pixels of each picture, given as its name and content, or why there are none."""
        return await self._each(pictures, learner.side, learner.pixels)

    async def small(self, name: str, content: bytes, side: int) -> Image.Image:
        """Return a picture as a lesson sees it, upright and on white, but at most `side` pixels a side."""

        def shrink(picture: Image.Image) -> Image.Image:
            shown = upright(picture)
            shown.thumbnail((side, side))
            return shown

        [found] = await self._each([(name, content)], side, shrink)
        if isinstance(found, Refusal):
            raise found
        return found

    async def _each(
        self, pictures: Sequence[tuple[str, bytes]], side: int, look: Callable[[Image.Image], Found]
    ) -> list[Found | Refusal]:
        """Return what `look`, which decodes, finds in each picture; a JPEG is decoded no larger than `side` needs."""
        costs = await self._stoppable(self._small, lambda stop: self._costs(pictures, side, stop))
        turn = asyncio.Semaphore(SMALL_AT_ONCE)  # pictures of other requests come in between

        async def one(picture: tuple[str, bytes], cost: int | Refusal) -> Found | Refusal:
            if isinstance(cost, Refusal):
                return cost
            async with turn:
                pool = self._large if cost > self.limits.small_pixels else self._small
                try:
                    return await self._stoppable(pool, lambda stop: self._decode(*picture, side, look, stop))
                except Refusal as refusal:
                    return refusal

        with self._room(sum(cost for cost in costs if isinstance(cost, int))):
            return await asyncio.gather(*map(one, pictures, costs))

    @contextmanager
    def _room(self, pixels: int) -> Iterator[None]:
        """Count pixels that are to be decoded; refuse more than are ever taken, or than others have left."""
        most = self.limits.queued_pixels
        if pixels > most:
            raise Refusal(
                413, f"the images have {pixels} pixels together, at most {most} are taken; send fewer at once"
            )
        if self.waiting + pixels > most:
            raise unavailable("the server has enough large images to decode; try again soon", 5)
        self.waiting += pixels
        try:
            yield
        finally:
            self.waiting -= pixels

    async def _stoppable(self, pool: ThreadPoolExecutor, work: Callable[[threading.Event], Found]) -> Found:
        """Return what a thread finds; if we are cancelled it stops, or never begins."""
        stop = threading.Event()
        self._stops.add(stop)
        try:
            if self._stopped:
                raise unavailable("the server is stopping")
            return await asyncio.get_running_loop().run_in_executor(pool, work, stop)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._stopped and task is not None and not task.cancelling():  # the work was given up, not who waits
                raise unavailable("the server is stopping") from None
            raise
        finally:
            stop.set()
            self._stops.discard(stop)

    def _costs(self, pictures: Sequence[tuple[str, bytes]], side: int, stop: threading.Event) -> list[int | Refusal]:
        found: list[int | Refusal] = []
        for name, content in pictures:
            if stop.is_set():  # nobody waits for them
                raise AbandonedError
            try:
                with open_picture(content, name, self.limits) as picture:
                    found.append(cost_of(picture, side))
            except Refusal as refusal:
                found.append(refusal)
        return found

    def _decode(
        self, name: str, content: bytes, side: int, look: Callable[[Image.Image], Found], stop: threading.Event
    ) -> Found:
        source = Source(content, stop)
        try:
            with open_picture(source, name, self.limits) as picture:
                source.until = time.monotonic() + self.limits.image_seconds
                if is_jpeg(picture):
                    picture.decodermaxblock = JPEG_BYTES
                reduce_jpeg(picture, side)
                return look(picture)
        except Refusal:
            raise
        except AbandonedError:
            text = f"the image '{short(name)}' takes more than {self.limits.image_seconds:.0f} s to decode"
            raise Refusal(413, f"{text}; save it as a plain JPEG or PNG") from None
        except Exception:  # noqa: BLE001 (decoders raise all sorts of things on hostile bytes)
            raise Refusal(422, f"the image '{short(name)}' is truncated or damaged") from None
