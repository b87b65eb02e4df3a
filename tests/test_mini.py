"""The pictures of `mini`: whole, as they were packed, and with what must be said of them."""

import hashlib
import importlib.util
import json
import shutil
import zipfile
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest

from dualprompt.data.datasets import mini
from dualprompt.data.sources import DATASETS, GROUPS, ArraySource, Dataset, Split
from dualprompt.errors import DualPromptError
from dualprompt.files import packaged
from dualprompt.learner import ContinualLearner
from sandbox import call

NAMES = GROUPS["mini"]
NOWHERE = Path("/nonexistent")
SIDES = {"mini-clothes": 28, "mini-digits": 28, "mini-fruit": 100, "mini-leaves": 128, "mini-scripts": 105}
TOOL = Path(__file__).parent.parent / "tools" / "pack_mini.py"


@lru_cache
def loaded(name: str) -> Dataset:
    return DATASETS[name].load(NOWHERE)


def pixels(split: Split) -> np.ndarray:
    assert isinstance(split.source, ArraySource)
    return split.source.pixels


def test_five_datasets_of_48_distinct_classes():
    assert tuple(SIDES) == NAMES
    assert [len(loaded(name).classes) for name in NAMES] == [10, 10, 10, 10, 8]
    assert len({label for name in NAMES for label in loaded(name).classes}) == 48


@pytest.mark.parametrize("name", NAMES)
def test_every_class_has_40_training_and_20_test_pictures(name: str):
    dataset, side = loaded(name), SIDES[name]
    assert dataset.name == name
    for split, per_class in ((dataset.train, 40), (dataset.test, 20)):
        images, classes = pixels(split), len(dataset.classes)
        assert (images.shape, images.dtype) == ((classes * per_class, side, side, 3), np.uint8)
        assert split.labels.dtype == np.int64
        assert np.bincount(split.labels).tolist() == [per_class] * classes
        assert images.std(axis=(1, 2)).max(axis=-1).min() > 5, "a picture shows nothing"


@pytest.mark.parametrize("name", NAMES)
def test_no_picture_occurs_twice_in_either_split(name: str):
    dataset = loaded(name)
    images = [*pixels(dataset.train), *pixels(dataset.test)]
    assert len({hashlib.sha256(image.tobytes()).digest() for image in images}) == len(images)


def test_labels_are_those_of_the_pictures():
    """By what is known of them: a one has little ink, a trouser is narrow, a golden apple is yellower than a plum."""
    digits, clothes, fruit = (loaded(f"mini-{domain}") for domain in ("digits", "clothes", "fruit"))

    def mean(dataset: Dataset, label: str, where: tuple[slice, ...] = (slice(None),)) -> np.ndarray:
        chosen = pixels(dataset.train)[dataset.train.labels == dataset.classes.index(label)]
        return chosen[(slice(None), *where)].mean((0, 1, 2))

    assert mean(digits, "one")[0] == min(mean(digits, label)[0] for label in digits.classes)
    left = (slice(None), slice(0, 6))
    assert mean(clothes, "trousers", left)[0] < mean(clothes, "pullover", left)[0] / 4
    golden, plum = mean(fruit, "apple-golden"), mean(fruit, "plum")
    assert golden[0] - golden[2] > plum[0] - plum[2] + 10


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "wrong SHA-256"),
        (lambda path: path.write_bytes(path.read_bytes().replace(b"\xff\xd8", b"\xff\xd9", 1)), "wrong SHA-256"),
        (lambda path: path.unlink(), "No such file"),
    ],
)
def test_a_damaged_file_of_the_package_is_told(damage, reason, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    whole = packaged(mini.FILE, mini.SHA256)
    monkeypatch.setattr("dualprompt.files.ASSETS", tmp_path)
    path = tmp_path / mini.FILE
    shutil.copyfile(whole, path)
    DATASETS["mini-digits"].load(NOWHERE)
    damage(path)
    with pytest.raises(DualPromptError) as refused:
        DATASETS["mini-digits"].load(NOWHERE)
    message = str(refused.value)
    assert message.startswith(f"{path}, which comes with dualprompt, is damaged ({reason}")
    assert message.endswith("install dualprompt again")
    assert "\n" not in message


def test_whose_the_pictures_are_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    shown = call("data", "show", "mini").out
    for name in NAMES:
        assert f"## {name}" in shown
        assert f"licence: {DATASETS[name].licence}" in " ".join(shown.split()), "a caption is broken into lines"
    assert shown.count("Permission is hereby granted, free of charge") == 3
    assert shown.count("https://creativecommons.org/licenses/by-sa/3.0/legalcode") == 2
    for holder in ("2017 Zalando SE", "2017-2020 Mihai Oltean, Horea Muresan", "2015 Brenden Lake"):
        assert f"Copyright (c) {holder}" in shown
    assert not list(tmp_path.iterdir())  # it writes nothing unless it is told where
    one = call("data", "show", "mini-leaves", "--out", tmp_path / "new" / "leaves.png", "--json").json
    assert one["licence"].startswith("CC BY-SA 3.0")
    assert "resized to 128×128" in one["notice"]
    assert one["gallery"] == str(tmp_path / "new" / "leaves.png")
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["leaves.png"]
    assert "--out names a PNG" in call("data", "show", "mini-leaves", "--out", "leaves.jpg").error


def test_the_same_pictures_are_packed_into_the_same_bytes(tmp_path: Path):
    spec = importlib.util.spec_from_file_location("pack_mini", TOOL)
    assert spec is not None
    assert spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    whole = packaged(mini.FILE, mini.SHA256)
    assert whole.stat().st_size < 8e6
    with zipfile.ZipFile(whole) as pack:
        assert {member.compress_type for member in pack.infolist()} == {zipfile.ZIP_STORED}
        pack.extractall(tmp_path / "pictures")
    assert tool.pack(tmp_path / "pictures", tmp_path / "again.zip") == mini.SHA256


def test_the_embedded_backbone_tells_leaves_it_has_hardly_seen():
    """Weights, normalisation, size and labels all fit: three pictures a class, nearest class mean, 224 pixels."""
    dataset, learner = loaded("mini-leaves"), ContinualLearner(method="simple-cil", device="cpu")
    assert learner.side == 224

    def some(split: Split, count: int) -> dict[str, list[np.ndarray]]:
        return {
            name: list(pixels(split)[split.labels == label][:count]) for label, name in enumerate(dataset.classes[:5])
        }

    learner.learn(some(dataset.train, 3))
    assert learner.evaluate(some(dataset.test, 3)).accuracy > 75  # chance is 20


def test_the_preset_runs_from_end_to_end(tmp_path: Path):
    """All five tasks in their order, with the baseline; few images and few pixels, for time."""
    little = ("--benchmark.train_per_class", 2, "--train.epochs", 1, "--backbone.input_size", 32, "--device", "cpu")
    done = call("run", "mini", *little, "--out", tmp_path / "run")
    assert done.code == 0, done.err
    for folder in (tmp_path / "run", tmp_path / "run" / "baseline"):
        result = json.loads((folder / "result.json").read_text())
        assert result["tasks"] == list(NAMES)
        assert [len(row) for row in result["accuracy_matrix"]] == [1, 2, 3, 4, 5]
