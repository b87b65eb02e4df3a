"""The hyper-parameters of every method, chosen on validation images with the same number of tries for each."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from dualprompt.config import BUFFER_SIZE, RunConfig, compose, load_preset
from dualprompt.errors import DualPromptError
from dualprompt.files import digest
from dualprompt.methods.base import METHODS, Grid, method_config
from dualprompt.metrics import variance
from dualprompt.progress import SILENT, Progress
from dualprompt.report.sheet import Column, Sheet
from dualprompt.report.tables import ABSENT
from dualprompt.run.identity import config_digest
from dualprompt.sweeps import paper
from dualprompt.sweeps.obtained import Obtained, Workers
from dualprompt.sweeps.runs import rehearses
from dualprompt.sweeps.store import Fresh, obtain
from dualprompt.values import merge, nested

BUDGET = 4
BEYOND = 3  # tries beyond its grid that a method has at most, where its best is at the edge
VALIDATION = 0.2
# What a table's images depend on.
REGIME = (
    "dataset", "stream", "tasks", "first", "class_order", "train_per_class", "test_per_class", "test_share",
    "shots", "shots_from", "imbalance", "disjoint", "blur",
)  # fmt: skip


@dataclass(frozen=True)
class Try:
    """One configuration of one method, and what came of it."""

    method: str
    values: dict[str, Any]
    obtained: Obtained
    beyond: bool = False  # outside the grid, because the best was at its edge
    best: bool = False

    @property
    def result(self) -> dict[str, Any] | None:
        """The numbers of the run, if it has not failed."""
        return None if self.obtained.error else self.obtained.run.result()

    def row(self) -> dict[str, Any]:
        """Return what JSON says of the try."""
        result = self.result or {}
        return {
            "method": self.method,
            "values": self.values,
            "average_accuracy": result.get("average_accuracy"),
            "forgetting": None if METHODS[self.method].joint else result.get("forgetting"),
            "seconds": self.obtained.seconds if result else None,
            "beyond_the_grid": self.beyond,
            "best": self.best,
            "error": self.obtained.error,
            "run_dir": str(self.obtained.run.folder),
        }


@dataclass(frozen=True)
class Sweep:
    """What to search: a preset's recipe, for some methods, over a grid that is given or each method's own."""

    preset: str
    recipe: str | None
    methods: Sequence[str]
    grid: Grid
    budget: int | None  # None: as many as every grid has, up to BUDGET
    overrides: dict[str, Any]
    buffer: int | None = None  # images that rehearsal methods keep; None: the recipe's, one of the table's sizes
    extend: int = BEYOND  # tries beyond the grid that a method may have

    def configs(self) -> dict[str, list[tuple[dict[str, Any], RunConfig]]]:
        """Return the values and the config of every try, by method; whatever is wrong with one shows here."""
        if self.overrides.get("benchmark.evaluate_on", "validation") != "validation":
            raise DualPromptError(
                "a sweep is evaluated on validation images only; leave benchmark.evaluate_on out, "
                "and test the winner with `dualprompt run` or `dualprompt table`"
            )
        grids = {name: _points(self.grid or own_grid(name, self._compose(name, {}))) for name in self.methods}
        # A method with nothing to choose is evaluated once, and takes no tries from the others.
        smallest = min(grids, key=lambda name: (grids[name] == [{}], len(grids[name])))
        most = len(grids[smallest])
        if self.budget is not None and not 1 <= self.budget <= most:
            raise DualPromptError(
                f"--budget must be 1 to {most}, for the grid of '{smallest}' has {most} configurations, "
                f"found {self.budget}"
            )
        count = self.budget or min(BUDGET, most)
        return {name: [self._try(name, point) for point in grid[:count]] for name, grid in grids.items()}

    def _try(self, method: str, point: dict[str, Any]) -> tuple[dict[str, Any], RunConfig]:
        config = self._compose(method, point)
        resolved = config.model_dump(mode="json") | {"method": method_config(config.method).model_dump(mode="json")}
        return {key: _value(resolved, key) for key in point}, config

    def _compose(self, method: str, point: dict[str, Any]) -> RunConfig:
        held_out = {"benchmark.validation": VALIDATION, "benchmark.evaluate_on": "validation"}
        buffer = {BUFFER_SIZE: self.buffer} if rehearses(method) and self.buffer is not None else {}
        overrides = held_out | buffer | self.overrides | point | {"method.name": method}
        try:
            config = compose(self.preset, self.recipe, overrides)
            method_config(config.method)
        except DualPromptError as error:
            raise DualPromptError(f"{method}: {error}") from None
        return config

    def run(
        self, root: Path, progress: Progress = SILENT, jobs: int | Workers = 1, fresh: Fresh | None = None
    ) -> list[Try]:
        """Run or reuse every try, then those beyond the edges that win; the best of each method is marked.

        Runs are below `root`; see `store.obtain` for `jobs` and `fresh`. `progress` shows how far it is.
        """
        if self.extend < 0:
            raise DualPromptError(f"--extend must be at least 0, found {self.extend}")
        planned = [(name, *each) for name, tries in self.configs().items() for each in tries]
        tries: list[Try] = []
        while planned:
            found = obtain([config for _, _, config in planned], root, progress, jobs, fresh)
            beyond = bool(tries)
            tries += [Try(name, values, got, beyond) for (name, values, _), got in zip(planned, found, strict=True)]
            planned = self._beyond(tries)
        best = [winner for winner in self._best(tries).values() if winner.result is not None]
        methods = list(dict.fromkeys(self.methods))
        ordered = sorted(tries, key=lambda tried: methods.index(tried.method))
        return [replace(tried, best=tried in best) for tried in ordered]

    def _best(self, tries: Sequence[Try]) -> dict[str, Try]:
        return {name: min((t for t in tries if t.method == name), key=_rank) for name in dict.fromkeys(self.methods)}

    def _beyond(self, tries: Sequence[Try]) -> list[tuple[str, dict[str, Any], RunConfig]]:
        """Return what to try next: for each number at an edge of those tried, the best with one further out."""
        planned: list[tuple[str, dict[str, Any], RunConfig]] = []
        for name, best in self._best(tries).items():
            mine = [tried for tried in tries if tried.method == name]
            points = [best.values | {key: value} for key, value in _edges(best, mine).items()] if best.result else []
            known = [tried.values for tried in mine]
            for point in points[: self.extend - sum(tried.beyond for tried in mine)]:
                with suppress(DualPromptError):  # an option ends where its range does
                    values, config = self._try(name, point)
                    if values not in known:
                        planned.append((name, values, config))
        return planned

    def departures(self) -> dict[str, Any]:
        """Return in what the sweep's images and buffers are not the main table's; nothing unless it was asked for."""
        table = compose(self.preset, self.recipe, {}).benchmark
        ours = self._compose(self.methods[0], {}).benchmark
        found = {key: getattr(ours, key) for key in REGIME if getattr(ours, key) != getattr(table, key)}
        configs = [compose(self.preset, self.recipe, {"method.name": name}) for name in self.methods]
        sizes = [getattr(method_config(config.method), "buffer_size", None) for config in configs]
        if self.buffer is not None and self.buffer not in (paper.buffers(table.name) or sizes):
            found["buffer"] = self.buffer
        return found

    def about(self, tries: Sequence[Try]) -> dict[str, Any]:
        """Return what was searched, in plain values."""
        config = tries[0].obtained.config
        return {
            "benchmark": config.benchmark.name,
            "backbone": config.backbone.name,
            "recipe": self._compose(tries[0].method, {}).train.recipe,
            "seed": config.seed,
            "judged_on": config.benchmark.evaluate_on,
            "validation": config.benchmark.validation,
            "budget": max(Counter(tried.method for tried in tries if not tried.beyond).values()),
            "beyond_the_grid": self.extend,
            "buffer_size": self.buffer,
            "departs_from_the_table": self.departures(),
        }

    def question(self) -> str:
        """Return the hash of all that decides what the sweep finds, but for images and weights."""
        return digest([[config_digest(config) for _, config in tries] for tries in self.configs().values()])

    def combined(self, tries: Sequence[Try]) -> dict[str, Any]:
        """Return one object for `--json`."""
        return self.about(tries) | {
            "question": self.question(),
            "tries": [tried.row() for tried in tries],
            "methods": winners(tries),
        }

    def sheet(self, tries: Sequence[Try]) -> Sheet:
        """Return the table of the sweep, a group for each method."""
        groups: dict[str, list[tuple[str, ...]]] = {}
        for tried in tries:
            row = tried.row()
            values = ", ".join(f"{key.removeprefix('method.')} {_short(value)}" for key, value in tried.values.items())
            accuracy = "failed" if tried.obtained.error else _number(row["average_accuracy"], 2)
            numbers = (accuracy, _number(row["forgetting"], 2), _number(row["seconds"], 1))
            marks = [_note(tried, tries), *(["beyond the grid"] if tried.beyond else [])]
            cells = (tried.method, values, *numbers, ", ".join(mark for mark in marks if mark))
            groups.setdefault(tried.method, []).append(cells)
        about = self.about(tries)
        backbone = Path(about["backbone"]).name
        kept = f"; rehearsal methods keep {self.buffer} images" if self.buffer is not None else ""
        return Sheet(
            f"sweep of {about['benchmark']}, {backbone}, recipe {about['recipe']}, seed {about['seed']}",
            (
                Column("method", right=False),
                Column("values", right=False),
                Column("A (%)"),
                Column("F (%)"),
                Column("training (s)", lesser=True),
                Column("", right=False),
            ),
            tuple(tuple(rows) for rows in groups.values()),
            (
                f"evaluated on {about['validation']:.0%} of the training images, held out; "
                f"{about['budget']} configurations a method{kept}",
                *self._remarks(tries),
                *_noise(tries),
            ),
        )

    def _remarks(self, tries: Sequence[Try]) -> list[str]:
        """Say where the sweep is not in the table's regime, and where its best lie at an edge."""
        remarks = []
        if departs := self.departures():
            listed = ", ".join(f"{key} {value}" for key, value in departs.items())
            remarks.append(f"reduced, not the regime of the main table: {listed}")
        if any(tried.beyond for tried in tries):
            remarks.append(
                f"a winner at the edge of the values tried is followed beyond it, {self.extend} tries at most"
            )
        edges: dict[str, list[str]] = {}
        for best in (tried for tried in tries if tried.best):
            found = _edges(best, [tried for tried in tries if tried.method == best.method])
            edges[best.method] = [key.removeprefix("method.") for key in found]
        if left := ", ".join(f"{name} ({', '.join(keys)})" for name, keys in edges.items() if keys):
            remarks.append(f"still at an edge: {left}")
        return remarks


