"""The tables of contents of TIFF and EXIF, looked at before Pillow makes numbers of what they claim.

Of a fraction it makes an object, in 7 µs and some 180 bytes: a file of 32 MB can hold four millions of them where its
resolution is said, and opening it takes half a minute, in which nothing is read and nothing can stop it.
"""

from __future__ import annotations

import re
import struct

from PIL import Image

MOST_FRACTIONS, MOST_NUMBERS = 1000, 1_000_000  # of one entry; texts and bytes may be of any length
MOST_ENTRIES = 200_000  # of all tables, which count too, and so does what may be a table's beginning
MOST_BLOCKS = 16  # of EXIF in a JPEG, which has more than one where 64 KB do not suffice
JPEG = b"\xff\xd8\xff"
_BEGIN = re.compile(rb"(?:II|MM)(?:\*\0|\0\*|\+\0|\0\+)")  # and what Pillow takes for it
_FRACTIONS = (5, 10)
# Bytes of a number; what is not named is kept as bytes.
_SIZES = {3: 2, 4: 4, 5: 8, 6: 1, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8, 13: 4, 16: 8, 17: 8, 18: 8}
_FURTHER = (0x8769, 0x8825, 0xA005)  # entries that lead to another table
_ORIENTATION = 0x0112
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def claim_too_much(content: bytes) -> bool:
    """Return whether a table in a picture's file claims more numbers than any camera or program writes."""
    if content.startswith(JPEG) and content.count(b"Exif\0\0") > MOST_BLOCKS:
        return True
    left = MOST_ENTRIES
    for found in _BEGIN.finditer(content):
        left = _left(content, found.start(), left - 1)  # also one whose table lies nowhere: there may be millions
        if left < 0:
            return True
    return False


def _left(content: bytes, start: int, left: int) -> int:
    """Return how many more entries are looked at after those of a table and its further ones; below 0: too much."""
    order, big = "<" if content[start : start + 1] == b"I" else ">", content[start + 2] == 43
    place, length, entry = ("Q", 8, "HHQQ") if big else ("I", 2, "HHII")
    size = struct.calcsize(f"{order}{entry}")
    waiting, seen = [content[start + 8 : start + 16] if big else content[start + 4 : start + 8]], set[int]()
    while waiting:
        said = waiting.pop()
        at = start + struct.unpack(f"{order}{place}", said)[0] if len(said) == struct.calcsize(place) else len(content)
        if at in seen or at + length > len(content):
            continue
        seen.add(at)
        count = int.from_bytes(content[at : at + length], "little" if order == "<" else "big")
        table = content[at + length : at + length + size * min(count, left + 1)]
        left -= 1 + len(table) // size
        for tag, kind, number, value in struct.iter_unpack(f"{order}{entry}", table[: len(table) // size * size]):
            many = kind in _SIZES and number > (MOST_FRACTIONS if kind in _FRACTIONS else MOST_NUMBERS)
            if many and start + value + number * _SIZES[kind] <= len(content):  # else it is not read
                return -1
            if tag in _FURTHER:
                waiting.append(struct.pack(f"{order}{place}", value))
        if left < 0:
            return left
    return left


def turned(image: Image.Image) -> Image.Image:
    """Return an image upright, by its EXIF orientation.

    Pillow's own function also writes the EXIF block anew, for which it makes numbers of all that is in it.
    """
    image.load()
    turn = _TURNS.get(image.getexif().get(_ORIENTATION, 1))
    return image if turn is None else image.transpose(turn)
