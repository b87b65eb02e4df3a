"""The pictures that results make."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dualprompt.data.stream import Stream
from dualprompt.metrics import over_tasks
from dualprompt.pictures.kinds import Grid, Line, Lines, Map
from dualprompt.report.tables import ERRORS, Result, by_method, explained, label
from dualprompt.report.verdict import two_errors


def _numbered(count: int) -> list[str]:
    return [str(number + 1) for number in range(count)]


def _mean_matrix(matrices: Sequence[Sequence[Sequence[float]]]) -> list[list[float | None]]:
    count = len(matrices[0])
    rows = [np.mean([matrix[t] for matrix in matrices], axis=0).tolist() for t in range(count)]
    return [row + [None] * (count - len(row)) for row in rows]


def accuracy_grid(results: Sequence[Result], key: str = "accuracy_matrix") -> Grid:
    """Return S of one method, the mean over its seeds: rows after each task, columns the tasks."""
    first = results[0]
    count = len(first[key])
    seeds = f"seed {first['seed']}" if len(results) == 1 else f"mean of {len(results)} seeds"
    what = "accuracy" if key == "accuracy_matrix" else "matching accuracy"
    return Grid(
        f"{label(first)} on {first['benchmark']}, {seeds}: {what} (%)",
        f"{what} on task",
        "after learning task",
        _numbered(count),
        _numbered(count),
        _mean_matrix([result[key] for result in results]),
        f"{what} (%)",
    )


def confusion_grid(results: Sequence[Result]) -> Grid:
    """Return which task's E-Prompt the images of each task used in the end, in percent of their number."""
    percents = [[[100 * n / sum(row) for n in row] for row in result["matching_confusion"]] for result in results]
    names = _task_names(results[0]["tasks"])
    title = "; ".join([f"{label(results[0])}: which task's E-Prompt is selected (%)", *explained([len(results)])])
    return Grid(
        title,
        "task whose E-Prompt is selected",
        "task of the image",
        _numbered(len(names)),
        names,
        np.mean(percents, axis=0).tolist(),
        "share (%)",
        spread=np.std(percents, axis=0, ddof=1).tolist() if len(results) > 1 else None,
    )


def key_grid(keys: np.ndarray, names: Sequence[str]) -> Grid:
    """Return the cosine similarity of every pair of task keys, (tasks, dim)."""
    unit = keys / np.linalg.norm(keys, axis=1, keepdims=True).clip(1e-12)
    return Grid(
        "similarity of task keys",
        "key of task",
        "task",
        _numbered(len(keys)),
        _task_names(names),
        (unit @ unit.T).tolist(),
        "cosine",
        low=-1,
        high=1,
        digits=2,
        colours="RdBu_r",
    )


def _task_names(names: Sequence[str]) -> list[str]:
    return [name if name == f"task {i}" else f"{i} {name}" for i, name in enumerate(names, start=1)]


def curves(results: Sequence[Result]) -> tuple[Lines, Lines]:
    """Return A_t and F_t over the tasks, a line a method, with the deviation over its seeds.

    Where every method has one seed, A has two standard errors instead, from the number of images evaluated.
    """
    groups = by_method(results)
    single = all(len(group) == 1 and group[0]["judged_images"] for group in groups.values())
    bars = explained(len(group) for group in groups.values())
    found = []
    for key, name in (("average_accuracy", "average accuracy A (%)"), ("forgetting", "forgetting F (%)")):
        lines, errors = [], single and key == "average_accuracy"
        for method, group in groups.items():
            values = np.array([over_tasks(result["accuracy_matrix"])[key] for result in group])
            tasks = list(range(1, values.shape[1] + 1))
            spread: list[float | None] | None = values.std(axis=0, ddof=1).tolist() if len(group) > 1 else None
            if errors:
                spread = [two_errors(group[0], count) for count in tasks]
            lines.append(Line(method, list(map(float, tasks)), values.mean(axis=0).tolist(), spread))
        title = "; ".join([name.rsplit(" ", 2)[0], *([ERRORS] if errors else bars)])
        found.append(Lines(title, "tasks learned", name, lines))
    return found[0], found[1]


def anytime(results: Sequence[Result]) -> Lines:
    """Return the accuracy on all classes so far as the images of an online stream come, a line a method."""
    lines, groups = [], {n: [r for r in g if r["anytime_curve"]] for n, g in by_method(results).items()}
    for method, group in groups.items():
        common = min((len(result["anytime_curve"]) for result in group), default=0)
        if common:
            values = np.array([[point[2] for point in result["anytime_curve"][:common]] for result in group])
            images = [float(point[0]) for point in group[0]["anytime_curve"][:common]]
            spread = values.std(axis=0, ddof=1).tolist() if len(group) > 1 else None
            lines.append(Line(method, images, values.mean(axis=0).tolist(), spread))
    title = "; ".join(["accuracy on all classes so far", *explained(map(len, groups.values()))])
    return Lines(title, "images that have come", "accuracy (%)", lines, whole=False)


def stream_map(stream: Stream, title: str, bins: int = 40) -> Map:
    """Return how many training images of each class come when: in each task, or in stretches of an online stream."""
    if stream.online:
        [task] = stream.experiences
        count, labels = len(task.train), task.train.labels.numpy()
        ends = np.unique(np.linspace(0, count, min(bins, count) + 1).round().astype(int))[1:]
        parts, columns = np.split(labels, ends[:-1]), [f"{end:,}" for end in ends]
        rules = [int(np.searchsorted(ends, mark)) + 1 for mark in task.marks[:-1] if 0 < mark < count]
        x = "images that have come"
    else:
        parts = [task.train.labels.numpy() for task in stream.experiences]
        columns, rules, x = _task_names([task.name for task in stream.experiences]), [], "task"
    counts = np.stack([np.bincount(part, minlength=len(stream.classes)) for part in parts], axis=1)
    return Map(
        title, x, "class, in the order of coming", columns, list(stream.classes), counts.tolist(), "images", rules
    )
