"""A table of text in several forms: for the terminal, as Markdown, LaTeX and HTML; and plain values as CSV."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.markup import escape
from rich.measure import Measurement
from rich.segment import Segment
from rich.table import Table

from dualprompt.texts import in_markdown, visible


@dataclass(frozen=True)
class Column:
    """A column of a sheet."""

    heading: str
    right: bool = True  # numbers stand right, names left
    lesser: bool = False  # left out where a terminal is too narrow


@dataclass(frozen=True)
class Sheet:
    """A table of text before it is given a form: rows in groups, remarks below."""

    title: str
    columns: tuple[Column, ...]
    groups: tuple[tuple[tuple[str, ...], ...], ...]
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True)
class Harmless:
    """A table on a terminal, to which the names in it can say nothing."""

    table: Table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield what the table is drawn with."""
        for part in console.render(self.table, options):
            yield part if part.control else Segment(visible(part.text), part.style)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        """Return how wide it is."""
        return Measurement.get(console, options, self.table)


def as_rich(sheet: Sheet, brief: bool = False) -> Table:
    """Return a sheet for the terminal, with a rule between groups; `brief` leaves out the lesser columns."""
    shown = [number for number, column in enumerate(sheet.columns) if not (brief and column.lesser)]
    table = Table(title=escape(sheet.title), caption=escape("\n".join(sheet.remarks)) or None, caption_justify="left")
    for number in shown:
        column = sheet.columns[number]
        table.add_column(escape(column.heading), justify="right" if column.right else "left", no_wrap=True)
    for rows in sheet.groups:
        for row in rows:
            table.add_row(*(escape(row[number]) for number in shown))
        table.add_section()
    return table


def as_markdown(sheet: Sheet) -> str:
    """Return a sheet as GitHub reads it; groups follow each other."""

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(map(in_markdown, cells)) + " |"

    head = [line([column.heading for column in sheet.columns])]
    head.append(line(["--:" if column.right else "---" for column in sheet.columns]))
    body = [line(row) for rows in sheet.groups for row in rows]
    title = [f"**{sheet.title}**", ""] if sheet.title else []
    return "\n".join([*title, *head, *body, *(f"\n{remark}" for remark in sheet.remarks), ""])


def as_html(sheet: Sheet) -> str:
    """Return a sheet as a plain HTML table, for notebooks."""

    def line(cells: Sequence[str], kind: str) -> str:
        aligned = zip(cells, sheet.columns, strict=True)
        parts = (
            f'<{kind} style="text-align: {"right" if column.right else "left"}">{html.escape(cell)}</{kind}>'
            for cell, column in aligned
        )
        return f"<tr>{''.join(parts)}</tr>"

    head = line([column.heading.replace("\n", " ") for column in sheet.columns], "th")
    body = "".join(line(row, "td") for rows in sheet.groups for row in rows)
    remarks = "".join(f"<p><small>{html.escape(remark)}</small></p>" for remark in sheet.remarks)
    caption = f'<caption style="text-align: left">{html.escape(sheet.title)}</caption>'
    return f"<table>{caption}<thead>{head}</thead><tbody>{body}</tbody></table>{remarks}"


LATEX = {
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "$": r"\$", "&": r"\&", "#": r"\#", "%": r"\%", "_": r"\_",
    "^": r"\textasciicircum{}", "~": r"\textasciitilde{}", "±": r"$\pm$", "–": "--", "²": "$^2$", "\n": " ",
}  # fmt: skip


def as_latex(sheet: Sheet) -> str:
    """Return a sheet as a `table` for a paper that loads `booktabs`."""

    def safe(text: str) -> str:
        return "".join(LATEX.get(character, character) for character in text)

    def line(cells: Sequence[str]) -> str:
        return " & ".join(map(safe, cells)) + r" \\"

    caption = ". ".join([sheet.title, *(remark[0].upper() + remark[1:] for remark in sheet.remarks)])
    groups = ["\n".join(line(row) for row in rows) for rows in sheet.groups]
    return "\n".join(
        [
            r"\begin{table}",
            rf"\caption{{{safe(caption)}.}}",
            r"\begin{center}",
            rf"\begin{{tabular}}{{{''.join('r' if column.right else 'l' for column in sheet.columns)}}}",
            r"\toprule",
            line([column.heading for column in sheet.columns]),
            r"\midrule",
            "\n\\midrule\n".join(groups),
            r"\bottomrule",
            r"\end{tabular}",
            r"\end{center}",
            r"\end{table}",
            "",
        ]
    )
