"""Images in whatever form people have them, as arrays of one size; nothing is cached."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, Protocol, TypeAlias, cast

import numpy as np
from PIL import Image

from dualprompt.data.cache import BROKEN, MOST_BYTES, WORKERS, FloatPixelsError, as_rgb
from dualprompt.data.folder import class_files, images_in, one_name, refuse_level, refuse_no_folder, refuse_splits
from dualprompt.data.formats import EXTENSIONS, open_image
from dualprompt.data.sources import Dataset, FileSource
from dualprompt.data.tags import turned
from dualprompt.errors import DualPromptError
from dualprompt.files import read_bytes, with_home
from dualprompt.progress import SILENT, Progress, Work

ImageLike: TypeAlias = str | Path | bytes | BinaryIO | Image.Image | np.ndarray


class Labelled(Protocol):
    """A dataset as PyTorch and others have them: pairs of an image and its label."""

    def __getitem__(self, index: int, /) -> tuple[Any, Any]:
        """Return a pair; an IndexError ends them."""
        ...


Data: TypeAlias = str | Path | Mapping[str, Sequence[ImageLike]] | Dataset | Labelled | Iterable[tuple[Any, Any]]

MOST_PIXELS = 64_000_000
DAMAGED = "it is no image, or damaged; replace it or leave it out"


def pixels_of(image: ImageLike, side: int, interpolation: str) -> np.ndarray:
    """Return an image as (side, side, 3) uint8: upright, RGB, squeezed to a square.

    What is larger than 64 megapixels, broken, or no image is refused with a DualPromptError that names it.
    """
    return np.array(upright(image, side).resize((side, side), Image.Resampling[interpolation.upper()]))


def upright(image: ImageLike, side: int | None = None) -> Image.Image:
    """Return an image upright and in RGB, as large as it is; a JPEG that is to be `side` pixels a side, smaller.

    What is larger than 64 megapixels, broken, or no image is refused with a DualPromptError that names it.
    """
    try:
        opened = _opened(image)
        width, height = opened.size
        if width * height > MOST_PIXELS:
            raise DualPromptError(
                f"{named(image)} has {width} × {height} pixels, more than {MOST_PIXELS:,}; shrink it first"
            )
        if side is not None and opened is not image:
            reduce_jpeg(opened, side)
        return as_rgb(turned(opened))
    except Image.DecompressionBombError as error:
        raise DualPromptError(f"{named(image)} has far more than {MOST_PIXELS:,} pixels; shrink it first") from error
    except OSError as error:
        reason = f"{error.strerror}; check the path" if error.strerror else DAMAGED
        raise DualPromptError(f"{named(image)} cannot be read: {reason}") from error
    except FloatPixelsError as error:
        raise DualPromptError(f"{named(image)} has floating-point pixels; save it with 8 or 16 bits") from error
    except BROKEN as error:
        raise DualPromptError(f"{named(image)} cannot be read: {DAMAGED}") from error


def reduce_jpeg(opened: Image.Image, side: int) -> None:
    """Let a large JPEG be decoded at a half, a quarter or an eighth of its size, still twice what is needed."""
    opened.draft(opened.mode, (2 * side, 2 * side))


def _opened(image: ImageLike) -> Image.Image:
    if isinstance(image, Image.Image):
        return image
    if isinstance(image, np.ndarray):
        return Image.fromarray(_checked(image))
    read = getattr(image, "read", None)
    if isinstance(image, str | Path):
        if str(image).startswith(("http:", "https:")) and not Path(image).exists():
            raise DualPromptError(f"{image} is an address, not a file; download the image first")
        encoded = read_bytes(with_home(image), MOST_BYTES)
    else:
        encoded = read() if read else image
    if not isinstance(encoded, bytes | bytearray | memoryview):
        raise DualPromptError(
            f"an image must be a path, bytes, an open file, a PIL image or a uint8 array, found {type(image).__name__}"
        )
    return open_image(io.BytesIO(encoded), named(image))


def _checked(array: np.ndarray) -> np.ndarray:
    grey = array.ndim == 2 or (array.ndim == 3 and array.shape[2] == 1)
    colour = array.ndim == 3 and array.shape[2] in (3, 4)
    if array.dtype != np.uint8 or not (grey or colour) or 0 in array.shape:
        raise DualPromptError(
            f"an array must be uint8 (height, width) or (height, width, 3), found {array.dtype} {array.shape}; "
            "convert it first"
        )
    return array[..., 0] if grey and array.ndim == 3 else array


def named(image: ImageLike) -> str:
    """Return what an error calls an image."""
    if isinstance(image, str | Path):
        return str(image)
    kind = {bytes: "an image given as bytes", np.ndarray: "an image given as an array"}
    return kind.get(type(image), getattr(image, "filename", "") or "an image given from memory")


def read_all(images: Sequence[ImageLike], side: int, interpolation: str) -> np.ndarray:
    """Return all images, as `read_some` does; if some cannot be read, one error names them."""
    pixels, faults = read_some(images, side, interpolation)
    if faults:
        raise DualPromptError(complaint(faults.values(), len(images)))
    return pixels


def complaint(faults: Iterable[str], images: int) -> str:
    """Return one line about images that cannot be used; the first five are named."""
    reasons = list(faults)
    more = f"; and {len(reasons) - 5} more" if len(reasons) > 5 else ""
    count = f"{len(reasons)} of {images} images cannot be used: " if images > 1 else ""
    return f"{count}{'; '.join(reasons[:5])}{more}"


def read_some(
    images: Sequence[ImageLike], side: int, interpolation: str, progress: Progress = SILENT
) -> tuple[np.ndarray, dict[int, str]]:
    """Return all images, (images, side, side, 3) uint8, and what is wrong with those that cannot be read, by row.

    Each of `images` is squeezed to `side` × `side` pixels by `interpolation`, bilinear or bicubic. `progress` shows
    how far it is.
    """

    def read(image: ImageLike) -> np.ndarray | DualPromptError:
        try:
            return pixels_of(image, side, interpolation)
        except DualPromptError as error:
            return error

    pixels = np.empty((len(images), side, side, 3), np.uint8)
    faults: dict[int, str] = {}
    with ThreadPoolExecutor(WORKERS) as pool, progress.bar(Work("reading", len(images), "img")) as bar:
        try:
            for row, found in enumerate(pool.map(read, images)):
                if isinstance(found, DualPromptError):
                    faults[row] = str(found)
                else:
                    pixels[row] = found
                bar.advance()
        except BaseException:  # whoever stops does not wait for images that were not begun
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return pixels, faults


def gather(data: Data, nested: bool = True) -> dict[str, list[ImageLike]]:
    """Return the images of each class, in sorted order.

    `data` is a folder of class folders, a mapping from classes to images, one of our datasets (its training images), or
    any dataset of (image, label) pairs; labels that are numbers are named by its `classes`, if it has some. A folder
    that seems one level too high, since its folders hold nothing but folders, is refused unless `nested`.
    """
    if isinstance(data, str | Path):
        path = with_home(data)
        refuse_no_folder(path)
        try:
            refuse_splits(path)
            found = class_files(path)
            if not nested:
                refuse_level(path)
            return {name: list(files) for name, files in sorted(found.items())}
        except OSError as error:
            raise DualPromptError(
                f"{error.filename or path} cannot be read ({error.strerror}); check its permissions"
            ) from error
    pairs = _split(data) if isinstance(data, Dataset) else data
    given: Mapping[str, Any] = data if isinstance(data, Mapping) else _of_pairs(pairs)  # pyright: ignore
    if strange := [name for name in given if not isinstance(name, str)]:
        raise DualPromptError(f"classes are called by strings, found {strange[0]!r}; give it a name")
    for name, images in given.items():
        if isinstance(images, str | bytes | Path | Image.Image | np.ndarray):
            raise DualPromptError(f"class '{name}' must have a list of images, found {type(images).__name__}")
    named_once = one_name("the classes to learn", ((name, list(images)) for name, images in given.items()))
    classes = dict(sorted(named_once.items()))
    if not classes:
        raise DualPromptError("there are no classes to learn; give at least one, with at least one image")
    if empty := [name for name, images in classes.items() if not images]:
        raise DualPromptError(f"class '{empty[0]}' has no images; give some or leave it out")
    return classes


def _split(dataset: Dataset) -> list[tuple[ImageLike, str | int]]:
    source = dataset.train.source
    images = source.paths if isinstance(source, FileSource) else source.pixels
    return [(image, dataset.classes[label]) for image, label in zip(images, dataset.train.labels, strict=True)]


def _of_pairs(pairs: Any) -> dict[str, list[ImageLike]]:
    names = getattr(pairs, "classes", None)
    classes: dict[str, list[ImageLike]] = {}
    try:
        for image, label in pairs:
            label = label if isinstance(label, str) else int(label)
            name = label if isinstance(label, str) else str(names[label] if names else label)
            classes.setdefault(name, []).append(image)
    except (TypeError, ValueError, IndexError) as error:
        raise DualPromptError(
            "give a folder of class folders, a mapping from classes to images, or a dataset of (image, label) pairs; "
            f"found {type(pairs).__name__} ({error})"
        ) from error
    return classes


def listed(images: ImageLike | Sequence[ImageLike]) -> tuple[list[ImageLike], bool]:
    """Return the images that are meant, and whether it is one alone; a folder stands for all images below it."""
    if isinstance(images, str | Path) and with_home(images).is_dir():
        return _images_below(with_home(images)), False
    several = isinstance(images, Sequence) and not isinstance(images, str | bytes | bytearray | memoryview)
    if not several and not (isinstance(images, np.ndarray) and images.ndim == 4):
        return [cast(ImageLike, images)], True  # what is no image is named when it is read
    found: list[ImageLike] = []
    for image in cast(Sequence[ImageLike], images):
        folder = isinstance(image, str | Path) and with_home(image).is_dir()
        found.extend(_images_below(with_home(str(image))) if folder else [image])
    return found, False


def _images_below(folder: Path) -> list[ImageLike]:
    found = images_in(folder)
    if not found:
        raise DualPromptError(f"{folder} holds no images; they end in {', '.join(sorted(EXTENSIONS))}")
    return list(found)
