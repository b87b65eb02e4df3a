"""Marked blocks of Markdown pages, filled from JSON, so that no number of a page is typed.

    <!-- published results/main.json table columns="method|A (%) as accuracy|F (%)" rows="l2p|er as replay" -->
    <!-- /published -->

Files are named from the page's folder. Names have `|` between them, and `as` gives another one. Kinds of block:

- `table` of what `--publish` wrote; it may choose a `sheet` (counted from 1), `columns` and `rows`, and leave out its
  title and remarks (`bare=yes`). Of several files, with commas between, rows of one name stand in one line, and
  `names` says what each file is called; files of one name are one table.
- `finding`: the text that a study ends in.
- `records`: a table of any JSON, one line for each object in the list `at=…`, or for each of several files.
- `text "…{path[format]}…" "…"`: lines with values of any JSON.

A path leads through objects and lists, as `idle/p50_ms`; a format is Python's, as `[.1f]`.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dualprompt.errors import DualPromptError
from dualprompt.files import read_json, write_text
from dualprompt.report import publication
from dualprompt.report.sheet import Column, Sheet, as_markdown
from dualprompt.texts import without_html

# A marker begins its line, so that an indented one can be shown as an example.
BLOCK = re.compile(r"^(<!-- published (?P<what>[^\n]*?) -->\n)(.*?)^(<!-- /published -->)", re.DOTALL | re.MULTILINE)
BEGIN = re.compile(r"^<!-- published ", re.MULTILINE)
FIELD = re.compile(r"(?P<path>[^\[\]{}]+)(?:\[(?P<format>[^\[\]{}]*)\])?")
Options = Mapping[str, str]


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
        named, kind, *rest = shlex.split(what)
        make, known = KINDS[kind]
        text = "\n".join(rest) if kind == "text" else ""
        options = {} if kind == "text" else dict(word.split("=", 1) for word in rest)
    except (ValueError, KeyError):
        raise DualPromptError(f"{page}: write <!-- published FILE {'|'.join(KINDS)} … -->, found '{what}'") from None
    if unknown := sorted(set(options) - set(known)):
        takes = ", ".join(f"{name}=…" for name in known) or "no options"
        raise DualPromptError(f"{page}: a {kind} takes {takes}; found '{unknown[0]}'")
    files = [page.parent / name for name in named.split(",")]
    try:
        return f"\n{make(files, text, options).rstrip()}\n\n"
    except ValueError as error:
        raise DualPromptError(f"{page}: {error}") from None


def _finding(files: Sequence[Path], text: str, options: Options) -> str:
    return "\n\n".join(without_html(publication.read(file)["finding"]) for file in files)


def _table(files: Sequence[Path], text: str, options: Options) -> str:
    sheets = [_with_columns(publication.read(file), options) for file in files]
    if len(sheets) == 1:
        sheet = _with_rows(sheets[0], options)
    else:
        united = _united(sheets, [name.strip() for name in options.get("names", "").split("|")])
        sheet = _joined({name: _with_rows(each, options) for name, each in united.items()})
    return as_markdown(replace(sheet, title="", remarks=()) if options.get("bare") == "yes" else sheet)


def _with_columns(value: Mapping[str, Any], options: Options) -> Sheet:
    """Return a table of a publication, with the columns that are asked for, in that order."""
    sheets, number = publication.sheets(value), options.get("sheet", "1")
    if not number.isdigit() or not 1 <= int(number) <= len(sheets):
        raise ValueError(f"sheet must be 1 to {len(sheets)}, found '{number}'")
    sheet = sheets[int(number) - 1]
    if "columns" in options:
        headings = [column.heading.replace("\n", " ") for column in sheet.columns]
        wanted = _names(options["columns"])
        _refuse_missing("column", wanted, headings)
        places = [headings.index(name) for name, _ in wanted]
        columns = tuple(
            replace(sheet.columns[place], heading=shown) for place, (_, shown) in zip(places, wanted, strict=True)
        )
        groups = tuple(tuple(tuple(row[place] for place in places) for row in group) for group in sheet.groups)
        sheet = replace(sheet, columns=columns, groups=groups)
    return sheet


def _with_rows(sheet: Sheet, options: Options) -> Sheet:
    """Return a table with the rows that are asked for, in that order."""
    if "rows" not in options:
        return sheet
    rows, wanted = _rows(sheet), _names(options["rows"])
    _refuse_missing("row", wanted, list(rows))
    return replace(sheet, groups=(tuple((shown, *rows[name][1:]) for name, shown in wanted),))


def _united(sheets: Sequence[Sheet], names: Sequence[str]) -> dict[str, Sheet]:
    """Return the tables by their names; the rows of those that share one follow each other."""
    if len(names) != len(sheets):
        raise ValueError(f'{len(sheets)} files need as many names="…|…", found {len(names)}')
    found: dict[str, Sheet] = {}
    for sheet, name in zip(sheets, names, strict=True):
        before = found.get(name, replace(sheet, groups=(), remarks=()))
        if before.columns != sheet.columns:
            raise ValueError(f"the tables of '{name}' have other columns: choose them with columns=…")
        remarks = tuple(dict.fromkeys((*before.remarks, *sheet.remarks)))
        found[name] = replace(before, groups=(*before.groups, *sheet.groups), remarks=remarks)
    return found


def _joined(sheets: Mapping[str, Sheet]) -> Sheet:
    """Return several tables as one: rows are known by their first cell, and those of the first table decide."""
    first = next(iter(sheets.values()))
    columns, lines = [first.columns[0]], {label: [label] for label in _rows(first)}
    for name, sheet in sheets.items():
        columns += [replace(column, heading=f"{name}: {column.heading}") for column in sheet.columns[1:]]
        found = _rows(sheet)
        _refuse_missing("row", [(label, label) for label in lines], list(found))
        for label, cells in lines.items():
            cells.extend(found[label][1:])
    remarks = tuple(dict.fromkeys(remark for sheet in sheets.values() for remark in sheet.remarks))
    return Sheet("", tuple(columns), (tuple(tuple(cells) for cells in lines.values()),), remarks)


def _rows(sheet: Sheet) -> dict[str, tuple[str, ...]]:
    """Return the lines of a table by their first cells, which must differ."""
    rows: dict[str, tuple[str, ...]] = {}
    for row in (row for group in sheet.groups for row in group):
        if row[0] in rows:
            raise ValueError(f"the table has several rows '{row[0]}', which cannot be told apart")
        rows[row[0]] = row
    return rows


def _records(files: Sequence[Path], text: str, options: Options) -> str:
    values = [read_json(file) for file in files]
    if "at" in options:
        lists = [_at(value, options["at"]) for value in values]
        if not all(isinstance(each, list) for each in lists):
            raise ValueError(f"'{options['at']}' is no list")
        values = [record for each in lists for record in each]
    if "columns" not in options:
        raise ValueError('records need columns="path|path[format] as heading"')
    wanted = _names(options["columns"])
    rows = tuple(tuple(_value(record, field) for field, _ in wanted) for record in values)
    numbers = [all(not isinstance(_at(record, _split(field)[0]), str) for record in values) for field, _ in wanted]
    columns = tuple(Column(_split(shown)[0], right) for (_, shown), right in zip(wanted, numbers, strict=True))
    return as_markdown(Sheet("", columns, (rows,)))


def _text(files: Sequence[Path], text: str, options: Options) -> str:
    if len(files) != 1 or not text:
        raise ValueError('a text has one file, and lines in quotes: text "…{path[format]}…"')
    value = read_json(files[0])
    return re.sub(r"\{([^{}]*)\}", lambda field: without_html(_value(value, field[1])), text)


def _names(text: str) -> list[tuple[str, str]]:
    """Read `a|b as c`: what each is called, and what it shall be called."""
    pairs = [part.split(" as ", 1) for part in text.split("|")]
    return [(pair[0].strip(), pair[-1].strip()) for pair in pairs]


def _refuse_missing(kind: str, wanted: Sequence[tuple[str, str]], there: Sequence[str]) -> None:
    for name, _ in wanted:
        if name not in there:
            raise ValueError(f"the table has no {kind} '{name}'; it has {', '.join(there)}")


def _split(field: str) -> tuple[str, str]:
    found = FIELD.fullmatch(field)
    if found is None:
        raise ValueError(f"write a value as path or path[format], found '{field}'")
    return found["path"], found["format"] or ""


def _value(value: Any, field: str) -> str:
    """Return a value in its format."""
    path, form = _split(field)
    found = _at(value, path)
    if not isinstance(found, str | int | float):
        raise ValueError(f"'{path}' is no single value")
    try:
        if re.search("[0-9]{4}", form):
            raise ValueError("nobody reads so many digits")
        return format(found, form)
    except ValueError:
        raise ValueError(f"'{path}' is {found!r:.40}, which has no format '{form}'") from None


def _at(value: Any, path: str) -> Any:
    """Return what a path leads to."""
    for step in path.split("/"):
        if isinstance(value, list) and step.lstrip("-").isdigit() and -len(value) <= int(step) < len(value):
            value = value[int(step)]
        elif isinstance(value, dict) and step in value:
            value = value[step]
        else:
            there = f"0 to {len(value) - 1}" if isinstance(value, list) else ", ".join(map(str, value or ()))
            raise ValueError(f"there is no '{step}' of '{path}'; there is {there[:200] or 'nothing'}")
    return value


Maker = Callable[[Sequence[Path], str, Options], str]
KINDS: dict[str, tuple[Maker, tuple[str, ...]]] = {
    "table": (_table, ("sheet", "columns", "rows", "names", "bare")),
    "finding": (_finding, ()),
    "records": (_records, ("at", "columns")),
    "text": (_text, ()),
}
