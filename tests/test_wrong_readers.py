"""Datasets that somebody read with a mistake: float pixels would be learned as black ones, and odd labels left out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dualprompt.data.memory import Given
from dualprompt.data.sources import DATASETS, ArraySource, Dataset, FileSource, PictureSource, Split
from dualprompt.data.stream import load_dataset
from dualprompt.errors import DualPromptError

PIXELS = np.random.default_rng(0).integers(0, 256, (4, 8, 6, 3), dtype=np.uint8)
LABELS = np.array([0, 0, 1, 1])
GOOD = Split(ArraySource(PIXELS), LABELS)

WRONG: dict[str, tuple[Split, str]] = {
    "between 0 and 1": (Split(ArraySource(PIXELS / 255), LABELS), "found float64 of shape (4, 8, 6, 3)"),
    "channels first": (Split(ArraySource(PIXELS.transpose(0, 3, 1, 2)), LABELS), "found uint8 of shape (4, 3, 8, 6)"),
    "grey": (Split(ArraySource(PIXELS[..., 0]), LABELS), "found uint8 of shape (4, 8, 6)"),
    "one is grey": (Split(PictureSource((*PIXELS[:3], PIXELS[3, ..., 0])), LABELS), "found uint8 of shape (8, 6)"),
    "a label too few": (Split(ArraySource(PIXELS), LABELS[:3]), "4 images need as many whole numbers as labels"),
    "a label too many": (Split(FileSource((Path("a"),) * 3), LABELS), "3 images need as many whole numbers as labels"),
    "labels from 1": (Split(ArraySource(PIXELS), LABELS + 1), "labels of 2 classes are 0 to 1, found 1 to 2"),
    "a label below 0": (Split(ArraySource(PIXELS), LABELS - 1), "labels of 2 classes are 0 to 1, found -1 to 0"),
    "labels with a point": (Split(ArraySource(PIXELS), LABELS / 1), "found float64 of shape (4,)"),
}


def loaded(made: Any) -> Dataset:
    with DATASETS.with_more({"mine": Given(made)}):
        return load_dataset("mine")


@pytest.mark.parametrize("split", ["training", "test"])
@pytest.mark.parametrize("mistake", WRONG)
def test_a_wrong_split_is_refused(mistake: str, split: str) -> None:
    wrong, found = WRONG[mistake]
    with pytest.raises(DualPromptError) as raised:
        loaded(Dataset("mine", ("a", "b"), *((wrong, GOOD) if split == "training" else (GOOD, wrong))))
    assert str(raised.value).startswith(f"dataset 'mine', {split} images: ")
    assert found in str(raised.value)


def test_what_is_no_dataset_is_refused() -> None:
    with pytest.raises(DualPromptError, match="'mine': its reader must return a Dataset, found NoneType"):
        loaded(None)


def test_a_right_one_is_taken_as_it_is() -> None:
    pictures = Split(PictureSource(tuple(PIXELS)), LABELS.astype(np.uint8))
    right = Dataset("mine", ("a", "b", "nobody's"), GOOD, pictures)
    assert loaded(right) is right
