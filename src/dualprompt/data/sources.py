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
