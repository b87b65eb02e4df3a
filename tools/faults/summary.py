"""What a campaign found, as tables that `dualprompt publish` reads; its parts may come from several commands."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tools.faults.soak import verdicts_of

from dualprompt import __version__
from dualprompt.bench.machine import processor
from dualprompt.files import write_json
from dualprompt.report import publication
from dualprompt.report.sheet import Column, Sheet

Row = tuple[str, str, str]  # what was done, how often, and what came of it
UNITS = {
    "memory_mb": "memory (MB)",
    "descriptors": "open files",
    "threads": "threads",
    "p50_ms": "p50 (ms)",
    "p95_ms": "p95 (ms)",
}


def publish(path: Path, found: dict[str, Any], words: Sequence[str]) -> None:
    """Write what was found; parts that were published before and are not found anew stay."""
    asked = publication.command(words).removeprefix("dualprompt")
    about = {"command": f"python -m tools.faults{asked}", "date": time.strftime("%Y-%m-%d"), "processor": processor()}
    measured = publication.read(path)["measured"] if path.exists() else {}
    measured |= {name: about | part for name, part in found.items()}
    made = sheets(measured)
    value = {
        "kind": "faults",
        "title": made[0].title,
        "command": about["command"],
        "date": about["date"],
        "dualprompt": __version__,
        "finding": "",
        "verdicts": [],
        "sheets": [asdict(sheet) for sheet in made],
        "rows": [],
        "measured": measured,
    }
    write_json(path, value)


def sheets(measured: dict[str, Any]) -> list[Sheet]:
    """Return a line for each part; and the soak over time, if there was one."""
    lines = []
    for name, told in TOLD.items():
        if part := measured.get(name):
            problems, date = str(len(part["problems"])), part["date"]
            lines += [(*row, problems, date) for row in told(part)]
    headings = (Column("how often"), Column("what came of it", right=False), Column("problems"), Column("date"))
    made = [Sheet("Faults", (Column("what was done", right=False), *headings), (tuple(lines),))]
    if soak := measured.get("soak"):
        soak["verdicts"] = verdicts_of(soak["samples"])
        quarter = max(1, len(soak["samples"]) // 4)
        ends = (soak["samples"][:quarter], soak["samples"][-quarter:])
        rows = []
        for key, shown in UNITS.items():
            means = [f"{sum(each[key] for each in end) / quarter:.1f}" for end in ends]
            rows.append((shown, *means, soak["verdicts"][key]))
        columns = (Column("mean of", right=False), Column("first quarter"), Column("last quarter"))
        made.append(Sheet("Soak", (*columns, Column("over the time", right=False)), (tuple(rows),)))
        made.append(over_time(soak["samples"]))
    return made


def over_time(samples: list[dict[str, Any]]) -> Sheet:
    """Return the means of each sixth of a soak."""
    size = -(-len(samples) // 6)
    rows = []
    for part in (samples[start : start + size] for start in range(0, len(samples), size)):
        means = [f"{sum(each[key] for each in part) / len(part):.1f}" for key in UNITS]
        rows.append((f"{part[0]['minute']:.0f} to {part[-1]['minute']:.0f}", *means))
    columns = (Column("minutes", right=False), *(Column(shown) for shown in UNITS.values()))
    return Sheet("Soak, over time", columns, (tuple(rows),))


def _requests(part: dict[str, Any]) -> list[Row]:
    rows = []
    for name, shown in (("schema", "malformed requests, from the schema"), ("by hand", "malformed requests, by hand")):
        own, seen = part[name], Counter[str]()
        for status, count in own["statuses"].items():
            seen[f"{status[0]}xx" if status.isdigit() else status] += count
        told = ", ".join(f"{count:,} {status}" for status, count in sorted(seen.items()))
        rows.append((shown, f"{own['requests']:,}", f"{told}; {own['server_errors']} server errors"))
    return rows


def _kills(part: dict[str, Any]) -> list[Row]:
    rows, runs, server = [], part["runs"], part["server"]
    if "kills" in runs:
        what = f"SIGKILL of runs of {len(runs['by_method'])} methods"
        rows.append((what, f"{runs['kills']}", f"{runs['lives']} runs ended, in the bits of one that nobody killed"))
    if "kills" in server:
        told = "; ".join(f"{count} × {outcome}" for outcome, count in server["outcomes"].items())
        rows.append(("SIGKILL of the server or what learns", f"{server['kills']}", told))
    return rows


def _disk(part: dict[str, Any]) -> list[Row]:
    done = sum(row.get("job") == "done" for row in part["rounds"])
    rest = len(part["rounds"]) - done
    told = f"{rest} lessons failed and named the file, the old model untouched; {done} had enough"
    return [("limits to the size of files", f"{len(part['rounds'])}", told)]


def _folders(part: dict[str, Any]) -> list[Row]:
    refused = sum(outcome.startswith("refused") for outcome in part["outcomes"].values())
    told = f"{refused} refused, {len(part['outcomes']) - refused} served; the folder beside them as before"
    return [("models from a stranger", f"{len(part['outcomes'])}", told)]


def _pictures(part: dict[str, Any]) -> list[Row]:
    waits = f"others waited {part['median_seconds']} s (median), {part['longest_seconds']} s (longest)"
    rest = f"at most {part['peak_memory_mb']:.0f} MB; SIGTERM ended it in {part['sigterm_seconds']} s"
    attacks = sum(part["statuses"].values())
    return [("requests with six pictures that grow", f"{attacks}", f"{waits}; {rest}")]


def _crowd(part: dict[str, Any]) -> list[Row]:
    rounds = [each for each in part["rounds"].values() if isinstance(each, dict)]
    logs = [each for each in part["rounds"].values() if not isinstance(each, dict)]
    health = sum((Counter(each["health"]) for each in rounds), Counter[str]())
    told = ", ".join(f"{count} × {status}" for status, count in health.items())
    waited = max(each["others_wait_seconds"] for each in rounds)
    text = f"health: {told}; others waited at most {waited} s; log of {max(logs):,} bytes"
    return [("silent, stalled and deaf connections", f"{sum(each['connections'] for each in rounds):,}", text)]


def _files(part: dict[str, Any]) -> list[Row]:
    count = part["mutations_of_each"] * part["kinds"]
    return [
        ("mutated files", f"{count:,}", f"of {part['kinds']} kinds, read as something whole or refused in one line")
    ]


def _soak(part: dict[str, Any]) -> list[Row]:
    told = f"{part['answers']:,} pictures and {part['large_pictures']:,} large ones answered"
    return [
        ("minutes of soak", f"{part['minutes']:.0f}", f"{told}, {part['taught']} taught, {part['forgotten']} forgotten")
    ]


def _loading(part: dict[str, Any]) -> list[Row]:
    before, after = part["before"], part["after"]
    told = f"{before['objects']:,} Python objects before, {after['objects']:,} after; {after['tensors']} tensors"
    memory = (
        f"{before['memory_mb']} MB before, {after['memory_mb']} after, {part['given_back_mb']} given back when asked"
    )
    return [("loads of a model in one process", f"{part['loads']}", f"{told}; {memory}")]


TOLD: dict[str, Callable[[dict[str, Any]], list[Row]]] = {
    "requests": _requests,
    "kills": _kills,
    "disk": _disk,
    "folders": _folders,
    "pictures": _pictures,
    "crowd": _crowd,
    "files": _files,
    "soak": _soak,
    "loading": _loading,
}
