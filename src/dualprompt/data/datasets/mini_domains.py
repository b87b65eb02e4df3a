"""`mini-domains`: the fruit of `mini` in four looks, a small domain-incremental benchmark that needs no download.

The domains are made, not found: each picture is changed in a way that leaves its class what it is. No picture is in two
domains. For domains of the world, take CORe50, DomainNet or Office-Home.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from dualprompt.data.datasets.mini import Mini
from dualprompt.data.sources import DATASETS, ArraySource, Dataset, Reader, Split

Look = Callable[[np.ndarray], np.ndarray]  # pixels to pixels, (images, height, width, 3) uint8


def photo(pixels: np.ndarray) -> np.ndarray:
    """Return pictures as they are."""
    return pixels


def grey(pixels: np.ndarray) -> np.ndarray:
    """Return pictures without colour."""
    return np.repeat(_brightness(pixels).round().astype(np.uint8)[..., None], 3, axis=-1)


def negative(pixels: np.ndarray) -> np.ndarray:
    """Return pictures in the opposite colours."""
    return 255 - pixels


def sketch(pixels: np.ndarray) -> np.ndarray:
    """Return dark lines on white, where the brightness changes."""
    down, across = np.gradient(_brightness(pixels), axis=(1, 2))
    drawn = 255 - np.clip(6 * np.hypot(down, across), 0, 255)
    return np.repeat(drawn.round().astype(np.uint8)[..., None], 3, axis=-1)


def _brightness(pixels: np.ndarray) -> np.ndarray:
    return pixels @ np.array([0.299, 0.587, 0.114])


LOOKS: dict[str, Look] = {"photo": photo, "grey": grey, "negative": negative, "sketch": sketch}
FRUIT = Mini("fruit", "", "MIT, © 2017–2020 Mihai Oltean, Horea Muresan")


class MiniDomain(Reader):
    """A part of the fruit of `mini`, in one look."""

    licence = FRUIT.licence

    def __init__(self, look: str) -> None:
        self.look, self.name = look, f"mini-domains/{look}"
        self.title = f"Fruits-360, a part: fruit, as {look}, 100 × 100 pixels, 10 classes"

    def load(self, root: Path) -> Dataset:
        """Take every fourth picture of each class, another one for each domain, and change it."""
        fruit = FRUIT.part(list(LOOKS).index(self.look), len(LOOKS))
        return Dataset(self.look, fruit.classes, self._changed(fruit.train), self._changed(fruit.test))

    def _changed(self, split: Split) -> Split:
        assert isinstance(split.source, ArraySource)
        return Split(ArraySource(LOOKS[self.look](split.source.pixels)), split.labels)

    def notice(self) -> str:
        """Return what is said of the fruit, and that it was changed."""
        return f"{FRUIT.notice()}\nOf these, `{self.name}` has a quarter, changed to look as: {self.look}.\n"


for _look in LOOKS:
    DATASETS.register(f"mini-domains/{_look}")(MiniDomain(_look))
