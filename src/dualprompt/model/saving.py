"""Between a model and its folder: what is written of it, and how it is built again from what was read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from dualprompt import __version__
from dualprompt.backbones import weights
from dualprompt.backbones.known import EMBEDDED, REPLACED
from dualprompt.errors import DualPromptError
from dualprompt.model import foundation as foundations
from dualprompt.model import saved
from dualprompt.model.foundation import Foundation, Model
from dualprompt.model.outcomes import Outcome, Outcomes
from dualprompt.model.predicting import asking, complete_matrix, judged, trade_off
from dualprompt.model.records import ModelRecord, TaskRecord
from dualprompt.model.results import PromptChoice, TaskInfo, Threshold
from dualprompt.run.checkpoint import State


def facts(foundation: Foundation, model: Model, threshold: Threshold) -> dict[str, Any]:
    """Return what `model.json` says of a model, but for its tensors."""
    config = foundation.config
    return {
        "dualprompt": __version__,
        "backbone": {
            "name": config.backbone.name,
            "sha256": foundation.weights.sha256,
            "input_size": config.backbone.input_size,
        },
        "method": config.method,
        "train": config.train.model_dump(mode="json"),
        "seed": config.seed,
        "threshold": threshold.value,
        "threshold_by": threshold.by,
        "tasks": [task.to_dict() for task in model.tasks],
        "rows": model.rows,
        "next_id": model.next_id,
        "trust": [
            [number, {label: [[o.trust, o.strange, list(o.ranked)] for o in own] for label, own in task.items()}]
            for number, task in model.trust.items()
        ],
    }


def info(foundation: Foundation, model: Model, threshold: Threshold) -> dict[str, Any]:
    """Return what a model knows and what it is made of, as JSON has it."""
    return {
        "classes": list(model.network.classes),
        "tasks": [task.to_dict() for task in model.tasks],
        "accuracy": judged(model),
        "accuracy_matrix": complete_matrix(model.tasks),
        "threshold": threshold.value,
        "threshold_by": threshold.by,
        "threshold_does": trade_off(model.trust, threshold.value),
        "side": foundation.view.side,
        "bytes": sum(value.nbytes for value in model.state.values()),
        "backbone": {
            "name": foundation.weights.name,
            "sha256": foundation.weights.sha256,
            "licence": foundation.weights.licence,
            "parameters": foundation.weights.parameters,
        },
        "method": dict(foundation.config.method),
        "device": str(foundation.device),
        "dualprompt": __version__,
    }


def restore(
    path: Path, device: str, backbone: str | None, version: int | None = None
) -> tuple[Foundation, Model, Threshold]:
    """Return what the model in `path` is built on, the model, and its threshold.

    Args:
        path: its folder.
        device: where it is to compute.
        backbone: where its backbone lies now, if that has moved.
        version: the number of an earlier version, if that is meant.
    """
    record, state = saved.read(path, version)
    foundation = _foundation(path, record, device, backbone)
    try:
        if state:
            foundation.refuse_larger(state)
        model = _model(foundation, record, state)
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        reason = str(error).strip().partition("\n")[0][:200]
        help_by = saved.remedy(path, record.version.number)
        raise DualPromptError(
            f"the model in {path} is damaged ({type(error).__name__}: {reason}); {help_by}"
        ) from error
    return foundation, model, Threshold(record.threshold, record.threshold_by)


def _foundation(path: Path, record: ModelRecord, device: str, backbone: str | None) -> Foundation:
    said = record.backbone
    place = weights.absolute_name(said.name)
    if backbone is None and Path(place).is_absolute() and not Path(place).exists():
        raise DualPromptError(
            f"the backbone of {path} is not at {said.name} any more; say where it lies now with "
            f"`dualprompt info {path} --backbone PLACE` (in Python: load(…, backbone=PLACE))"
        )
    values = {"method": record.method, "train": record.train}
    foundation = foundations.build(values, backbone or said.name, said.input_size, device, record.seed)
    if foundation.weights.sha256 != said.sha256:
        if said.name == EMBEDDED.name and said.sha256 in REPLACED:
            raise DualPromptError(
                f"{path} was made with an embedded backbone ({REPLACED[said.sha256]}) that this version of "
                "dualprompt has replaced; learn its classes again, or keep the version that made it"
            )
        raise DualPromptError(
            f"{path} was made with another backbone than the '{foundation.weights.name}' that is here "
            "(its SHA-256 differs); restore the file, or give its place with backbone="
        )
    return foundation


def _outcome(found: float | tuple[float, float | None, list[str]]) -> Outcome:
    return Outcome(found) if isinstance(found, float | int) else Outcome(found[0], found[1], tuple(found[2]))


def _task(record: TaskRecord, trust: Outcomes) -> TaskInfo:
    """Return what a record says of a task; earlier releases did not note how many images an accuracy was of."""
    held, correct = record.held, record.correct
    if held is None:
        held = sum(map(len, trust.get(record.id, {}).values())) if record.accuracy is not None else 0
        correct = round(held * (record.accuracy or 0) / 100)
    return TaskInfo(
        id=record.id,
        name=record.name,
        classes=tuple(record.classes),
        images=record.images,
        learned=record.learned,
        bytes=record.bytes,
        accuracy=record.accuracy,
        held=held,
        correct=correct,
        left_one_out=record.left_one_out,
        prompts=None if record.prompts is None else PromptChoice(**record.prompts.model_dump()),
        measured=record.measured,
    )


def _model(foundation: Foundation, record: ModelRecord, state: State) -> Model:
    """Return the model that was read; one that could not answer is refused now."""
    trust = {
        number: {label: [_outcome(each) for each in several] for label, several in own.items()}
        for number, own in record.trust
    }
    tasks = tuple(_task(each, trust) for each in record.tasks)
    model = foundation.model(tasks, tuple(record.rows), record.next_id, trust, state)
    if tasks:
        alive = [row[0] for row in model.rows if row is not None]
        model.method.refuse_misfits([alive.count(task.id) for task in tasks], len(model.rows))
        side = foundation.view.side
        blank = torch.zeros(1, side, side, 3, dtype=torch.uint8, device=foundation.device)
        with asking(model.method):
            logits, task, similarity = model.network(blank)
        if not all(bool(torch.isfinite(value).all()) for value in (logits, similarity)) or int(task) >= len(tasks):
            raise ValueError("it has no answer to a black image")
    return model
