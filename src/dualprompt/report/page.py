"""A page of sections as one HTML file that needs nothing else: style, drawings and pictures are inside it."""

from __future__ import annotations

import base64
import itertools
import re
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from dualprompt.errors import DualPromptError
from dualprompt.files import read_bytes, reason, write_text
from dualprompt.pictures.drawing import save_with_data
from dualprompt.pictures.kinds import COLOURS, INK, PAPER, QUIET, Picture, signed
from dualprompt.report.sheet import Sheet

LARGEST = 3_000_000  # bytes of a page
SMALLEST = 0.7  # of a drawing's width, to which a narrow screen shrinks it
TELEPHONE, NARROW = 340, 40  # pixels of a drawing and letters of a row, above which a telephone cuts it
FIRST = 13  # letters of a row's name, for which `report.html` always leaves room on a telephone
BROAD = 140  # letters of a row, above which any screen cuts it
# Colours of drawings that follow the page into the dark; `report.html` says what they are there.
THEMED = {INK: "ink", QUIET: "faint", PAPER: "paper"} | {colour: f"line-{n}" for n, colour in enumerate(COLOURS)}


@dataclass(frozen=True)
class Text:
    """A paragraph; `strong` ones stand out."""

    text: str
    strong: bool = False
    kind: str = "text"


@dataclass(frozen=True)
class Shown:
    """A table."""

    sheet: Sheet
    kind: str = "table"


@dataclass(frozen=True)
class Drawn:
    """A picture, and the name of its files beside the page."""

    name: str
    picture: Picture
    kind: str = "drawing"


@dataclass(frozen=True)
class Photo:
    """A PNG."""

    path: Path
    caption: str
    kind: str = "photo"


@dataclass(frozen=True)
class Answer:
    """What a method says of a picture."""

    method: str
    said: str
    percent: int  # how sure it is
    right: bool
    remark: str = ""


@dataclass(frozen=True)
class Card:
    """A small picture, what it shows, and what is said of it."""

    jpeg: str  # base64
    truth: str
    answers: tuple[Answer, ...]
    coarse: bool = False  # so few pixels that they are shown as squares


@dataclass(frozen=True)
class Strip:
    """Pictures side by side."""

    title: str
    cards: tuple[Card, ...]
    kind: str = "strip"


@dataclass(frozen=True)
class Code:
    """Something to read when one wants to, folded away."""

    title: str
    text: str
    kind: str = "code"


Item = Text | Shown | Drawn | Photo | Strip | Code


@dataclass
class Section:
    """A heading and what follows it."""

    name: str  # its anchor
    title: str
    items: list[Item] = field(default_factory=list)


def write(path: Path, title: str, subtitle: str, sections: list[Section]) -> Path:
    """Write the page, and each of its drawings as SVG and CSV into the folder NAME-files beside it.

    `title` and `subtitle` head the page, `sections` follow in their order; `path` is returned.
    """
    jinja2 = _jinja2()
    folder = path.with_name(f"{path.stem}-files")
    source = (resources.files("dualprompt.report") / "templates" / "report.html").read_text(encoding="utf-8")
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"by_kind": _by_kind, "signed": signed}
    shown = [
        {
            "name": section.name,
            "title": section.title,
            "items": [_prepared(item, folder, f"{section.name}-{n}-") for n, item in enumerate(section.items)],
        }
        for section in sections
    ]
    html = environment.from_string(source).render(title=title, subtitle=subtitle, sections=shown)
    if len(html.encode()) > LARGEST:
        raise DualPromptError(
            f"the report would have {len(html.encode()) / 1e6:.1f} MB, more than {LARGEST / 1e6:.0f}; "
            "give fewer paths, and a report for each"
        )
    write_text(path, html)
    return path


def _by_kind(items: list[dict[str, Any]]) -> list[tuple[str, list[dict[str, Any]]]]:
    """Return neighbours of one kind together, so that drawings can stand side by side."""
    return [(kind, list(group)) for kind, group in itertools.groupby(items, key=lambda item: item["kind"])]


def _jinja2() -> Any:
    try:
        import jinja2
    except ImportError as error:
        raise DualPromptError(
            f"a report needs the extra 'report' ({error}): pip install 'dualprompt[report]'"
        ) from None
    return jinja2


def _prepared(item: Item, folder: Path, prefix: str) -> dict[str, Any]:
    """Return what the template needs of an item."""
    if isinstance(item, Drawn):
        drawing = save_with_data(folder, item.name, item.picture).read_text(encoding="utf-8")
        least = round(item.picture.size[0] * 96 * SMALLEST)
        return {
            "kind": item.kind,
            "least": least,
            "wide": least > TELEPHONE,
            "svg": _inline(drawing, prefix, item.picture.title),
            "files": f"{folder.name}/{item.name}",
        }
    if isinstance(item, Photo):
        return {
            "kind": item.kind,
            "data": base64.b64encode(_photo(item.path)).decode(),
            "caption": item.caption,
        }
    plain = {name: getattr(item, name) for name in item.__dataclass_fields__}
    if isinstance(item, Shown):
        plain |= {"wide": _letters(item.sheet, "\n") > NARROW, "broad": _letters(item.sheet) > BROAD}
    return plain


def _letters(sheet: Sheet, end: str | None = None) -> int:
    """Return how many letters a row of a table has where headings are broken at `end`; by default at any space."""
    rows = [row for rows in sheet.groups for row in rows]
    heads = [max(map(len, column.heading.split(end)), default=0) for column in sheet.columns]
    heads[0] = max(heads[0], FIRST)
    return sum(max([head, *(len(row[n]) for row in rows)]) + 2 for n, head in enumerate(heads))


def _photo(path: Path) -> bytes:
    try:
        return read_bytes(path, LARGEST)
    except OSError as error:
        raise DualPromptError(f"{path} cannot be read ({reason(error)}); make the study again") from None


def _inline(svg: str, prefix: str, title: str) -> str:
    """Return an SVG as a part of a page: no prolog, and names of its own, since a page has many."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r'\bid="', f'id="{prefix}', svg)
    svg = re.sub(r'(href="#|url\(#)', rf"\g<1>{prefix}", svg)
    for colour, name in THEMED.items():
        svg = re.sub(rf"(?<=: ){colour}\b", f"var(--{name}, {colour})", svg)
    safe = title.replace("&", "&amp;").replace("<", "&lt;").replace('"', "&quot;")
    return svg.replace("<svg ", f'<svg role="img" aria-label="{safe}" ', 1)
