"""Two runs side by side: what differs in their configs, what they reached, and where on the way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dualprompt.errors import DualPromptError
from dualprompt.report.run_files import combined
from dualprompt.report.sheet import Column, Sheet
from dualprompt.report.tables import ABSENT, METRICS, by_method, label
from dualprompt.run.folder import Run
from dualprompt.training.group import BASELINE
from dualprompt.values import flat


def compare(one: Sequence[Run], other: Sequence[Run]) -> dict[str, Any]:
    """Compare the runs of two folders, each the mean over its seeds; baselines beside a method are left out."""
    sides = [_side(runs) for runs in (one, other)]
    first, second = (side["result"] for side in sides)
    return {
        "runs": [side["folder"] for side in sides],
        "labels": [label(first), label(second)],
        "seeds": [side["seeds"] for side in sides],
        "config": _differences(*(side["config"] for side in sides)),
        "metrics": {
            key: {"values": [first[key], second[key]], "difference": _minus(second[key], first[key])}
            for key, _ in METRICS
        },
        "accuracy_matrices": [first["accuracy_matrix"], second["accuracy_matrix"]],
        "same_tasks": first["tasks"] == second["tasks"],
    }


def _side(runs: Sequence[Run]) -> dict[str, Any]:
    main = [run for run in runs if run.config().method["name"] != BASELINE] or list(runs)
    methods = list(by_method([run.result() for run in main]))
    if len(methods) > 1:
        raise DualPromptError(
            f"the folder holds several methods ({', '.join(methods)}); give the folder of a run, as {main[0].folder}"
        )
    config = main[0].config().model_dump(mode="json", exclude={"seed"})
    seeds = [run.config().seed for run in main]
    folder = main[0].folder if len(main) == 1 else main[0].folder.parent
    return {"folder": str(folder), "seeds": seeds, "config": flat(config), "result": combined(main, folder)}


def _differences(one: dict[str, Any], other: dict[str, Any]) -> dict[str, list[Any]]:
    keys = dict.fromkeys((*one, *other))
    return {key: [one.get(key), other.get(key)] for key in keys if one.get(key) != other.get(key)}


def _minus(value: float | None, other: float | None) -> float | None:
    return None if value is None or other is None else value - other


def sheets(value: dict[str, Any]) -> list[Sheet]:
    """Return the comparison as tables: configs, metrics, and the accuracy matrices with their difference."""
    names = [f"{number}: {name}" for number, name in enumerate(value["labels"], start=1)]
    where = tuple(
        f"{number} is {folder}, seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}"
        for number, folder, seeds in zip((1, 2), value["runs"], value["seeds"], strict=True)
    )
    config = [(key, *(ABSENT if v is None else str(v) for v in pair)) for key, pair in value["config"].items()]
    metrics = [
        (title, *map(_number, found["values"]), _number(found["difference"], "+"))
        for key, title in METRICS
        if (found := value["metrics"][key])
    ]
    found = [
        Sheet(
            "what differs in the configs" if config else "the configs are the same",
            (Column("key", right=False), *(Column(name, right=False) for name in names)),
            (tuple(config),),
            where,
        ),
        Sheet(
            "what they reached",
            (Column("metric", right=False), *map(Column, names), Column("2 − 1")),
            (tuple(metrics),),
        ),
    ]
    return [*found, _matrix(*value["accuracy_matrices"])] if value["same_tasks"] else found


def _matrix(one: list[list[float]], other: list[list[float]]) -> Sheet:
    """Return accuracy after each task on each task: of one, of the other, and how they differ."""
    columns = (Column("after task"), Column("run"), *(Column(f"task {task + 1}") for task in range(len(one))))
    groups = []
    for t, (mine, theirs) in enumerate(zip(one, other, strict=True)):
        rest = [""] * (len(one) - len(mine))
        gaps = [f"{b - a:+.1f}" for a, b in zip(mine, theirs, strict=True)]
        groups.append(
            (
                (str(t + 1), "1", *(f"{a:.1f}" for a in mine), *rest),
                ("", "2", *(f"{b:.1f}" for b in theirs), *rest),
                ("", "2 − 1", *gaps, *rest),
            )
        )
    return Sheet("accuracy (%)", columns, tuple(groups))


def _number(value: float | None, sign: str = "") -> str:
    return ABSENT if value is None else f"{value:{sign}.2f}"
