"""Keeps what `make demo` came to, for the README: `python -m tools.site.demo runs/demo-… docs/results/demo.json`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from dualprompt.files import write_json
from dualprompt.report.tables import over_seeds
from dualprompt.research import FinishedGroup, load_run

NUMBERS = ("average_accuracy", "forgetting", "matching_accuracy")


def record(folder: Path) -> dict[str, Any]:
    """Return the numbers of a finished demo: a line for each method, and what they were made with."""
    group = load_run(folder)
    if not isinstance(group, FinishedGroup):
        raise SystemExit(f"{folder} is not what `make demo` leaves")
    results = [run.result for run in group.runs]
    methods = list(dict.fromkeys(run.method for run in group.runs))
    lines = []
    for method in methods:
        own = [result for run, result in zip(group.runs, results, strict=True) if run.method == method]
        lines.append({"method": method} | {key: over_seeds([each[key] for each in own]) for key in NUMBERS})
    manifest = group.runs[0].run.manifest()
    return {
        "command": "make demo",
        "date": manifest["started"][:10],
        "versions": {name: version for name, version in manifest["versions"].items() if name != "platform"},
        "seeds": sorted({result["seed"] for result in results}),
        "methods": lines,
        "configs": {run.method: run.run.manifest()["config"] for run in reversed(group.runs)},  # of the first seed
    }


def main() -> int:
    """Write the record."""
    folder, file = map(Path, sys.argv[1:])
    write_json(file, record(folder))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
