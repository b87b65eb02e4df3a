"""Reads what a study has left in its folder; `studies/results.py` writes it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Discriminator, Field, Tag

from dualprompt.config import Record, read_record
from dualprompt.files import refuse_links
from dualprompt.pictures.kinds import Grid, Lines, Points, whole
from dualprompt.report import publication

FILE = "study.json"


def _plain_name(name: str) -> str:
    if name.startswith("."):
        raise ValueError("a file's name begins with no dot")
    return name


# What files are called: a name may not lead out of the folder.
FileName = Annotated[str, Field(pattern=r"^[^/\\\x00-\x1f]{1,200}$"), AfterValidator(_plain_name)]
PictureRecord = Annotated[
    Annotated[Grid, Tag("grid")] | Annotated[Lines, Tag("lines")] | Annotated[Points, Tag("points")],
    Discriminator(lambda value: value.get("kind") if isinstance(value, dict) else getattr(value, "kind", None)),
    AfterValidator(whole),
]


class _RowRecord(Record):
    runs: list[str]


class StudyRecord(Record):
    """What `study.json` holds."""

    study: FileName
    title: str
    paper: str
    finding: str
    benchmark: str
    backbone: str
    recipe: str
    rows: list[_RowRecord]
    tables: list[publication.SheetRecord]
    pictures: dict[FileName, PictureRecord]
    photos: dict[FileName, str]


def is_study(folder: Path) -> bool:
    """Return whether a folder holds a study."""
    return (folder / FILE).is_file()


def read(folder: Path) -> StudyRecord:
    """Return what study.json says."""
    refuse_links(folder)
    return read_record(folder / FILE, StudyRecord, "restore it or make the study again")
