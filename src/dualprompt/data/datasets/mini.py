"""`mini`: five small datasets of real pictures that come with the package, in the spirit of 5-datasets.

The pictures lie, encoded as they were taken over, in one zip file that `tools/pack_mini.py` makes:
DOMAIN/SPLIT/CLASS/NUMBER.png or .jpg. All pictures of a domain have one size.
"""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np

from dualprompt.data.cache import open_rgb
from dualprompt.data.sources import DATASETS, ArraySource, Dataset, Reader, Split
from dualprompt.files import packaged

FILE = "mini.zip"
SHA256 = "6707324178b6f7e5419fad000662e05fe12522af0e053f3799ee7cef5f55e297"
LICENCES = "mini-LICENCES.md"  # beside it


class Mini(Reader):
    """One domain of the packed pictures."""

    def __init__(self, domain: str, title: str, licence: str) -> None:
        self.domain, self.name = domain, f"mini-{domain}"
        self.title, self.licence = title, licence

    def load(self, root: Path) -> Dataset:
        """Decode all pictures into memory; `root` is not read."""
        return self.part(0, 1)

    def part(self, place: int, parts: int) -> Dataset:
        """Decode one of so many parts, which have as many pictures of each class: every `parts`-th, from a place on."""
        with zipfile.ZipFile(packaged(FILE, SHA256)) as pack:
            members = [name.split("/") for name in pack.namelist() if name.startswith(f"{self.domain}/")]
            classes = tuple(dict.fromkeys(label for _, _, label, _ in members))

            def split(wanted: str) -> Split:
                of_class = [[m for m in members if m[1:3] == [wanted, label]][place::parts] for label in classes]
                chosen = [member for mine in of_class for member in mine]
                pixels = np.stack([np.asarray(open_rgb(pack.read("/".join(member)))) for member in chosen])
                labels = [classes.index(label) for _, _, label, _ in chosen]
                return Split(ArraySource(pixels), np.array(labels, dtype=np.int64))

            return Dataset(self.name, classes, split("train"), split("test"))

    def notice(self) -> str:
        """Return the authors, source, licence and changes of these pictures."""
        _, *sections = packaged(FILE, SHA256).with_name(LICENCES).read_text(encoding="utf-8").split("\n## ")
        found = next(section for section in sections if section.startswith(f"{self.name}\n"))
        return f"## {found.strip()}\n"


for _reader in (
    Mini("clothes", "Fashion-MNIST, a part: clothes, 28 × 28 pixels, 10 classes", "MIT, © 2017 Zalando SE"),
    Mini(
        "digits",
        "MNIST, a part: handwritten digits, 28 × 28 pixels, 10 classes",
        "CC BY-SA 3.0, © Yann LeCun and Corinna Cortes",
    ),
    Mini(
        "fruit",
        "Fruits-360, a part: fruit from all sides, 100 × 100 pixels, 10 classes",
        "MIT, © 2017–2020 Mihai Oltean, Horea Muresan",
    ),
    Mini(
        "leaves",
        "PlantVillage, a part: healthy and diseased leaves, 128 × 128 pixels, 10 classes",
        "CC BY-SA 3.0, David P. Hughes, Marcel Salathé and others",
    ),
    Mini(
        "scripts",
        "Omniglot, a part: which of 8 scripts a handwritten character is from, 105 × 105 pixels",
        "MIT, © 2015 Brenden Lake",
    ),
):
    DATASETS.register(_reader.name)(_reader)
