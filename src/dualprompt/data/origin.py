"""Where the images of a benchmark come from, so that what is said of one can be found again."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from dualprompt.data.cache import Decoded, Store
from dualprompt.data.sources import Dataset, FileSource
from dualprompt.errors import one_line
from dualprompt.files import digest


@dataclass(frozen=True, eq=False)
class Origin:
    """Which images of which dataset's split they are."""

    dataset: str
    split: str  # train or test
    kept: np.ndarray  # (images,) the place of each in the split; unreadable ones have none here
    paths: tuple[Path, ...]  # of every image of the split; empty where images have no files
    content: str  # hash of the images as they are kept

    def files(self, rows: np.ndarray) -> list[str]:
        """Return the files of some images, as seen from the folder that all files of the split have in common."""
        if not self.paths:
            return [""] * len(rows)
        common = os.path.commonpath([str(path.parent) for path in self.paths])
        return [one_line(Path(os.path.relpath(self.paths[place], common)).as_posix()) for place in self.kept[rows]]


def mark(datasets: Sequence[Dataset], decoded: Sequence[Decoded], store: Store) -> None:
    """Note the origin of decoded images: of the training split of each dataset, then of its test split."""
    splits = [(dataset, kind) for dataset in datasets for kind in ("train", "test")]
    for (dataset, kind), part in zip(splits, decoded, strict=True):
        source = (dataset.train if kind == "train" else dataset.test).source
        paths = source.paths if isinstance(source, FileSource) else ()
        content = digest([part.fingerprint, asdict(store)])
        part.images.origin = Origin(dataset.name, kind, part.kept, paths, content)
