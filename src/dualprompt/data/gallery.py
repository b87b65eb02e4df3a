"""What a dataset looks like: a picture with a row for each class, and its counts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
from PIL import Image, ImageDraw, ImageFont
from rich.markup import escape
from rich.table import Table

from dualprompt.data.cache import BROKEN, open_rgb
from dualprompt.data.formats import open_image
from dualprompt.data.sources import Dataset, FileSource, Split
from dualprompt.errors import DualPromptError
from dualprompt.files import atomic

GAP = 4
MARGIN = 12
TEXT = 14
LONGEST_NAME = 32


def gallery(
    dataset: Dataset,
    path: Path,
    per_class: int = 8,
    max_classes: int = 20,
    side: int = 64,
    split: Literal["train", "test"] = "train",
) -> Path:
    """Write a PNG with a row for each class: its name, then `per_class` images spread evenly over the class.

    Images keep their proportions within a square of `side` pixels; a crossed square stands for one that
    cannot be read. When there are more than `max_classes` classes, the last line says how many are not shown.
    Returns `path`.
    """
    from matplotlib import get_data_path  # takes a moment: only for who draws

    if min(per_class, max_classes, side) < 1:
        raise DualPromptError(
            "per_class, max_classes and side of a gallery must be positive, "
            f"found {per_class}, {max_classes} and {side}"
        )
    images = dataset.train if split == "train" else dataset.test
    names = [_shortened(name) for name in dataset.classes[:max_classes]]
    hidden = len(dataset.classes) - len(names)
    footer = f"{hidden} more class{'es' if hidden > 1 else ''} not shown" if hidden else ""

    font = ImageFont.truetype(Path(get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf", TEXT)  # knows accents
    step = side + GAP
    left = 2 * MARGIN + math.ceil(max(font.getlength(text) for text in (*names, footer)))
    bottom = MARGIN + len(names) * step - GAP
    height = bottom + MARGIN + (TEXT + MARGIN if footer else 0)
    canvas = Image.new("RGB", (left + per_class * step - GAP + MARGIN, height), "white")
    pen = ImageDraw.Draw(canvas)
    for row, name in enumerate(names):
        top = MARGIN + row * step
        pen.text((MARGIN, top + side / 2), name, fill="black", font=font, anchor="lm")
        for column, index in enumerate(spread(np.flatnonzero(images.labels == row), per_class)):
            picture = _picture(images, index, side)
            x, y = (side - picture.width) // 2, (side - picture.height) // 2
            canvas.paste(picture, (left + column * step + x, top + y))
    pen.text((MARGIN, bottom + MARGIN), footer, fill="dimgrey", font=font, anchor="lt")
    with atomic(path) as partial:
        canvas.save(partial, format="PNG")
    return path


def summary(dataset: Dataset) -> dict[str, Any]:
    """Return a dataset's counts, ready for JSON.

    `image_sizes` lists up to ten of the `distinct_image_sizes`, the most frequent first; `unreadable` lists
    the files that are no images. Only the headers of files are read.
    """
    sizes: Counter[tuple[int, int]] = Counter()
    unreadable: list[str] = []
    for split in (dataset.train, dataset.test):
        if not isinstance(split.source, FileSource):
            sizes.update((image.shape[1], image.shape[0]) for image in split.source.pixels)
            continue
        for path in split.source.paths:
            try:
                with open_image(path, str(path)) as image:
                    sizes[image.size] += 1
            except BROKEN:
                unreadable.append(str(path))
    train, test = (
        np.bincount(split.labels, minlength=len(dataset.classes)).tolist() for split in (dataset.train, dataset.test)
    )
    return {
        "name": dataset.name,
        "train_images": len(dataset.train),
        "test_images": len(dataset.test),
        "distinct_image_sizes": len(sizes),
        "image_sizes": [
            {"width": width, "height": height, "images": count} for (width, height), count in sizes.most_common(10)
        ],
        "unreadable": unreadable,
        "classes": [
            {"name": name, "train": train[label], "test": test[label]} for label, name in enumerate(dataset.classes)
        ],
    }


def table(summary: Mapping[str, Any]) -> Table:
    """Return a summary for the terminal; its `licence` and `gallery`, where there is one, are named below."""
    result = Table("class", title=escape(summary["name"]), show_footer=True)
    result.columns[0].footer = f"{len(summary['classes'])} classes"
    for split in ("train", "test"):
        result.add_column(split, footer=str(summary[f"{split}_images"]), justify="right")
    for row in summary["classes"]:
        result.add_row(escape(row["name"]), str(row["train"]), str(row["test"]))
    sizes = ", ".join(f"{size['width']}×{size['height']}" for size in summary["image_sizes"][:3])
    more = summary["distinct_image_sizes"] - 3
    notes = [f"pixels: {sizes}" + (f" and {more} other size{'s' if more > 1 else ''}" if more > 0 else "")]
    if unreadable := summary["unreadable"]:
        notes.append(f"cannot be read: {', '.join(unreadable[:10])}" + (" …" if len(unreadable) > 10 else ""))
    if "licence" in summary:
        notes.append(f"licence: {summary['licence']}")
    if summary.get("gallery"):
        notes.append(f"gallery: {summary['gallery']}")
    result.caption = escape("\n".join(notes))
    return result


def _shortened(name: str) -> str:
    return name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 1]}…"


def spread(indices: np.ndarray, count: int) -> list[int]:
    """Return at most `count` of `indices`, evenly spaced."""
    count = min(count, len(indices))
    return [int(indices[place * len(indices) // count]) for place in range(count)]


def _picture(split: Split, index: int, side: int) -> Image.Image:
    """One image, scaled to touch the edges of a square of `side` pixels."""
    if not isinstance(split.source, FileSource):
        image = Image.fromarray(split.source.pixels[index])
    else:
        try:
            image = open_rgb(split.source.paths[index].read_bytes(), str(split.source.paths[index]))
        except BROKEN:
            return _crossed(side)
    scale = side / max(image.size)
    size = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))
    # Enlarged pixels stay squares, so that one sees how little a small image holds.
    return image.resize(size, Image.Resampling.NEAREST if scale > 1 else Image.Resampling.LANCZOS)


def _crossed(side: int) -> Image.Image:
    image = Image.new("RGB", (side, side), "lightgrey")
    pen = ImageDraw.Draw(image)
    pen.line((0, 0, side, side), "red", 2)
    pen.line((0, side, side, 0), "red", 2)
    return image
