"""Stanford Cars: 16,185 photographs of 196 models of cars, with the official split."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from dualprompt.data.lists import split_of
from dualprompt.data.matlab import arrays_of
from dualprompt.data.sources import DATASETS, Dataset, Reader, Remote, Split, damaged

CLASSES = 196
FOLDER = "stanford_cars"


def _remote(file: str, where: str, md5: str, size: int, unpack: str | None = None) -> Remote:
    return Remote((f"https://ai.stanford.edu/~jkrause/{where}/{file}",), f"{FOLDER}/{file}", f"md5:{md5}", size, unpack)


class Cars196(Reader):
    """Two folders of images, and Matlab files that name the class of each, counted from 1."""

    name = "cars196"
    title = "Stanford Cars: 8,144 and 8,041 photographs of 196 models of cars, 2 GB"
    images = (8_144, 8_041)
    licence = "non-commercial research; cite J. Krause et al., 3D Object Representations for …, 2013"
    # The server is said to have stopped (pytorch/vision, issue 7545). Files from elsewhere that lie where it would put
    # them are verified and unpacked by `data get`.
    remotes = (
        _remote("car_devkit.tgz", "cars", "c3b158d763b6e2245038c8ad08e45376", 330_960, "devkit"),
        _remote("cars_train.tgz", "car196", "065e5b463ae28d29e77c1b4b166cfe61", 979_269_282, "cars_train"),
        _remote("cars_test.tgz", "car196", "4ce7ebf6a94d07f1952d94dd34c4d501", 977_350_468, "cars_test"),
        _remote("cars_test_annos_withlabels.mat", "car196", "b0a2b23655a3edd16d84508592a98d10", 185_758),
    )

    def load(self, root: Path) -> Dataset:
        """List the files of both splits."""
        folder = root / FOLDER
        path = folder / "devkit" / "cars_meta.mat"
        (names,) = arrays_of(self.name, path, "class_names")
        classes = tuple(_text(name) for name in names.reshape(-1))
        if len(classes) != CLASSES or not all(classes):
            raise damaged(self.name, path, f"holds {len(classes)} class names instead of {CLASSES}")
        train = self._split(folder / "cars_train", folder / "devkit" / "cars_train_annos.mat")
        return Dataset(
            self.name, classes, train, self._split(folder / "cars_test", folder / "cars_test_annos_withlabels.mat")
        )

    def _split(self, folder: Path, path: Path) -> Split:
        (marks,) = arrays_of(self.name, path, "annotations")
        if not {"class", "fname"} <= set(marks.dtype.names or ()):
            raise damaged(self.name, path, "holds no 'class' and 'fname' of each image")
        try:
            files = [(_text(mark["fname"]), int(mark["class"].reshape(-1)[0]) - 1) for mark in marks.reshape(-1)]
        except (LookupError, ValueError, TypeError, AttributeError, OverflowError) as error:
            raise damaged(self.name, path, f"cannot be understood ({error})") from None
        if not files or not all(file and 0 <= label < CLASSES for file, label in files):
            raise damaged(self.name, path, f"holds no files with classes from 1 to {CLASSES}")
        return split_of(self.name, folder, files)


def _text(value: np.ndarray) -> str:
    """Return the one text in an array; nothing where there is none."""
    found = np.asarray(value).reshape(-1)
    return str(found[0]) if found.size == 1 and found.dtype.kind == "U" else ""


DATASETS.register("cars196")(Cars196())
