"""Mutations of every kind of file that is read back: each is read as something whole or refused in one line."""

from __future__ import annotations

from typing import Any

from tools.faults.common import tested


def campaign_files(count: int, seed: int) -> dict[str, Any]:
    """Try so many mutations of every kind of file (tests/test_hostile_files.py, with more examples)."""
    options = (f"--hypothesis-seed={seed}", "-k", "mutations")
    return {"mutations_of_each": count} | tested("test_hostile_files.py", *options, DUALPROMPT_EXAMPLES=str(count))
