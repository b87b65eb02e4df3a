"""A model that is loaded again and again in one process: does anything of the old ones stay?"""

from __future__ import annotations

import ctypes
import gc
import io
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tools.faults.common import copied, memory_mb

from dualprompt.bench.load import picture
from dualprompt.hosted.model import ServedModel

WARM_UP = 10  # loads after which caches are full
LARGE_EVERY = 5


def campaign_loading(source: Path, folder: Path, times: int) -> dict[str, Any]:
    """Switch to the saved model so many times, and ask it; return what is alive before and after."""
    served = ServedModel(copied(source, folder / "loading"), "cpu")
    large = picture(4000, 3000)
    pixels = np.zeros((4, served.learner.side, served.learner.side, 3), np.uint8)

    def switch(number: int) -> None:
        served.reload()
        served.answers(pixels, [5] * len(pixels))
        if number % LARGE_EVERY == 0:
            served.learner.pixels(Image.open(io.BytesIO(large)))

    for number in range(WARM_UP):
        switch(number)
    before = _alive()
    for number in range(times):
        switch(number)
    after = _alive()
    ctypes.CDLL(None).malloc_trim(0)
    given_back = after["memory_mb"] - memory_mb(Path("/proc/self"))
    served.close()
    kept = after["tensors"] - before["tensors"]
    return {
        "loads": times,
        "before": before,
        "after": after,
        "given_back_mb": round(given_back, 1),
        "problems": [f"{kept} tensors of old models are still alive"] if kept else [],
    }


def _alive() -> dict[str, Any]:
    gc.collect()
    objects = gc.get_objects()
    tensors = sum(issubclass(type(each), torch.Tensor) for each in objects)
    return {"objects": len(objects), "tensors": tensors, "memory_mb": round(memory_mb(Path("/proc/self")), 1)}
