"""Pictures on paper: as figures of matplotlib, and as files with their numbers beside them."""

from __future__ import annotations

import csv
import io
import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dualprompt.files import atomic, write_text
from dualprompt.pictures.kinds import INK, LABEL, PAPER, Picture, Points, shortened
from dualprompt.texts import in_csv

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TITLE = 10  # points
LONGEST_TITLE = 240  # letters; the rest of one from a stranger's file would leave the picture no room
STYLE = {
    "svg.fonttype": "none",  # text stays text: small, searchable, sharp
    "svg.hashsalt": "dualprompt",  # the same picture gives the same file
    "font.family": ["sans-serif"],
    "font.sans-serif": ["DejaVu Sans"],
    "axes.labelsize": 10,
    "figure.facecolor": PAPER,
    "savefig.facecolor": PAPER,
    "axes.facecolor": "none",
    "axes.edgecolor": INK,
    "text.color": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
}


def figure_of(*pictures: Picture) -> Figure:
    """Return pictures side by side in one figure, which no window or notebook owns."""
    import matplotlib

    from dualprompt.pictures.notebook import NotebookFigure

    widths, height = [picture.size[0] for picture in pictures], max(picture.size[1] for picture in pictures)
    with matplotlib.rc_context(STYLE):  # pyright: ignore[reportArgumentType]
        figure = NotebookFigure(figsize=(sum(widths), height), layout="constrained", dpi=120)
        parts = figure.subfigures(1, len(pictures), squeeze=False, width_ratios=widths)[0]
        for part, picture in zip(parts, pictures, strict=True):
            part.set_facecolor("none")
            ax = part.subplots()
            ax.tick_params(labelsize=9)
            for side in ("top", "right"):
                ax.spines[side].set_visible(False)
            picture.draw(ax)
            if not isinstance(picture, Points):
                ax.set_xlabel(shortened(picture.x, LABEL), parse_math=False)
                ax.set_ylabel(shortened(picture.y, LABEL), parse_math=False)
            title = _folded(shortened(picture.title, LONGEST_TITLE), 72 * picture.size[0] - 12)
            part.suptitle(title, fontsize=TITLE, parse_math=False)
    return figure


def _folded(text: str, room: float) -> str:
    """Return a title in lines that are no wider than `room` points."""
    from matplotlib.textpath import TextPath

    def wide(line: str) -> float:
        return TextPath((0, 0), line.replace("$", "S"), size=TITLE).get_extents().width

    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if lines[-1] and wide(longer) > room:
            lines.append(word)
        else:
            lines[-1] = longer
    return "\n".join(lines)


def save(path: Path, *pictures: Picture) -> Path:
    """Draw pictures side by side to a file whose suffix says its format."""
    import matplotlib

    form = path.suffix.removeprefix(".")
    with matplotlib.rc_context(STYLE), warnings.catch_warnings(), atomic(path) as partial:  # pyright: ignore[reportArgumentType]
        warnings.filterwarnings("ignore", "Glyph .* missing", UserWarning)  # a name in another script; the text has it
        figure_of(*pictures).savefig(partial, format=form, metadata={"Date": None} if form == "svg" else None)
        if form == "svg":
            partial.write_text(_smaller(partial.read_text(encoding="utf-8")), encoding="utf-8")
    return path


def save_with_data(folder: Path, name: str, picture: Picture) -> Path:
    """Draw a picture as `NAME.svg` and write its numbers to `NAME.csv`; return the drawing."""
    write_text(folder / f"{name}.csv", as_csv(picture.data()))
    return save(folder / f"{name}.svg", picture)


def _smaller(svg: str) -> str:
    """Drop from an SVG what no viewer needs: metadata, comments, and digits far below a pixel."""
    svg = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", svg, flags=re.DOTALL)
    svg = re.sub(r"(?<=\d\.\d\d)\d+(?=[ \"\n,)])", "", svg)
    return re.sub(r"\n\s*", "\n", svg)


def as_csv(rows: Sequence[dict[str, Any]]) -> str:
    """Return rows of plain values, which all have the same keys, in full precision."""
    out = io.StringIO()
    writer = csv.DictWriter(out, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(
        {key: in_csv(each) if isinstance(each, str) else each for key, each in row.items()} for row in rows
    )
    return out.getvalue()
