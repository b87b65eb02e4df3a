"""What `dualprompt list` shows: methods, benchmarks, backbones, presets and runs, as rows of plain values."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

from dualprompt.config import load_preset, preset_names
from dualprompt.errors import DualPromptError
from dualprompt.files import read_json

Entry = dict[str, Any]
STUDY = "study.json"  # what a study leaves


def methods() -> list[Entry]:
    """Return every method."""
    from dualprompt.methods.base import METHODS

    return [
        {"name": name, "summary": METHODS[name].summary, "selections": list(METHODS[name].selections)}
        for name in METHODS.names()
    ]


def benchmarks() -> list[Entry]:
    """Return every dataset that can be a task or be cut into tasks."""
    from dualprompt.data.sources import DATASETS, GROUPS

    rows = [
        {"name": name, "title": reader.title, "licence": reader.licence, "download": bool(reader.remotes),
         "beside ImageNet": reader.seen}
        for name in DATASETS.names() if (reader := DATASETS[name])
    ]  # fmt: skip
    groups = [
        {"name": name, "title": " + ".join(parts), "licence": "as its parts",
         "download": any(DATASETS[part].remotes for part in parts), "beside ImageNet": "as its parts"}
        for name, parts in GROUPS.items()
    ]  # fmt: skip
    folder = {
        "name": "a folder",
        "title": "class folders of images, yours",
        "licence": "yours",
        "download": False,
        "beside ImageNet": "",
    }
    return [*rows, *groups, folder]


def backbones() -> list[Entry]:
    """Return every backbone with a short name."""
    from dualprompt.backbones.base import BACKBONES
    from dualprompt.backbones.known import Known, known

    rows = known()
    for name in BACKBONES.names():
        kind = BACKBONES[name]
        rows.append(asdict(Known(name, kind.title, "drawn", licence=kind.licence, needs_network=False)))
    first = ("name", "title", "images", "labels")  # what one chooses by
    return [{key: row[key] for key in (*first, *(key for key in row if key not in first))} for row in rows]


def presets() -> list[Entry]:
    """Return every preset that comes with the package."""
    rows = []
    for name in preset_names():
        values = load_preset(name)
        recipes = list(values["recipes"])
        rows.append(
            {
                "name": name,
                "title": values["title"],
                "recipes": recipes,
                "backbone": values["backbone"]["name"],
            }
        )
    return rows


def runs(folder: Path) -> list[Entry]:
    """Return the runs, groups of runs and studies in a folder, the newest first."""
    if not folder.is_dir():
        raise DualPromptError(f"{folder} is not a folder; say where the runs lie: dualprompt list runs FOLDER")
    found = [entry for each in sorted(folder.iterdir()) if each.is_dir() and (entry := _entry(each))]
    if not found:
        raise DualPromptError(f"{folder} holds no runs; `dualprompt run mini` makes one")
    return sorted(found, key=lambda entry: entry["date"], reverse=True)


def _entry(folder: Path) -> Entry | None:
    """Return what is known of a run, a group of runs or a study; None for any other folder."""
    from dualprompt.training import group

    entry: Entry = {"name": folder.name, "kind": "run", "date": "", "benchmark": "", "methods": [], "seeds": 0}
    entry |= {"runs": 0, "finished": 0, "average_accuracy": {}, "finding": None, "error": None}
    try:
        if group.is_run(folder):
            return entry | _run(folder)
        return entry | _study(folder / STUDY) if (folder / STUDY).is_file() else None
    except DualPromptError as error:  # one that cannot be read stands beside the others
        return entry | {"error": str(error)}


def _run(folder: Path) -> Entry:
    from dualprompt.training import group

    members = [(member, member.run(folder)) for member in group.members_of(folder)]
    results = [(member.name, run.result()) for member, run in members if run.finished]
    begun = [run.manifest()["started"] for _, run in members if run.manifest_path.is_file()]
    return {
        "date": min(begun, default=""),
        "benchmark": members[0][0].config.benchmark.name,
        "methods": list(dict.fromkeys(member.name for member, _ in members)),
        "seeds": len({member.config.seed for member, _ in members}),
        "runs": len(members),
        "finished": len(results),
        "average_accuracy": {
            name: statistics.fmean(result["average_accuracy"] for other, result in results if other == name)
            for name in dict.fromkeys(name for name, _ in results)
        },
    }


def _study(path: Path) -> Entry:
    found = read_json(path, "study", "benchmark", "finding", "rows")
    written = datetime.fromtimestamp(path.stat().st_mtime).astimezone()
    return {
        "kind": f"study {found['study']}",
        "date": written.isoformat(timespec="seconds"),
        "benchmark": str(found["benchmark"]),
        "finding": str(found["finding"]),
    }


LISTS: dict[str, Callable[[], list[Entry]]] = {
    "methods": methods,
    "benchmarks": benchmarks,
    "backbones": backbones,
    "presets": presets,
}
