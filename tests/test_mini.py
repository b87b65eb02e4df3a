import hashlib
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageDraw
from sklearn.datasets import load_digits

from dualprompt.data.datasets import mini
from dualprompt.data.sources import DATASETS, GROUPS, ArraySource, Dataset, Split

NAMES = GROUPS["mini"]
NOWHERE = Path("/nonexistent")


@lru_cache
def loaded(name: str) -> Dataset:
    return DATASETS[name].load(NOWHERE)


def pixels(split: Split) -> np.ndarray:
    assert isinstance(split.source, ArraySource)
    return split.source.pixels


def nearest_mean_accuracy(dataset: Dataset, train: np.ndarray, test: np.ndarray) -> float:
    means = np.stack([train[dataset.train.labels == label].mean(0) for label in range(len(dataset.classes))])
    distances = ((test[:, None] - means) ** 2).sum(-1)
    return float((distances.argmin(1) == dataset.test.labels).mean())


def test_five_datasets_of_fifty_distinct_classes():
    assert len(NAMES) == 5
    classes = [(name, c) for name in NAMES for c in loaded(name).classes]
    assert len(set(classes)) == 50


@pytest.mark.parametrize("name", NAMES)
def test_balanced_colour_images(name: str):
    dataset = loaded(name)
    assert dataset.name == name
    for split, per_class in ((dataset.train, mini.TRAIN_PER_CLASS), (dataset.test, mini.TEST_PER_CLASS)):
        images = pixels(split)
        assert images.shape == (10 * per_class, mini.SIZE, mini.SIZE, 3)
        assert images.dtype == np.uint8
        assert split.labels.dtype == np.int64
        assert np.bincount(split.labels).tolist() == [per_class] * 10
        red, green, blue = np.moveaxis(images.astype(int), -1, 0)
        colourful = (abs(red - green) + abs(green - blue)).mean(axis=(1, 2))
        assert (colourful > 10).mean() > 0.9
        assert images.std(axis=(1, 2)).max(axis=-1).min() > 5, "an image shows nothing"


@pytest.mark.parametrize("name", NAMES)
def test_no_image_occurs_twice_in_either_split(name: str):
    dataset = loaded(name)
    images = [*pixels(dataset.train), *pixels(dataset.test)]
    assert len({hashlib.sha256(image.tobytes()).digest() for image in images}) == len(images)


@pytest.mark.parametrize("name", NAMES)
def test_an_image_depends_on_its_own_identity_only(name: str, monkeypatch: pytest.MonkeyPatch):
    whole = loaded(name)
    monkeypatch.setattr(mini, "TRAIN_PER_CLASS", 3)
    monkeypatch.setattr(mini, "TEST_PER_CLASS", 2)
    np.random.seed(1)  # global state must not matter
    few = DATASETS[name].load(NOWHERE)
    for label in range(10):
        for small, large, count in ((few.train, whole.train, 3), (few.test, whole.test, 2)):
            kept = pixels(large)[large.labels == label][:count]
            np.testing.assert_array_equal(pixels(small)[small.labels == label], kept)


def test_no_handwritten_digit_serves_both_splits():
    pools = mini._digits()
    drawings = {split: [] for split in ("train", "test")}
    for label in range(10):
        assert len(pools[label, "train"]) >= mini.TRAIN_PER_CLASS
        assert len(pools[label, "test"]) >= mini.TEST_PER_CLASS
        for split, seen in drawings.items():
            seen += [digit.tobytes() for digit in pools[label, split]]
    assert len(drawings["train"]) + len(drawings["test"]) == len(load_digits(return_X_y=True)[1])
    assert not set(drawings["train"]) & set(drawings["test"])


def rendered(font: str, letter: str) -> bytes:
    image = Image.new("L", (128, 128))
    ImageDraw.Draw(image).text((64, 64), letter, fill=255, font=mini._font(font), anchor="mm")
    return image.tobytes()


def test_some_fonts_are_for_testing_only_and_every_font_has_every_letter():
    assert not set(mini.Letters.train_fonts) & set(mini.Letters.test_fonts)
    for name in mini.Letters.train_fonts + mini.Letters.test_fonts:
        *glyphs, missing = (rendered(name, letter) for letter in (*mini.Letters.classes, "\uffff"))
        assert len({missing, *glyphs}) == 11, name


@pytest.mark.parametrize("name", NAMES)
def test_raw_pixels_and_colours_do_not_give_the_class_away(name: str):
    dataset = loaded(name)

    def small(split: Split) -> np.ndarray:
        coarse = pixels(split).reshape(len(split), 8, mini.SIZE // 8, 8, mini.SIZE // 8, 3).mean((2, 4))
        return coarse.reshape(len(split), -1)

    assert nearest_mean_accuracy(dataset, small(dataset.train), small(dataset.test)) < 0.25


@pytest.mark.parametrize("name", NAMES)
def test_form_tells_the_classes_apart(name: str):
    """Where edges are and how they lie, blind to colour and to which side is darker."""
    dataset = loaded(name)

    def edges(split: Split) -> np.ndarray:
        grey = pixels(split).astype(np.float32).mean(-1)
        down, across = np.gradient(grey, axis=(1, 2))
        direction = ((np.arctan2(down, across) % np.pi) / np.pi * 6).astype(int).clip(0, 5)
        strength = np.hypot(down, across) * (np.arange(6)[:, None, None, None] == direction)
        cells = strength.reshape(6, len(split), 4, mini.SIZE // 4, 4, mini.SIZE // 4).mean((3, 5))
        features = np.moveaxis(cells, 0, -1).reshape(len(split), -1)
        return features / np.linalg.norm(features, axis=1, keepdims=True)

    assert nearest_mean_accuracy(dataset, edges(dataset.train), edges(dataset.test)) > 0.25
