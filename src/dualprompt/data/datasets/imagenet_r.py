"""ImageNet-R: 30,000 renditions (art, cartoons, sketches, toys, …) of 200 ImageNet classes."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from pathlib import Path

import numpy as np

from dualprompt.data.sources import DATASETS, Dataset, FileSource, Reader, Remote, Split, damaged, missing

CLASSES = 200
TEST_SHARE = 0.2
SPLIT = "imagenet-r split v1"  # naming another version draws another split
WNID = re.compile(r"n\d{8}")


class ImageNetR(Reader):
    """One folder a class, named by its WordNet id.

    ImageNet-R is published without splits. Ours follows from the file names alone: no file is moved, and the
    same files give the same split everywhere.
    """

    name = "imagenet-r"
    title = "ImageNet-R: 30,000 renditions of 200 ImageNet classes"
    licence = "MIT (the collection; the images belong to their authors)"
    remotes = (
        Remote(
            urls=("https://people.eecs.berkeley.edu/~hendrycks/imagenet-r.tar",),
            path="imagenet-r.tar",
            checksum="sha256:18c6bf493b39a0d975d48e587437f562caab9c52ae6327dcfa9dd8eb54aa1b52",
            size=2_191_079_936,
            unpack="imagenet-r",
        ),
    )

    def load(self, root: Path) -> Dataset:
        """List the files of both splits: 24,000 and 6,000 when all are there."""
        folder = root / "imagenet-r"
        if not folder.is_dir():
            raise missing(self.name, folder)
        wnids = sorted(path.name for path in folder.iterdir() if path.is_dir() and WNID.fullmatch(path.name))
        if len(wnids) != CLASSES:
            raise damaged(self.name, folder, f"holds {len(wnids)} class folders instead of {CLASSES}")
        files: dict[str, int] = {}  # "wnid/file" to label, in sorted order
        for label, wnid in enumerate(wnids):
            found = sorted(path.name for path in (folder / wnid).iterdir() if path.suffix.lower() in (".jpg", ".jpeg"))
            if not found:
                raise damaged(self.name, folder / wnid, "holds no .jpg file")
            files.update({f"{wnid}/{file}": label for file in found})
        test = draw_test(list(files))
        return Dataset(
            self.name,
            _class_names(folder / "README.txt", wnids),
            _split(folder, {file: label for file, label in files.items() if file not in test}),
            _split(folder, {file: label for file, label in files.items() if file in test}),
        )


def draw_test(files: list[str]) -> set[str]:
    """Return the test split of `files` (each "wnid/file"): the fifth of them whose hashes come first."""
    ranked = sorted(files, key=lambda file: hashlib.sha256(f"{SPLIT}:{file}".encode()).digest())
    return set(ranked[: round(TEST_SHARE * len(files))])


def _split(folder: Path, files: dict[str, int]) -> Split:
    return Split(
        FileSource(tuple(folder / file for file in files)),
        np.fromiter(files.values(), dtype=np.int64, count=len(files)),
    )


def _class_names(readme: Path, wnids: list[str]) -> tuple[str, ...]:
    """Return the names in lines "wnid name" of README.txt; the wnid where a name is absent or not unique."""
    names: dict[str, str] = {}
    if readme.is_file():
        for line in readme.read_text(encoding="utf-8", errors="replace").splitlines():
            wnid, _, name = line.strip().partition(" ")
            if WNID.fullmatch(wnid) and name:
                names[wnid] = name.strip()
    times = Counter(names.get(wnid, wnid) for wnid in wnids)
    return tuple(names[wnid] if wnid in names and times[names[wnid]] == 1 else wnid for wnid in wnids)


DATASETS.register("imagenet-r")(ImageNetR())
