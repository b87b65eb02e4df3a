"""Every random number of a run derives from its seed and the place where it is drawn, never from global state."""

from __future__ import annotations

import hashlib


def derive(seed: int, *place: int | str) -> int:
    """Return a 63-bit seed for a place such as `("batches", task, epoch)`.

    Equal places give equal seeds on every machine; different places give unrelated ones, so that a resumed
    run draws what the uninterrupted one would have drawn.
    """
    # A name may hold the separator; doubled, it cannot be taken for one.
    parts = (f"{type(part).__name__}:{str(part).replace('/', '//')}" for part in place)
    text = "/".join([str(seed), *parts])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
