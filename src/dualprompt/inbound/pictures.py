"""Checks pictures and archives that strangers send, before anything else looks at them."""

from __future__ import annotations

import errno
import io
import stat
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import BinaryIO, TypeGuard

from PIL import Image
from PIL.JpegImagePlugin import JpegImageFile
from PIL.TiffImagePlugin import ROWSPERSTRIP, TiffImageFile

from dualprompt.data.folder import named, too_high
from dualprompt.data.formats import open_image, why_not_named
from dualprompt.errors import DualPromptError
from dualprompt.inbound.limits import MEGABYTE, Limits, Refusal

DIRECTORY_BYTES = 16 * MEGABYTE
TILEWIDTH, TILELENGTH = 322, 323  # of TIFF
ALL_ROWS = 2**32 - 1  # lie in one strip
PART_CHARACTERS, PATH_CHARACTERS = 255, 1024  # more than file systems and people need
END_OF_DIRECTORY = b"PK\x05\x06"
ZIP64_RECORD, ZIP64_LOCATOR = b"PK\x06\x06", b"PK\x06\x07"
ZIP64_BYTES = 56 + 20  # of both
# What zipfile raises on hostile archives; NotImplementedError is its word for a version of the format it does not know.
DAMAGE = (zipfile.BadZipFile, zlib.error, struct.error, EOFError, ValueError, OverflowError, NotImplementedError)


@dataclass(frozen=True)
class Picture:
    """A picture that waits to be learned: its class, the sender's name for it, and our file."""

    label: str
    name: str
    path: Path


def open_picture(source: bytes | io.BytesIO, name: str, limits: Limits) -> Image.Image:
    """Return the opened, not yet decoded picture; refuse what is none and what would be too large decoded."""
    try:
        picture = open_image(io.BytesIO(source) if isinstance(source, bytes) else source, f"'{short(name)}'")
        width, height = extent(picture)
    except DualPromptError as error:
        raise Refusal(422, str(error)) from None
    except Image.DecompressionBombError:
        raise Refusal(413, f"the image '{short(name)}' has more than {limits.image_pixels} pixels") from None
    except Exception:  # noqa: BLE001 (decoders raise all sorts of things on hostile bytes)
        known = "JPEG, PNG, WebP, AVIF, HEIC, GIF, BMP, TIFF or PPM"
        raise Refusal(422, f"'{short(name)}' is not an image that can be read ({known})") from None
    most = limits.image_pixels if is_jpeg(picture) else min(limits.image_pixels, limits.decoded_pixels)
    if width * height > most:
        picture.close()
        only = "" if most == limits.image_pixels else " of formats other than JPEG, which is decoded at a smaller size"
        text = f"the image '{short(name)}' has {width} x {height} pixels; at most {most} are taken{only}"
        raise Refusal(413, text)
    return picture


def extent(picture: Image.Image) -> tuple[int, int]:
    """Return the width and height that a picture's decoder holds: a TIFF may be cut into pieces larger than itself."""
    width, height = picture.size
    if isinstance(picture, TiffImageFile):
        pieces = {tag: int(picture.tag_v2.get(tag, 0)) for tag in (TILEWIDTH, TILELENGTH, ROWSPERSTRIP)}
        rows = 0 if pieces[ROWSPERSTRIP] == ALL_ROWS else pieces[ROWSPERSTRIP]
        width, height = max(width, pieces[TILEWIDTH]), max(height, pieces[TILELENGTH], rows)
    return width, height


def is_jpeg(picture: Image.Image) -> TypeGuard[JpegImageFile]:
    """Return whether a picture is a JPEG, or one of several in a file, as some cameras write them."""
    return isinstance(picture, JpegImageFile)


def check_label(label: str, limits: Limits) -> str:
    """Return a class's or task's name, or refuse it."""
    label = label.strip()
    if not label or len(label) > limits.name_characters or not label.isprintable() or label in (".", ".."):
        at_most = f"1 to {limits.name_characters} printable characters"
        raise Refusal(422, f"'{short(label)}' cannot be the name of a class or task; give {at_most}")
    return label


