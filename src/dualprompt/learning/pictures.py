"""Images in whatever form people have them, as arrays of one size; nothing is cached."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeAlias

import numpy as np
from PIL import Image, ImageOps

from dualprompt.data.cache import BROKEN, FORMATS, WORKERS, as_rgb
from dualprompt.data.folder import class_files, images_in
from dualprompt.errors import DualPromptError
from dualprompt.progress import SILENT, Progress

ImageLike: TypeAlias = str | Path | bytes | Image.Image | np.ndarray
Data: TypeAlias = str | Path | Mapping[str, Sequence[ImageLike]]

MOST_PIXELS = 64_000_000


def pixels_of(image: ImageLike, side: int, interpolation: str) -> np.ndarray:
    """Return an image as (side, side, 3) uint8: upright, RGB, squeezed to a square.

    What is larger than 64 megapixels, broken, or no image is refused with a DualPromptError that names it.
    """
    try:
        opened = _opened(image)
        width, height = opened.size
        if width * height > MOST_PIXELS:
            raise DualPromptError(
                f"{named(image)} has {width} × {height} pixels, more than {MOST_PIXELS:,}; shrink it first"
            )
        if opened is not image:
            # A large JPEG is decoded at a half, a quarter or an eighth of its size, still twice what is needed.
            opened.draft(opened.mode, (2 * side, 2 * side))
        upright = as_rgb(ImageOps.exif_transpose(opened))
        return np.array(upright.resize((side, side), Image.Resampling[interpolation.upper()]))
    except OSError as error:
        reason = error.strerror or "it is no image, or damaged"
        raise DualPromptError(f"{named(image)} cannot be read: {reason}") from error
    except BROKEN as error:
        raise DualPromptError(f"{named(image)} cannot be read: it is no image, or damaged") from error


def _opened(image: ImageLike) -> Image.Image:
    if isinstance(image, Image.Image):
        return image
    if isinstance(image, np.ndarray):
        return Image.fromarray(_checked(image))
    encoded = image if isinstance(image, bytes) else Path(image).expanduser().read_bytes()
    return Image.open(io.BytesIO(encoded), formats=FORMATS)


def _checked(array: np.ndarray) -> np.ndarray:
    grey = array.ndim == 2 or (array.ndim == 3 and array.shape[2] == 1)
    colour = array.ndim == 3 and array.shape[2] in (3, 4)
    if array.dtype != np.uint8 or not (grey or colour) or 0 in array.shape:
        raise DualPromptError(
            f"an array must be uint8 (height, width) or (height, width, 3), found {array.dtype} {array.shape}"
        )
    return array[..., 0] if grey and array.ndim == 3 else array


def named(image: ImageLike) -> str:
    """Return what an error calls an image."""
    if isinstance(image, str | Path):
        return str(image)
    kind = {bytes: "an image given as bytes", np.ndarray: "an image given as an array"}
    return kind.get(type(image), getattr(image, "filename", "") or "an image given from memory")


def read_all(images: Sequence[ImageLike], side: int, interpolation: str, progress: Progress = SILENT) -> np.ndarray:
    """Return all images, (images, side, side, 3) uint8; if some cannot be read, one error names them all."""

    def read(image: ImageLike) -> np.ndarray | DualPromptError:
        try:
            return pixels_of(image, side, interpolation)
        except DualPromptError as error:
            return error

    pixels = np.empty((len(images), side, side, 3), np.uint8)
    faults: list[str] = []
    with ThreadPoolExecutor(WORKERS) as pool, progress.bar("reading images", len(images), "img") as bar:
        for row, found in enumerate(pool.map(read, images)):
            if isinstance(found, DualPromptError):
                faults.append(str(found))
            else:
                pixels[row] = found
            bar.advance()
    if faults:
        more = f"; and {len(faults) - 5} more" if len(faults) > 5 else ""
        count = f"{len(faults)} of {len(images)} images cannot be used: " if len(images) > 1 else ""
        raise DualPromptError(f"{count}{'; '.join(faults[:5])}{more}")
    return pixels


def gather(data: Data) -> dict[str, list[ImageLike]]:
    """Return the images of each class: those of a folder of class folders, or of a mapping, in sorted order."""
    if isinstance(data, str | Path):
        path = Path(data).expanduser()
        if not path.is_dir():
            found = "is not a folder" if path.exists() else "does not exist"
            raise DualPromptError(f"{path} {found}; give a folder that holds one folder of images for each class")
        if splits := [name for name in ("train", "test", "val") if (path / name).is_dir()]:
            raise DualPromptError(
                f"{path} holds '{splits[0]}', a split and no class; give the folder below it that holds the classes"
            )
        try:
            return {name: list(files) for name, files in sorted(class_files(path).items())}
        except OSError as error:
            raise DualPromptError(f"{error.filename or path} cannot be read ({error.strerror})") from error
    classes: dict[str, list[ImageLike]] = {}
    for name, images in sorted(data.items()):
        if isinstance(images, str | bytes | Path | Image.Image | np.ndarray):
            raise DualPromptError(f"class '{name}' must have a list of images, found {type(images).__name__}")
        classes[name] = list(images)
    if not classes:
        raise DualPromptError("there are no classes to learn; give at least one, with at least one image")
    if empty := [name for name, images in classes.items() if not images]:
        raise DualPromptError(f"class '{empty[0]}' has no images; give some or leave it out")
    return classes


def listed(images: ImageLike | Sequence[ImageLike]) -> tuple[list[ImageLike], bool]:
    """Return the images that are meant, and whether it is one alone; a folder stands for all images below it."""
    if isinstance(images, str | Path) and Path(images).expanduser().is_dir():
        return _below(Path(images).expanduser()), False
    if isinstance(images, str | Path | bytes | Image.Image) or (isinstance(images, np.ndarray) and images.ndim < 4):
        return [images], True
    found: list[ImageLike] = []
    for image in images:
        folder = isinstance(image, str | Path) and Path(image).expanduser().is_dir()
        found.extend(_below(Path(str(image)).expanduser()) if folder else [image])
    return found, False


def _below(folder: Path) -> list[ImageLike]:
    found = images_in(folder)
    if not found:
        raise DualPromptError(f"{folder} holds no images")
    return list(found)
