"""What the load test found, as tables and sentences."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from dualprompt.report.publication import command
from dualprompt.report.sheet import Column, Sheet, as_markdown

WORDS = {"torch": "PyTorch", "onnx": "ONNX Runtime", "int8": "ONNX Runtime, int8"}


def sheets(found: dict[str, Any]) -> list[Sheet]:
    """Return the servers as one table, and the network's pass alone as another."""
    headings = (
        "pictures a second",
        "p50 (ms)",
        "p95 (ms)",
        "processor time a picture (ms)",
        "errors",
        "other work (%)",
    )
    columns = (Column("engine", right=False), Column("clients"), Column("batched", right=False), *map(Column, headings))
    rows = []
    for each in found["servers"]:
        batched = "yes" if each["batched"] else "no"
        for clients, part in ((1, each["idle"]), (found["clients"], each["loaded"])):
            if part:
                rows.append((WORDS[each["engine"]], str(clients), batched, *_cells(part)))
    title = f"One server on {found['cores']} cores, {found['model']['backbone']} at {found['model']['side']} pixels"
    remark = "Others: the part of all cores that processes without a part in the measurement had meanwhile."
    made = [Sheet(title, columns, (tuple(rows),), (remark,))]
    if found["passes"]:
        headings = ("pictures a second", "processor time a picture (ms)", "cores used")
        rows = [
            (each["what"], f"{each['per_second']:.1f}", f"{each['cpu_ms']:.1f}", f"{each['cores_used']:.2f}")
            for each in found["passes"]
        ]
        columns = (Column("PyTorch's pass alone", right=False), *map(Column, headings))
        made.append(Sheet("The network's pass alone, without server and decoding", columns, (tuple(rows),)))
    return made


def _cells(part: dict[str, Any]) -> tuple[str, ...]:
    numbers = [part[key] for key in ("per_second", "p50_ms", "p95_ms", "cpu_ms")]
    told = ["–" if value is None else f"{value:.1f}" for value in numbers]
    others = "–" if part["others_percent"] is None else f"{part['others_percent']:.0f}"
    return (*told, f"{part['errors']:,} of {part['requests']:,}", others)


def finding(found: dict[str, Any]) -> str:
    """Return what follows from the figures, in sentences."""
    batched = {each["engine"]: each for each in found["servers"] if each["batched"]}
    alone = {each["engine"]: each for each in found["servers"] if not each["batched"]}
    lines = []
    for engine, each in batched.items():
        if (other := alone.get(engine)) and other["loaded"]["per_second"]:
            ratio = each["loaded"]["per_second"] / other["loaded"]["per_second"]
            lines.append(f"{WORDS[engine]}, {found['clients']} clients: batching answers {ratio:.2f} times as many.")
    if found["passes"]:
        one = max(each["per_second"] for each in found["passes"] if each["batch"] == 1)
        many = max(each["per_second"] for each in found["passes"] if each["batch"] > 1)
        lines.append(f"The pass alone: many pictures at a time are {many / one:.2f} times as fast as one, at best.")
    for engine, each in batched.items():
        if engine != "torch" and "torch" in batched:
            lines.append(_faster(engine, each, batched["torch"]))
        if (agreement := each["agreement"]) and agreement["before"] is not None:
            change = f"{agreement['before']:.1f} % before, {agreement['after']:.1f} % after"
            lines.append(f"{WORDS[engine]}: accuracy {change}, on {agreement['images']} pictures.")
    return " ".join(lines)


def _faster(engine: str, each: dict[str, Any], torch: dict[str, Any]) -> str:
    idle = torch["idle"]["p50_ms"] / each["idle"]["p50_ms"]
    loaded = each["loaded"]["per_second"] / torch["loaded"]["per_second"]
    return f"{WORDS[engine]} is {idle:.1f} times as fast as PyTorch for one client (p50), {loaded:.1f} times for many."


def publication(found: dict[str, Any], words: Sequence[str]) -> dict[str, Any]:
    """Return all of it as what `dualprompt publish` reads; `words` are those of the command."""
    from importlib.metadata import PackageNotFoundError, version

    from dualprompt.bench.machine import processor

    versions = {}
    for package in ("dualprompt", "torch", "onnxruntime"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = None
    made = sheets(found)
    asked = command(words).removeprefix("dualprompt")
    return {
        "kind": "serving",
        "title": made[0].title,
        "command": f"python -m dualprompt.bench.load{asked}",
        "date": time.strftime("%Y-%m-%d"),
        "versions": versions,
        "processor": processor(),
        "finding": finding(found),
        "verdicts": [],
        "sheets": [asdict(sheet) for sheet in made],
        "rows": [],
        "measured": found,
    }


def summary(found: dict[str, Any]) -> str:
    """Return the figures for people."""
    return "\n".join([*map(as_markdown, sheets(found)), finding(found), ""])
