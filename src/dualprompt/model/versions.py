"""Earlier versions of a model: which there are, going back to one, and removing those that hold what was forgotten."""

from __future__ import annotations

import contextlib
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from dualprompt.data.folder import one_form
from dualprompt.errors import DamagedError, DualPromptError
from dualprompt.model import card, saved, saving
from dualprompt.model.names import Kind
from dualprompt.model.records import LAST_ID, MOST_KEPT, ModelRecord


@dataclass(frozen=True)
class Version:
    """A state that a model was saved in."""

    number: int
    saved: str  # when, ISO 8601; empty where a release before versions saved it
    why: str  # what was done
    classes: tuple[str, ...]
    tasks: tuple[str, ...]
    bytes: int  # of its tensors; versions of the same tensors share them
    current: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return {**asdict(self), "classes": list(self.classes), "tasks": list(self.tasks)}


def listed(path: Path) -> tuple[Version, ...]:
    """Return the versions of the model in `path`, oldest first; the last is the model itself."""
    current = saved.record(path)
    earlier = [number for number in saved.copies(path) if number < current.version.number]
    return (*(_version(path, saved.record(path, number)) for number in earlier), _version(path, current, True))


def known(path: Path) -> tuple[list[Version], Version | None]:
    """Return the earlier versions and the model itself; None: it is damaged. Then copies that are whole are earlier."""
    try:
        saved.record(path)
    except DamagedError:
        earlier = []
        for number in saved.copies(path):
            with contextlib.suppress(DualPromptError):
                earlier.append(_version(path, saved.record(path, number)))
        return earlier, None
    *earlier, current = listed(path)
    return earlier, current


def _version(path: Path, record: ModelRecord, current: bool = False) -> Version:
    try:
        size = (path / record.tensors.file).lstat().st_size
    except OSError:  # they are gone; other versions can still be gone back to
        size = 0
    classes = tuple(dict.fromkeys(label for task in record.tasks for label in task.classes))
    tasks = tuple(task.name for task in record.tasks)
    return Version(record.version.number, record.version.saved, record.version.why, classes, tasks, size, current)


def rollback(
    path: Path, number: int | None = None, *, held: bool = False, device: str = "auto", backbone: str | None = None
) -> Version:
    """Make an earlier version the model again, as a further version, so that this can be undone too.

    That helps where the model itself is damaged, its `model.json` or its tensors. What was in `model.json` is then kept
    beside it, as `model.json.damaged`; as long as it lies there, no tensors are removed.

    Args:
        path: the model's folder.
        number: of the version; None: the one before the model, so that twice is once there and back.
        held: whether we ourselves hold the model; one that others hold is refused.
        device: where the version is tried before it becomes the model.
        backbone: where its backbone lies now, if that has moved.
    """
    with contextlib.nullcontext() if held else _held(path, damaged=True):
        earlier, current = known(path)
        numbers = [version.number for version in earlier]
        if not numbers:
            raise DualPromptError(f"{path} has no earlier version to go back to; each change that is saved makes one")
        if number is None:
            number = numbers[-1]
        if number not in numbers:
            said = "it is the model now" if current and number == current.number else f"there is no version {number}"
            raise DualPromptError(f"{path}: {said}; earlier versions: {', '.join(map(str, numbers))}")
        foundation, model, threshold = saving.restore(path, device, backbone, number)
        # Ids that were given since are not given again; what is damaged may have given more.
        latest = saved.record(path, None if current else numbers[-1]).next_id
        free = latest if current else max(latest + 1, saved.said_next_id(path))
        model = replace(model, next_id=min(max(model.next_id, free), LAST_ID))
        facts = saving.facts(foundation, model, threshold)
        text = card.text(saving.info(foundation, model, threshold))
        saved.write(path, facts, model.state, text, f"went back to version {number}")
        return _version(path, saved.record(path), True)


def keep(path: Path, count: int) -> None:
    """Keep so many earlier versions from now on, and remove those beyond."""
    if not 0 <= count <= MOST_KEPT:
        raise DualPromptError(f"0 to {MOST_KEPT} earlier versions can be kept, found {count}")
    with _held(path):
        saved.set_keep(path, count)


def purge(path: Path, tasks: set[int]) -> tuple[int, ...]:
    """Remove the earlier versions that hold one of these tasks, by their ids; return their numbers.

    What was set aside, because it could not be read, is removed too: nobody knows what is in it. Classes may have had
    other names then, so whole tasks decide. Whoever calls holds the model.
    """
    found = saved.copies(path)
    gone = [number for number in found if tasks & {task.id for task in saved.record(path, number).tasks}]
    files = [*saved.asides(path), *(found[number] for number in gone)]
    saved.remove(files)
    if left := [file for file in files if os.path.lexists(file)]:
        raise DualPromptError(f"{left[0]} cannot be removed; see who may write there, and try again")
    saved.tidy(path)
    current = saved.record(path).version.number
    return tuple(number for number in gone if number < current)


def labels_of(path: Path, tasks: set[int]) -> set[str]:
    """Return what the classes of these tasks, by their ids, are or were called in any version."""
    records = [saved.record(path), *(saved.record(path, number) for number in saved.copies(path))]
    return {label for record in records for task in record.tasks if task.id in tasks for label in task.classes}


def holders(path: Path, what: str | int, kind: Kind | None = None) -> set[int]:
    """Return the ids of tasks that are called so, or have a class that is, in any version; what `purge` is given."""
    records = [saved.record(path), *(saved.record(path, number) for number in saved.copies(path))]
    label = one_form(str(what))
    return {
        task.id
        for record in records
        for task in record.tasks
        if (kind != "class" and what in (task.id, task.name)) or (kind != "task" and label in task.classes)
    }


def _held(path: Path, damaged: bool = False) -> contextlib.AbstractContextManager[int]:
    """Hold a model; nothing is written into a folder that is none. It may be a `damaged` one."""
    with contextlib.suppress(DamagedError) if damaged else contextlib.nullcontext():
        saved.record(path)  # it says what is wrong
    return saved.held(path)
