"""MNIST and Fashion-MNIST from their idx files, gzipped as published or not."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path

import numpy as np

from dualprompt.data.sources import DATASETS, ArraySource, Dataset, Reader, Remote, Split, damaged, missing

UNSIGNED_BYTE = 8  # the only element type these files use


class Mnist(Reader):
    """Four idx files: images and labels of the training and the test split ("t10k")."""

    images = (60_000, 10_000)

    def __init__(
        self,
        name: str,
        title: str,
        licence: str,
        folder: str,
        classes: tuple[str, ...],
        mirrors: tuple[str, ...],
        files: dict[str, tuple[str, int]],
    ) -> None:
        self.name = name
        self.title = title
        self.licence = licence
        self.folder = folder
        self.classes = classes
        self.remotes = tuple(
            Remote(tuple(mirror + file for mirror in mirrors), f"{folder}/{file}", f"sha256:{digest}", size)
            for file, (digest, size) in files.items()
        )

    def load(self, root: Path) -> Dataset:
        """Read all images into memory."""
        folder = root / self.folder
        return Dataset(self.name, self.classes, self._split(folder, "train"), self._split(folder, "t10k"))

    def _split(self, folder: Path, prefix: str) -> Split:
        images = self._idx(self._find(folder / f"{prefix}-images-idx3-ubyte.gz"), 3)
        path = self._find(folder / f"{prefix}-labels-idx1-ubyte.gz")
        labels = self._idx(path, 1).astype(np.int64)
        if len(labels) != len(images):
            raise damaged(self.name, path, f"holds {len(labels)} labels for {len(images)} images")
        if labels.max() >= len(self.classes):
            raise damaged(
                self.name,
                path,
                f"holds label {labels.max()}, above the highest class {len(self.classes) - 1}",
            )
        return Split(ArraySource(np.repeat(images[..., None], 3, axis=3)), labels)

    def _find(self, path: Path) -> Path:
        """Return the published gzipped file, or its unpacked twin."""
        for candidate in (path, path.with_suffix("")):
            if candidate.is_file():
                return candidate
        raise missing(self.name, path)

    def _idx(self, path: Path, dimensions: int) -> np.ndarray:
        """Read an idx file: two zero bytes, element type, number of dimensions, their sizes, the elements."""
        try:
            content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise damaged(self.name, path, f"cannot be decompressed ({error})") from None
        magic = bytes([0, 0, UNSIGNED_BYTE, dimensions])
        if content[:4] != magic:
            raise damaged(self.name, path, f"starts with bytes {content[:4].hex()} instead of {magic.hex()}")
        start = 4 + 4 * dimensions
        if len(content) < start:
            raise damaged(self.name, path, f"ends after {len(content)} bytes, inside its header")
        shape = tuple(int(size) for size in np.frombuffer(content[4:start], dtype=">u4"))
        expected = start + int(np.prod(shape, dtype=object))
        if len(content) != expected or 0 in shape:
            raise damaged(self.name, path, f"holds {len(content)} bytes; its header {shape} asks for {expected}")
        return np.frombuffer(content, dtype=np.uint8, offset=start).reshape(shape)


DATASETS.register("mnist")(
    Mnist(
        name="mnist",
        title="MNIST: 70,000 handwritten digits of 28 × 28 grey pixels",
        licence="CC BY-SA 3.0",
        folder="MNIST/raw",
        classes=tuple("0123456789"),
        mirrors=(
            "https://ossci-datasets.s3.amazonaws.com/mnist/",
            "https://storage.googleapis.com/cvdf-datasets/mnist/",
            "http://yann.lecun.com/exdb/mnist/",
        ),
        files={
            "train-images-idx3-ubyte.gz": (
                "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
                9_912_422,
            ),
            "train-labels-idx1-ubyte.gz": (
                "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
                28_881,
            ),
            "t10k-images-idx3-ubyte.gz": (
                "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
                1_648_877,
            ),
            "t10k-labels-idx1-ubyte.gz": (
                "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
                4_542,
            ),
        },
    )
)

DATASETS.register("fashion-mnist")(
    Mnist(
        name="fashion-mnist",
        title="Fashion-MNIST: 70,000 pictures of clothes of 28 × 28 grey pixels",
        licence="MIT",
        folder="FashionMNIST/raw",
        classes=(
            "T-shirt/top",
            "Trouser",
            "Pullover",
            "Dress",
            "Coat",
            "Sandal",
            "Shirt",
            "Sneaker",
            "Bag",
            "Ankle boot",
        ),
        mirrors=(
            "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
            "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion/",
        ),
        files={
            "train-images-idx3-ubyte.gz": (
                "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
                26_421_880,
            ),
            "train-labels-idx1-ubyte.gz": (
                "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
                29_515,
            ),
            "t10k-images-idx3-ubyte.gz": (
                "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
                4_422_102,
            ),
            "t10k-labels-idx1-ubyte.gz": (
                "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
                5_148,
            ),
        },
    )
)
