"""Results as tables: for the terminal, as plain text, CSV and JSON."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from dualprompt.metrics import mean_and_deviation
from dualprompt.report.sheet import Column, Harmless, Sheet, as_rich
from dualprompt.report.verdict import two_errors
from dualprompt.texts import in_csv

Result = dict[str, Any]
ABSENT = "–"
ERRORS = "± is two standard errors, from the number of images"
METRICS = (
    ("average_accuracy", "A (%)"),
    ("forgetting", "F (%)"),
    ("matching_accuracy", "matching (%)"),
    ("image_weighted_accuracy", "image-weighted A (%)"),
    ("mean_over_steps", "mean over steps (%)"),
    ("backward_transfer", "BWT"),
)
# Metrics of a result that tables have where they are asked for: see report/columns.py.
MORE = ("coda_forgetting", "forward_transfer", "task_known_accuracy", "calibration_error", "unseen_auroc")
# Of an online stream, which has no tasks that a method knows of.
ONLINE = (("area_under_curve", "A_auc (%)"), ("last_accuracy", "A_last (%)"))


def is_online(result: Result) -> bool:
    """Return whether a result is of an online stream."""
    return result.get("anytime_curve") is not None


def metrics_of(results: Sequence[Result]) -> tuple[tuple[str, str], ...]:
    """Return which metrics results have, and what tables call them."""
    return ONLINE if all(map(is_online, results)) else METRICS


def label(result: Result) -> str:
    """Return what tables call a result: its line of a comparison, or method, and how it selects unless by `query`.

    Whoever sets results of one method side by side gives them a `label` to tell them apart.
    """
    if "label" in result:
        return result["label"]
    name, selection = result.get("line", result["method"]), result.get("selection")
    return name if selection in (None, "query") else f"{name} ({selection})"


def by_method(results: Sequence[Result]) -> dict[str, list[Result]]:
    """Group results by method and selection, in the order of first appearance."""
    groups: dict[str, list[Result]] = {}
    for result in results:
        groups.setdefault(label(result), []).append(result)
    return groups


def headline_sheet(results: Sequence[Result]) -> Sheet:
    """Return one row a method: each metric as mean ± standard deviation over seeds, and what was trained.

    BWT has a column only where it says more than F.
    """
    first = results[0]
    backbone = Path(first["backbone"]).name if Path(first["backbone"]).is_absolute() else first["backbone"]
    repeats = all(round(result["backward_transfer"] + result["forgetting"], 2) == 0 for result in results)
    shown = [each for each in metrics_of(results) if each[0] != "backward_transfer" or not repeats]
    metrics = [Column(heading, lesser=number >= 3) for number, (_, heading) in enumerate(shown)]
    trained = [Column(heading, lesser=True) for heading in ("trained", "MB", "% of backbone")]
    rows = []
    for name, group in by_method(results).items():
        count = group[0]["parameters"]
        sizes = (f"{count['trained']:,}", f"{count['mb']:.2f}", f"{count['percent_of_backbone']:.2f}")
        rows.append((name, str(len(group)), *(_mean(group, key) for key, _ in shown), *sizes))
    remarks = explained(len(group) for group in by_method(results).values()) or _one_seed(results)
    if not repeats:
        remarks.append("BWT is −F unless the accuracy on a task rose between when it was learned and the last task")
    if all(map(is_online, results)):
        remarks.append("A_auc: mean accuracy on all classes so far, over evaluations on the way; A_last: at the end")
    remarks += unfair(results)
    if first["skipped_images"]:
        remarks.append(f"{first['skipped_images']} unreadable images were left out")
    return Sheet(
        f"{first['benchmark']}, {backbone}, recipe {first['recipe']}",
        (Column("method", right=False), Column("seeds"), *metrics, *trained),
        (tuple(rows),),
        tuple(remarks),
    )


def unfair(results: Sequence[Result]) -> list[str]:
    """Say of every table which of its results were given what no learner has."""
    selections = {result.get("selection") for result in results}
    remarks = []
    if "batch_vote" in selections:
        remarks.append("batch_vote leaks the task when a test batch holds one task")
    if "oracle" in selections:
        remarks.append("oracle is told the true task of each image")
    if peeking := dict.fromkeys(label(result) for result in results if result.get("peeks")):
        remarks.append(f"chosen by the images that it is judged on, so no fair result: {', '.join(peeking)}")
    return remarks


def _one_seed(results: Sequence[Result]) -> list[str]:
    """Return the line that says how far numbers of one seed can be trusted, where the images were counted."""
    errors = [error for result in results if (error := two_errors(result)) is not None]
    if not errors:
        return []
    return [f"one seed: by the number of images alone, A may be off by {max(errors):.1f} points (two standard errors)"]


def headline(results: Sequence[Result], brief: bool = False) -> Table:
    """Return the headline for the terminal; `brief` leaves out all but A, F and matching accuracy."""
    table = as_rich(headline_sheet(results), brief)
    table.min_width = len(str(table.title))
    return table


def _mean(group: Sequence[Result], key: str) -> str:
    return over_seeds([result.get(key) for result in group])


def over_seeds(values: Sequence[float | None]) -> str:
    """Return mean ± standard deviation of the numbers that there are; a single one stands alone."""
    numbers = [value for value in values if value is not None]
    if not numbers:
        return ABSENT
    return plus_minus(*mean_and_deviation(numbers)) if len(numbers) > 1 else f"{numbers[0]:.2f}"


def explained(seeds: Iterable[int]) -> list[str]:
    """Return the line that says what ± is, from the numbers of seeds of a table's rows; none where there is no ±."""
    counts = sorted(set(seeds) - {0})
    if not counts or counts[-1] == 1:
        return []
    if len(counts) == 1:
        return [f"± is the standard deviation over {counts[0]} seeds"]
    single = "; a single seed has none" if counts[0] == 1 else ""
    return [f"± is the standard deviation over seeds, {counts[0]} to {counts[-1]} a row{single}"]


