"""What a dataset is: class names and two splits of labelled images, read from the official files."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dualprompt.errors import DualPromptError
from dualprompt.registry import Registry


@dataclass(frozen=True)
class ArraySource:
    """Images that the official files hold as raw pixels."""

    pixels: np.ndarray  # (images, height, width, 3) uint8


@dataclass(frozen=True)
class PictureSource:
    """Images in memory that differ in size."""

    pixels: tuple[np.ndarray, ...]  # each (height, width, 3) uint8


@dataclass(frozen=True)
class FileSource:
    """Images that lie in files of their own, still encoded."""

    paths: tuple[Path, ...]


@dataclass(frozen=True)
class Split:
    """Labelled images: `labels[i]` is the index into the dataset's classes of image i."""

    source: ArraySource | PictureSource | FileSource
    labels: np.ndarray  # (images,) int64

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class Dataset:
    """A dataset in memory or on disk, before any decoding."""

    name: str
    classes: tuple[str, ...]
    train: Split
    test: Split


def checked(name: str, dataset: object) -> Dataset:
    """Return what a reader made; what would be learned wrong, or in part, is refused."""
    if not isinstance(dataset, Dataset):
        raise DualPromptError(f"dataset '{name}': its reader must return a Dataset, found {type(dataset).__name__}")
    for kind, split in (("training", dataset.train), ("test", dataset.test)):
        if fault := _fault(split, len(dataset.classes)):
            raise DualPromptError(f"dataset '{name}', {kind} images: {fault}; mend its reader")
    return dataset


def _fault(split: Split, classes: int) -> str | None:
    """Return what is wrong with a split of so many classes."""
    source, labels = split.source, np.asarray(split.labels)
    count = len(source.paths) if isinstance(source, FileSource) else len(source.pixels)
    if labels.shape != (count,) or labels.dtype.kind not in "iu":
        return f"{count} images need as many whole numbers as labels, found {labels.dtype} of shape {labels.shape}"
    if count and not 0 <= labels.min() <= labels.max() < classes:
        return f"labels of {classes} classes are 0 to {classes - 1}, found {labels.min()} to {labels.max()}"
    whole = (source.pixels,) if isinstance(source, ArraySource) else ()
    for pixels in source.pixels if isinstance(source, PictureSource) else whole:
        dimensions = "images, height, width" if whole else "height, width"
        if pixels.dtype != np.uint8 or pixels.ndim != 3 + bool(whole) or pixels.shape[-1] != 3:
            return f"pixels are uint8 of shape ({dimensions}, 3), found {pixels.dtype} of shape {pixels.shape}"
    return None


@dataclass(frozen=True)
class Remote:
    """One official file: where it is, where it goes below the data root, and what it must be."""

    urls: tuple[str, ...]  # mirrors of the same bytes, the preferred one first
    path: str  # below the data root
    checksum: str  # "sha256:…" or "md5:…"
    size: int | None = None
    unpack: str | None = None  # an archive: the folder that it holds, extracted beside it


class Reader(ABC):
    """Reads one dataset from its official layout below a data root."""

    title: str
    licence: str
    images: tuple[int | None, int | None] = (None, None)  # how many to learn from and to test on, as published
    remotes: tuple[Remote, ...] = ()
    by_hand: str = ""  # what to put where, for one that cannot be downloaded from here
    seen: str = ""  # what of it ImageNet has too: goes on where the dataset's name ends
    seen_pictures: bool = False  # whether its very pictures are ImageNet's

    def notice(self) -> str:
        """Return what must be said of whose pictures these are, where they come with the package."""
        return ""

    @abstractmethod
    def load(self, root: Path) -> Dataset:
        """Read the dataset; raise a DualPromptError with the remedy where files are missing or damaged."""


DATASETS: Registry[Reader] = Registry("dataset", "dualprompt.data.datasets")

# Benchmarks made of several datasets, in the order of their tasks.
GROUPS: dict[str, tuple[str, ...]] = {
    "5-datasets": ("cifar10", "mnist", "svhn", "notmnist", "fashion-mnist"),
    "mini": ("mini-clothes", "mini-digits", "mini-fruit", "mini-leaves", "mini-scripts"),
    "mini-domains": tuple(f"mini-domains/{look}" for look in ("photo", "grey", "negative", "sketch")),
    # The order of S-Prompts and RanPAC.
    "domainnet": tuple(
        f"domainnet/{domain}" for domain in ("real", "quickdraw", "painting", "sketch", "infograph", "clipart")
    ),
    "core50": tuple(f"core50/s{session}" for session in (1, 2, 4, 5, 6, 8, 9, 11)),
    "office-home": tuple(f"office-home/{domain}" for domain in ("art", "clipart", "product", "real-world")),
}


def missing(dataset: str, path: Path) -> DualPromptError:
    """Return the error for an official file or folder that is not there."""
    return DualPromptError(
        f"{path} does not exist; {_remedy(dataset, 'get it')}; where your datasets lie is said by "
        "$DUALPROMPT_DATA, by --root of `data get` and `data show`, and by --benchmark.root of `run`"
    )


def damaged(dataset: str, path: Path, found: str) -> DualPromptError:
    """Return the error for an official file that is not what it should be; `found` continues "PATH …"."""
    found = " ".join(found.split())  # it may quote a library's message of several lines
    return DualPromptError(f"{path} {found}; {_remedy(dataset, 'get a good copy')}")


def _remedy(dataset: str, want: str) -> str:
    return DATASETS[dataset].by_hand or f"{want} with `dualprompt data get {dataset}`"
