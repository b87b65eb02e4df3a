"""The one error a user sees: a single line that names the thing and the remedy."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def one_line(text: str) -> str:
    """Return a text on one line that every terminal can show: what is not printable is written as Python escapes it."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class DualPromptError(Exception):
    """A mistake the user can mend. The command prints its message, which is one line, and exits with code 2."""

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))  # names of files may hold anything


class DamagedError(DualPromptError):
    """A file of ours is not as it was written; what it said may be had from elsewhere."""


class InterruptedRunError(DualPromptError):
    """A run was asked to stop and saved itself first; the command exits with code 130."""


class LostProcessError(DualPromptError):
    """A process of a run that several carry out ended before the others."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a phrase that helps someone who mistyped `name`: the nearest known name, then all of them."""
    names = sorted(known)
    folded = {each.casefold(): each for each in names}
    close = [folded[each] for each in difflib.get_close_matches(name.casefold(), folded, n=1, cutoff=0.5)]
    if close and len(names) > 20:
        return f"did you mean '{close[0]}'?"
    hint = f"did you mean '{close[0]}'? " if close else ""
    return f"{hint}known: {', '.join(names)}"