def plus_minus(mean: float, deviation: float) -> str:
    """Return how tables write a mean and its standard deviation."""
    return f"{mean:.2f} ± {deviation:.2f}"


def matrix_sheet(result: Result) -> Sheet:
    """Return S: a row after each task, a column a task, in percent."""
    matrix, rows = result["accuracy_matrix"], []
    for t, row in enumerate(matrix):
        name = result["tasks"][t]
        place = f"{t + 1}" if name == f"task {t + 1}" else f"{t + 1} {name}"
        rows.append((place, *(f"{value:.1f}" for value in row), *[""] * (len(matrix) - len(row))))
    return Sheet(
        f"accuracy matrix of {label(result)}, seed {result['seed']} (%)",
        (Column("after task", right=False), *(Column(f"task {task + 1}") for task in range(len(matrix)))),
        (tuple(rows),),
    )


def accuracy_matrix(result: Result) -> Table:
    """Return S for the terminal."""
    table = as_rich(matrix_sheet(result))
    table.min_width = len(str(table.title))
    return table


def headline_csv(results: Sequence[Result]) -> str:
    """Return one line a run, in full precision."""
    out = io.StringIO()
    online = ONLINE if all(map(is_online, results)) else ()
    keys = [*(key for key, _ in (*METRICS, *online)), *MORE]
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["method", "selection", "benchmark", "backbone", "recipe", "seed", *keys, "trained_parameters"])
    for r in results:
        about = [r[key] for key in ("selection", "benchmark", "backbone", "recipe", "seed")]
        names = [in_csv(each) if isinstance(each, str) else each for each in (r.get("line", r["method"]), *about)]
        writer.writerow([*names, *map(r.get, keys), r["parameters"]["trained"]])
    return out.getvalue()


def matrix_csv(result: Result) -> str:
    """Return the accuracy matrix, in full precision."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    matrix = result["accuracy_matrix"]
    writer.writerow(["after_task", *(f"task_{task + 1}" for task in range(len(matrix)))])
    writer.writerows([t + 1, *row] for t, row in enumerate(matrix))
    return out.getvalue()


def wide(*tables: Table) -> int:
    """Return a width at which no cell of the tables is cut or wrapped."""
    unbounded = Console(width=100_000).options
    return max([80, *(Measurement.get(Console(width=100_000), unbounded, table).maximum for table in tables)])


def text(*tables: Table) -> str:
    """Return tables as plain text, as wide as they need to be."""
    console = Console(file=io.StringIO(), width=wide(*tables), color_system=None)
    for table in tables:
        console.print(Harmless(table))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()
