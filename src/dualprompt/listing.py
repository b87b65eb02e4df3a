"""What `dualprompt list` shows: methods, benchmarks, backbones and presets, as rows of plain values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from dualprompt.config import load_preset, preset_names

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
        {"name": name, "title": DATASETS[name].title, "licence": DATASETS[name].licence,
         "download": bool(DATASETS[name].remotes)}
        for name in DATASETS.names()
    ]  # fmt: skip
    groups = [
        {"name": name, "title": " + ".join(parts), "licence": "as its parts",
         "download": any(DATASETS[part].remotes for part in parts)}
        for name, parts in GROUPS.items()
    ]  # fmt: skip
    folder = {
        "name": "a folder",
        "title": "class folders of images, yours",
        "licence": "yours",
        "download": False,
    }
    return [*rows, *groups, folder]


def backbones() -> list[Entry]:
    """Return every backbone with a short name."""
    from dualprompt.backbones.base import BACKBONES
    from dualprompt.backbones.known import Known, known

    added = ((name, BACKBONES[name]) for name in BACKBONES.names())
    return known() + [asdict(Known(name, kind.title, "drawn", kind.licence, False)) for name, kind in added]


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


LISTS: dict[str, Callable[[], list[Entry]]] = {
    "methods": methods,
    "benchmarks": benchmarks,
    "backbones": backbones,
    "presets": presets,
}
