from __future__ import annotations

import shutil
from pathlib import Path, PurePath

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dualprompt.data.folder import left_out, load_folder
from dualprompt.data.sources import FileSource, Split
from dualprompt.errors import DualPromptError


def fill(folder: Path, **counts: int) -> Path:
    """Write files with image names; reading a folder opens none of them."""
    for name, count in counts.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        for i in range(count):
            (folder / name / f"{i:03}.jpg").write_bytes(b"")
    return folder


def names(split: Split, root: Path) -> list[str]:
    assert isinstance(split.source, FileSource)
    assert len(split.source.paths) == len(split.labels)
    assert split.labels.dtype == np.int64
    return [path.relative_to(root).as_posix() for path in split.source.paths]


@settings(deadline=None)  # it writes files
@given(counts=st.lists(st.integers(2, 30), min_size=1, max_size=4), share=st.floats(0.01, 0.99))
def test_every_image_is_in_one_split_and_every_class_in_both(
    tmp_path_factory: pytest.TempPathFactory, counts: list[int], share: float
):
    root = fill(tmp_path_factory.mktemp("root"), **{f"c{i}": count for i, count in enumerate(counts)})
    dataset = load_folder(root, share)
    train, test = names(dataset.train, root), names(dataset.test, root)
    assert sorted(train + test) == sorted(path.relative_to(root).as_posix() for path in root.rglob("*.jpg"))
    for label, count in enumerate(counts):
        in_test = int((dataset.test.labels == label).sum())
        assert in_test == min(max(1, round(count * share)), count - 1)
    for split, listed in ((dataset.train, train), (dataset.test, test)):
        assert [dataset.classes[label] for label in split.labels] == [name.split("/")[0] for name in listed]
        assert listed == sorted(listed)
    shutil.rmtree(root)


def test_split_depends_on_relative_paths_alone(tmp_path: Path):
    first, second = (fill(tmp_path / place, cat=20, dog=10) for place in ("here", "there/deep"))
    splits = [names(load_folder(root, 0.3).test, root) for root in (first, second)]
    assert splits[0] == splits[1]
    before = set(splits[0])
    fill(first, cat=21)
    assert len(before - set(names(load_folder(first, 0.3).test, first))) <= 1


def test_names_extensions_and_what_is_ignored(tmp_path: Path):
    root = fill(tmp_path / "pets", dog=1, cat=1)
    wanted = ["cat/a.JPEG", "cat/b.png", "cat/deeper/still/c.WebP", "cat/d.tif", "cat/e.tiff", "cat/f.GIF"]
    ignored = [
        "cat/Thumbs.db",
        "cat/.hidden.jpg",
        "cat/.git/x.png",
        "cat/notes.txt",
        ".trash/x.jpg",
        "stray.jpg",
    ]
    for name in [*wanted, *ignored, "dog/g.bmp", "dog/h.ppm"]:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"")
    dataset = load_folder(root, 0.5)
    assert dataset.name == "pets"
    assert dataset.classes == ("cat", "dog")
    listed = names(dataset.train, root) + names(dataset.test, root)
    assert sorted(listed) == sorted([*wanted, "cat/000.jpg", "dog/000.jpg", "dog/g.bmp", "dog/h.ppm"])


@pytest.mark.parametrize("held_out", ["test", "val"])
def test_train_and_test_folders_are_taken_as_they_are(tmp_path: Path, held_out: str):
    fill(tmp_path / "train", b=3, a=1)
    fill(tmp_path / held_out, a=2, b=1)
    fill(tmp_path, meta=4)
    dataset = load_folder(tmp_path, 0.2)
    assert dataset.classes == ("a", "b")
    assert names(dataset.train, tmp_path) == ["train/a/000.jpg", *(f"train/b/00{i}.jpg" for i in range(3))]
    assert dataset.test.labels.tolist() == [0, 0, 1]
    assert names(dataset.test, tmp_path)[0] == f"{held_out}/a/000.jpg"


def test_test_wins_over_val(tmp_path: Path):
    for name in ("train", "val", "test"):
        fill(tmp_path / name, a=1, b=1)
    assert names(load_folder(tmp_path, 0.2).test, tmp_path) == ["test/a/000.jpg", "test/b/000.jpg"]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda root: None, "does not exist"),
        (lambda root: root.write_text("x"), "is not a folder"),
        (lambda root: root.mkdir(), "holds no class folders"),
        (lambda root: fill(root, cat=2, dog=0, eel=0), "without images: 'dog', 'eel'; "),
        (lambda root: fill(root, cat=2, dog=1), "a single image of 'dog'; "),
        (
            lambda root: fill(root / "train", cat=2, dog=2),
            "holds only 'train'; it needs both train/ and test/",
        ),
        (
            lambda root: (fill(root / "train", cat=2), fill(root / "test", cat=1, dog=2)),
            "one of them has 'dog'",
        ),
        (lambda root: (fill(root / "train", cat=2, ox=1), fill(root / "val", cat=1)), "one of them has 'ox'"),
        (lambda root: (fill(root / "train", cat=2), fill(root / "val", cat=0)), "val has .* images: 'cat'"),
        (lambda root: (fill(root / "train", cat=2), (root / "test").mkdir()), "test holds no class folders"),
    ],
)
def test_refusals_name_the_place_and_the_remedy(tmp_path: Path, make, message: str):
    root = tmp_path / "root"
    make(root)
    with pytest.raises(DualPromptError, match=message) as error:
        load_folder(root, 0.2)
    assert str(root) in str(error.value)
    assert "\n" not in str(error.value)


def test_names_that_look_the_same_are_one_class(tmp_path: Path):
    composed, apart = "caf\u00e9", "cafe\u0301"
    fill(tmp_path / "one", **{composed: 3, "tea": 2})
    fill(tmp_path / "two" / "train", **{composed: 3, "tea": 2})
    fill(tmp_path / "two" / "test", **{apart: 2, "tea": 2})
    fill(tmp_path / "one", **{apart: 4})
    assert len(list((tmp_path / "one").iterdir())) == 3
    one = load_folder(tmp_path / "one", 0.5)
    assert one.classes == (composed, "tea")
    assert sum(int((split.labels == 0).sum()) for split in (one.train, one.test)) == 7
    assert load_folder(tmp_path / "two", 0.5).classes == (composed, "tea")


@pytest.mark.parametrize("names", [("cat", "Cat"), ("stra\u00dfe", "STRASSE"), ("E\u0301t\u00e9", "\u00e9te\u0301")])
def test_names_that_differ_by_case_only_are_refused(names: tuple[str, str], tmp_path: Path):
    fill(tmp_path, **dict.fromkeys(names, 2))
    with pytest.raises(DualPromptError, match="differ by case only; rename one of them"):
        load_folder(tmp_path, 0.5)


def test_what_is_left_out_of_a_folder_of_many_is_found_by_one_look_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    fill(tmp_path, **{f"c{i}": 1 for i in range(100)})
    for i in range(100):
        (tmp_path / f"{i}.txt").touch()
    compared, equal = 0, PurePath.__eq__

    def counting(one: PurePath, other: object) -> bool:
        nonlocal compared
        compared += 1
        return equal(one, other)

    monkeypatch.setattr(PurePath, "__eq__", counting)
    assert len(left_out(tmp_path)) == 100
    assert compared < 1000  # with 20,000 files beside 2,000 classes it took 38 s to compare each with each
