"""What pixels alone tell of many images: which are copies of each other, and which are blurred."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

BITS = 64  # of a dHash
NEAR_BITS = 5  # in which near copies differ at most
NEAR_SHADES = 8.0  # of 255, by which their thumbnails differ at most on average: flat images of any colour hash alike
BLURRED = 0.02  # of the folder's median sharpness, below which an image is called blurred
FEWEST_TO_COMPARE = 8  # images, below which a median says nothing
THUMBNAIL = 16  # pixels a side
CHUNK = 64  # images looked at in one go: their shades are numbers of four bytes
ROWS = 512  # compared with all others at a time, so that 50,000 images fit into memory

_GREY = (np.float32(0.299), np.float32(0.587), np.float32(0.114))


@dataclass(frozen=True)
class Looks:
    """What is kept of each image to compare it with the others."""

    contents: tuple[str, ...]  # a hash of the pixels
    hashes: np.ndarray  # (images, 64) ±1, dHash: where a 9 × 8 thumbnail grows brighter to the right
    thumbnails: np.ndarray  # (images, 16 · 16 · 3) uint8
    sharpness: np.ndarray  # (images,) the variance of the Laplacian of the greys

    @staticmethod
    def of(pixels: np.ndarray) -> Looks:
        """Look at images, (images, side, side, 3) uint8."""
        shades = pixels.astype(np.float32)
        grey = _GREY[0] * shades[..., 0] + _GREY[1] * shades[..., 1] + _GREY[2] * shades[..., 2]
        small = _shrunk(grey[..., None], 8, 9)[..., 0]
        brighter = small[:, :, 1:] > small[:, :, :-1]
        thumbnails = _shrunk(shades, THUMBNAIL, THUMBNAIL).reshape(len(pixels), -1)
        return Looks(
            contents=tuple(hashlib.blake2b(image.tobytes(), digest_size=16).hexdigest() for image in pixels),
            hashes=np.where(brighter, 1, -1).astype(np.float32).reshape(-1, BITS),
            thumbnails=thumbnails.round().astype(np.uint8),
            sharpness=_sharpness(grey),
        )

    @staticmethod
    def joined(parts: list[Looks]) -> Looks:
        """Return the looks at all images of several parts."""
        return Looks(
            contents=tuple(content for part in parts for content in part.contents),
            hashes=np.concatenate([part.hashes for part in parts]),
            thumbnails=np.concatenate([part.thumbnails for part in parts]),
            sharpness=np.concatenate([part.sharpness for part in parts]),
        )

    @staticmethod
    def at(pixels: np.ndarray) -> Looks:
        """Look at any number of images, some at a time."""
        return Looks.joined([Looks.of(pixels[start : start + CHUNK]) for start in range(0, len(pixels), CHUNK)])

    def alike(self, labels: np.ndarray) -> np.ndarray | None:
        """Return numbers, (images,), that images of one class share with their copies; None: there are no copies.

        A copy under another label is no copy here: it stays what speaks against this one.
        """
        shared = np.arange(len(labels))
        for rows, _ in self.copies:
            for label in np.unique(labels[rows]):
                mine = [row for row in rows if labels[row] == label]
                shared[mine] = mine[0]
        return shared if (shared != np.arange(len(labels))).any() else None

    @cached_property
    def copies(self) -> list[tuple[list[int], bool]]:
        """Groups of images that are copies of each other, and whether all of a group are exact ones."""
        first = {content: row for row, content in reversed(list(enumerate(self.contents)))}
        exact = [(first[content], row) for row, content in enumerate(self.contents) if first[content] != row]
        pairs = np.array([*exact, *self._near(sorted(first.values()))], np.int64).reshape(-1, 2)
        count = len(self.contents)
        graph = coo_array((np.ones(len(pairs), bool), (pairs[:, 0], pairs[:, 1])), shape=(count, count))
        group = connected_components(graph, directed=False)[1]
        order = np.argsort(group, kind="stable")
        found = np.split(order, np.flatnonzero(np.diff(group[order])) + 1)
        rows = sorted(each.tolist() for each in found if len(each) > 1)
        return [(own, len({self.contents[row] for row in own}) == 1) for own in rows]

    def _near(self, rows: list[int]) -> list[tuple[int, int]]:
        """Return pairs among images of different content that look alike."""
        mine, found = np.array(rows, np.int64), []
        hashes = self.hashes[mine]
        for start in range(0, len(mine), ROWS):
            alike = hashes[start : start + ROWS] @ hashes[start:].T  # a bit that differs takes 2 from 64
            one, other = np.nonzero(alike >= BITS - 2 * NEAR_BITS)
            one, other = mine[start:][one[one < other]], mine[start:][other[one < other]]
            for part in np.array_split(np.arange(len(one)), max(1, len(one) // 10_000)):
                a, b = (self.thumbnails[which[part]].astype(np.int16) for which in (one, other))
                near = np.abs(a - b).mean(axis=1) <= NEAR_SHADES
                found.extend(zip(one[part][near].tolist(), other[part][near].tolist(), strict=True))
        return found

    def blurred(self) -> dict[int, float]:
        """Return the images that are far less sharp than most, and their share of the median sharpness."""
        if len(self.sharpness) < FEWEST_TO_COMPARE:
            return {}
        share = self.sharpness / max(float(np.median(self.sharpness)), 1e-6)
        return {row: float(share[row]) for row in np.argsort(share, kind="stable").tolist() if share[row] < BLURRED}


def _shrunk(images: np.ndarray, height: int, width: int) -> np.ndarray:
    """Return (images, height, width, channels) means over equal parts of (images, side, side, channels)."""
    count, side, _, channels = images.shape
    rows = _parts(height, side) @ images.reshape(count, side, side * channels)  # as products, which are quick
    return _parts(width, side) @ rows.reshape(count, height, side, channels)


def _parts(parts: int, side: int) -> np.ndarray:
    """Return (parts, side) weights that take the mean over each of equal parts, which share the pixels between them."""
    edges = np.linspace(0, side, parts + 1)
    pixels = np.arange(side)
    covered = np.minimum(edges[1:, None], pixels + 1) - np.maximum(edges[:-1, None], pixels)
    return (np.clip(covered, 0, 1) * parts / side).astype(np.float32)


def _sharpness(grey: np.ndarray) -> np.ndarray:
    inner = grey[:, 1:-1, 1:-1]
    around = grey[:, :-2, 1:-1] + grey[:, 2:, 1:-1] + grey[:, 1:-1, :-2] + grey[:, 1:-1, 2:]
    return (around - 4 * inner).var(axis=(1, 2))