def split_names(names: Iterable[str]) -> dict[str, str]:
    """Return which class each file named `class/picture.jpg` shows; pictures may lie deeper in their class.

    When all lie in one folder that holds only folders, as in the archive of a folder, that one is left out.
    """
    return {name: path.parts[0] for name, path in _inside(names).items()}


def _inside(names: Iterable[str]) -> dict[str, PurePosixPath]:
    """Return the path of each file from the folder that holds the classes."""
    paths = {name: _checked(name) for name in names}
    if len({path.parts[0] for path in paths.values()}) == 1 and all(len(path.parts) > 2 for path in paths.values()):
        paths = {name: PurePosixPath(*path.parts[1:]) for name, path in paths.items()}
    if loose := next((name for name, path in paths.items() if len(path.parts) < 2), None):
        raise Refusal(422, f"'{short(loose)}' lies in no class folder; name files class/picture.jpg")
    return paths


def level(names: Iterable[str]) -> str | None:
    """Return why files seem to be sent from one level too high, as months of classes are; None: they do not."""
    nested = too_high(_inside(names).values())
    if not nested:
        return None
    first, own = next(iter(nested.items()))
    return (
        f"the upload seems one level too high: it holds folders of folders ('{short(first)}' holds "
        f"{named(map(short, own))}); send one of them at a time, or say with nested=true that "
        f"{named(map(short, nested))} {'are the classes' if len(nested) > 1 else 'is the class'}"
    )


def why_not_taken(name: str) -> str | None:
    """Return why a file of an archive is not taken for a picture, by its name; None: it is."""
    path = PurePosixPath(name)
    hidden = any(part.startswith(".") and part not in (".", "..") for part in path.parts[:-1])
    return "in a hidden folder" if hidden else why_not_named(path)


def unpack(archive: Path, folder: Path, limits: Limits) -> tuple[list[Picture], list[tuple[str, str]]]:
    """Write the pictures of a zip of class folders into `folder`, under names of ours; refuse a hostile one.

    Return them, and the files that are no pictures, archives in the archive too, with the reason.
    """
    try:
        with archive.open("rb") as file:
            _check_directory(file, limits)
            with zipfile.ZipFile(file) as opened:
                pictures = list(_unpacked(opened, archive.stat().st_size, folder, limits))
                files = [entry.filename for entry in opened.infolist() if not entry.is_dir()]
                return pictures, [(name, why) for name in files if (why := why_not_taken(name))]
    except (*DAMAGE, OSError) as error:
        if isinstance(error, OSError) and error.errno != errno.EINVAL:  # EINVAL: a place before the archive's beginning
            raise
        raise Refusal(422, f"the archive is damaged or no zip ({error})") from None


def _unpacked(opened: zipfile.ZipFile, size: int, folder: Path, limits: Limits) -> Iterator[Picture]:
    entries = opened.infolist()
    if len(entries) > limits.archive_entries:  # it said fewer
        raise Refusal(413, f"the archive has {len(entries)} entries; at most {limits.archive_entries} are taken")
    for entry in entries:
        _check_entry(entry, limits)
    if sum(entry.compress_size for entry in entries) > size:  # by which each one's growth is measured
        raise Refusal(422, "the archive is damaged or hostile (its entries claim more bytes than it has)")
    if sum(entry.file_size for entry in entries) > limits.archive_bytes:
        raise Refusal(413, f"the archive holds more than {limits.archive_bytes} bytes")
    pictures = [entry for entry in entries if not entry.is_dir() and not why_not_taken(entry.filename)]
    if len(pictures) > limits.task_images:
        raise Refusal(413, f"the archive holds {len(pictures)} images; at most {limits.task_images} are taken")
    labels = split_names(entry.filename for entry in pictures)
    folder.mkdir(parents=True, exist_ok=True)
    for number, entry in enumerate(pictures):
        path = folder / f"{number:06}{PurePosixPath(entry.filename).suffix.lower()}"
        with opened.open(entry) as source, path.open("wb") as target:
            _copy(source.read, target, entry)
        yield Picture(labels[entry.filename], entry.filename, path)


