"""Every random number of a run derives from its seed and the place where it is drawn, never from global state."""

from __future__ import annotations

import hashlib


def derive(seed: int, *place: int | str) -> int:
    """Return a 63-bit seed for a place such as `("batches", task, epoch)`.

    Equal places give equal seeds on every machine; different places give unrelated ones, so that a resumed
    run draws what the uninterrupted one would have drawn.
    """
    text = "/".join([str(seed), *(f"{type(part).__name__}:{part}" for part in place)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
