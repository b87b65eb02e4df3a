"""What there is to say of a stream before anything learns it: a picture, and a line a task."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.table import Table

from dualprompt.config import RunConfig
from dualprompt.data.stream import outline
from dualprompt.pictures.drawing import save
from dualprompt.report.figures import stream_map


def describe_stream(config: RunConfig, path: Path | None) -> tuple[dict[str, Any], Table]:
    """Return what the tasks of a run's stream hold, as data and as a table; draw it to a file where one is given."""
    benchmark = config.benchmark
    stream = outline(benchmark, config.seed)
    title = f"{benchmark.name} ({benchmark.stream}), seed {config.seed}: training images of each class"
    if path is not None:
        save(path, stream_map(stream, title))
    tasks = [
        {
            "name": task.name,
            "classes": len(task.labels),
            "new": len(task.new_labels),
            "train": len(task.train),
            "test": len(task.judged(benchmark.evaluate_on)),
            "border": task.border,
            "marks": list(task.marks),
        }
        for task in stream.experiences
    ]
    said = "--out FILE.png draws it" if path is None else f"picture: {path}"
    table = Table("task", "classes", "new", "train", "test", "border", title=title, caption=said)
    for task in tasks:
        known = "told" if task["border"] else "not told"
        table.add_row(*(str(task[key]) for key in ("name", "classes", "new", "train", "test")), known)
    return {"stream": benchmark.stream, "tasks": tasks, "picture": None if path is None else str(path)}, table
