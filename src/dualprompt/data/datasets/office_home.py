"""Office-Home: 65 classes of things in four domains, as folders; it has no official split."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from dualprompt.data.folder import load_folder
from dualprompt.data.sources import DATASETS, Dataset, Reader, damaged, missing

CLASSES = 65
TEST_SHARE = 0.2
FOLDER = "OfficeHomeDataset_10072016"


class OfficeHome(Reader):
    """A domain: one folder a class. The test split follows from the file names, as that of any folder does."""

    licence = "non-commercial research and education; cite H. Venkateswara et al., Deep Hashing Network for …, 2017"
    seen = "has everyday things, many of which are classes of ImageNet"
    by_hand = (
        "no checksum is published: download OfficeHomeDataset_10072016.zip by the link in "
        "https://www.hemanthdv.org/officeHomeDataset.html and unpack it so that OfficeHomeDataset_10072016/Art, "
        "Clipart, Product and 'Real World' are folders of class folders"
    )

    def __init__(self, domain: str, folder: str) -> None:
        self.name, self.domain, self.folder = f"office-home/{domain}", domain, folder
        self.title = f"Office-Home, {domain}: pictures of 65 classes of things at work and at home"

    def load(self, root: Path) -> Dataset:
        """List the files of both splits."""
        folder = root / FOLDER / self.folder
        if not folder.is_dir():
            raise missing(self.name, folder)
        dataset = load_folder(folder, TEST_SHARE)
        if len(dataset.classes) != CLASSES:
            raise damaged(self.name, folder, f"holds {len(dataset.classes)} class folders instead of {CLASSES}")
        return replace(dataset, name=self.domain)


for _domain, _folder in (
    ("art", "Art"),
    ("clipart", "Clipart"),
    ("product", "Product"),
    ("real-world", "Real World"),
):
    DATASETS.register(f"office-home/{_domain}")(OfficeHome(_domain, _folder))
