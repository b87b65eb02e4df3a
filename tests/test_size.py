"""Files, functions and rooms stay small enough to be read."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import dualprompt

PACKAGE = Path(dualprompt.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
MOST_OF_FILE, MOST_OF_FUNCTION, MOST_OF_ROOM = 400, 60, 2500
LARGE_ROOMS = {"data", "methods"}  # where one file is added for each dataset and each method


def lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def test_there_are_files_to_measure():
    assert len(FILES) > 100


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_a_file_and_its_functions_are_short(path: Path):
    assert lines(path) <= MOST_OF_FILE
    long = {f"{each.name} ({size})" for each in functions(path) if (size := extent(each)) > MOST_OF_FUNCTION}
    assert not long


def extent(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return (function.end_lineno or function.lineno) - function.lineno + 1


def test_a_room_is_small():
    rooms = Counter[str]()
    for path in FILES:
        if path.parent != PACKAGE:
            rooms[path.relative_to(PACKAGE).parts[0]] += lines(path)
    assert {name for name, size in rooms.items() if size > MOST_OF_ROOM} <= LARGE_ROOMS


def test_the_learner_is_a_facade():
    assert lines(PACKAGE / "learner.py") < 370
