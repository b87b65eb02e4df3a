"""What readers of file lists share: lines of a text file, and a split of the files that they name."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path, PurePosixPath

import numpy as np

from dualprompt.data.sources import FileSource, Split, damaged, missing
from dualprompt.files import read_bytes, reason

MOST_BYTES = 64 * 2**20  # of a list; the longest official one has 5 MB


def lines_of(dataset: str, path: Path) -> list[str]:
    """Return the lines of an official text file that are not empty."""
    if not path.is_file():
        raise missing(dataset, path)
    try:
        text = read_bytes(path, MOST_BYTES).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise damaged(dataset, path, f"cannot be read as text ({reason(error)})") from None
    return [line.strip() for line in text.splitlines() if line.strip()]


def pairs_of(dataset: str, path: Path) -> list[tuple[str, str]]:
    """Return the lines of an official file as pairs: what stands before the first space, and the rest."""
    pairs = []
    for number, line in enumerate(lines_of(dataset, path), start=1):
        first, _, rest = line.partition(" ")
        if not rest:
            raise damaged(dataset, path, f"has one word in line {number} ('{line[:40]}') instead of two")
        pairs.append((first, rest.strip()))
    return pairs


def number_of(dataset: str, path: Path, text: str, below: int) -> int:
    """Return a number of an official file, from 0 up to but not including `below`."""
    if not (text.isascii() and text.isdecimal() and len(text) < 10 and int(text) < below):
        raise damaged(dataset, path, f"holds '{text[:40]}' instead of a number below {below}")
    return int(text)


def split_of(dataset: str, folder: Path, files: Iterable[tuple[str, int]]) -> Split:
    """Return the split of files that a list names from `folder`, each with its label; none may lie outside.

    The folders in which they lie must be there: lists without their images are not the dataset.
    """
    paths, labels, folders = [], [], dict[Path, None]()
    for file, label in files:
        place = PurePosixPath(file)
        if place.is_absolute() or ".." in place.parts:
            raise damaged(dataset, folder, f"is not where its list has '{file[:80]}'")
        paths.append(folder / place)
        labels.append(label)
        folders[paths[-1].parent] = None
    if absent := next((each for each in folders if not each.is_dir()), None):
        raise missing(dataset, absent)
    return Split(FileSource(tuple(paths)), np.array(labels, dtype=np.int64))
