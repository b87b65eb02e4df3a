import io
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

from dualprompt.data.gallery import gallery, summary, table
from dualprompt.data.sources import ArraySource, Dataset, FileSource, Split
from dualprompt.errors import DualPromptError

COLOURS = ((200, 0, 0), (0, 200, 0), (0, 0, 200))


def array_dataset(classes: int = 3, each: int = 5) -> Dataset:
    labels = np.repeat(np.arange(classes), each)
    pixels = np.zeros((len(labels), 28, 28, 3), np.uint8)
    pixels[:] = np.array(COLOURS, np.uint8)[labels % 3][:, None, None]
    names = tuple(f"class {label}" for label in range(classes))
    test = Split(ArraySource(pixels[::each]), labels[::each])
    return Dataset("flat", names, Split(ArraySource(pixels), labels), test)


def file_dataset(folder: Path) -> Dataset:
    """Two classes of files of many sizes, kinds and modes; the second has fewer images than a row."""
    kinds = [
        ("RGB", (200, 50), "jpg"),
        ("L", (30, 90), "png"),
        ("RGBA", (64, 64), "png"),
        ("P", (7, 5), "gif"),
    ]
    paths = []
    for index, (mode, size, extension) in enumerate(kinds):
        paths.append(folder / f"{index}.{extension}")
        Image.new(mode, size, 90).save(paths[-1])
    train = Split(FileSource(tuple(paths)), np.array([0, 0, 0, 1]))
    return Dataset("files", ("many", "few"), train, Split(FileSource(tuple(paths[:2])), np.array([0, 1])))


def cells(picture: Image.Image, rows: int, columns: int, side: int) -> np.ndarray:
    """The squares of a gallery without a footer: (rows, columns, side, side, 3)."""
    pixels = np.asarray(picture)
    tops = [picture.height - 12 - side - row * (side + 4) for row in reversed(range(rows))]
    lefts = [picture.width - 12 - side - column * (side + 4) for column in reversed(range(columns))]
    return np.stack([[pixels[y : y + side, x : x + side] for x in lefts] for y in tops])


def test_each_class_has_a_row_of_its_images(tmp_path: Path):
    path = gallery(array_dataset(), tmp_path / "new" / "flat.png", per_class=4, side=40)
    with Image.open(path) as picture:
        assert picture.format == "PNG"
        assert picture.height == 2 * 12 + 3 * 44 - 4
        squares = cells(picture, rows=3, columns=4, side=40)
        names = np.asarray(picture.convert("L"))[:, : picture.width - 4 * 44 - 12]
    for row, colour in enumerate(COLOURS):
        assert (squares[row] == colour).all()
        assert (names[12 + 44 * row : 12 + 44 * row + 40] < 128).any(), "a class without its name"
    assert [entry.name for entry in path.parent.iterdir()] == ["flat.png"]


def test_files_keep_their_proportions_and_short_classes_leave_blanks(tmp_path: Path):
    path = gallery(file_dataset(tmp_path), tmp_path / "files.png", per_class=3, side=40)
    with Image.open(path) as picture:
        squares = cells(picture, rows=2, columns=3, side=40)
    inked = squares.min(axis=-1) < 250
    wide, tall = inked[0, 0], inked[0, 1]
    assert (wide.any(1).sum(), wide.any(0).sum()) == (10, 40)
    assert (tall.any(1).sum(), tall.any(0).sum()) == (40, 13)
    assert inked[1, 0].any()
    assert not inked[1, 1:].any()


def test_an_unreadable_file_is_crossed_out_and_named(tmp_path: Path):
    dataset = file_dataset(tmp_path)
    (tmp_path / "1.png").write_bytes(b"not an image")
    with Image.open(gallery(dataset, tmp_path / "files.png", per_class=3, side=40)) as picture:
        squares = cells(picture, rows=2, columns=3, side=40)
    assert (squares[0, 1] == (255, 0, 0)).all(-1).any()
    assert not (squares[0, 0] == (255, 0, 0)).all(-1).any()
    assert set(summary(dataset)["unreadable"]) == {str(tmp_path / "1.png")}


def test_images_are_spread_over_the_class(tmp_path: Path):
    shades = np.arange(100, dtype=np.uint8)
    split = Split(ArraySource(np.tile(shades[:, None, None, None], (1, 8, 8, 3))), np.zeros(100, np.int64))
    path = gallery(Dataset("shades", ("grey",), split, split), tmp_path / "a.png", per_class=4, side=8)
    with Image.open(path) as picture:
        assert cells(picture, rows=1, columns=4, side=8)[0, :, 0, 0, 0].tolist() == [0, 25, 50, 75]


def test_classes_beyond_the_limit_are_counted(tmp_path: Path):
    def height(classes: int) -> tuple[int, bool]:
        path = gallery(array_dataset(classes), tmp_path / "a.png", max_classes=3, side=16)
        with Image.open(path) as picture:
            below = np.asarray(picture.convert("L"))[12 + 3 * 20 :]
            return picture.height, bool((below < 200).any())

    at_limit, beyond = height(3), height(7)
    assert beyond[0] > at_limit[0]
    assert (at_limit[1], beyond[1]) == (False, True)


def test_the_test_split_can_be_shown(tmp_path: Path):
    dataset = array_dataset()
    black = Split(ArraySource(np.zeros((3, 9, 9, 3), np.uint8)), np.arange(3))
    dataset = Dataset("flat", dataset.classes, dataset.train, black)
    with Image.open(gallery(dataset, tmp_path / "a.png", per_class=1, side=9, split="test")) as picture:
        assert (cells(picture, rows=3, columns=1, side=9) == 0).all()


@pytest.mark.parametrize(("per_class", "max_classes", "side"), [(0, 1, 1), (1, 0, 1), (1, 1, -1)])
def test_refuses_an_empty_picture(tmp_path: Path, per_class: int, max_classes: int, side: int):
    with pytest.raises(DualPromptError, match="must be positive"):
        gallery(array_dataset(), tmp_path / "a.png", per_class, max_classes, side)
    assert not list(tmp_path.iterdir())


def test_summary_counts_images_of_both_kinds(tmp_path: Path):
    arrays = summary(array_dataset())
    assert arrays["train_images"] == 15
    assert arrays["test_images"] == 3
    assert arrays["classes"][1] == {"name": "class 1", "train": 5, "test": 1}
    assert arrays["image_sizes"] == [{"width": 28, "height": 28, "images": 18}]
    files = summary(file_dataset(tmp_path))
    assert [(row["name"], row["train"], row["test"]) for row in files["classes"]] == [
        ("many", 3, 1),
        ("few", 1, 1),
    ]
    assert files["distinct_image_sizes"] == 4
    assert files["image_sizes"][0] == {"width": 200, "height": 50, "images": 2}
    assert files["unreadable"] == []
    assert json.loads(json.dumps([arrays, files])) == [arrays, files]


def test_table_shows_counts_sizes_and_odd_names(tmp_path: Path):
    dataset = file_dataset(tmp_path)
    odd = Dataset("files", ("[bold]many", "few"), dataset.train, dataset.test)
    out = io.StringIO()
    Console(file=out, width=120).print(table(summary(odd) | {"gallery": "files.png"}))
    text = out.getvalue()
    for expected in ("[bold]many", "200×50", "1 other size", "gallery: files.png", "2 classes"):
        assert expected in text
