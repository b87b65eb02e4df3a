"""What batching can give at all: the network's pass alone, over one picture and over many, on one core and on all."""

from __future__ import annotations

import os
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from dualprompt.learner import ContinualLearner


@dataclass
class Pass:
    """A way to have pictures answered: `parts` threads take an equal part of a batch each, on `threads` cores."""

    batch: int
    parts: int
    threads: int
    wall: list[float] = field(default_factory=list)  # seconds for a batch
    cpu: list[float] = field(default_factory=list)

    @property
    def name(self) -> str:
        """What it is called."""
        how = f"{self.parts} parts, a core each" if self.parts > 1 else f"{self.threads} cores share it"
        return f"{self.batch} at a time, {'one core' if self.parts == self.threads == 1 else how}"

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        wall, cpu = statistics.median(self.wall), statistics.median(self.cpu)
        return {
            "what": self.name,
            "batch": self.batch,
            "parts": self.parts,
            "threads": self.threads,
            "per_second": round(self.batch / wall, 1),
            "per_cpu_second": round(self.batch / cpu, 1),
            "cpu_ms": round(1000 * cpu / self.batch, 1),
            "cores_used": round(cpu / wall, 2),
        }


def measure(learner: ContinualLearner, rounds: int = 12, batches: tuple[int, ...] = (1, 8, 32)) -> list[dict[str, Any]]:
    """Return how fast a learner answers pictures in each way, all in turns."""
    cores = os.cpu_count() or 1
    ways = [Pass(1, 1, 1), *(Pass(batch, 1, cores) for batch in batches)]
    ways += [Pass(batch, cores, 1) for batch in batches if batch >= cores > 1]
    pixels = np.random.default_rng(0).integers(0, 256, (max(batches), learner.side, learner.side, 3), dtype=np.uint8)
    before = torch.get_num_threads()
    with ThreadPoolExecutor(cores) as pool:
        for turn in range(rounds + 1):
            for way in ways:
                _once(learner, pixels[: way.batch], way, pool, keep=turn > 0)  # the first passes are slower
    torch.set_num_threads(before)
    return [way.to_dict() for way in ways]


def _once(learner: ContinualLearner, pixels: np.ndarray, way: Pass, pool: ThreadPoolExecutor, *, keep: bool) -> None:
    def answer(piece: np.ndarray) -> None:
        torch.set_num_threads(way.threads)  # of this thread alone
        learner.predict_pixels(piece, 1)

    wall, cpu = time.perf_counter(), time.process_time()
    if way.parts == 1:
        answer(pixels)
    else:
        list(pool.map(answer, np.array_split(pixels, way.parts)))
    if keep:
        way.wall.append(time.perf_counter() - wall)
        way.cpu.append(time.process_time() - cpu)
