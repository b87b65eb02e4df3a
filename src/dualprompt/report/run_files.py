"""What a finished run leaves to look at: tables as text, CSV and JSON, and pictures."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dualprompt.errors import DualPromptError
from dualprompt.files import write_json, write_text
from dualprompt.metrics import mean_and_deviation
from dualprompt.pictures.drawing import save
from dualprompt.pictures.kinds import Picture
from dualprompt.report import figures, tables
from dualprompt.run.folder import Run, no_run
from dualprompt.training.group import BASELINE, is_run, members_of

COMMON = ("benchmark", "backbone", "tasks")  # of all methods of a group


def finished_runs(folder: Path) -> list[Run]:
    """Return the finished runs of a folder: one, or those of its group."""
    refuse_other_folders(folder)
    runs = [member.run(folder) for member in members_of(folder)]
    if not all(run.finished for run in runs):
        resume = f"dualprompt resume {shlex.quote(str(folder))}"
        raise DualPromptError(f"run {folder} is not finished; continue it with: {resume}")
    return runs


def refuse_other_folders(folder: Path) -> None:
    """Refuse a folder that holds no run."""
    if not folder.exists():
        raise DualPromptError(f"{folder} does not exist; give the directory of a run")
    if not is_run(folder):
        raise no_run(folder)


def publish_run(run: Run) -> list[Path]:
    """Write a run's tables and pictures into its folder; return the pictures."""
    result = run.result()
    write_text(run.folder / "table.txt", tables.text(tables.headline([result]), tables.accuracy_matrix(result)))
    write_text(run.folder / "accuracy_matrix.csv", tables.matrix_csv(result))
    write_text(run.folder / "metrics.csv", tables.headline_csv([result]))
    pictures = [save(run.folder / "accuracy_matrix.png", figures.accuracy_grid([result]))]
    pictures.append(save(run.folder / "curves.png", *_curves([result])))
    keys = task_keys(run)
    if keys is not None:
        grid = figures.key_grid(keys, result["tasks"])
        pictures.append(save(run.folder / "key_similarity.png", grid))
    return pictures


def task_keys(run: Run) -> np.ndarray | None:
    """Return the keys that a finished run learned, (tasks, dim), if its method has one for each task."""
    tasks = len(run.result()["tasks"])
    state = run.checkpoints.after_task(tasks - 1)
    names = [f"bank.task_key.{task}" for task in range(tasks)]
    if not all(name in state for name in names):
        return None
    return np.stack([state[name].float().numpy() for name in names])


def publish_group(runs: Sequence[Run], folder: Path) -> list[Path]:
    """Write the tables and pictures of every run, and those that set them side by side; return the pictures."""
    pictures = [picture for run in runs for picture in publish_run(run)]
    results = [run.result() for run in runs]
    write_text(folder / "comparison.txt", tables.text(tables.headline(results)))
    write_text(folder / "comparison.csv", tables.headline_csv(results))
    write_json(folder / "comparison.json", combined(runs, folder))
    return [save(folder / "comparison.png", *_curves(results)), *pictures]


def _curves(results: Sequence[dict[str, Any]]) -> Sequence[Picture]:
    """Return A and F over the tasks; of online streams, the accuracy as images come."""
    online = all(map(tables.is_online, results)) and any(result["anytime_curve"] for result in results)
    return [figures.anytime(results)] if online else figures.curves(results)


def combined(runs: Sequence[Run], folder: Path) -> dict[str, Any]:
    """Return one object for `--json`: the method's numbers, as means over seeds, with the baseline's beside them.

    Where there are several methods, each stands in `methods`, and the object itself says only what they have in common.
    """
    results = [run.result() for run in runs]
    methods = {name: _over_seeds(group) for name, group in tables.by_method(results).items()}
    baseline = methods[BASELINE] if len(methods) > 1 and BASELINE in methods else None
    main = [each for each in methods.values() if each is not baseline]
    if len(main) == 1:
        value = main[0]
    else:
        common = {key: results[0][key] for key in COMMON} | {"seed": sorted({result["seed"] for result in results})}
        value = common | {"methods": [{"line": name} | each for name, each in methods.items()]}
    return value | {
        "run_dir": str(folder),
        "baseline": baseline,
        "runs": [str(run.folder) for run in runs],
    }


def _over_seeds(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    if len(results) == 1:
        return dict(results[0])
    value = dict(results[0]) | {"seed": [result["seed"] for result in results]}
    for key in (*(key for key, _ in (*tables.METRICS, *tables.ONLINE)), *tables.MORE):
        numbers = [result[key] for result in results if result.get(key) is not None]
        if numbers:
            mean, deviation = mean_and_deviation(numbers)
            value |= {key: mean, f"{key}_std": deviation if len(numbers) > 1 else None}
    for key in ("accuracy_matrix", "matching_matrix", "task_known_matrix"):
        if all(result[key] is not None for result in results):
            rows = zip(*(result[key] for result in results), strict=True)
            value[key] = [np.mean(row, axis=0).tolist() for row in rows]
    return value