def _edges(best: Try, tries: Sequence[Try]) -> dict[str, float]:
    """Return the options whose best value is at the edge of those tried, with the next value beyond."""
    found = {key: beyond([tried.values[key] for tried in tries], value) for key, value in best.values.items()}
    return {key: value for key, value in found.items() if value is not None}


def beyond(tried: Iterable[Any], best: Any) -> float | int | None:
    """Return the value that follows `best`, by the factor between it and its neighbour, if it is the least or greatest.

    None if it lies inside, or is no positive number, or the only one. Whole numbers stay whole.
    """
    numbers = sorted({value for value in tried if isinstance(value, int | float) and value > 0 and value is not True})
    if len(numbers) < 2 or best not in (numbers[0], numbers[-1]):
        return None
    neighbour = numbers[1] if best == numbers[0] else numbers[-2]
    further = float(f"{best / neighbour * best:.6g}")  # 0.0001, not 0.00009999999999999999
    if all(isinstance(value, int) for value in numbers):
        whole = round(further)
        return None if whole < 1 or whole == best else whole
    return further


def own_grid(method: str, config: RunConfig) -> Grid:
    """Return the grid that a method brings, or else learning rates around the config's."""
    lr = config.train.lr
    return getattr(METHODS[method], "grid", {"train.lr": (lr / 4, lr / 2, lr, lr * 2)})


