"""notMNIST: the letters A to J in many typefaces, one PNG file each."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from dualprompt.data.sources import DATASETS, Dataset, FileSource, Reader, Remote, Split, damaged, missing

LETTERS = "ABCDEFGHIJ"

# Files of the official archives that no decoder reads: all are empty but the first, which is no PNG.
KNOWN_BAD = frozenset(
    {
        "A/RnJlaWdodERpc3BCb29rSXRhbGljLnR0Zg==.png",
        "A/SG90IE11c3RhcmQgQlROIFBvc3Rlci50dGY=.png",
        "A/Um9tYW5hIEJvbGQucGZi.png",
        "B/TmlraXNFRi1TZW1pQm9sZEl0YWxpYy5vdGY=.png",
        "D/VHJhbnNpdCBCb2xkLnR0Zg==.png",
        "A/RGVtb2NyYXRpY2FCb2xkT2xkc3R5bGUgQm9sZC50dGY=.png",
        "F/Q3Jvc3NvdmVyIEJvbGRPYmxpcXVlLnR0Zg==.png",
    }
)


def _remote(part: str, md5: str, size: int) -> Remote:
    file = f"notMNIST_{part}.tar.gz"
    return Remote(
        urls=(
            f"https://commondatastorage.googleapis.com/books1000/{file}",
            f"http://yaroslavvb.com/upload/notMNIST/{file}",
        ),
        path=file,
        checksum=f"md5:{md5}",
        size=size,
        unpack=f"notMNIST_{part}",
    )


class NotMnist(Reader):
    """One folder a letter below `notMNIST_large` (training) and `notMNIST_small` (test), as published.

    Also below `notMNIST/train` and `notMNIST/test`, or `Train` and `Test`: so lies the part of notMNIST that
    5-datasets was first made of.
    """

    name = "notmnist"
    title = "notMNIST: letters A to J in many typefaces, 28 × 28 grey pixels"
    licence = "none stated; cite Y. Bulatov, notMNIST dataset, 2011"
    remotes = (
        _remote("large", "70a95b805ecfb6592c48e196df7c1499", 247_336_696),
        _remote("small", "c9890a473a9769fda4bdf314aaf500dd", 8_458_043),
    )

    def load(self, root: Path) -> Dataset:
        """List the files of both splits."""
        train, test = self._folders(root)
        return Dataset(self.name, tuple(LETTERS), self._split(train), self._split(test))

    def _folders(self, root: Path) -> tuple[Path, Path]:
        official = root / "notMNIST_large", root / "notMNIST_small"
        parts = root / "notMNIST"
        for train, test in (official, (parts / "train", parts / "test"), (parts / "Train", parts / "Test")):
            if train.is_dir():
                return train, test
        return official

    def _split(self, folder: Path) -> Split:
        paths: list[Path] = []
        labels: list[int] = []
        for label, letter in enumerate(LETTERS):
            if not (folder / letter).is_dir():
                raise missing(self.name, folder / letter)
            files = sorted(path for path in (folder / letter).glob("*.png") if f"{letter}/{path.name}" not in KNOWN_BAD)
            if not files:
                raise damaged(self.name, folder / letter, "holds no .png file")
            paths += files
            labels += [label] * len(files)
        return Split(FileSource(tuple(paths)), np.array(labels, dtype=np.int64))


DATASETS.register("notmnist")(NotMnist())
