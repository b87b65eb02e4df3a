"""Ways to damage a file, as a bad disk, a careless editor or an enemy would."""

from __future__ import annotations

import copy
import io
import json
import zipfile
from random import Random
from typing import Any

DEEP: Any = 0
for _ in range(150):
    DEEP = [DEEP]
VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2**31, 10**30, 0.5, -1.0, 1e308, "", "0.5", "x", "../x", "a\nb", "é", "x" * 300,
    [], [1], [None], [[1, 2], [3]], ["a", "a"], {}, {"a": 1}, DEEP, 8192, 10**9, float("nan"), float("inf"),
)  # fmt: skip


def damaged(content: bytes, rng: Random) -> bytes:
    """Cut, change, insert, repeat or empty some bytes."""
    at, size = rng.randrange(len(content) + 1), rng.choice((1, 2, 8, 100))
    kind = rng.randrange(6)
    if kind == 0:
        return content[:at]
    if kind == 1:
        return content[:at] + bytes(rng.randrange(256) for _ in range(size)) + content[at + size :]
    if kind == 2:
        return content[:at] + bytes(rng.randrange(256) for _ in range(size)) + content[at:]
    if kind == 3:
        return content[:at] + content[at + size :]
    if kind == 4:
        return content[:at] + content[max(0, at - size) : at] + content[at:]
    return content[:at] + bytes(min(size, len(content) - at)) + content[at + size :]


def changed(value: Any, rng: Random) -> Any:
    """Return a JSON value with one thing in it that is not what it was."""
    value = copy.deepcopy(value)
    places = _places(value)
    if not places:
        return rng.choice(VALUES)
    owner, key = rng.choice(places)
    kind = rng.randrange(4)
    if kind == 0:
        del owner[key]
    elif kind == 1 and isinstance(owner, list):
        owner.insert(key, copy.deepcopy(rng.choice((owner[key], *VALUES))))
    elif kind == 2:
        other, name = rng.choice(places)
        owner[key] = copy.deepcopy(other[name])
    else:
        owner[key] = rng.choice(VALUES)
    return value


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Return where the parts of a value are: their owner and their key in it."""
    inner = (
        list(value.items()) if isinstance(value, dict) else list(enumerate(value)) if isinstance(value, list) else []
    )
    return [place for key, part in inner for place in ((value, key), *_places(part))]


def changed_json(content: bytes, rng: Random) -> bytes:
    """Damage a JSON file as text, or what it says."""
    if rng.randrange(4) == 0:
        return damaged(content, rng)
    return json.dumps(changed(json.loads(content), rng)).encode()


def changed_lines(content: bytes, rng: Random) -> bytes:
    """Damage a file of JSON lines."""
    if rng.randrange(3) == 0:
        return damaged(content, rng)
    lines = content.splitlines(keepends=True)
    at = rng.randrange(len(lines))
    lines[at] = json.dumps(changed(json.loads(lines[at]), rng)).encode() + b"\n"
    return b"".join(lines)


def changed_tensors(content: bytes, rng: Random) -> bytes:
    """Damage a safetensors file: any of its bytes, or what its header says."""
    if rng.randrange(3) == 0:
        return damaged(content, rng)
    size = int.from_bytes(content[:8], "little")
    header = json.dumps(changed(json.loads(content[8 : 8 + size]), rng)).encode()
    return len(header).to_bytes(8, "little") + header + content[8 + size :]


def changed_archive(content: bytes, rng: Random) -> bytes:
    """Damage a zip, or one of its members before it is packed."""
    if rng.randrange(3) == 0:
        return damaged(content, rng)
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as new:
        names = old.namelist()
        victim = rng.choice(names)
        for name in names:
            inner = old.read(name)
            if name == victim:
                shape = rng.choice(("(1,)", "()", "(0,)", "(99999, 99999)", "(-1,)", "(1, 2, 3, 4, 5)", "None"))
                start = inner.find(b"'shape': ")
                end = inner.find(b"), }", start) + 1
                room = end - start - 9
                fits = start > 0 and len(shape) <= room and rng.randrange(2)
                inner = inner[: start + 9] + shape.ljust(room).encode() + inner[end:] if fits else damaged(inner, rng)
            new.writestr(name, inner)
    return out.getvalue()
