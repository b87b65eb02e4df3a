"""The subsets and splits that PILOT (and RevisitingCIL, RanPAC, EASE with it) gives away as folders.

ObjectNet, OmniBenchmark and VTAB are used in continual learning in these versions only: 200, 300 and 50 classes.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from dualprompt.data.folder import load_folder
from dualprompt.data.sources import DATASETS, Dataset, Reader, damaged, missing

PAGE = "https://github.com/sun-hailong/LAMDA-PILOT"


class PilotFolders(Reader):
    """`pilot/FOLDER/train` and `pilot/FOLDER/test`, each with a folder a class; classes count by their sorted names."""

    def __init__(
        self,
        name: str,
        title: str,
        folder: str,
        classes: int,
        licence: str,
        seen: str = "",
        images: tuple[int | None, int | None] = (None, None),
    ) -> None:
        self.name, self.title, self.licence, self.seen, self.images = name, title, licence, seen, images
        self.folder, self.classes = Path("pilot") / folder, classes
        self.by_hand = (
            f"no checksum is published: download PILOT's archive by the link in {PAGE} and unpack it so that "
            f"{self.folder}/train and {self.folder}/test are folders of class folders"
        )

    def load(self, root: Path) -> Dataset:
        """List the files of both splits."""
        folder = root / self.folder
        for split in ("train", "test"):
            if not (folder / split).is_dir():
                raise missing(self.name, folder / split)
        dataset = load_folder(folder, 0.2)
        if len(dataset.classes) != self.classes:
            found = f"holds {len(dataset.classes)} class folders instead of {self.classes}"
            raise damaged(self.name, folder / "train", found)
        return replace(dataset, name=self.name)


for _reader in (
    PilotFolders(
        "cub200-pilot",
        "CUB-200-2011 as PILOT splits it: photographs of 200 species of birds",
        "cub",
        200,
        "non-commercial research and education, as CUB-200-2011",
        seen="shares species, and some photographs, with ImageNet",
        images=(9_430, 2_358),
    ),
    PilotFolders(
        "imagenet-r-pilot",
        "ImageNet-R as PILOT splits it: renditions of 200 ImageNet classes",
        "imagenet-r",
        200,
        "MIT (the collection; the images belong to their authors)",
        seen="has 200 classes of ImageNet-1k, in other pictures",
        images=(24_000, 6_000),
    ),
    PilotFolders(
        "imagenet-a-pilot",
        "ImageNet-A as PILOT splits it: photographs of 200 ImageNet classes that are hard to tell",
        "imagenet-a",
        200,
        "MIT (the collection; the images belong to their authors)",
        seen="has 200 classes of ImageNet-1k, in other pictures",
    ),
    PilotFolders(
        "objectnet",
        "ObjectNet, PILOT's 200 of its 313 classes: household objects from odd sides",
        "objectnet",
        200,
        "CC BY 4.0 with two clauses: never tune the parameters of a model with it, and show images on the web with "
        "their red border only; PILOT's benchmark trains on it all the same",
        seen="shares 113 of its 313 classes with ImageNet-1k, in other pictures",
        images=(26_509, 6_628),
    ),
    PilotFolders(
        "omnibenchmark",
        "OmniBenchmark, PILOT's 300 classes of many realms",
        "omnibenchmark",
        300,
        "not stated with PILOT's subset; cite Y. Zhang et al., Benchmarking Omni-Vision Representation, 2022",
        images=(89_697, None),
    ),
    PilotFolders(
        "vtab5",
        "VTAB as PILOT uses it: 50 classes of five of its datasets (RESISC45, DTD, Pets, EuroSAT, Flowers), ten a task",
        "vtab",
        50,
        "those of its five sources",
        seen="shares breeds of dogs and cats with ImageNet",
        images=(1_796, 8_619),
    ),
):
    DATASETS.register(_reader.name)(_reader)
