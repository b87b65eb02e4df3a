"""Which files are images, by name and by content, and how one is opened."""

from __future__ import annotations

import functools
import io
import math
import os
import time
from importlib import import_module
from pathlib import Path, PurePath
from typing import BinaryIO

from PIL import Image

from dualprompt.data.tags import claim_too_much
from dualprompt.errors import DualPromptError

# Told by content, not by name. Pillow knows more, but some of them (EPS) start other programs.
FORMATS = ("JPEG", "PNG", "BMP", "WEBP", "GIF", "TIFF", "PPM", "AVIF")
HEIF_NAMES = frozenset((".heic", ".heif", ".hif"))
EXTENSIONS = HEIF_NAMES | {".jpg", ".jpeg", ".png", ".bmp", ".webp", ".gif", ".tif", ".tiff", ".ppm", ".avif"}

_HEIC_BRANDS = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"hevm", b"hevs")
_ANY_BRANDS = (b"mif1", b"msf1")  # of a container that may hold HEVC or AV1; its other brands tell
MOST_SECONDS = 2.0  # of this thread, to open a picture; that takes milliseconds
_HEADER = 64  # bytes; the brands of a file lie at its beginning
_ARCHIVE = "an archive; unpack it"
_SORTS = {
    "a video; save frames of it as images": ".mp4 .mov .avi .mkv .webm .m4v .mpg .mpeg .wmv .3gp .mts",
    "a camera's raw file; export it as JPEG": ".cr2 .cr3 .nef .arw .dng .raf .orf .rw2 .raw .pef .srw",
    "a drawing or layered file; export it as PNG": ".svg .psd .xcf .ai .eps .pdf",
    _ARCHIVE: ".zip .tar .gz .7z .rar .tgz",
}
_SORT_OF = {ending: sort for sort, endings in _SORTS.items() for ending in endings.split()}
_OF_SYSTEM = {"thumbs.db", "desktop.ini", "icon\r"}
_FOLDERS_OF_SYSTEM = {  # what macOS, network drives and Windows leave; thumbnails of @eaDir are images by name
    *("__macosx", "@eadir", "#recycle", "$recycle.bin", "system volume information", "lost+found"),
}


class _Source(io.RawIOBase):
    """A picture's bytes, of which little is read while it is opened.

    What lies before the pixels is read without a bound by Pillow: a JPEG of 4 MB with 200,000 blocks of EXIF took 20 s,
    and one of 32 MB the square of that; a GIF's comments took fifty times their size. No header of a camera or a
    program is so.
    """

    def __init__(self, source: BinaryIO) -> None:
        self._source = source
        self.until = time.thread_time() + MOST_SECONDS

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        """Read on, unless opening takes too long."""
        if time.thread_time() > self.until:
            raise OSError("it takes too long to open")
        read = self._source.read(len(buffer))
        buffer[: len(read)] = read
        return len(read)

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        """Go to a place."""
        return self._source.seek(offset, whence)

    def readable(self) -> bool:
        """Return that it can be read."""
        return True

    def seekable(self) -> bool:
        """Return that it knows places."""
        return True

    def close(self) -> None:
        """Close what is read."""
        self._source.close()
        super().close()


def open_image(source: io.BytesIO | Path, name: str = "the image") -> Image.Image:
    """Open an image of a format that is read, without decoding it; errors call it by its name.

    HEIC is read by an extra: without it, a DualPromptError says which. What is no image, or takes seconds to open,
    raises one of `cache.BROKEN`.
    """
    if not isinstance(source, Path) and claim_too_much(source.getvalue()):
        raise OSError("its tags claim more numbers than a camera writes")
    raw = _Source(source.open("rb") if isinstance(source, Path) else source)
    file = io.BufferedReader(raw)
    heic = _is_heic(file.read(_HEADER))
    file.seek(0)
    if heic and not reads_heic():
        raise DualPromptError(f"{name} is a HEIC image; install dualprompt[heif] to read it, or convert it to JPEG")
    opened = Image.open(file, formats=("HEIF",) if heic else FORMATS)
    raw.until = math.inf  # how long decoding may take is for others to say
    return opened


def _is_heic(head: bytes) -> bool:
    if head[4:8] != b"ftyp":
        return False
    brand = head[8:12]
    others = head[16 : int.from_bytes(head[:4], "big")]
    return brand in _HEIC_BRANDS or (brand in _ANY_BRANDS and any(each in others for each in _HEIC_BRANDS))


@functools.cache
def reads_heic() -> bool:
    """Return whether HEIC can be read here, and see to it that Pillow does."""
    try:
        import_module("pillow_heif").register_heif_opener()
    except ImportError:
        return False
    return True


def why_no_image(path: Path) -> str | None:
    """Return why what lies at a path is not taken for an image, by its name and kind alone; None: it is."""
    if path.is_dir():
        if of_system(path.name):
            return "a folder of the operating system"
        return "a hidden folder" if path.name.startswith(".") else "a link to a folder, which is not followed"
    if path.is_symlink() and not path.exists():
        return "a link that leads nowhere"
    return why_not_named(path) if path.is_file() else "no file but a pipe, a device or the like"


def why_not_named(path: PurePath) -> str | None:
    """Return why a file is not taken for an image, by its name alone; None: it is."""
    name, ending = path.name, path.suffix.lower()
    if name.lower() in _OF_SYSTEM or name == ".DS_Store" or any(map(of_system, path.parts[:-1])):
        return "a file of the operating system"
    if name.startswith("."):
        return "a hidden file"
    if ending in EXTENSIONS:
        return None
    return _SORT_OF.get(ending, f"not named like an image ('{ending}')" if ending else "not named like an image")


def is_archive(path: PurePath) -> bool:
    """Return whether a file is named like an archive."""
    return _SORT_OF.get(path.suffix.lower()) == _ARCHIVE


def of_system(name: str) -> bool:
    """Return whether folders of this name are the operating system's, or a drive's."""
    return name.lower() in _FOLDERS_OF_SYSTEM


def below(folder: Path) -> list[Path]:
    """Return all files below a folder, sorted, and the folders that are not entered: hidden ones, the system's, links.

    The folder itself is entered, whatever it is called.
    """
    found: list[Path] = []
    for place, folders, names in os.walk(folder, onerror=_raise):
        closed = [name for name in folders if name.startswith(".") or of_system(name) or Path(place, name).is_symlink()]
        folders[:] = [name for name in folders if name not in closed]
        found.extend(Path(place, name) for name in (*names, *closed))
    return sorted(found)


def _raise(error: OSError) -> None:
    raise error
