"""ImageNet-R with the train and test lists that CODA-Prompt released, and its numbering of the classes."""

from __future__ import annotations

from pathlib import Path

from dualprompt.data.datasets.imagenet_r import ARCHIVE, CLASSES, class_names
from dualprompt.data.lists import lines_of, number_of, split_of
from dualprompt.data.sources import DATASETS, Dataset, Reader, Remote, damaged, missing

FOLDER = "imagenet-r"
PREFIX = f"data/{FOLDER}/"


def _remote(split: str, sha256: str, size: int) -> Remote:
    file = f"imagenet-r_{split}.yaml"
    coda = "GT-RIPL/CODA-Prompt/6417d4f68754be68b697c7ca2323ee61e791e1a3/dataloaders/splits"
    mammoth = "aimagelab/mammoth/e75a491c69fd729edeb01431afb753d9157d9a81/datasets/imagenet_r_utils"
    urls = tuple(f"https://raw.githubusercontent.com/{place}/{file}" for place in (coda, mammoth))
    return Remote(urls, f"imagenet-r-coda/{file}", f"sha256:{sha256}", size)


class ImageNetRCoda(Reader):
    """Two YAML lists of 24,000 and 6,000 files and their labels, drawn at random, over all classes.

    The labels are not the order of the WordNet ids: CODA's class orders speak of them.
    """

    name = "imagenet-r-coda"
    title = "ImageNet-R as CODA-Prompt splits and numbers it: 24,000 and 6,000 renditions, 200 classes"
    images = (24_000, 6_000)
    licence = "MIT (the collection and the lists; the images belong to their authors)"
    seen = "has 200 classes of ImageNet-1k, in other pictures"
    remotes = (
        ARCHIVE,
        _remote("train", "6bcaa14ca9359915ac3a44c48ae71388146385686eb15da79a37844421a0b845", 1_137_662),
        _remote("test", "57275ac242d68983a4f39ccb81ec34f48b1bd920b9cd79e6e8040d7c042db02a", 284_216),
    )

    def load(self, root: Path) -> Dataset:
        """List the files of both splits."""
        folder = root / FOLDER
        if not folder.is_dir():
            raise missing(self.name, folder)
        wnids: dict[int, str] = {}
        lists = [self._files(root / remote.path, wnids) for remote in self.remotes[1:]]
        if sorted(wnids) != list(range(CLASSES)):
            raise damaged(self.name, root / self.name, f"speaks of {len(wnids)} classes instead of {CLASSES}")
        names = class_names(folder / "README.txt", [wnids[label] for label in range(CLASSES)])
        train, test = (split_of(self.name, folder, files) for files in lists)
        return Dataset(self.name, names, train, test)

    def _files(self, path: Path, wnids: dict[int, str]) -> list[tuple[str, int]]:
        """Return the files of a list with their labels, sorted; note which WordNet id each label stands for."""
        lines = lines_of(self.name, path)
        half = len(lines) // 2
        if not lines or len(lines) % 2 or (lines[0], lines[half]) != ("data:", "targets:"):
            raise damaged(self.name, path, "is not the list 'data' and then as many 'targets'")
        files = []
        for file, label in zip(lines[1:half], lines[half + 1 :], strict=True):
            place = file.removeprefix("- ")
            if not place.startswith(PREFIX):
                raise damaged(self.name, path, f"holds '{file[:80]}' instead of a file below {PREFIX}")
            number, place = number_of(self.name, path, label.removeprefix("- "), CLASSES), place.removeprefix(PREFIX)
            if wnids.setdefault(number, place.partition("/")[0]) != place.partition("/")[0]:
                raise damaged(self.name, path, f"gives label {number} to two classes")
            files.append((place, number))
        return sorted(files)


DATASETS.register("imagenet-r-coda")(ImageNetRCoda())
