"""Marked blocks of Markdown pages, filled from published JSON.

    <!-- published results/main.json table columns="method|A (%)|F (%)" -->
    <!-- /published -->

The file is named from the page's folder. `table` may choose a `sheet` (counted from 1) and `columns`; `finding` is the
text that a study ends in.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from dualprompt.errors import DualPromptError
from dualprompt.files import write_text
from dualprompt.report import publication
from dualprompt.report.sheet import Sheet, as_markdown

# A marker begins its line, so that an indented one can be shown as an example.
BLOCK = re.compile(r"^(<!-- published (?P<what>[^\n]*?) -->\n)(.*?)^(<!-- /published -->)", re.DOTALL | re.MULTILINE)
BEGIN = re.compile(r"^<!-- published ", re.MULTILINE)


def fill(page: Path, check: bool = False) -> tuple[int, bool]:
    """Fill the marked blocks of a page; return their number, and whether anything changed. `check` writes nothing."""
    try:
        before = page.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DualPromptError(f"{page} cannot be read ({error}); give a Markdown page") from None
    blocks = list(BLOCK.finditer(before))
    if len(BEGIN.findall(before)) != len(blocks):
        raise DualPromptError(f"{page}: a block begins with <!-- published … --> and ends with <!-- /published -->")
    after = BLOCK.sub(lambda block: block[1] + _rendered(page, block["what"]) + block[4], before)
    if after != before and not check:
        write_text(page, after)
    return len(blocks), after != before


def _rendered(page: Path, what: str) -> str:
    """Return the text that a marker asks for."""
    try:
        file, kind, *rest = shlex.split(what)
        options = dict(word.split("=", 1) for word in rest)
    except ValueError:
        raise DualPromptError(f"{page}: write <!-- published FILE table|finding … -->, found '{what}'") from None
    value = publication.read(page.parent / file)
    if kind == "finding" and not options:
        return f"\n{value['finding']}\n\n"
    unknown = set(options) - {"sheet", "columns"}
    if kind != "table" or unknown:
        raise DualPromptError(f"{page}: a block is a table with sheet=… and columns=…, or a finding; found '{what}'")
    return f"\n{as_markdown(_chosen(page, value, options))}\n"


def _chosen(page: Path, value: Mapping[str, Any], options: Mapping[str, str]) -> Sheet:
    sheets, number = publication.sheets(value), options.get("sheet", "1")
    if not number.isdigit() or not 1 <= int(number) <= len(sheets):
        raise DualPromptError(f"{page}: sheet must be 1 to {len(sheets)}, found '{number}'")
    sheet = sheets[int(number) - 1]
    if "columns" not in options:
        return sheet
    headings = [column.heading.replace("\n", " ") for column in sheet.columns]
    wanted = [name.strip() for name in options["columns"].split("|")]
    missing = [name for name in wanted if name not in headings]
    if missing:
        raise DualPromptError(f"{page}: the table has no column '{missing[0]}'; it has {', '.join(headings)}")
    places = [headings.index(name) for name in wanted]
    groups = tuple(tuple(tuple(row[place] for place in places) for row in group) for group in sheet.groups)
    return replace(sheet, columns=tuple(sheet.columns[place] for place in places), groups=groups)
