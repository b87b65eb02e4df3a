"""Distributions that are installed for a test: a folder on the path with a module and a dist-info beside it."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from dualprompt.registry import Registry

GUIDES = Path(__file__).parents[1] / "docs" / "guides"


def pasted(containing: str) -> str:
    """Return the one fenced block of the guides that holds a text, as one who copies it from the page has it."""
    blocks = [block for page in sorted(GUIDES.glob("*.md")) for block in python_blocks(page)]
    (found,) = (block for block in blocks if containing in block)
    return found


def python_blocks(page: Path) -> list[str]:
    """Return the fenced Python of a page."""
    return re.findall(r"^```python\n(.*?)^```$", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def write_distribution(folder: Path, name: str, modules: Mapping[str, str], group: str, points: str) -> None:
    """Lay out an installed distribution: its modules, its name, and its entry points of one group, a line each."""
    about = folder / f"{name.replace('-', '_')}-1.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(f"[{group}]\n{points}\n")
    for module, source in modules.items():
        (folder / f"{module}.py").write_text(source)


@contextmanager
def installed(folder: Path, registry: Registry[Any]) -> Iterator[None]:
    """Have a registry look anew, with what is installed in a folder; afterwards all is as before."""
    registry.names()
    known = set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        for part, value in (("_things", dict(registry._things)), ("_broken", {}), ("_discovered", False)):
            patch.setattr(registry, part, value)
        try:
            yield
        finally:
            for name in set(sys.modules) - known:
                if str(getattr(sys.modules[name], "__file__", "")).startswith(str(folder)):
                    del sys.modules[name]
