"""Answers predictions in batches: what arrives while the network computes is computed together next.

An idle server answers at once. Only when other pictures are being decoded does a batch wait for them, a few
milliseconds, so that batching costs a lone client nothing.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from dualprompt.inbound.limits import busy

Result = TypeVar("Result")


@dataclass
class _Waiting(Generic[Result]):
    pixels: np.ndarray
    top_k: int
    answer: asyncio.Future[Result]


class Batcher(Generic[Result]):
    """Gathers pictures, asks `compute(pixels, top_k)` for their answers in a thread of its own, in the order they came.

    `compute` takes (pictures, side, side, 3) uint8 and how many classes each picture should be answered with.
    `wait` is how many seconds a batch waits for pictures that are on their way. `observe` receives every batch's size.
    """

    def __init__(
        self,
        compute: Callable[[np.ndarray, Sequence[int]], Sequence[Result]],
        largest: int = 16,
        wait: float = 0.004,
        queued: int = 512,
        observe: Callable[[int], None] = lambda size: None,
    ) -> None:
        self.compute, self.largest, self.wait, self.queued, self.observe = compute, largest, wait, queued, observe
        self.coming = 0  # pictures that are being read or decoded, and will be submitted soon
        self._waiting: deque[_Waiting[Result]] = deque()
        self._changed = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="network")
        self._task: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    def start(self) -> None:
        """Begin to answer; needs a running event loop."""
        self._task = asyncio.create_task(self._work())

    async def stop(self) -> None:
        """Stop; whoever still waits is cancelled."""
        if self._task:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        for item in self._waiting:
            item.answer.cancel()
        self._thread.shutdown(wait=True)

    @contextmanager
    def expect(self, count: int) -> Iterator[None]:
        """Say that `count` pictures are on their way while the block runs; refuse when too many are."""
        if self.coming + len(self) + count > self.queued:
            raise busy(f"the server has {self.coming + len(self)} images to answer; try again soon")
        self.coming += count
        try:
            yield
        finally:
            self.coming -= count
            self._changed.set()

    async def ask(self, pixels: np.ndarray, top_k: int) -> Result:
        """Return the answer for one picture, (side, side, 3) uint8."""
        item = _Waiting[Result](pixels, top_k, asyncio.get_running_loop().create_future())
        self._waiting.append(item)
        self._changed.set()
        return await item.answer

    async def _work(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._gather()
            batch = [self._waiting.popleft() for _ in range(min(self.largest, len(self)))]
            batch = [item for item in batch if not item.answer.done()]  # whoever has gone needs no answer
            if not batch:
                continue
            self.observe(len(batch))
            try:
                pixels = np.stack([item.pixels for item in batch])
                answers = await loop.run_in_executor(self._thread, self.compute, pixels, [b.top_k for b in batch])
                for item, answer in zip(batch, answers, strict=True):
                    if not item.answer.done():
                        item.answer.set_result(answer)
            except Exception as error:  # noqa: BLE001 (it belongs to those who asked; the next batch goes on)
                for item in batch:
                    if not item.answer.done():
                        item.answer.set_exception(error)

    async def _gather(self) -> None:
        """Wait for a first picture, then shortly for those that are on their way."""
        while not self._waiting:
            self._changed.clear()
            await self._changed.wait()
        until = asyncio.get_running_loop().time() + self.wait
        while len(self) < self.largest and self.coming:
            left = until - asyncio.get_running_loop().time()
            if left <= 0:
                return
            self._changed.clear()
            try:
                async with asyncio.timeout(left):
                    await self._changed.wait()
            except TimeoutError:
                return
