"""ImageNet-R: 30,000 renditions (art, cartoons, sketches, toys, …) of 200 ImageNet classes, split by us."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from dualprompt.data.lists import split_of
from dualprompt.data.sources import DATASETS, Dataset, Reader, Remote, damaged, missing

CLASSES = 200
TEST_SHARE = 0.2
WNID = re.compile(r"n\d{8}")
ARCHIVE = Remote(
    urls=("https://people.eecs.berkeley.edu/~hendrycks/imagenet-r.tar",),
    path="imagenet-r.tar",
    checksum="sha256:18c6bf493b39a0d975d48e587437f562caab9c52ae6327dcfa9dd8eb54aa1b52",
    size=2_191_079_936,
    unpack="imagenet-r",
)


class WordNetFolders(Reader):
    """One folder a class, named by its WordNet id.

    It is published without splits. Ours follows from the file names alone: no file is moved, and the same files give
    the same split everywhere. Naming another version of it would draw another split.
    """

    licence = "MIT (the collection; the images belong to their authors)"
    seen = "has 200 classes of ImageNet-1k, in other pictures"

    def __init__(self, name: str, title: str, remote: Remote) -> None:
        self.name, self.title, self.remotes = name, title, (remote,)

    def load(self, root: Path) -> Dataset:
        """List the files of both splits."""
        folder = root / self.name
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
        test = draw_test(list(files), f"{self.name} split v1")
        return Dataset(
            self.name,
            class_names(folder / "README.txt", wnids),
            split_of(self.name, folder, (pair for pair in files.items() if pair[0] not in test)),
            split_of(self.name, folder, (pair for pair in files.items() if pair[0] in test)),
        )


def draw_test(files: list[str], split: str) -> set[str]:
    """Return the test split of `files` (each "wnid/file") under a split's name: the fifth whose hashes come first."""
    ranked = sorted(files, key=lambda file: hashlib.sha256(f"{split}:{file}".encode()).digest())
    return set(ranked[: round(TEST_SHARE * len(files))])


def class_names(readme: Path, wnids: Sequence[str]) -> tuple[str, ...]:
    """Return the names in lines "wnid name" of README.txt; the wnid where a name is absent or not unique."""
    names: dict[str, str] = {}
    if readme.is_file():
        for line in readme.read_text(encoding="utf-8", errors="replace").splitlines():
            wnid, _, name = line.strip().partition(" ")
            if WNID.fullmatch(wnid) and name:
                names[wnid] = name.strip()
    times = Counter(names.get(wnid, wnid) for wnid in wnids)
    return tuple(names[wnid] if wnid in names and times[names[wnid]] == 1 else wnid for wnid in wnids)


DATASETS.register("imagenet-r")(
    WordNetFolders("imagenet-r", "ImageNet-R: 30,000 renditions of 200 ImageNet classes, 2.2 GB", ARCHIVE)
)
