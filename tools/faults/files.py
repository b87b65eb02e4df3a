"""Mutations of every kind of file that is read back: each is read as something whole or refused in one line."""

from __future__ import annotations

import re
from typing import Any

from tools.faults.common import tested


def campaign_files(count: int, seed: int) -> dict[str, Any]:
    """Try so many mutations of every kind of file (tests/test_hostile_files.py, with more examples)."""
    options = (f"--hypothesis-seed={seed}", "-k", "mutations")
    done = tested("test_hostile_files.py", *options, DUALPROMPT_EXAMPLES=str(count))
    kinds = sum(map(int, re.findall(r"(\d+) (?:passed|failed)", done["summary"])))
    return {"mutations_of_each": count, "kinds": kinds} | done
