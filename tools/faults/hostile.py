"""Damaged and hostile images, zips and multipart bodies, without end."""

from __future__ import annotations

import io
import random
import stat
import struct
import zipfile
import zlib
from collections.abc import Iterator
from typing import Any

from PIL import Image

from dualprompt.bench.load import picture


def images(rng: random.Random) -> Iterator[bytes]:
    """Damaged, hostile and misnamed images, without end."""
    good = {kind: encoded(kind) for kind in ("JPEG", "PNG", "GIF", "WEBP", "BMP", "TIFF", "PPM")}
    huge = [
        _png_header(60_000, 60_000),
        _png_header(2**31 - 1, 2**31 - 1),
        b"P6 99999 99999 255\n" + bytes(100),
        b"GIF89a" + struct.pack("<HH", 65535, 65535) + b"\x80\0\0\0\0\0\xff\xff\xff,\0\0\0\0\xff\xff\xff\xff\0\x02\0;",
        b"BM" + struct.pack("<IHHIIiiHHIIiiII", 100, 0, 0, 54, 40, 2**30, 2**30, 1, 24, 0, 0, 0, 0, 0, 0),
        _bomb(),
    ]
    others = [
        b"",
        b"\0" * 1000,
        b"<svg onload=alert(1)>",
        b"%PDF-1.7",
        b"%!PS-Adobe-3.0 EPSF-3.0\n",
        b"PK\x03\x04",
        b"{}",
    ]
    while True:
        source = bytearray(rng.choice(list(good.values())))
        kind = rng.randrange(6)
        if kind == 0:
            yield bytes(source[: rng.randrange(len(source))])
        elif kind == 1:
            for _ in range(rng.choice((1, 3, 30, 300))):
                source[rng.randrange(len(source))] = rng.randrange(256)
            yield bytes(source)
        elif kind == 2:  # a polyglot: two files in one
            yield bytes(source) + rng.choice([*good.values(), *others, archive({"a/b.png": bytes(source)})])
        elif kind == 3:
            yield rng.choice(huge)
        elif kind == 4:
            yield rng.choice(others)
        else:
            at = rng.randrange(len(source))
            yield bytes(source[:at]) + rng.randbytes(rng.choice((4, 4000))) + bytes(source[at:])


def encoded(kind: str) -> bytes:
    """A good picture in a format of Pillow's."""
    file = io.BytesIO()
    Image.open(io.BytesIO(picture(48, 40))).save(file, kind)
    return file.getvalue()


def _chunk(name: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))


def _png_header(width: int, height: int) -> bytes:
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", header) + _chunk(b"IDAT", zlib.compress(bytes(1000)))


def _bomb() -> bytes:
    """A small file that says it holds few pixels and text that grows a thousandfold."""
    text = _chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(80_000_000)))
    return b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", struct.pack(">IIBBBBB", 9, 9, 8, 2, 0, 0, 0)) + text


def archive(entries: dict[str, bytes], change: dict[str, Any] | None = None) -> bytes:
    """A zip, whose table of contents may be changed to lie."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as opened:
        for name, content in entries.items():
            info = zipfile.ZipInfo(name)
            opened.writestr(info, content, zipfile.ZIP_DEFLATED)
            for key, value in (change or {}).items():
                setattr(info, key, value)
    return file.getvalue()


def archives(rng: random.Random) -> Iterator[bytes]:
    """Hostile and damaged zips, without end. None of them may teach anything."""
    image = encoded("PNG")
    names = (
        "../x/a.png",
        "/etc/a.png",
        "a/../../b.png",
        "C:\\a\\b.png",
        "a\\..\\b.png",
        "loose.png",
        "\x01/a.png",
        "",
        "a/",
    )
    changes: list[dict[str, Any]] = [
        {"external_attr": (stat.S_IFLNK | 0o777) << 16},
        {"external_attr": stat.S_IFCHR << 16},
        {"flag_bits": 1},
        {"compress_type": zipfile.ZIP_LZMA},
        {"compress_type": 99},
        {"CRC": 7},
        {"file_size": 2**31},
        {"file_size": 3},
        {"compress_size": 2**31},
        {"header_offset": 2**31},
    ]
    bombs = [archive({"a/b.png": bytes(20_000_000)}), archive({f"a/{n}.txt": bytes(900_000) for n in range(300)})]
    nested = archive({"a/b.zip": archive({"a/b.png": image})})
    endless = archive({f"a/{'b' * 60_000}{n}.jpg": encoded("JPEG")[:300] for n in range(5)})
    while True:
        kind = rng.randrange(6)
        if kind == 0:
            yield archive({rng.choice(names) or "x": image})
        elif kind == 1:
            yield archive({"a/b.png": image}, rng.choice(changes))
        elif kind == 2:
            yield rng.choice([*bombs, nested, endless])
        elif kind == 3:
            whole = archive({"a/b.png": image, "b/c.png": image})
            yield whole[: rng.randrange(len(whole) - 22)]
        elif kind == 4:  # damaged, and its pictures are none, so that nothing can be learned
            whole = bytearray(archive({"a/b.png": b"none", "b/c.png": b"none"}))
            for _ in range(rng.choice((1, 5, 50))):
                whole[rng.randrange(len(whole))] = rng.randrange(256)
            yield bytes(whole)
        else:
            yield rng.randbytes(rng.choice((0, 10, 3000)))


def bodies(rng: random.Random) -> Iterator[bytes]:
    """Multipart bodies that are cut, changed or nonsense, without end."""
    head = b'--faults\r\nContent-Disposition: form-data; name="images"; filename="a.png"\r\n\r\n'
    whole = head + encoded("PNG")[:200] + b"\r\n--faults--\r\n"  # no changed name may make it one to learn
    while True:
        kind = rng.randrange(4)
        if kind == 0:
            yield whole[: rng.randrange(len(whole))]
        elif kind == 1:
            changed = bytearray(whole)
            for _ in range(rng.choice((1, 3, 10))):
                changed[rng.randrange(len(head) + 5)] = rng.randrange(256)
            yield bytes(changed)
        elif kind == 2:
            yield (
                b"--faults\r\n"
                + rng.choice((b"A: " + b"b" * 100_000, b"A: b\r\n" * 5000, b"\r\n" * 100, b": :\r\n\r\n"))
                + whole
            )
        else:
            yield rng.randbytes(rng.randrange(3000))
