"""CORe50: 50 household objects, filmed in eleven sessions; three of them are the official test set."""

from __future__ import annotations

from pathlib import Path

from dualprompt.data.lists import split_of
from dualprompt.data.sources import DATASETS, GROUPS, Dataset, Reader, Remote, Split, damaged, missing

FOLDER = "core50_128x128"
TEST_SESSIONS = (3, 7, 10)
KINDS = (
    "plug adapter", "mobile phone", "scissors", "light bulb", "can", "glasses", "ball", "marker", "cup",
    "remote control",
)  # fmt: skip
OBJECTS = tuple(f"{kind} {number}" for kind in KINDS for number in range(1, 6))


class Core50(Reader):
    """A training session, as a domain: `sS/oO/*.png`; every session is tested on the same images."""

    images = (None, 44_972)
    licence = "CC BY 4.0"
    seen = "has kinds of things that are classes of ImageNet"
    remotes = (
        Remote(
            urls=("http://bias.csr.unibo.it/maltoni/download/core50/core50_128x128.zip",),
            path="core50_128x128.zip",
            checksum="md5:745f3373fed08d69343f1058ee559e13",
            unpack=FOLDER,
        ),
    )

    def __init__(self, name: str) -> None:
        self.name, self.session = name, name.partition("/")[2]
        self.title = f"CORe50, session {self.session}: about 15,000 frames of 50 objects; the whole archive has 5.9 GB"

    def load(self, root: Path) -> Dataset:
        """List the frames of the session, and of the three of the test set."""
        folder = root / FOLDER
        test = self._split(folder, *(f"s{number}" for number in TEST_SESSIONS))
        return Dataset(self.session, OBJECTS, self._split(folder, self.session), test)

    def _split(self, folder: Path, *sessions: str) -> Split:
        files: list[tuple[str, int]] = []
        for session in sessions:
            for label in range(len(OBJECTS)):
                place = folder / session / f"o{label + 1}"
                if not place.is_dir():
                    raise missing(self.name, place)
                found = sorted(path.name for path in place.glob("*.png"))
                if not found:
                    raise damaged(self.name, place, "holds no .png file")
                files += [(f"{session}/{place.name}/{file}", label) for file in found]
        return split_of(self.name, folder, files)


for _name in GROUPS["core50"]:
    DATASETS.register(_name)(Core50(_name))
