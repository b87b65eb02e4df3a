"""Datasets that are given in Python: arrays, a torch Dataset, or one of Hugging Face's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from dualprompt.data.cache import as_rgb
from dualprompt.data.sources import DATASETS, ArraySource, Dataset, PictureSource, Reader, Split
from dualprompt.errors import DualPromptError

IMAGES, LABELS = ("image", "img", "pixels"), ("label", "labels", "fine_label")  # columns, as most datasets call them


class Given(Reader):
    """Hands over a dataset that is in memory."""

    title = "given in Python"
    licence = "the user's own"

    def __init__(self, dataset: Dataset) -> None:
        self.dataset = dataset

    def load(self, root: Path) -> Dataset:
        """Return it; nothing lies below a root."""
        return self.dataset


@contextmanager
def known(datasets: Mapping[str, Dataset]) -> Iterator[None]:
    """Let configs name these datasets for a while."""
    with DATASETS.with_more({name: Given(dataset) for name, dataset in datasets.items()}):
        yield


def dataset_of(name: str, train: Any, test: Any, classes: Sequence[str] | None = None) -> Dataset:
    """Return a dataset of two splits, each a pair of images and labels, a torch Dataset, or one of Hugging Face's.

    Args:
        name: what it is called.
        train: the images to learn from.
        test: the images to be evaluated on.
        classes: the names of the labels 0, 1, …; by default what `train` says of itself, or their numbers.
    """
    (train_images, train_labels), (test_images, test_labels) = (_read(name, split) for split in (train, test))
    count = 1 + max(*map(int, train_labels), *map(int, test_labels))
    names = [str(each) for each in classes or _classes(train) or range(count)]
    if len(names) < count:
        raise DualPromptError(f"dataset '{name}' has label {count - 1}, but {len(names)} class names; name all of them")
    splits = [_split(name, *each) for each in ((train_images, train_labels), (test_images, test_labels))]
    return Dataset(name, tuple(names), *splits)


def _classes(data: Any) -> Sequence[str] | None:
    """Return what a dataset calls its classes: torchvision's `classes`, Hugging Face's features."""
    if isinstance(found := getattr(data, "classes", None), Sequence) and not isinstance(found, str):
        return found
    features = getattr(data, "features", None)
    if not isinstance(features, Mapping):
        return None
    return next((getattr(features[column], "names", None) for column in LABELS if column in features), None)


def _read(name: str, data: Any) -> tuple[Sequence[Any], np.ndarray]:
    """Return the images and labels of a split."""
    if isinstance(data, tuple) and len(data) == 2:
        images, labels = data
    elif hasattr(data, "__getitem__") and hasattr(data, "__len__"):
        pairs = [_pair(name, data[index]) for index in range(len(data))]
        images, labels = [image for image, _ in pairs], [label for _, label in pairs]
    else:
        raise DualPromptError(
            f"dataset '{name}': a split is a pair (images, labels), or has items and a length; found {type(data)}"
        )
    numbers = np.asarray(labels)
    if numbers.ndim != 1 or numbers.dtype.kind not in "iu" or len(numbers) != len(images) or not len(numbers):
        raise DualPromptError(f"dataset '{name}' needs one whole number for each image, and at least one image")
    if numbers.min() < 0:
        raise DualPromptError(f"dataset '{name}' has label {numbers.min()}; labels count from 0")
    return images, numbers.astype(np.int64)


def _pair(name: str, item: Any) -> tuple[Any, Any]:
    """Return image and label of an item: (image, label), or a mapping with columns of the usual names."""
    if isinstance(item, Mapping):
        image = next((item[column] for column in IMAGES if column in item), None)
        label = next((item[column] for column in LABELS if column in item), None)
        if image is not None and label is not None:
            return image, label
        raise DualPromptError(
            f"dataset '{name}' has the columns {', '.join(map(str, item))}; it needs one of {', '.join(IMAGES)} "
            f"and one of {', '.join(LABELS)}"
        )
    if isinstance(item, tuple | list) and len(item) == 2:
        return item[0], item[1]
    raise DualPromptError(
        f"dataset '{name}': an item is a pair (image, label), and a split (images, labels) or a Dataset; "
        f"found {type(item).__name__} as an item"
    )


def pixels_of(name: str, images: Any) -> Sequence[np.ndarray] | np.ndarray:
    """Return images as (height, width, 3) uint8 each: an array of them, or PIL images, arrays and tensors in a list.

    `name` is what a complaint calls them.
    """
    if isinstance(images, np.ndarray) and images.ndim == 4 and images.shape[-1] == 3 and images.dtype == np.uint8:
        return images
    shape = tuple(getattr(images, "shape", ()))
    if isinstance(images, Image.Image | str | Path) or (len(shape) == 3 and 3 in (shape[0], shape[-1])):
        raise DualPromptError(f"{name}: several images are meant; give a list, or an array (count, height, width, 3)")
    return tuple(_pixels(name, image) for image in images)


def _split(name: str, images: Sequence[Any], labels: np.ndarray) -> Split:
    pixels = pixels_of(f"dataset '{name}'", images)
    if isinstance(pixels, np.ndarray):
        return Split(ArraySource(pixels), labels)
    if len({each.shape for each in pixels}) == 1:
        return Split(ArraySource(np.stack(pixels)), labels)
    return Split(PictureSource(tuple(pixels)), labels)


def _pixels(name: str, image: Any) -> np.ndarray:
    """Return an image as (height, width, 3) uint8."""
    if isinstance(image, Image.Image):
        return np.array(as_rgb(image))
    found = np.asarray(image)
    if found.ndim == 2:
        found = np.repeat(found[..., None], 3, axis=2)
    elif found.ndim == 3 and found.shape[0] in (1, 3) and found.shape[-1] not in (1, 3):
        found = found.transpose(1, 2, 0)  # channels first, as torch has them
    if found.ndim == 3 and found.shape[-1] == 1:
        found = np.repeat(found, 3, axis=2)
    if found.dtype != np.uint8 or found.ndim != 3 or found.shape[-1] != 3:
        raise DualPromptError(
            f"{name}: an image is a PIL image or uint8 of one or three channels, without normalisation; "
            f"found {found.dtype} {found.shape}; leave out transforms such as ToTensor and Normalize"
        )
    return np.ascontiguousarray(found)
