"""The code that decides a run's result, as one hash: a result of other code must not pass for one of this.

It covers the method's module and the loop, with all that they import from the rooms where results are made. Comments,
docstrings and layout are no part of it, nor is the version of Python: what is hashed is the syntax tree, in words.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import inspect
import secrets
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dualprompt.backbones.base import BACKBONES
from dualprompt.config import RunConfig
from dualprompt.files import digest
from dualprompt.methods.base import METHODS

PACKAGE = Path(__file__).parent.parent
LOOP = "dualprompt.training.loop"
ROOMS = (
    *(f"dualprompt.{room}" for room in ("training", "features", "run", "methods", "prompts", "backbones")),
    *(f"dualprompt.{room}" for room in ("data", "derived", "metrics", "seeds")),
)
# They show, record, find or fetch, and change no number. What they find is in the identity: images and weights by
# their content (so readers in data/datasets, which nothing imports by name, need no mention), options by their values.
APART = frozenset(
    {
        "dualprompt.run.code",
        "dualprompt.run.folder",
        "dualprompt.run.identity",
        "dualprompt.run.predictions",
        "dualprompt.run.provenance",
        "dualprompt.run.records",
        "dualprompt.run.tracking",
        "dualprompt.training.group",
        "dualprompt.backbones.hub",
        "dualprompt.backbones.known",
        "dualprompt.backbones.overlap",
        "dualprompt.data.download",
        "dualprompt.data.gallery",
    }
)
# What the grammar gained after Python 3.11, and what says nothing: a tree without them is the same in every version.
SILENT_FIELDS = frozenset({"ctx", "kind", "type_comment", "type_params", "type_ignores"})


def fingerprint(method: str, backbone: str | None = None) -> str:
    """Return the hash of the code that decides a run of `method`; it is worked out once a process.

    A backbone that one file has added is part of it. The others are, as the loop imports them.
    """
    found = of_method(METHODS[method])
    return digest([found, of_method(BACKBONES[backbone])]) if backbone is not None and backbone in BACKBONES else found


def code_of(config: RunConfig) -> str:
    """Return the hash of the code that decides a run."""
    return fingerprint(config.method["name"], config.backbone.name)


@functools.cache
def of_method(kind: type) -> str:
    """Return the hash for the class of a method or a backbone."""
    return digest({name: source and _read(source).hash for name, source in modules(kind).items()} | _unread(kind))


def modules(kind: type) -> dict[str, bytes | None]:
    """Return the modules that decide a run of a method, with their source; None where there is none to read."""
    return _reached([kind.__module__, LOOP], lambda name: _counts(name, kind))


@functools.cache
def of_module(name: str) -> str:
    """Return the hash of a module of ours, with all that it imports from the rooms where results are made."""
    found = _reached([name], lambda other: other.startswith(ROOMS) and other not in APART)
    return digest({name: source and _read(source).hash for name, source in found.items()})


def _reached(waiting: list[str], counts: Callable[[str], bool]) -> dict[str, bytes | None]:
    """Return modules and those that they import, as far as these count, with their source."""
    found = dict[str, bytes | None]()
    while waiting:
        name = waiting.pop()
        if name not in found:
            path = _file(name)
            found[name] = path and path.read_bytes()
            waiting += [other for other in _imported(name, path) if counts(other)] if path else []
    return found


def _unread(kind: type) -> dict[str, str]:
    """Return what stands for a method that no file holds: its source, or else what no other process will have."""
    if _file(kind.__module__) is not None:
        return {}
    try:
        return {"source": inspect.getsource(kind)}
    except (OSError, TypeError):  # typed at a prompt
        return {"source": _of_this_process()}


@functools.cache
def _of_this_process() -> str:
    return secrets.token_hex()


def _counts(name: str, kind: type) -> bool:
    """Return whether an imported module may decide a result: one of the rooms, or of the method's own folder."""
    if name.partition(".")[0] == "dualprompt":
        return name.startswith(ROOMS) and name not in APART
    path, own = _file(name), _file(kind.__module__)
    if path is None or own is None or kind.__module__.startswith("dualprompt."):
        return False
    return name.partition(".")[0] == kind.__module__.partition(".")[0] or path.parent == own.parent


def _file(name: str) -> Path | None:
    """Return the source file of a module; those of the package are found without being imported."""
    top, _, rest = name.partition(".")
    if top == "dualprompt":
        place = PACKAGE.joinpath(*rest.split(".")) if rest else PACKAGE
        paths = [place.with_suffix(".py"), place / "__init__.py"]
    else:
        origin = getattr(sys.modules.get(name), "__file__", None)
        paths = [Path(origin)] if origin else []
    return next((path for path in paths if path.suffix == ".py" and path.is_file()), None)


@dataclass(frozen=True)
class _Read:
    """A source text as it was read: its hash, and each import as dots, module and names."""

    hash: str
    imports: tuple[tuple[int, str, tuple[str, ...]], ...]


@functools.cache
def _read(source: bytes) -> _Read:
    tree = ast.parse(source)
    imports: list[tuple[int, str, tuple[str, ...]]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imports += [(0, alias.name, ()) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            imports.append((node.level, node.module or "", tuple(alias.name for alias in node.names)))
    return _Read(digest(plain(tree)), tuple(imports))


def _imported(name: str, path: Path) -> Iterator[str]:
    """Yield every module that a file may import, wherever in it that is said."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for level, module, names in _read(path.read_bytes()).imports:
        base = importlib.util.resolve_name("." * level + module, package) if level else module
        yield base
        yield from (part for part in (f"{base}.{each}" for each in names) if _file(part) is not None)


def plain(node: Any) -> Any:
    """Return a syntax tree as lists and strings, without places, docstrings and whatever differs between Pythons."""
    if isinstance(node, ast.AST):
        fields = ((name, plain(value)) for name, value in ast.iter_fields(node) if name not in SILENT_FIELDS)
        told = ((name, value) for name, value in fields if value is not None and value != [])
        return [type(node).__name__, *([name, value] for name, value in told)]
    if isinstance(node, list):
        return [plain(each) for each in node if not _is_text(each)]
    return node if node is None else f"{type(node).__name__} {node!r}"


def _is_text(node: Any) -> bool:
    """Return whether a statement is a bare string: a docstring, or a comment in its clothes."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
