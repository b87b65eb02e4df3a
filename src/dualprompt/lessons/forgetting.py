"""Making a model forget: a task or a class, and what was measured on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dualprompt.data.folder import one_form
from dualprompt.methods.base import Method
from dualprompt.model import outcomes
from dualprompt.model.foundation import Foundation, Model
from dualprompt.model.names import Kind, find
from dualprompt.model.network import Rows
from dualprompt.model.results import TaskInfo
from dualprompt.run.checkpoint import State


def forget(
    foundation: Foundation, model: Model, what: str | int, kind: Kind | None = None
) -> tuple[Model, TaskInfo | str]:
    """Return a model without a task or a class, and which it was; `kind` says which, where both have that name."""
    what = one_form(what) if isinstance(what, str) and what not in {t.name for t in model.tasks} else what
    task = find(model.tasks, what, kind)
    if task is not None:
        return without_classes(foundation, model, task.id, task.classes), task
    for number in [task.id for task in model.tasks if what in task.classes]:
        model = without_classes(foundation, model, number, (str(what),))
    return model, str(what)


def without_classes(foundation: Foundation, model: Model, number: int, labels: Sequence[str]) -> Model:
    """Return a model without some classes of the task with the id `number`; without its last class, the task goes."""
    place, task = next((place, task) for place, task in enumerate(model.tasks) if task.id == number)
    rest = tuple(name for name in task.classes if name not in labels)
    if not rest and len(model.tasks) == 1:
        return foundation.model(next_id=model.next_id)
    rows = [i for i, row in enumerate(model.rows) if row is not None and row[0] == task.id and row[1] in labels]
    own = [i for i, row in enumerate(model.rows) if row is not None and row[0] == task.id]
    places = [own.index(i) for i in rows] if rest else None
    method = foundation.method(model.state)
    method.forget(place, rows, places)
    alive = tuple(None if i in rows else row for i, row in enumerate(model.rows))
    size = bytes_of(compact(foundation, method.state(), alive), place) if rest else 0
    left = replace(task, classes=rest, bytes=size)
    tasks = tuple(each if each is not task else left for each in model.tasks if each is not task or rest)
    trust = {
        each: {label: own for label, own in task_trust.items() if each != task.id or label not in labels}
        for each, task_trust in model.trust.items()
        if each != task.id or rest
    }
    left_over = [{n: value for n, value in each.measured.items() if n != task.id} for each in tasks]
    tasks = tuple(replace(each, measured=own) for each, own in zip(tasks, left_over, strict=True))
    known = {row[1] for row in alive if row is not None}
    trust = outcomes.without(trust, [label for label in labels if label not in known])
    # What was measured on images of a class that is gone says nothing of those that are left; nor does what was said
    # in its name. Of the others it is kept who came second.
    tasks = tuple(
        outcomes.measured(each, trust.get(number, {})) if each.id == number else outcomes.remeasured(each, trust)
        for each in tasks
    )
    return foundation.model(tasks, alive, model.next_id, trust, method=method)


def compact(foundation: Foundation, state: State, rows: Rows) -> Method:
    """Return a method of that state without the rows of forgotten classes."""
    method = foundation.method(state)
    if state:
        method.drop_classes([i for i, row in enumerate(rows) if row is None])
    return method


def bytes_of(method: Method, task: int) -> int:
    """Return how much a method, which must be compact, keeps for a task alone."""
    return sum(value.nbytes for value in method.owned_by(task).values())
