from __future__ import annotations

import errno
import hashlib
import io
import multiprocessing
import os
import struct
import tracemalloc
import warnings
from collections.abc import Callable
from multiprocessing.synchronize import Barrier
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from dualprompt.data import formats
from dualprompt.data.cache import ABANDONED, Store, decode, open_rgb
from dualprompt.data.sources import ArraySource, FileSource, Split
from dualprompt.data.tags import claim_too_much
from dualprompt.errors import DualPromptError
from dualprompt.progress import Began, Event, Progress
from sandbox import forked

BIG = Store(side=1000, keep_aspect=True)


def photo(path: Path, width: int = 40, height: int = 30, seed: int = 0) -> Path:
    """Write a smooth random picture, so that JPEG has something real to compress."""
    coarse = np.random.default_rng(seed).integers(0, 256, (4, 5, 3), dtype=np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC).save(path)
    return path


def photos(folder: Path, count: int = 6) -> tuple[Path, ...]:
    names = (f"{i}.{'jpg' if i % 2 else 'png'}" for i in range(count))
    return tuple(photo(folder / name, 40 + 7 * i, 30 + 11 * i, i) for i, name in enumerate(names))


def split(paths: tuple[Path, ...], labels: list[int] | None = None) -> Split:
    return Split(FileSource(paths), np.array(labels or [0] * len(paths), dtype=np.int64))


def rewrite(path: Path, content: bytes, keep_date: bool) -> None:
    before = path.stat()
    path.write_bytes(content)
    shift = 0 if keep_date else 1_000_000_000
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + shift))


