"""The reference of the commands, read from their parsers."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from itertools import groupby
from textwrap import dedent

from dualprompt.cli import build_parser

WIDE = 10_000  # help is not wrapped
OPTION = re.compile(r"(?<!\w)--[a-z][\w.-]*\w")
UNNAMED = ("positional arguments", "options")  # argparse's own groups, which need no heading


def commands() -> str:
    """Return all commands as Markdown, a section each."""
    parser, _ = build_parser()
    return "\n".join(section(name, sub) for name, sub in leaves(parser))


def leaves(parser: argparse.ArgumentParser, name: str = "") -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Return the commands below a parser that have no commands of their own, in their order."""
    inner = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not inner:
        yield name, parser
    for action in inner:
        called = {sub: word for word, sub in reversed(action.choices.items())}  # an alias comes after its name
        for sub, word in reversed(called.items()):
            yield from leaves(sub, f"{name} {word}".strip())


def section(name: str, parser: argparse.ArgumentParser) -> str:
    """Return a command: what it does, how it is called, its options, examples."""
    about = (parser.description or "").strip()
    parts = [f"## {name}", "", f"{about[:1].upper()}{about[1:].rstrip('.')}.", "", "```text", usage(parser), "```", ""]
    groups: dict[str, list[argparse.Action]] = {}
    for group in parser._action_groups:
        title = "" if group.title in UNNAMED else group.title or ""
        groups.setdefault(title, []).extend(action for action in group._group_actions if visible(action))
    for title, actions in groups.items():
        if actions:
            parts += [
                f"| {title or 'option'} | what it does |",
                "|---|---|",
                *(row(parser, action) for action in actions),
                "",
            ]
    for told in paragraphs(parser.epilog or ""):
        parts += [told, ""]
    return "\n".join(parts)


def paragraphs(epilog: str) -> Iterator[str]:
    """Yield what stands below the options: prose as prose, so that it fits any screen, and indented lines as code."""
    for code, lines in groupby(epilog.strip("\n").splitlines(), key=lambda line: line.startswith("  ") or not line):
        text = "\n".join(lines).strip("\n")
        if code and text:
            yield f"```text\n{dedent(text)}\n```"
        elif text:
            yield in_markdown(text)


def in_markdown(text: str) -> str:
    """Return words of a terminal as Markdown: options as code, and nothing else taken for markup."""
    parts = text.replace("examples:", "Examples:").split("`")
    parts[::2] = [OPTION.sub(r"`\g<0>`", re.sub(r"([\\*_<>#|\[\]])", r"\\\1", part)) for part in parts[::2]]
    return "`".join(parts)


def visible(action: argparse.Action) -> bool:
    """Return whether an option is anyone's to use and more than `--help`."""
    return action.help != argparse.SUPPRESS and not isinstance(action, argparse._HelpAction)


def usage(parser: argparse.ArgumentParser) -> str:
    """Return a command's synopsis: what it must be given, and that it takes options."""
    words = [shape(action) for action in parser._actions if not action.option_strings]
    needed = [f"{action.option_strings[-1]} {shape(action)}" for action in parser._actions if required(action)]
    dotted = ["[--section.key VALUE …]"] if parser.get_default("takes_overrides") else []
    return " ".join([parser.prog, *words, *needed, "[options]", *dotted])


def required(action: argparse.Action) -> bool:
    """Return whether an option must be given."""
    return bool(action.option_strings) and action.required


def shape(action: argparse.Action) -> str:
    """Return what stands for a value: NAME, [NAME], NAME …, or the values it may have."""
    if action.nargs == 0:
        return ""
    choices = "{" + ",".join(map(str, action.choices)) + "}" if action.choices is not None else None
    metavar = action.metavar if isinstance(action.metavar, str) else None
    name = metavar or choices or action.dest.upper().replace("_", "-")
    if isinstance(action.nargs, int):
        return " ".join([name] * action.nargs)
    return {"?": f"[{name}]", "*": f"[{name} …]", "+": f"{name} …"}.get(str(action.nargs), name)


def row(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    """Return an option as a line of a table."""
    words = [f"{flag} {shape(action)}".strip() for flag in action.option_strings] or [shape(action)]
    told = argparse.HelpFormatter(parser.prog, width=WIDE)._expand_help(action) if action.help else ""
    cells = ", ".join(f"`{word}`" for word in words), told
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
