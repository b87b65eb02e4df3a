"""Names of tasks and classes: which are refused, which are free, which is meant."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

from dualprompt.errors import DualPromptError, nearest
from dualprompt.files import with_home
from dualprompt.model.images import Data
from dualprompt.model.results import TaskInfo

Kind = Literal["task", "class"]


def few(names: Iterable[str]) -> str:
    """Return a phrase with the first five names, and how many more there are."""
    listed = list(names)
    return ", ".join(listed[:5]) + (f" and {len(listed) - 5} more" if len(listed) > 5 else "")


def refuse_unprintable(what: str, names: Iterable[str]) -> None:
    """Refuse names that nobody could read."""
    for name in names:
        if not name.strip() or not name.isprintable():
            raise DualPromptError(f"{name!r} cannot be the name of a {what}; give it printable characters")


def free_name(name: str | None, data: Data, tasks: Sequence[TaskInfo], number: int) -> str:
    """Return what a new task is called: what was asked for, or else a name made from its folder or number.

    `name` was asked for, or None; `data` may be a folder; `tasks` have names that are taken; `number` is the new one's.
    """
    taken = {task.name for task in tasks}
    if name is not None:
        refuse_unprintable("task", [name])
        if name in taken:
            raise DualPromptError(f"a task is called '{name}' already; give this one another name")
        return name
    said = _of_folder(with_home(data).resolve()) if isinstance(data, str | Path) else f"task {number}"
    return next(each for n in range(1, len(taken) + 2) if (each := said if n == 1 else f"{said} {n}") not in taken)


def _of_folder(folder: Path) -> str:
    """Return a folder's name; `train` says nothing of what lies in it, so there its parent's."""
    return folder.parent.name if folder.name == "train" and folder.parent.name else folder.name


def find(tasks: Sequence[TaskInfo], what: str | int, kind: Kind | None = None) -> TaskInfo | None:
    """Return the task that is meant, or None where it is a class; `kind` says which, where both have that name.

    A class is meant by `one_form` of its name.
    """
    if kind == "class":
        known = [name for task in tasks for name in task.classes]
        if what not in known:
            raise DualPromptError(f"there is no class '{what}'; {nearest(str(what), known)}")
        return None
    if isinstance(what, int):
        task = next((task for task in tasks if task.id == what), None)
        if task is None:
            raise DualPromptError(f"there is no task with id {what}; known: {[task.id for task in tasks]}")
        return task
    task = next((task for task in tasks if task.name == what), None)
    others = [] if kind == "task" else [other for other in tasks if what in other.classes]
    if task is None and not others:
        names = [*(task.name for task in tasks), *(name for task in tasks for name in task.classes)]
        raise DualPromptError(f"there is no task or class '{what}'; {nearest(what, names)}")
    if task is not None and others and (others != [task] or len(task.classes) > 1):
        raise DualPromptError(f"'{what}' is a task and a class; say which is meant with kind= (--task or --class)")
    return task