def _points(grid: Grid) -> list[dict[str, Any]]:
    """Return every configuration of a grid; its first option changes first, so that a small budget covers it."""
    for key in grid:
        if key.split(".")[0] not in ("train", "method") or key.count(".") != 1 or key == "method.name":
            raise DualPromptError(f"--grid takes options of train and method, as train.lr=1e-4,5e-5; found '{key}'")
        if not grid[key]:
            raise DualPromptError(f"--grid {key} has no values")
    backwards = itertools.product(*reversed(grid.values()))
    return [dict(zip(grid, reversed(values), strict=True)) for values in backwards]


def _noise(tries: Sequence[Try]) -> list[str]:
    """Return the line that says how far two tries of one seed must lie apart to be told apart."""
    results = [tried.result for tried in tries if tried.result and tried.result["judged_images"]]
    if not results:
        return []
    most = max(variance(result["accuracy_matrix"], result["judged_images"]) for result in results)
    return [
        f"one seed: two standard errors of the difference of two tries are up to {2 * (2 * most) ** 0.5:.2f} points"
    ]


def _note(tried: Try, tries: Sequence[Try]) -> str:
    """Return "best" for a method's highest accuracy if it stands alone; of equals, one is taken."""
    shown = {id(t): f"{t.result['average_accuracy']:.2f}" for t in tries if t.method == tried.method and t.result}
    winner = next((id(t) for t in tries if t.method == tried.method and t.best), None)
    equal = [key for key in shown if winner in shown and shown[key] == shown[winner]]
    if id(tried) not in equal:
        return ""
    return "best" if len(equal) == 1 else "equal, taken" if id(tried) == winner else "equal"