def _check_directory(file: BinaryIO, limits: Limits) -> None:
    """Refuse an archive whose table of contents alone would fill the memory, before `zipfile` reads it."""
    size = file.seek(0, io.SEEK_END)
    file.seek(max(0, size - 65_557 - ZIP64_BYTES))
    tail = file.read()
    at = tail.rfind(END_OF_DIRECTORY)
    if at < 0 or len(tail) < at + 22:
        raise Refusal(422, "the archive is damaged or no zip (it has no table of contents)")
    entries, directory = struct.unpack("<HI", tail[at + 10 : at + 16])
    if tail[max(0, at - 20) : at].startswith(ZIP64_LOCATOR):
        record = tail[max(0, at - ZIP64_BYTES) : at - 20]
        if not record.startswith(ZIP64_RECORD):
            raise Refusal(422, "the archive is damaged or a kind of ZIP64 that is not taken; send an ordinary zip")
        entries, directory = struct.unpack("<QQ", record[32:48])
    if entries > limits.archive_entries:
        raise Refusal(413, f"the archive has more than {limits.archive_entries} entries")
    if directory > DIRECTORY_BYTES:
        raise Refusal(413, f"the archive's table of contents has more than {DIRECTORY_BYTES} bytes")
    file.seek(0)


def _check_entry(entry: zipfile.ZipInfo, limits: Limits) -> None:
    name = short(entry.filename)
    _checked(entry.filename.rstrip("/") or "/")
    kind = stat.S_IFMT(entry.external_attr >> 16)
    if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
        raise Refusal(422, f"the archive's entry '{name}' is a link or device; only files and folders are taken")
    if entry.flag_bits & 1:
        raise Refusal(422, f"the archive's entry '{name}' is encrypted; send it without a password")
    if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise Refusal(422, f"the archive's entry '{name}' is compressed in a way other than deflate")
    if not why_not_taken(entry.filename) and entry.file_size > limits.image_bytes:
        raise Refusal(413, f"the image '{name}' has more than {limits.image_bytes} bytes")
    if entry.file_size > limits.archive_ratio * entry.compress_size:
        raise Refusal(413, f"the archive's entry '{name}' grows more than {limits.archive_ratio:.0f}-fold")


def _copy(read: Callable[[int], bytes], target: BinaryIO, entry: zipfile.ZipInfo) -> None:
    """Copy an entry, but no more than its size in the table of contents, which may lie."""
    left = entry.file_size
    while chunk := read(min(left + 1, MEGABYTE)):
        left -= len(chunk)
        if left < 0:
            raise Refusal(413, f"the archive's entry '{short(entry.filename)}' is larger than it says")
        target.write(chunk)


def _checked(name: str) -> PurePosixPath:
    path = PurePosixPath(name)
    bad = path.is_absolute() or ".." in path.parts or "\\" in name or "\0" in name or name[1:2] == ":"
    if bad or not path.parts:
        raise Refusal(422, f"'{short(name)}' is not a relative path inside the upload")
    if len(name) > PATH_CHARACTERS or max(map(len, path.parts)) > PART_CHARACTERS:
        most = f"at most {PART_CHARACTERS} characters for a file or folder, {PATH_CHARACTERS} for a path"
        raise Refusal(422, f"'{short(name)}' is too long a name; {most} are taken")
    return path


def short(name: str) -> str:
    """Return a sender's name for something as an answer or a record may show it."""
    shown = "".join(letter if letter.isprintable() else "?" for letter in name)
    return shown if len(shown) <= 80 else f"{shown[:77]}..."