def encoded(image: Image.Image, kind: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


@pytest.mark.parametrize("keep_aspect", [True, False])
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_gather_equals_pillow_by_hand(tmp_path: Path, keep_aspect: bool, interpolation: str):
    paths = photos(tmp_path / "in")
    decoded = decode(split(paths), Store(48, keep_aspect, interpolation), cache=tmp_path / "cache")
    indices = torch.tensor([4, 0, 5, 0, 2])
    canvas = decoded.images.gather(indices)
    for row, index in enumerate(indices.tolist()):
        image = Image.open(paths[index]).convert("RGB")
        width, height = image.size
        if keep_aspect:
            scale = min(1, 48 / min(width, height))
            size = (round(width * scale), round(height * scale))
        else:
            size = (min(width, 48), min(height, 48))
        expected = np.asarray(image.resize(size, Image.Resampling[interpolation.upper()]))
        height, width = canvas.shapes[row].tolist()
        assert (width, height) == size
        assert np.array_equal(canvas.pixels[row, :height, :width].numpy(), expected)
        assert not canvas.pixels[row, height:].any()
        assert not canvas.pixels[row, :, width:].any()


@given(st.integers(1, 500), st.integers(1, 500), st.integers(1, 300), st.booleans())
def test_store_shrinks_and_never_enlarges(width: int, height: int, side: int, keep_aspect: bool):
    new_width, new_height = Store(side, keep_aspect).size(width, height)
    assert 1 <= new_width <= width
    assert 1 <= new_height <= height
    if keep_aspect:
        assert min(new_width, new_height) == min(side, width, height)
        assert abs(new_width / width - new_height / height) <= 0.5 / min(width, height) + 1e-9
    else:
        assert (new_width, new_height) == (min(side, width), min(side, height))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied(orientation: int):
    upright = np.zeros((16, 32, 3), np.uint8)
    upright[:8, :8] = (255, 0, 0)  # red marks the top left corner
    stored = {
        1: upright,
        2: upright[:, ::-1],
        3: upright[::-1, ::-1],
        4: upright[::-1],
        5: upright.transpose(1, 0, 2),
        6: np.rot90(upright, 1),
        7: upright[::-1, ::-1].transpose(1, 0, 2),
        8: np.rot90(upright, -1),
    }[orientation]
    exif = Image.Exif()
    exif[0x0112] = orientation
    shown = open_rgb(encoded(Image.fromarray(np.ascontiguousarray(stored)), "PNG", exif=exif))
    assert np.array_equal(np.asarray(shown), upright)


def test_every_colour_mode_becomes_rgb():
    def pixel(image: Image.Image, kind: str = "PNG", **options: object) -> tuple[int, ...]:
        shown = open_rgb(encoded(image, kind, **options))
        assert shown.mode == "RGB"
        return tuple(np.asarray(shown)[0, 0].tolist())

    size = (8, 8)
    assert pixel(Image.new("L", size, 77)) == (77, 77, 77)
    assert pixel(Image.new("1", size, 1)) == (255, 255, 255)
    assert pixel(Image.new("RGBA", size, (255, 0, 0, 0))) == (255, 255, 255)
    assert pixel(Image.new("RGBA", size, (255, 0, 0, 255))) == (255, 0, 0)
    assert pixel(Image.new("LA", size, (0, 128))) == (127, 127, 127)
    assert pixel(Image.new("I;16", size, 200 * 256 + 3)) == (200, 200, 200)
    assert pixel(Image.new("I;16", size, 65535), "TIFF") == (255, 255, 255)
    assert pixel(Image.new("CMYK", size, (0, 255, 255, 0)), "TIFF") == (255, 0, 0)
    assert pixel(Image.new("CMYK", size, (0, 0, 0, 255)), "JPEG") == (0, 0, 0)
    palette = Image.new("P", size, 1)
    palette.putpalette([10, 20, 30, 40, 50, 60])
    assert pixel(palette) == (40, 50, 60)
    assert pixel(palette, transparency=1) == (255, 255, 255)
    with pytest.raises(ValueError, match="floating-point"):
        pixel(Image.new("F", size, 0.5), "TIFF")


def test_all_bad_images_are_named_and_skipped_on_request(tmp_path: Path):
    paths = photos(tmp_path / "in", 9)
    jpeg = paths[1].read_bytes()
    paths[1].write_bytes(jpeg[: len(jpeg) // 2])
    paths[2].write_bytes(b"not an image")
    paths[4].write_bytes(b"")
    paths[6].unlink()
    png = paths[8].read_bytes()
    paths[8].write_bytes(png[: len(png) * 2 // 3])
    bad = (paths[1], paths[2], paths[4], paths[6], paths[8])

    with pytest.raises(DualPromptError) as error:
        decode(split(paths), BIG, cache=tmp_path / "cache")
    message = str(error.value)
    assert "\n" not in message
    assert message.startswith("5 of 9 images cannot be read: ")
    assert "--skip-bad" in message
    assert [path for path in paths if str(path) in message] == list(bad)

    decoded = decode(split(paths), BIG, skip_bad=True, cache=tmp_path / "cache")
    assert decoded.bad == bad
    assert decoded.kept.tolist() == [0, 3, 5, 7]
    for row, index in enumerate(decoded.kept):
        expected = np.asarray(Image.open(paths[index]).convert("RGB"))
        assert np.array_equal(decoded.images.image(row), expected)


def test_ten_bad_images_are_named_and_the_rest_counted(tmp_path: Path):
    paths = tuple(tmp_path / f"{i:02}.png" for i in range(13))
    for path in paths:
        path.write_bytes(b"?")
    with pytest.raises(DualPromptError, match=r"13 of 13 .*09\.png and 3 more; ") as error:
        decode(split(paths), BIG, cache=tmp_path / "cache")
    assert "10.png" not in str(error.value)
    assert len(decode(split(paths), BIG, skip_bad=True, cache=tmp_path / "cache").images) == 0


def test_decompression_bomb_is_a_bad_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    paths = (photo(tmp_path / "small.png", 8, 8), photo(tmp_path / "bomb.png", 100, 100))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    assert decode(split(paths), BIG, skip_bad=True, cache=tmp_path / "cache").bad == (paths[1],)


def many_blocks() -> bytes:
    """A JPEG with 70,000 comments, each of which is read by itself."""
    plain = encoded(Image.new("RGB", (32, 32)), "JPEG")
    block = b"\xff\xfe" + struct.pack(">H", 12) + bytes(10)
    return plain[:2] + block * 70_000 + plain[2:]


def many_comments() -> bytes:
    """A GIF with 200,000 comments, each of which takes fifty times its bytes."""
    plain = encoded(Image.new("P", (16, 16)), "GIF")
    end = plain.index(b"\x2c", 13)
    return plain[:end] + b"\x21\xfe\x01x\0" * 200_000 + plain[end:]


@pytest.mark.parametrize("make", [many_blocks, many_comments])
@pytest.mark.parametrize("as_file", [False, True])
def test_what_takes_long_to_open_is_given_up(
    make: Callable[[], bytes], as_file: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(formats, "MOST_SECONDS", 0.02)
    source = tmp_path / "a.jpg"
    source.write_bytes(make())
    with pytest.raises(OSError, match="too long"):
        formats.open_image(source if as_file else io.BytesIO(source.read_bytes()))
    photo(source)
    with formats.open_image(source) as opened:
        monkeypatch.setattr(formats.time, "thread_time", lambda: 1e9)  # decoding may take as long as it likes
        assert opened.convert("RGB").size == (40, 30)


def overlapping(entries: int, size: int) -> bytes:
    """TIFF's table of contents: each of its entries claims the same bytes."""
    table = b"".join(struct.pack("<HHII", 3000 + n, 1, size, 8) for n in range(entries))
    return (b"II*\0" + struct.pack("<IH", 8, entries) + table + bytes(4)).ljust(size + 8, b"\0")


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", ["PNG", "WEBP", "TIFF"])
def test_a_small_picture_that_claims_its_bytes_often_takes_little(kind: str):
    claims = overlapping(1000, 100_000)
    if kind == "TIFF":
        plain = encoded(Image.new("L", (16, 16)), "TIFF")
        (start,) = struct.unpack("<I", plain[4:8])
        (count,) = struct.unpack("<H", plain[start : start + 2])
        own = plain[start + 2 : start + 2 + 12 * count]
        more = b"".join(struct.pack("<HHII", 40_000 + n, 1, 100_000, 8) for n in range(1000))
        table = struct.pack("<H", count + 1000) + own + more + bytes(4)
        content = plain[:4] + struct.pack("<I", len(plain) + 100_000) + plain[8:] + bytes(100_000) + table
    else:
        content = encoded(Image.new("RGB", (16, 16)), kind, exif=claims)
    tracemalloc.start()
    try:
        assert open_rgb(content).size == (16, 16)
        assert tracemalloc.get_traced_memory()[1] < 20 * len(content)
    finally:
        tracemalloc.stop()


def fractions(count: int, order: str = "<", begin: bytes = b"II*\0") -> bytes:
    """EXIF of a picture that lies on its side, in a second table of which a value has many fractions."""
    first = struct.pack(f"{order}HHHIHHHHIII", 2, 0x112, 3, 1, 6, 0, 0x8769, 4, 1, 38, 0)
    further = struct.pack(f"{order}HHHIII", 1, 0x9201, 5, count, 60, 0)
    head = begin + struct.pack(f"{order}I", 8) + first + further
    return head.ljust(60, b"\0") + struct.pack(f"{order}II", 1, 2) * count


def tiff_of(count: int) -> bytes:
    """A TIFF whose resolution is many fractions."""
    entries = {256: 16, 257: 16, 258: 8, 259: 1, 262: 1, 273: 8, 277: 1, 278: 16, 279: 256}
    table = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in entries.items())
    table += struct.pack("<HHII", 282, 5, count, 300) + bytes(4)
    head = b"II*\0" + struct.pack("<IH", 8, len(entries) + 1) + table
    return head.ljust(300, b"\0") + struct.pack("<II", 1, 2) * count


@pytest.mark.parametrize(("count", "refused"), [(1, False), (5000, True)])
@pytest.mark.parametrize("kind", ["PNG", "WEBP", "JPEG", "TIFF"])
def test_tags_of_more_numbers_than_a_camera_writes_are_refused(kind: str, count: int, refused: bool):
    picture = Image.new("RGB", (16, 8))
    content = tiff_of(count) if kind == "TIFF" else encoded(picture, kind, exif=b"Exif\0\0" + fractions(count))
    if refused:
        with pytest.raises(OSError, match="more numbers than a camera"):
            open_rgb(content)
    else:
        assert open_rgb(content).size == ((16, 16) if kind == "TIFF" else (8, 16))


def test_a_jpeg_of_many_blocks_of_exif_is_refused():
    plain = encoded(Image.new("RGB", (32, 32)), "JPEG")
    block = b"\xff\xe1" + struct.pack(">H", 18) + b"Exif\0\0" + bytes(10)
    with pytest.raises(OSError, match="more numbers than a camera"):  # Pillow puts them together one by one
        open_rgb(plain[:2] + block * 17 + plain[2:])


@pytest.mark.parametrize(
    ("order", "begin"),
    [("<", b"II*\0"), (">", b"MM\0*"), ("<", b"II\0*"), (">", b"MM*\0"), (">", b"MM\0+")],
)
def test_tables_are_found_in_all_ways_to_write_them(order: str, begin: bytes):
    assert claim_too_much(b"before" + fractions(2000, order, begin))
    assert not claim_too_much(b"before" + fractions(20, order, begin))
    assert not claim_too_much((b"before" + fractions(2000, order, begin))[:9000])  # what is not there is not read
    cycle = begin + struct.pack(f"{order}IHHHIII", 8, 1, 0x8769, 4, 1, 8, 0)
    assert not claim_too_much(cycle)
    many = b"".join(begin + struct.pack(f"{order}I", 800 - 8 * n) for n in range(100))  # all of the same table
    assert claim_too_much(many + struct.pack(f"{order}H", 65535) + bytes(12 * 65535))


def test_beginnings_that_lead_nowhere_are_counted():
    assert claim_too_much(b"II*\0\xff\xff\xff\xff" * 250_000)  # 32 MB of them took 5 s to walk, each time
    assert not claim_too_much(b"II*\0\xff\xff\xff\xff" * 1000)


@given(st.integers(0, 200), st.binary(max_size=24), st.integers(0, 300))
def test_any_bytes_are_looked_at(place: int, other: bytes, end: int):
    whole = b"II*\0" + fractions(30) + b"MM\0*" + fractions(30, ">", b"MM\0*") + b"II+\0" + bytes(60)
    assert claim_too_much((whole[:place] + other + whole[place + len(other) :])[: end or None]) in (True, False)


def test_disguised_formats_are_refused(tmp_path: Path):
    path = tmp_path / "picture.jpg"
    path.write_bytes(encoded(Image.new("RGB", (8, 8)), "PCX"))
    assert decode(split((path,)), BIG, skip_bad=True, cache=tmp_path / "cache").bad == (path,)


def test_second_call_reads_no_image_file(tmp_path: Path):
    paths = photos(tmp_path / "in")
    first = decode(split(paths), BIG, cache=tmp_path / "cache")
    before = [first.images.image(i).copy() for i in range(len(paths))]
    for path in paths:
        rewrite(path, b"\0" * path.stat().st_size, keep_date=True)
    second = decode(split(paths), BIG, cache=tmp_path / "cache")
    assert second.fingerprint == first.fingerprint
    assert all(np.array_equal(second.images.image(i), before[i]) for i in range(len(paths)))
    # Another store has to decode, and must not file the new content under the old one's key.
    with pytest.raises(DualPromptError, match="without a new date"):
        decode(split(paths), Store(8, True), cache=tmp_path / "cache")


def test_one_changed_file_is_seen(tmp_path: Path):
    paths = photos(tmp_path / "in")
    first = decode(split(paths), BIG, cache=tmp_path / "cache")
    old = first.images.image(2).copy()
    photo(tmp_path / "other.png", 11, 12, seed=99)
    rewrite(paths[2], (tmp_path / "other.png").read_bytes(), keep_date=False)
    second = decode(split(paths), BIG, cache=tmp_path / "cache")
    assert second.fingerprint != first.fingerprint
    assert second.images.image(2).shape == (12, 11, 3)
    assert np.array_equal(first.images.image(2), old)  # who holds the old images keeps them


def test_fingerprint_follows_content_and_labels_not_place_or_store(tmp_path: Path):
    here, there = photos(tmp_path / "here"), photos(tmp_path / "there")
    labels = [0, 0, 0, 1, 1, 1]

    def fingerprint(paths: tuple[Path, ...], labels: list[int], store: Store = BIG) -> str:
        return decode(split(paths, labels), store, cache=tmp_path / "cache").fingerprint

    reference = fingerprint(here, labels)
    assert fingerprint(there, labels) == reference
    assert fingerprint(here, labels, Store(8, False)) == reference
    assert fingerprint(here, [0, 0, 1, 1, 1, 1]) != reference
    assert fingerprint(here[::-1], labels) != reference


@pytest.mark.parametrize("damage", ["short", "long", "no pixels", "no index", "broken index", "foreign index"])
def test_damaged_cache_is_rebuilt(tmp_path: Path, damage: str):
    paths = photos(tmp_path / "in")
    first = decode(split(paths), BIG, cache=tmp_path / "cache")
    expected = [first.images.image(i).copy() for i in range(len(paths))]
    del first
    pixels = next((tmp_path / "cache").rglob("pixels.bin"))
    index = pixels.with_name("index.json")
    if damage == "short":
        pixels.write_bytes(pixels.read_bytes()[:-1])
    elif damage == "long":
        pixels.write_bytes(pixels.read_bytes() + b"\0")
    elif damage == "no pixels":
        pixels.unlink()
    elif damage == "no index":
        index.unlink()
    else:
        index.write_text('{"shapes": [[1,' if damage == "broken index" else "[]")
    second = decode(split(paths), BIG, cache=tmp_path / "cache")
    assert all(np.array_equal(second.images.image(i), expected[i]) for i in range(len(paths)))
    assert len(list((tmp_path / "cache").rglob("pixels.bin"))) == 1


def test_broken_memory_of_contents_is_made_again(tmp_path: Path):
    paths = photos(tmp_path / "in")
    first = decode(split(paths), BIG, cache=tmp_path / "cache")
    memory = next((tmp_path / "cache" / "images" / "contents").iterdir())
    memory.write_text("{")
    assert decode(split(paths), BIG, cache=tmp_path / "cache").fingerprint == first.fingerprint


def test_full_disk_is_said_and_leaves_nothing_half(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    paths = photos(tmp_path / "in")
    decode(split(paths[:2]), BIG, cache=tmp_path / "cache")  # so that contents are known and a cache exists
    before = sorted((tmp_path / "cache" / "images").iterdir())
    real_sync = os.fsync

    def full_for_pixels(handle: int) -> None:
        if Path(f"/proc/self/fd/{handle}").resolve().name == "pixels.bin":
            raise OSError(errno.ENOSPC, "No space left on device")
        real_sync(handle)

    monkeypatch.setattr(os, "fsync", full_for_pixels)
    with pytest.raises(DualPromptError, match="the disk is full"):
        decode(split(paths), BIG, cache=tmp_path / "cache")
    assert sorted((tmp_path / "cache" / "images").iterdir()) == before
    monkeypatch.undo()
    assert len(decode(split(paths), BIG, cache=tmp_path / "cache").images) == len(paths)


def test_cache_that_cannot_be_written_is_said(tmp_path: Path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DualPromptError, match="cannot be written"):
        decode(split(photos(tmp_path / "in")), BIG, cache=tmp_path / "file")


def test_abandoned_work_is_swept_and_fresh_work_is_not(tmp_path: Path):
    images = tmp_path / "cache" / "images"
    for name, age in ((".old.partial", ABANDONED + 60), (".fresh.partial", 60)):
        (images / name).mkdir(parents=True)
        past = (images / name).stat().st_mtime - age
        os.utime(images / name, (past, past))
    decode(split(photos(tmp_path / "in")), BIG, cache=tmp_path / "cache")
    assert not (images / ".old.partial").exists()
    assert (images / ".fresh.partial").exists()


class Interrupting(Progress):
    """Does something else, once, in the middle of decoding."""

    def __init__(self, act: Callable[[], object]) -> None:
        self.act: Callable[[], object] | None = act

    def receive(self, event: Event) -> None:
        if isinstance(event, Began) and event.work.kind == "decoding" and self.act:
            act, self.act = self.act, None
            act()


def test_who_comes_second_uses_what_the_first_wrote(tmp_path: Path):
    paths = photos(tmp_path / "in")
    cache = tmp_path / "cache"
    first = []
    meanwhile = Interrupting(lambda: first.append(decode(split(paths), BIG, cache=cache)))
    second = decode(split(paths), BIG, cache=cache, progress=meanwhile)
    assert meanwhile.act is None
    assert torch.equal(first[0].images.flat, second.images.flat)
    assert len(list(cache.rglob("pixels.bin"))) == 1


def test_a_file_that_changes_between_hashing_and_decoding_is_refused(tmp_path: Path):
    paths = photos(tmp_path / "in")
    meanwhile = Interrupting(lambda: paths[3].write_bytes(paths[1].read_bytes()))
    with pytest.raises(DualPromptError, match="changed while it was read"):
        decode(split(paths), BIG, cache=tmp_path / "cache", progress=meanwhile)
    assert not list((tmp_path / "cache").rglob("pixels.bin"))


def decode_together(all_there: Barrier, folder: Path, cache: Path, out: Path) -> None:
    """Decode a folder as soon as the others are about to."""
    paths = tuple(sorted(folder.iterdir()))
    all_there.wait(60)
    found = decode(split(paths), Store(64, True), cache=cache)
    out.write_text(hashlib.sha256(found.images.flat.numpy().data).hexdigest())


def test_processes_that_decode_the_same_at_once(tmp_path: Path):
    paths = photos(tmp_path / "in", 40)
    all_there = multiprocessing.get_context("forkserver").Barrier(3)
    found = [tmp_path / str(n) for n in range(3)]
    workers = [forked(decode_together, all_there, tmp_path / "in", tmp_path / "cache", path) for path in found]
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [0, 0, 0]
    results = {path.read_text() for path in found}
    alone = decode(split(tuple(sorted(paths))), Store(64, True), cache=tmp_path / "alone")
    shared = decode(split(tuple(sorted(paths))), Store(64, True), cache=tmp_path / "cache")
    assert results == {hashlib.sha256(alone.images.flat.numpy().data).hexdigest()}
    assert torch.equal(alone.images.flat, shared.images.flat)
    assert not list((tmp_path / "cache" / "images").glob(".*"))


def test_images_open_without_a_warning(tmp_path: Path):
    frozen = np.zeros((3, 8, 8, 3), np.uint8)
    frozen.setflags(write=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        decode(split(photos(tmp_path / "in")), BIG, cache=tmp_path / "cache")
        decode(Split(ArraySource(frozen), np.zeros(3, np.int64)), BIG)


def test_arrays_stay_in_memory_and_shrink_like_files(tmp_path: Path):
    pixels = np.random.default_rng(0).integers(0, 256, (5, 20, 30, 3), dtype=np.uint8)
    arrays = Split(ArraySource(pixels), np.arange(5))
    kept = decode(arrays, BIG, cache=tmp_path / "cache")
    assert kept.kept.tolist() == list(range(5))
    assert kept.images.flat.data_ptr() == pixels.ctypes.data  # not copied
    assert not (tmp_path / "cache").exists()
    shrunk = decode(arrays, Store(10, True)).images
    expected = Image.fromarray(pixels[3]).resize((15, 10), Image.Resampling.BILINEAR)
    assert np.array_equal(shrunk.image(3), np.asarray(expected))

    fingerprint = kept.fingerprint
    assert decode(Split(arrays.source, np.arange(5)[::-1].copy()), BIG).fingerprint != fingerprint
    changed = pixels.copy()
    changed[4, 19, 29, 2] ^= 1
    assert decode(Split(ArraySource(changed), np.arange(5)), BIG).fingerprint != fingerprint
    assert decode(Split(ArraySource(pixels.reshape(5, 30, 20, 3)), np.arange(5)), BIG).fingerprint != fingerprint
    assert pixels.flags.writeable
