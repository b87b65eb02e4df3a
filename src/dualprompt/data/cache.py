"""Images decoded once: files into one flat file of the cache, keyed by content; arrays stay in memory."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import shutil
import struct
import time
import uuid
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import numpy as np
import torch
from PIL import Image
from pydantic import Field

from dualprompt.config import Count, Record
from dualprompt.data.formats import open_image
from dualprompt.data.images import Images
from dualprompt.data.sources import ArraySource, FileSource, PictureSource, Split
from dualprompt.data.tags import turned
from dualprompt.errors import DualPromptError, one_line
from dualprompt.files import (
    MOST_JSON,
    cache_root,
    digest,
    disk_errors,
    parse_json,
    read_bytes,
    sha256,
    write_json,
)
from dualprompt.progress import SILENT, Progress, Work

FORMAT = 2  # part of the cache's key: raise it when decoding changes
WORKERS = min(4, os.cpu_count() or 1)  # threads: Pillow and hashlib release the interpreter's lock
CHUNK = 64  # images in flight, so that a slow disk does not fill the memory
ABANDONED = 24 * 3600  # seconds after which the unfinished work of a killed process is swept away
MOST_BYTES = 2**30  # of an image's file
UNREADABLE = "unreadable"  # stands for the content of a file that cannot be opened

# What Pillow raises on broken files; it promises no common class.
BROKEN = (
    OSError,
    SyntaxError,
    ValueError,
    TypeError,
    LookupError,
    ArithmeticError,
    EOFError,
    struct.error,
    zlib.error,
    Image.DecompressionBombError,
)

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class Store:
    """How large images are kept. They are shrunk with antialiasing, never enlarged.

    With `keep_aspect` the short side becomes at most `side`; without, each side does by itself.
    """

    side: int
    keep_aspect: bool
    interpolation: str = "bilinear"

    def __post_init__(self) -> None:
        if self.side < 1:
            raise ValueError(f"side must be positive, found {self.side}")
        if self.interpolation not in ("bilinear", "bicubic"):
            raise ValueError(f"interpolation must be bilinear or bicubic, found {self.interpolation!r}")

    def size(self, width: int, height: int) -> tuple[int, int]:
        """Return the width and height at which an image of the given size is kept."""
        if not self.keep_aspect:
            return min(width, self.side), min(height, self.side)
        scale = min(1.0, self.side / min(width, height))
        return round(width * scale), round(height * scale)

    def shrink(self, image: Image.Image) -> Image.Image:
        """Return `image` at the size it is kept, itself if it is small enough."""
        size = self.size(*image.size)
        if size == image.size:
            return image
        return image.resize(size, Image.Resampling[self.interpolation.upper()])


class _Index(Record):
    """What `index.json` holds: height and width of each image, and which of the files were bad."""

    shapes: list[Annotated[list[Annotated[int, Field(ge=1, lt=2**20)]], Field(min_length=2, max_length=2)]]
    bad: list[Count]


@dataclass(frozen=True)
class Decoded:
    """The images of a split that could be read."""

    images: Images
    kept: np.ndarray  # (images,) int64: which images of the split these are, ascending
    bad: tuple[Path, ...]  # the files left out
    fingerprint: str  # of the split's content and labels, whatever the store


def decode(
    split: Split,
    store: Store,
    *,
    skip_bad: bool = False,
    progress: Progress = SILENT,
    cache: Path | None = None,
) -> Decoded:
    """Return the decoded images of `split`: arrays from memory, files through `cache` (default: cache_root).

    Files are decoded only if no earlier call decoded the same contents for the same store. Those that cannot
    be read are all found, then refused, or left out with `skip_bad`.
    """
    if isinstance(split.source, ArraySource):
        decoded = _decode_array(split.source, split.labels, store)
    elif isinstance(split.source, PictureSource):
        decoded = _decode_pictures(split.source, split.labels, store)
    else:
        folder = (cache or cache_root()) / "images"
        decoded = _decode_files(split.source, split.labels, store, progress, folder)
    if decoded.bad and not skip_bad:
        raise bad_images(decoded.bad, len(split))
    return decoded


def bad_images(bad: Sequence[Path], total: int) -> DualPromptError:
    """Return the error that names images which cannot be read."""
    named = ", ".join(str(path) for path in bad[:10])
    more = f" and {len(bad) - 10} more" if len(bad) > 10 else ""
    return DualPromptError(
        f"{len(bad)} of {total} images cannot be read: {named}{more}; "
        "mend or remove them, or leave them out with --skip-bad"
    )


class FloatPixelsError(ValueError):
    """Nothing says which number is white."""


def open_rgb(encoded: bytes, name: str = "the image") -> Image.Image:
    """Decode an image as people see it: upright by its EXIF orientation, 8-bit RGB, the first of many frames.

    Transparent pixels lie on white. 16-bit greys keep their high byte. CMYK is converted without a colour
    profile. Floating-point images are refused with a ValueError, for nothing says which number is white.
    """
    with open_image(io.BytesIO(encoded), name) as opened:
        return as_rgb(turned(opened))


def as_rgb(image: Image.Image) -> Image.Image:
    """Return an image of any kind as 8-bit RGB, as `open_rgb` says."""
    if image.mode == "F":
        raise FloatPixelsError("floating-point pixels")
    if image.mode.startswith("I"):
        image = Image.fromarray((np.asarray(image).astype(np.int64) >> 8).clip(0, 255).astype(np.uint8))
    elif image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert("RGB")


def _decode_array(source: ArraySource, labels: np.ndarray, store: Store) -> Decoded:
    pixels = np.require(source.pixels, np.uint8, ["C", "W"])
    content = hashlib.sha256(pixels.reshape(-1).data)
    count, height, width, _ = pixels.shape
    if count and store.size(width, height) != (width, height):
        shrunk = _in_threads(lambda image: np.asarray(store.shrink(Image.fromarray(image))), list(pixels))
        pixels = np.stack(list(shrunk))
    fingerprint = digest({"shape": source.pixels.shape, "pixels": content.hexdigest(), "labels": labels.tolist()})
    return Decoded(Images.from_array(pixels), np.arange(count), (), fingerprint)


def _decode_pictures(source: PictureSource, labels: np.ndarray, store: Store) -> Decoded:
    contents = [hashlib.sha256(f"{each.shape}".encode() + each.tobytes()).hexdigest() for each in source.pixels]
    shrunk = _in_threads(lambda image: np.array(store.shrink(Image.fromarray(image))), source.pixels)
    images = Images.concat([Images.from_array(each[None]) for each in shrunk])
    return Decoded(images, np.arange(len(contents)), (), digest({"contents": contents, "labels": labels.tolist()}))


def _decode_files(source: FileSource, labels: np.ndarray, store: Store, progress: Progress, folder: Path) -> Decoded:
    contents = _contents(source.paths, folder / "contents", progress)
    entry = folder / digest({"format": FORMAT, "contents": contents, "store": asdict(store)})
    found = _open(entry, len(contents))
    if found is None:
        _write(entry, source.paths, contents, store, progress)
        found = _open(entry, len(contents))
        if found is None:
            raise DualPromptError(f"{entry} disappeared or changed while it was written; run again")
    images, bad = found
    return Decoded(
        images=images,
        kept=np.setdiff1d(np.arange(len(contents)), bad),
        bad=tuple(source.paths[index] for index in bad),
        fingerprint=digest({"contents": contents, "labels": labels.tolist()}),
    )


def _contents(paths: Sequence[Path], folder: Path, progress: Progress) -> list[str]:
    """Return the SHA-256 of each file, remembered below `folder` for as long as its size and date stay."""
    if not paths:
        return []
    names = [one_line(str(path.absolute())) for path in paths]
    parents = {str(path.absolute().parent) for path in paths}
    memory = folder / f"{digest(os.path.commonpath(parents))}.json"
    known = {name: noted for name, noted in _read_mapping(memory).items() if _is_note(noted)}
    marks = [_mark(path) for path in paths]
    fresh = [i for i, name in enumerate(names) if not marks[i] or known.get(name, [])[:2] != marks[i]]
    if fresh:
        with progress.bar(Work("reading", len(fresh), "images")) as bar:
            for i, content in zip(fresh, _in_threads(lambda i: _content(paths[i]), fresh), strict=True):
                known[names[i]] = [*marks[i], content]
                bar.advance()
        write_json(memory, {name: entry for name, entry in known.items() if entry[-1] != UNREADABLE})
    return [known[name][-1] for name in names]


def _is_note(value: Any) -> bool:
    """Return whether a value is what is noted of a file: size, date and content."""
    kinds = [type(part) for part in value] if isinstance(value, list) else []
    return kinds == [int, int, str]


def _mark(path: Path) -> list[int]:
    try:
        status = path.stat()
    except OSError:
        return []
    return [status.st_size, status.st_mtime_ns]


def _content(path: Path) -> str:
    try:
        return sha256(path) if path.stat().st_size <= MOST_BYTES else UNREADABLE
    except OSError:
        return UNREADABLE


def _read_mapping(path: Path) -> dict[str, Any]:
    try:
        value = parse_json(read_bytes(path, MOST_JSON))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _open(entry: Path, count: int) -> tuple[Images, list[int]] | None:
    """Return the images in `entry` and which of `count` were bad; None if it is absent or not whole."""
    index, pixels = _read_mapping(entry / "index.json"), entry / "pixels.bin"
    try:
        found = _Index.model_validate(index)
        shapes = torch.tensor(found.shapes, dtype=torch.int64).reshape(-1, 2)
        bad, size = found.bad, pixels.stat().st_size
        if len(shapes) + len(bad) != count or sum(height * width * 3 for height, width in found.shapes) != size:
            return None
        if bad != sorted(set(bad)) or any(position >= count for position in bad) or not pixels.is_file():
            return None
        # Copy-on-write, because torch warns of read-only memory; nothing writes, so nothing is copied.
        flat = np.memmap(pixels, np.uint8, mode="c") if size else np.zeros(0, np.uint8)
    except (OSError, ValueError):
        return None
    return Images(torch.from_numpy(flat), shapes), bad


def _write(entry: Path, paths: Sequence[Path], contents: Sequence[str], store: Store, progress: Progress) -> None:
    """Decode into `entry`, which appears whole or not at all, also when two processes write it at once."""

    def read(position: int) -> np.ndarray | None:
        try:
            encoded = read_bytes(paths[position], MOST_BYTES)
            found = hashlib.sha256(encoded).hexdigest()
        except OSError:
            encoded, found = b"", UNREADABLE
        if found != contents[position]:
            raise DualPromptError(
                f"{paths[position]} changed while it was read, or without a new date; touch it and run again"
            )
        try:
            return np.asarray(store.shrink(open_rgb(encoded, str(paths[position]))))
        except BROKEN:
            return None

    partial = entry.with_name(f".{entry.name}.{uuid.uuid4().hex}.partial")
    shapes: list[tuple[int, ...]] = []
    bad: list[int] = []
    try:
        with (
            disk_errors(entry),
            progress.bar(Work("decoding", len(paths), "images")) as bar,
        ):
            partial.mkdir(parents=True)
            _sweep(entry.parent)
            with (partial / "pixels.bin").open("wb") as file:
                for position, pixels in enumerate(_in_threads(read, range(len(paths)))):
                    if pixels is None:
                        bad.append(position)
                    else:
                        shapes.append(pixels.shape[:2])
                        file.write(pixels.data)
                    bar.advance()
                file.flush()
                os.fsync(file.fileno())
            write_json(partial / "index.json", {"shapes": shapes, "bad": bad})
            _install(partial, entry, len(paths))
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _install(partial: Path, entry: Path, count: int) -> None:
    for _ in range(2):
        try:
            partial.rename(entry)
        except OSError:
            if not entry.exists():
                raise
            if _open(entry, count) is not None:
                return  # another process was quicker, and the key says that its pixels are these
            shutil.rmtree(entry, ignore_errors=True)  # what is there is not whole: make room
        else:
            return


def _sweep(folder: Path) -> None:
    for partial in folder.glob(".*.partial"):
        with contextlib.suppress(FileNotFoundError):  # another process sweeps too
            if time.time() - partial.stat().st_mtime > ABANDONED:
                shutil.rmtree(partial, ignore_errors=True)


def _in_threads(work: Callable[[T], R], items: Sequence[T]) -> Iterator[R]:
    """Yield `work(item)` for each item, in order."""
    with ThreadPoolExecutor(WORKERS) as pool:
        for start in range(0, len(items), CHUNK):
            yield from pool.map(work, items[start : start + CHUNK])
