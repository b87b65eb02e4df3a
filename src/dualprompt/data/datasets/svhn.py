"""SVHN (Street View House Numbers), the cropped digits, from its Matlab files."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from dualprompt.data.matlab import arrays_of
from dualprompt.data.sources import DATASETS, ArraySource, Dataset, Reader, Remote, Split, damaged


class Svhn(Reader):
    """Two .mat files with `X` (32, 32, 3, images) and `y` (images, 1), where label 10 is the digit 0."""

    name = "svhn"
    title = "SVHN: 99,289 house-number digits of 32 × 32 pixels"
    images = (73_257, 26_032)
    licence = "non-commercial use only"
    remotes = (
        Remote(
            urls=("http://ufldl.stanford.edu/housenumbers/train_32x32.mat",),
            path="SVHN/train_32x32.mat",
            checksum="sha256:435e94d69a87fde4fd4d7f3dd208dfc32cb6ae8af2240d066de1df7508d083b8",
            size=182_040_794,
        ),
        Remote(
            urls=("http://ufldl.stanford.edu/housenumbers/test_32x32.mat",),
            path="SVHN/test_32x32.mat",
            checksum="sha256:cdce80dfb2a2c4c6160906d0bd7c68ec5a99d7ca4831afa54f09182025b6a75b",
            size=64_275_384,
        ),
    )

    def load(self, root: Path) -> Dataset:
        """Read all images into memory."""
        train, test = (self._split(root / remote.path) for remote in self.remotes)
        return Dataset(self.name, tuple("0123456789"), train, test)

    def _split(self, path: Path) -> Split:
        pixels, labels = arrays_of(self.name, path, "X", "y")
        if pixels.dtype != np.uint8 or pixels.ndim != 4 or pixels.shape[2] != 3 or pixels.size == 0:
            raise damaged(
                self.name,
                path,
                f"holds X as {pixels.dtype} {pixels.shape} instead of uint8 (32, 32, 3, images)",
            )
        if labels.size != pixels.shape[3]:
            raise damaged(self.name, path, f"holds {labels.size} labels for {pixels.shape[3]} images")
        if labels.dtype.kind not in "iuf" or labels.min() < 1 or labels.max() > 10:
            raise damaged(self.name, path, "holds labels y outside 1 to 10")
        digits = labels.reshape(-1).astype(np.int64) % 10
        return Split(ArraySource(np.ascontiguousarray(pixels.transpose(3, 0, 1, 2))), digits)


DATASETS.register("svhn")(Svhn())
