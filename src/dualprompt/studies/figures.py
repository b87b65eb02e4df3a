"""Results as pictures, drawn with matplotlib straight to files."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dualprompt.files import atomic
from dualprompt.metrics import over_tasks
from dualprompt.studies.tables import by_method

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CELLS = 25  # above so many tasks a cell has no room for its number
INK, QUIET, COLOURS = "#1f2933", "#9aa5b1", ("#0b6e99", "#d9480f", "#2b8a3e", "#862e9c", "#5c940d")


def _figure(width: float, height: float, columns: int = 1) -> tuple[Figure, list[Axes]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained", dpi=120)
    axes = figure.subplots(1, columns, squeeze=False)[0]
    for ax in axes:
        ax.tick_params(colors=INK, labelsize=9)
        for side in ("top", "right"):
            ax.spines[side].set_visible(False)
    return figure, list(axes)


def _save(figure: Figure, path: Path) -> Path:
    with atomic(path) as partial:
        figure.savefig(partial, format=path.suffix.removeprefix("."))
    return path


def accuracy_heat_map(result: dict[str, Any], path: Path) -> Path:
    """Draw S: rows after each task, columns the tasks, the numbers in the cells."""
    matrix = result["accuracy_matrix"]
    count = len(matrix)
    values = np.full((count, count), np.nan)
    for t, row in enumerate(matrix):
        values[t, : t + 1] = row
    width = max(4.2, 1.8 + 0.62 * min(count, CELLS))
    figure, (ax,) = _figure(width, 1.6 + 0.5 * min(count, CELLS))
    picture = ax.imshow(values, cmap="YlGnBu", vmin=0, vmax=100, aspect="auto")
    for t, row in enumerate(matrix if count <= CELLS else []):
        for task, value in enumerate(row):
            ax.text(
                task,
                t,
                f"{value:.0f}",
                ha="center",
                va="center",
                fontsize=8,
                color="white" if value > 60 else INK,
            )
    _number_axes(ax, count, "accuracy on task", "after learning task")
    title = f"{result['method']} on {result['benchmark']}, seed {result['seed']}"
    ax.set_title(textwrap.fill(title, int(9 * width)), fontsize=10, color=INK, parse_math=False)
    figure.colorbar(picture, ax=ax, label="accuracy (%)", shrink=0.9)
    return _save(figure, path)


def key_similarities(keys: np.ndarray, names: Sequence[str], path: Path) -> Path:
    """Draw the cosine similarity of every pair of task keys, (tasks, dim)."""
    unit = keys / np.linalg.norm(keys, axis=1, keepdims=True).clip(1e-12)
    similarity = unit @ unit.T
    count = len(keys)
    figure, (ax,) = _figure(2.2 + 0.62 * min(count, CELLS), 1.8 + 0.5 * min(count, CELLS))
    picture = ax.imshow(similarity, cmap="RdBu_r", vmin=-1, vmax=1, aspect="auto")
    for row in range(count if count <= CELLS else 0):
        for column in range(count):
            value = similarity[row, column]
            ax.text(
                column,
                row,
                f"{value:.2f}",
                ha="center",
                va="center",
                fontsize=7,
                color="white" if abs(value) > 0.6 else INK,
            )
    _number_axes(ax, count, "task key", "task key")
    if count <= 12:
        labels = [name if name == f"task {i}" else f"{i} {name}" for i, name in enumerate(names, start=1)]
        ax.set_yticks(
            range(count), [label if len(label) <= 24 else f"{label[:23]}…" for label in labels], parse_math=False
        )
    ax.set_title("similarity of task keys", fontsize=10, color=INK)
    figure.colorbar(picture, ax=ax, label="cosine", shrink=0.9)
    return _save(figure, path)


def _number_axes(ax: Axes, count: int, x: str, y: str) -> None:
    ticks = range(count) if count <= 20 else range(0, count, -(-count // 20))
    labels = [str(tick + 1) for tick in ticks]
    ax.set_xticks(ticks, labels)
    ax.set_yticks(ticks, labels)
    ax.set_xlabel(x, color=INK)
    ax.set_ylabel(y, color=INK)


def curves(results: Sequence[dict[str, Any]], path: Path) -> Path:
    """Draw A_t and F_t over the tasks, a line a method with a band over its seeds."""
    figure, axes = _figure(9, 3.4, columns=2)
    labels = (("average_accuracy", "average accuracy $A_t$ (%)"), ("forgetting", "forgetting $F_t$ (%)"))
    tasks = np.arange(1, len(results[0]["accuracy_matrix"]) + 1)
    for ax, (key, label) in zip(axes, labels, strict=True):
        for colour, (name, group) in zip(_cycle(COLOURS), by_method(results).items(), strict=False):
            lines = np.array([over_tasks(result["accuracy_matrix"])[key] for result in group])
            mean, spread = lines.mean(axis=0), lines.std(axis=0)
            ax.plot(tasks, mean, marker="o", markersize=4, color=colour, label=name)
            if len(group) > 1:
                ax.fill_between(tasks, mean - spread, mean + spread, color=colour, alpha=0.18, linewidth=0)
        ax.set_xlabel("tasks learned", color=INK)
        ax.set_ylabel(label, color=INK)
        ax.set_xticks(tasks if len(tasks) <= 20 else tasks[:: -(-len(tasks) // 20)])
        ax.grid(axis="y", color=QUIET, alpha=0.3)
    axes[0].legend(frameon=False, fontsize=9)
    return _save(figure, path)


def _cycle(colours: Sequence[str]) -> list[str]:
    return list(colours) * 20
