"""What a model knows, how well it does, its versions and its answers, as tables for a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime

from rich.markup import escape
from rich.table import Column, Table
from rich.text import Text

from dualprompt.learner import Answer, ContinualLearner
from dualprompt.metrics import wilson
from dualprompt.model.versions import Version
from dualprompt.texts import visible

Confusion = Mapping[str, Mapping[str, int]]  # how many images of each class were given which label
NAMED = 20  # classes of a task that a narrow table names; --json names all
MATTERS = 0.01  # probability, below which a class is no alternative to be shown


def brief_tasks(learner: ContinualLearner) -> Table:
    """Return what a model knows, for a narrow terminal: names are wrapped, numbers are whole."""
    table = Table("id", title="what it knows")
    for name in ("task", "classes"):
        table.add_column(name, overflow="fold")
    for name in ("images", "accuracy"):
        table.add_column(name, no_wrap=True)
    for task in learner.tasks:
        more = len(task.classes) - NAMED
        names = ", ".join(task.classes[:NAMED]) + (f" and {more} more" if more > 0 else "")
        accuracy = "–"
        if task.accuracy is not None and task.interval is not None:
            accuracy = "{:.1f} % ({:.0f}–{:.0f})".format(task.accuracy, *task.interval)
        table.add_row(*map(Text, (f"{task.id}", task.name, names, f"{task.images}", accuracy)))
    return table


def tasks_table(learner: ContinualLearner) -> Table:
    """Return what a model knows, a row a task."""
    columns = ("id", "task", "classes", "images", "accuracy", "of", "95 %", "prompts", "kept", "learned")
    table = Table(*columns, title="what it knows")
    for task in learner.tasks:
        accuracy = "–" if task.accuracy is None else f"{task.accuracy:.1f} %"
        interval = "–" if task.interval is None else "{:.0f}–{:.0f}".format(*task.interval)
        prompts = "–" if task.prompts is None else "yes" if task.prompts.used else "no"
        measured = (accuracy, f"{task.held}", interval, prompts)
        names = ", ".join(task.classes)
        cells = (f"{task.id}", task.name, names, f"{task.images}", *measured, f"{task.bytes:,} B", moment(task.learned))
        table.add_row(*(Text(cell) for cell in cells))  # Text: names may hold brackets
    return table


def judged_table(confusion: Confusion, title: str | None = None) -> Table:
    """Return how images were answered, a row a class."""
    first, last = (Column(name, overflow="fold") for name in ("class", "taken for"))
    table = Table(first, "images", "accuracy", "95 %", last, title=title)
    for name, row in confusion.items():
        table.add_row(Text(name), *share_cells({name: row}), Text(taken_for(name, row)))
    return table


def share_cells(confusion: Confusion) -> tuple[str, str, str]:
    """Return the images of some classes, how many of them were right, and where that share lies with 95 %."""
    right = sum(row.get(name, 0) for name, row in confusion.items())
    images = sum(sum(row.values()) for row in confusion.values())
    return f"{images}", f"{100 * right / images:.1f} %", "{:.0f}–{:.0f}".format(*wilson(right, images))


def taken_for(name: str, row: Mapping[str, int]) -> str:
    """Return what images of a class were taken for, most often first."""
    wrong = sorted(((count, label) for label, count in row.items() if label != name), reverse=True)
    more = f", {len(wrong) - 3} others" if len(wrong) > 3 else ""
    return ", ".join(f"{label or 'none of these'} {count}" for count, label in wrong[:3]) + more


def matrix_table(learner: ContinualLearner) -> Table:
    """Return the accuracy on each task after each task, where it was measured."""
    names = [task.name for task in learner.tasks]
    table = Table("after", *map(escape, names), title="accuracy on each task (%)")
    for name, row in zip(names, learner.accuracy_matrix(), strict=True):
        table.add_row(Text(name), *("" if value is None else f"{value:.1f}" for value in row))
    return table


def versions_table(versions: Sequence[Version], brief: bool = False) -> Table:
    """Return the versions of a model, newest last; brief: as a narrow terminal can hold them."""
    table = Table()
    for name in ("version", "saved", "what was done", "classes", *(() if brief else ("tasks", "tensors"))):
        table.add_column(name, overflow="fold", no_wrap=name != "what was done")
    for each in versions:
        number = f"{each.number} (now)" if each.current else f"{each.number}"
        lesser = () if brief else (f"{len(each.tasks)}", f"{each.bytes:,} B")
        cells = (number, moment(each.saved), each.why or "–", f"{len(each.classes)}", *lesser)
        table.add_row(*map(Text, cells))
    return table


def answers_table(answers: Sequence[Answer], brief: bool = False) -> Table:
    """Return answers for people: what it is, how sure, and what else it could be, where that is worth a word.

    Where it is to be brief, for a narrow terminal, names are wrapped: a file whose name is cut cannot be found.
    """
    table = Table()
    for name in ("image", "label", "probability", *(() if brief else ("task", "similarity")), "else"):
        table.add_column(name, overflow="fold", no_wrap=name == "probability")
    for answer in answers:
        known = answer.label is not None  # else the best class is only one of those that it could be
        others = answer.top[1:3] if known else answer.top[:2]
        label, sure = (answer.label, percent(answer.top[0].probability)) if known else ("none of these", "–")
        lesser = () if brief else (answer.task or "–", f"{answer.similarity:.2f}")
        worth = [score for score in others if score.probability >= MATTERS]
        runners_up = ", ".join(f"{score.label} {100 * score.probability:.0f} %" for score in worth)
        path = visible(answer.path or "").replace("\n", "\\n")  # on one line, and so that the file can be found by it
        table.add_row(*map(Text, (path, label or "", sure, *lesser, runners_up)))
    return table


def percent(probability: float) -> str:
    """Return a probability for people: never one that looks like certainty."""
    return "> 99.9 %" if probability >= 0.9995 else f"{100 * probability:.1f} %"


def moment(written: str | None) -> str:
    """Return a moment that was written in ISO 8601 for people, in their own time; whatever else it is, as it is."""
    try:
        return f"{datetime.fromisoformat(written).astimezone():%Y-%m-%d %H:%M}" if written else "–"
    except (ValueError, OverflowError):  # model.json may come from anywhere
        return str(written)
