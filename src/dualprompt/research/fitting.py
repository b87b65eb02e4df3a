"""`fit`: a method trained on a benchmark in a line."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from dualprompt.config import RunConfig, as_layer, compose, own_defaults, parse
from dualprompt.data.memory import dataset_of, known
from dualprompt.data.sources import Dataset
from dualprompt.errors import DualPromptError
from dualprompt.files import new_folder, runs_root, with_home
from dualprompt.progress import SILENT, Progress
from dualprompt.research.finished import FinishedGroup, FinishedRun
from dualprompt.training import group
from dualprompt.values import flat, merge, nested

# For benchmarks that no preset describes.
RECIPE = {"recipe": "own", "epochs": 5, "batch_size": 16, "lr": 0.005}
OWN = "own"  # what a dataset is called that brings no name
TEST = ("test", "validation", "val")  # what others call the split to be evaluated on
SPLITS = (
    "benchmark is a preset's name, a Dataset (`dualprompt.dataset_of`) or several, a pair (train, test), or a mapping "
    "with 'train' and 'test'"
)


def fit(
    benchmark: str | Dataset | Sequence[Any] | Mapping[str, Any],
    method: str | Mapping[str, Any] = "dualprompt",
    *,
    backbone: str = "embedded",
    tasks: int | list[int] | list[list[str]] | None = None,
    seeds: int = 1,
    recipe: str | None = None,
    out: str | Path | None = None,
    progress: Progress | bool = True,
    **options: Any,
) -> FinishedRun | FinishedGroup:
    """Train a method on a benchmark; return the finished run, or with several seeds the group of runs.

    Args:
        benchmark: a preset's name or file; a pair (train, test) or a mapping with these keys, each a torch Dataset, one
            of Hugging Face's or a pair (images, labels), cut into `tasks`; or what `dataset_of` returns, or several, a
            task each.
        method: a method's name, or a mapping with `name` and options.
        backbone: a name as for `dualprompt run`.
        tasks: how one dataset is cut: into how many tasks, or the numbers or names of classes in each.
        seeds: how many seeds to run, counted from 0 or from `seed=…`.
        recipe: one of the preset's recipes.
        out: a new folder for the runs; by default one below `runs/` with the time in its name.
        progress: whether to show bars and notes, or an object that receives them.
        options: sections of the config, as `train={"epochs": 2}`, or values, as `device="cpu"`.
    """
    if seeds < 1:
        raise DualPromptError(f"seeds must be at least 1, found {seeds}")
    given = {} if isinstance(benchmark, str) else _named(benchmark)
    chosen = {"name": method} if isinstance(method, str) else dict(method)
    above = {**flat(options), **flat({"method": chosen}), "backbone.name": backbone}
    with known(given), ExitStack() as stack:
        if isinstance(benchmark, str):
            above |= {} if tasks is None else {"benchmark.tasks": tasks}
            config = compose(benchmark, recipe, above)
        else:
            config = _own(given, tasks, above)
        if isinstance(progress, bool):
            from dualprompt.console import Terminal

            progress = stack.enter_context(Terminal()) if progress else SILENT
        first = config.seed
        configs = [config.model_copy(update={"seed": first + number}) for number in range(seeds)]
        own = runs_root() / time.strftime("fit-%Y%m%d-%H%M%S")
        folder = with_home(out) if out else stack.enter_context(new_folder(own))
        runs = group.start(group.plan(configs, baseline=False), folder, progress)
    found = tuple(FinishedRun(run) for run in runs)
    return found[0] if seeds == 1 else FinishedGroup(folder, found)


def _named(benchmark: Any) -> dict[str, Dataset]:
    """Return the datasets that are given, by name: several, one, or the two splits of one."""
    if isinstance(benchmark, Dataset):
        return {benchmark.name: benchmark}
    if isinstance(benchmark, Mapping):
        held = next((name for name in TEST if name in benchmark), None)
        if "train" not in benchmark or held is None:
            raise DualPromptError(f"{SPLITS}; found {', '.join(map(str, benchmark)) or 'nothing'}")
        return {OWN: dataset_of(OWN, benchmark["train"], benchmark[held])}
    if not isinstance(benchmark, Sequence) or not len(benchmark):
        raise DualPromptError(f"{SPLITS}; found {type(benchmark).__name__}")
    if not any(isinstance(each, Dataset) for each in benchmark) and len(benchmark) == 2:
        return {OWN: dataset_of(OWN, *benchmark)}
    if not all(isinstance(each, Dataset) for each in benchmark):
        raise DualPromptError(f"{SPLITS}; found {', '.join(type(each).__name__ for each in benchmark)}")
    found = {each.name: each for each in benchmark}
    if len(found) < len(benchmark):
        raise DualPromptError("two of the datasets have one name; give each its own")
    return found


def _own(given: Mapping[str, Dataset], tasks: Any, above: Mapping[str, Any]) -> RunConfig:
    """Return the config of a benchmark that no preset describes: below what was asked for, the method's own values."""
    names = list(given)
    benchmark = {"name": "-".join(names)[:80], "dataset": names if len(names) > 1 else names[0], "tasks": tasks}
    asked: dict[str, Any] = {}
    for key, value in above.items():
        asked = merge(asked, nested(key, value))
    values = merge({"benchmark": benchmark, "train": RECIPE}, as_layer(own_defaults(asked["method"]["name"])))
    return parse(RunConfig, merge(values, asked))
