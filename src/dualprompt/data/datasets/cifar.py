"""CIFAR-10 and CIFAR-100 from their binary versions, which need no pickle."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from dualprompt.data.sources import DATASETS, ArraySource, Dataset, Reader, Remote, Split, damaged, missing

SIDE = 32
PIXEL_BYTES = 3 * SIDE * SIDE


class Cifar(Reader):
    """Records of `label_bytes` labels, the last of them the class, and three colour planes of pixels."""

    images = (50_000, 10_000)
    licence = "none stated; cite A. Krizhevsky, Learning Multiple Layers of Features from Tiny Images, 2009"
    seen = "has classes that ImageNet has too, in other pictures"

    def __init__(
        self,
        name: str,
        title: str,
        folder: str,
        train: tuple[str, ...],
        test: tuple[str, ...],
        class_names: str,
        classes: int,
        label_bytes: int,
        remote: Remote,
    ) -> None:
        self.name = name
        self.title = title
        self.folder = folder
        self.train = train
        self.test = test
        self.class_names = class_names
        self.classes = classes
        self.label_bytes = label_bytes
        self.remotes = (remote,)

    def load(self, root: Path) -> Dataset:
        """Read all images into memory."""
        folder = root / self.folder
        path = folder / self.class_names
        if not path.is_file():
            raise missing(self.name, path)
        names = tuple(path.read_text(encoding="utf-8", errors="replace").split())
        if len(names) != self.classes:
            raise damaged(self.name, path, f"holds {len(names)} class names instead of {self.classes}")
        return Dataset(self.name, names, self._split(folder, self.train), self._split(folder, self.test))

    def _split(self, folder: Path, files: tuple[str, ...]) -> Split:
        records = np.concatenate([self._records(folder / file) for file in files])
        pixels = records[:, self.label_bytes :].reshape(-1, 3, SIDE, SIDE).transpose(0, 2, 3, 1)
        labels = records[:, self.label_bytes - 1].astype(np.int64)
        return Split(ArraySource(np.ascontiguousarray(pixels)), labels)

    def _records(self, path: Path) -> np.ndarray:
        if not path.is_file():
            raise missing(self.name, path)
        length = self.label_bytes + PIXEL_BYTES
        size = path.stat().st_size
        if size == 0 or size % length:
            raise damaged(self.name, path, f"has {size} bytes, which is no whole number of {length}-byte records")
        records = np.fromfile(path, dtype=np.uint8).reshape(-1, length)
        highest = int(records[:, self.label_bytes - 1].max())
        if highest >= self.classes:
            raise damaged(self.name, path, f"holds label {highest}, above the highest class {self.classes - 1}")
        return records


def _mirrors(file: str) -> tuple[str, ...]:
    return f"https://www.cs.toronto.edu/~kriz/{file}", f"https://cave.cs.toronto.edu/kriz/{file}"


DATASETS.register("cifar10")(
    Cifar(
        name="cifar10",
        title="CIFAR-10: 60,000 photographs of 32 × 32 pixels, 10 classes",
        folder="cifar-10-batches-bin",
        train=tuple(f"data_batch_{number}.bin" for number in range(1, 6)),
        test=("test_batch.bin",),
        class_names="batches.meta.txt",
        classes=10,
        label_bytes=1,
        remote=Remote(
            urls=_mirrors("cifar-10-binary.tar.gz"),
            path="cifar-10-binary.tar.gz",
            checksum="sha256:c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
            size=170_052_171,
            unpack="cifar-10-batches-bin",
        ),
    )
)

DATASETS.register("cifar100")(
    Cifar(
        name="cifar100",
        title="CIFAR-100: 60,000 photographs of 32 × 32 pixels, 100 classes",
        folder="cifar-100-binary",
        train=("train.bin",),
        test=("test.bin",),
        class_names="fine_label_names.txt",
        classes=100,
        label_bytes=2,  # the superclass, then the class
        remote=Remote(
            urls=_mirrors("cifar-100-binary.tar.gz"),
            path="cifar-100-binary.tar.gz",
            checksum="sha256:58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec",
            size=168_513_733,
            unpack="cifar-100-binary",
        ),
    )
)
