"""Names that strangers chose, made harmless for where they are shown: a terminal, a Markdown page, a spreadsheet."""

from __future__ import annotations

import re

# What commands a terminal, turns letters round, ends a line unseen, or cannot be written.
_COMMANDS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_ESCAPE = re.compile(r"\\(?=[!-/:-@\[-`{-~])")  # a backslash that would take away ours, or what follows it
_TAG = re.compile(r"<(?=[A-Za-z/!?])")
_NUMBER = re.compile(r"[+-]?[0-9.]+(e[+-]?[0-9]+)?", re.IGNORECASE)
_FORMULA = ("=", "+", "-", "@")  # how cells begin that spreadsheets work out


def visible(text: str) -> str:
    """Return a text of any lines in which what would command a terminal is written as Python escapes it."""
    return _COMMANDS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def without_html(text: str) -> str:
    """Return a text of any lines in which no HTML begins, nor a comment that marks a block of a page."""
    return _TAG.sub("&lt;", visible(text))


def in_markdown(text: str) -> str:
    """Return a text as a cell of a Markdown table: it ends neither the cell nor the line, and begins no HTML."""
    escaped = _ESCAPE.sub(r"\\\\", visible(text)).replace("|", "\\|")
    return _TAG.sub("&lt;", escaped.replace("\n", " "))


def in_csv(text: str) -> str:
    """Return a text as a cell of a CSV file: what a spreadsheet would work out has the apostrophe that it knows."""
    return f"'{visible(text)}" if _worked_out(text) else visible(text)


def path_in_csv(path: str) -> str:
    """Return the path of a file as a cell of a CSV file: with ./ it names the same file, and is not worked out."""
    return visible(f"./{path}" if _worked_out(path) else path)


def _worked_out(text: str) -> bool:
    return len(text) > 1 and text.lstrip().startswith(_FORMULA) and _NUMBER.fullmatch(text) is None
