"""What `dualprompt list` shows: methods, benchmarks, backbones, presets and runs, as rows of plain values."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dualprompt.config import load_preset, preset_names
from dualprompt.errors import DualPromptError

Entry = dict[str, Any]


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
    found = [entry for each in sorted(folder.iterdir()) if each.is_dir() and (entry := _run(each))]
    if not found:
        raise DualPromptError(f"{folder} holds no runs; `dualprompt run mini` makes one")
    return sorted(found, key=lambda entry: entry["started"], reverse=True)


def _run(folder: Path) -> Entry | None:
    """Return what is known of a run or a group of runs; None for any other folder."""
    from dualprompt.training import group

    if not group.is_run(folder):
        return None
    entry: Entry = {"name": folder.name, "started": "", "benchmark": "", "methods": [], "seeds": 0}
    entry |= {"finished": "", "A (%)": ""}
    try:
        members = [(member, member.run(folder)) for member in group.members_of(folder)]
        results = [(member.name, run.result()) for member, run in members if run.finished]
        begun = [run.manifest()["started"] for _, run in members if run.manifest_path.is_file()]
    except DualPromptError as error:  # one that cannot be read stands beside the others
        return entry | {"finished": str(error)}
    names = list(dict.fromkeys(member.name for member, _ in members))
    means = {
        name: statistics.fmean(result["average_accuracy"] for other, result in results if other == name)
        for name in dict.fromkeys(name for name, _ in results)
    }
    return entry | {
        "started": min(begun, default=""),
        "benchmark": members[0][0].config.benchmark.name,
        "methods": names,
        "seeds": len({member.config.seed for member, _ in members}),
        "finished": f"{len(results)} of {len(members)}",
        "A (%)": ", ".join(f"{mean:.2f}" for mean in means.values()),
    }


LISTS: dict[str, Callable[[], list[Entry]]] = {
    "methods": methods,
    "benchmarks": benchmarks,
    "backbones": backbones,
    "presets": presets,
}
