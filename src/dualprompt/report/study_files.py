"""Reads what a study has left in its folder; `studies/results.py` writes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dualprompt.files import read_json
from dualprompt.report import publication
from dualprompt.report.pictures import Picture, from_plain
from dualprompt.report.sheet import Sheet

FILE = "study.json"


def is_study(folder: Path) -> bool:
    """Return whether a folder holds a study."""
    return (folder / FILE).is_file()


def read(folder: Path) -> dict[str, Any]:
    """Return what study.json says."""
    return read_json(folder / FILE, "study", "title", "finding", "tables", "pictures", "rows")


def sheets(value: dict[str, Any]) -> list[Sheet]:
    """Return the tables of a study that was read."""
    return publication.sheets({"sheets": value["tables"]})


def pictures(value: dict[str, Any]) -> dict[str, Picture]:
    """Return the pictures of a study that was read."""
    return {name: from_plain(plain) for name, plain in value["pictures"].items()}
