"""Folders of studies and sweeps: what one question found is not overwritten by another."""

from __future__ import annotations

from pathlib import Path

from dualprompt.errors import DualPromptError
from dualprompt.files import read_json


def place(base: Path, file: str, question: str, given: bool) -> Path:
    """Return the folder for the answer to a question: `base`, or one beside it where `base` holds another's.

    `file` is what an answer leaves there, with its `question`. A folder that the user gave is that one or none.
    """
    for folder in (base,) if given else (base, base.with_name(f"{base.name}-{question[:8]}")):
        if free(folder, file, question):
            return folder
    raise DualPromptError(f"{base} holds a {Path(file).stem} with other options; give another folder with --out")


def free(folder: Path, file: str, question: str) -> bool:
    """Return whether a folder holds no answer to another question."""
    path = folder / file
    return not path.is_file() or read_json(path).get("question") == question
