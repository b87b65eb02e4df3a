"""CUB-200-2011: 11,788 photographs of 200 species of birds, with the official split."""

from __future__ import annotations

from pathlib import Path

from dualprompt.data.lists import number_of, pairs_of, split_of
from dualprompt.data.sources import DATASETS, Dataset, Reader, Remote, damaged

CLASSES = 200


class Cub200(Reader):
    """Lists of images, labels and splits, each line with an image's number, beside a folder of images."""

    name = "cub200"
    title = "CUB-200-2011: 5,994 and 5,794 photographs of 200 species of birds, 1.2 GB"
    images = (5_994, 5_794)
    licence = "non-commercial research and education; cite C. Wah et al., The Caltech-UCSD Birds-200-2011 Dataset, 2011"
    seen = "shares species, and some photographs, with ImageNet"
    remotes = (
        Remote(
            urls=(
                "https://data.caltech.edu/records/65de6-vp158/files/CUB_200_2011.tgz",
                "http://www.vision.caltech.edu/visipedia-data/CUB-200-2011/CUB_200_2011.tgz",
            ),
            path="CUB_200_2011.tgz",
            checksum="md5:97eceeb196236b17998738112f37df78",
            size=1_150_585_339,
            unpack="CUB_200_2011",
        ),
    )

    def load(self, root: Path) -> Dataset:
        """List the files of both splits."""
        folder = root / "CUB_200_2011"
        classes = self._by_number(folder / "classes.txt")
        if len(classes) != CLASSES:
            raise damaged(self.name, folder / "classes.txt", f"holds {len(classes)} classes instead of {CLASSES}")
        numbers = {number: label for label, number in enumerate(classes)}
        images = self._by_number(folder / "images.txt")
        path = folder / "image_class_labels.txt"
        labels = self._by_number(path, images)
        if strange := next((label for label in labels.values() if label not in numbers), None):
            raise damaged(self.name, path, f"holds class '{strange[:40]}', which classes.txt has not")
        path = folder / "train_test_split.txt"
        trains = {image: number_of(self.name, path, text, 2) for image, text in self._by_number(path, images).items()}
        test, train = (
            split_of(
                self.name,
                folder / "images",
                [(images[image], numbers[labels[image]]) for image in images if trains[image] == wanted],
            )
            for wanted in (0, 1)
        )
        return Dataset(self.name, tuple(classes.values()), train, test)

    def _by_number(self, path: Path, images: dict[str, str] | None = None) -> dict[str, str]:
        """Return the lines of a file by the number that begins each, which must be those of the images."""
        found = dict(pairs_of(self.name, path))
        if images is not None and found.keys() != images.keys():
            raise damaged(self.name, path, f"speaks of other images than images.txt ({len(found)}, not {len(images)})")
        return found


DATASETS.register("cub200")(Cub200())
