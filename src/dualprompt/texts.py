"""Names that strangers chose, made harmless for where they are shown: a terminal, a Markdown page, a spreadsheet."""

from __future__ import annotations

import re

# What commands a terminal, turns letters round, ends a line unseen, or cannot be written.
_COMMANDS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_TAG = re.compile(r"<(?=[A-Za-z/!?])")
_NUMBER = re.compile(r"[+-]?[0-9.]+(e[+-]?[0-9]+)?", re.IGNORECASE)
FORMULA = ("=", "+", "-", "@")  # how cells begin that spreadsheets work out


def visible(text: str) -> str:
    """Return a text of any lines in which what would command a terminal is written as Python escapes it."""
    return _COMMANDS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def in_markdown(text: str) -> str:
    """Return a text as a cell of a Markdown table: it ends neither the cell nor the line, and begins no HTML."""
    return _TAG.sub("&lt;", visible(text).replace("|", "\\|").replace("\n", " "))


def in_csv(text: str) -> str:
    """Return a text as a cell of a CSV file: what a spreadsheet would work out has the apostrophe that it knows."""
    formula = len(text) > 1 and text.startswith(FORMULA) and _NUMBER.fullmatch(text) is None
    return f"'{visible(text)}" if formula else visible(text)