def _value(config: dict[str, Any], dotted: str) -> Any:
    section, key = dotted.split(".")
    return config[section][key]


def _rank(tried: Try) -> tuple[float, float]:
    """Highest accuracy first, then least forgetting; a failed try is last."""
    result = tried.result
    return (-result["average_accuracy"], result["forgetting"]) if result else (float("inf"), 0)


def winners(tries: Sequence[Try]) -> dict[str, Any]:
    """Return what a recipe would say under `methods:` to make the best try of each method its own."""
    methods: dict[str, Any] = {}
    for tried in tries:
        if tried.best:
            for key, value in tried.values.items():
                methods = merge(methods, {tried.method: nested(key.removeprefix("method."), value)})
    return methods


def preset_lines(preset: str, recipe: str | None, methods: dict[str, Any]) -> tuple[str, str]:
    """Return where in a preset the winners belong, and the lines to put there.

    What is said of methods in that place already is in the lines too, since a key may be there only once.
    """
    values = load_preset(preset)
    chosen = recipe or values.get("recipe")
    owner = values if chosen is None else values["recipes"][chosen]
    there = owner.get("methods", {})
    where = "at the top level of the preset" if chosen is None else f"below recipes.{chosen}"
    if there:
        where += ", in place of the methods there"
    lines = ["methods:", *(f"  {name}: {_flow(own)}" for name, own in merge(there, methods).items())]
    return where, "\n".join(("" if chosen is None else "    ") + line for line in lines)


def _flow(value: Any) -> str:
    return yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=1000).strip()


def _short(value: Any) -> str:
    return "null" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _number(value: float | None, digits: int) -> str:
    return ABSENT if value is None else f"{value:,.{digits}f}"
