"""Tiny-ImageNet: 200 ImageNet classes at 64 × 64 pixels; the official validation split is the test split."""

from __future__ import annotations

from pathlib import Path

from dualprompt.data.lists import lines_of, split_of
from dualprompt.data.sources import DATASETS, Dataset, Reader, Remote, Split, damaged, missing

CLASSES = 200
FOLDER = "tiny-imagenet-200"


class TinyImageNet(Reader):
    """`train/WNID/images/*.JPEG`, and `val/images` with a list of their classes; classes are sorted by WordNet id."""

    name = "tiny-imagenet"
    title = "Tiny-ImageNet: 100,000 and 10,000 photographs of 200 ImageNet classes, 64 × 64 pixels, 0.25 GB"
    licence = "as ImageNet: non-commercial research and education"
    seen = "has 200 classes of ImageNet-1k, in ImageNet's own pictures"
    seen_pictures = True
    remotes = (
        Remote(
            urls=("http://cs231n.stanford.edu/tiny-imagenet-200.zip",),
            path="tiny-imagenet-200.zip",
            checksum="md5:90528d7ca1a48142e341f4ef8d21d0de",
            size=248_100_043,
            unpack=FOLDER,
        ),
    )

    def load(self, root: Path) -> Dataset:
        """List the files of both splits."""
        folder = root / FOLDER
        wnids = sorted(lines_of(self.name, folder / "wnids.txt"))
        if len(set(wnids)) != CLASSES:
            raise damaged(self.name, folder / "wnids.txt", f"holds {len(set(wnids))} classes instead of {CLASSES}")
        labels = {wnid: label for label, wnid in enumerate(wnids)}
        words = dict(line.split("\t", 1) for line in lines_of(self.name, folder / "words.txt") if "\t" in line)
        firsts = [words.get(wnid, wnid).split(",")[0].strip() for wnid in wnids]
        names = tuple(name if firsts.count(name) == 1 else wnid for name, wnid in zip(firsts, wnids, strict=True))
        return Dataset(self.name, names, self._train(folder, wnids), self._test(folder, labels))

    def _train(self, folder: Path, wnids: list[str]) -> Split:
        files: list[tuple[str, int]] = []
        for label, wnid in enumerate(wnids):
            place = folder / "train" / wnid / "images"
            if not place.is_dir():
                raise missing(self.name, place)
            files += [(f"train/{wnid}/images/{path.name}", label) for path in sorted(place.glob("*.JPEG"))]
        return split_of(self.name, folder, files)

    def _test(self, folder: Path, labels: dict[str, int]) -> Split:
        path = folder / "val" / "val_annotations.txt"
        marks = [line.split("\t") for line in lines_of(self.name, path)]
        if strange := next((mark for mark in marks if len(mark) < 2 or mark[1] not in labels), None):
            raise damaged(self.name, path, f"holds '{' '.join(strange)[:80]}', which names no class of wnids.txt")
        return split_of(self.name, folder, [(f"val/images/{mark[0]}", labels[mark[1]]) for mark in marks])


DATASETS.register("tiny-imagenet")(TinyImageNet())
