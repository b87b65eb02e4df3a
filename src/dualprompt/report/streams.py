"""What there is to say of a stream before anything learns it: a picture, and a line a task."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.table import Table

from dualprompt.config import RunConfig
from dualprompt.data.stream import outline
from dualprompt.pictures.drawing import save
from dualprompt.report.figures import stream_map


def draw_stream(config: RunConfig, path: Path) -> tuple[dict[str, Any], Table]:
    """Draw a run's stream to a file; return what its tasks hold, as data and as a table."""
    benchmark = config.benchmark
    stream = outline(benchmark, config.seed)
    title = f"{benchmark.name} ({benchmark.stream}), seed {config.seed}: training images of each class"
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
    table = Table("task", "classes", "new", "train", "test", "border", title=title, caption=f"picture: {path}")
    for task in tasks:
        known = "told" if task["border"] else "not told"
        table.add_row(*(str(task[key]) for key in ("name", "classes", "new", "train", "test")), known)
    return {"stream": benchmark.stream, "tasks": tasks, "picture": str(path)}, table
