"""The paper's second table: architecture-based methods on ResNets, DualPrompt on its ViT, each by its bound."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dualprompt.config import BenchmarkConfig, RunConfig, compose, origins, read_line
from dualprompt.errors import DualPromptError, nearest
from dualprompt.methods.base import METHODS, method_config
from dualprompt.metrics import over_tasks
from dualprompt.report.publication import STEPS
from dualprompt.report.sheet import Column, Sheet
from dualprompt.report.tables import ABSENT, explained, over_seeds, plus_minus
from dualprompt.report.verdict import paired
from dualprompt.sweeps import paper
from dualprompt.sweeps.main_table import Line, TableRow, fairness, other_code, settings

BOUND = "upper-bound"
CIFAR = "resnet18-cifar"
RESNET18, RESNET152, VIT = "ResNet-18", "ResNet-152", "ViT"
NONE = "none"  # as --backbone: without the lines on the ViT
NO_WEIGHTS = "not run: it needs ImageNet weights, as --resnet152 FILE gives them"
LAST, MEAN = "average_accuracy", "mean_over_steps"
MIXED = (
    "the paper's numbers mix two metrics: accuracy after the last task (ViT) and the mean over steps (RPSNet, DynaER\n"
    "and the bound of ResNet-18, all three from other papers); after the last task RPSNet has 57.05 and DynaER 64.36;\n"
    "which those of SupSup, DualNet and ResNet-152 are is not said"
)
LIKE = (
    "Diff is like with like: the upper bound's last accuracy less the method's, its mean over steps less the method's"
)
SIZES = (
    "added: weights beyond one backbone and what else is kept but images; the paper's 19.8 MB of DynaER are the mean "
    "size of pruned networks, not released"
)


@dataclass(frozen=True)
class Backbones:
    """The ResNets of the table; the ViT is the preset's, or that of --backbone."""

    resnet18: str = CIFAR
    resnet152: str | None = None  # ImageNet weights; None: there are none

    def of(self, group: str, method: str) -> str | None:
        """Return the backbone of a line; None: the preset's, or there is none."""
        if group != RESNET18:
            return self.resnet152 if group == RESNET152 else None
        if method == "supsup" and self.resnet18 == CIFAR:
            return f"{CIFAR}-nf20"  # as its authors have it, after GEM
        return self.resnet18.replace(CIFAR, f"{CIFAR}-pool") if method == "dualnet" else self.resnet18


@dataclass(frozen=True)
class Entry:
    """A place in the table."""

    group: str  # the family of its backbone: what its upper bound is looked for in
    label: str  # as --methods says it
    line: Line | None  # None: it cannot be run
    published: paper.Published2 | None

    @property
    def method(self) -> str:
        """The method's name."""
        return read_line(self.label)[0]


@dataclass(frozen=True)
class Row:
    """A place in the table and its runs, and those of the upper bound of its backbone."""

    entry: Entry
    runs: TableRow | None
    bound: TableRow | None

    def diff(self, key: str) -> float | None:
        """Return how much higher the upper bound is in a metric, over the seeds that both have."""
        if self.runs is None or self.bound is None or self.bound is self.runs:
            return None
        found = paired(self.bound.results, self.runs.results, key)
        return found and found.mean

    def steps(self) -> list[float]:
        """Return A after each step, in the mean over the seeds; nothing where no run is finished."""
        each = [over_tasks(result["accuracy_matrix"])[LAST] for result in self.runs.results] if self.runs else []
        return [sum(values) / len(values) for values in zip(*each, strict=True)]

    def added(self) -> tuple[float, float] | None:
        """Return MB, and their share of the backbone in percent; none of joint training, which adds nothing."""
        if self.runs is None or not self.runs.results or self.entry.method == BOUND:
            return None
        parameters = self.runs.results[0]["parameters"]
        megabytes = parameters["additional"]["mb"] + parameters["kept"]["mb"]
        return megabytes, 100 * megabytes / (parameters["backbone"] * 4 / 1e6)

    def values(self) -> dict[str, Any]:
        """Return what JSON and CSV say of the place, in full precision."""
        added, runs, published = self.added(), self.runs, self.entry.published
        metrics = runs.metrics() if runs else {}
        theirs = published._asdict() if published else dict.fromkeys(paper.Published2._fields)
        config = self.entry.line.config if self.entry.line else None
        return {
            "group": self.entry.group,
            "method": self.entry.label,
            "backbone": config and config.backbone.name,
            "recipe": config and config.train.recipe,
            "seeds": len(runs.finished) if runs else 0,
            **{name: metrics.get(name) for key in (LAST, MEAN) for name in (key, f"{key}_std")},
            "diff_last": self.diff(LAST),
            "diff_mean": self.diff(MEAN),
            "buffer_size": (self.entry.line and self.entry.line.buffer) or 0,
            "added_mb": added and added[0],
            "added_percent": added and added[1],
            "training_seconds": runs.seconds if runs else None,
            "not_run": None if self.entry.line else NO_WEIGHTS,
            **{f"paper_{key}": value for key, value in theirs.items()},
        }


def default_methods() -> list[str]:
    """Return the methods of the table, in its order."""
    return [BOUND, *paper.ARCHITECTURES, "l2p", "dualprompt"]


def entries(
    preset: str, recipe: str, methods: Sequence[str], backbones: Backbones, overrides: dict[str, Any]
) -> list[Entry]:
    """Return the places of the table, in its order.

    Those on ResNets have the `recipe`; those on the ViT have the preset's own, and alone take overrides of `backbone`.
    Where that is "none" they are left out.
    """
    names = [read_line(label)[0] for label in methods]
    for name in names:
        if name not in default_methods():
            raise DualPromptError(f"table architecture has no method '{name}'; {nearest(name, default_methods())}")
    common = {key: value for key, value in overrides.items() if not key.startswith("backbone.")}
    found = []
    for group, known in paper.GROUPS.items():
        for label, name in zip(methods, names, strict=True):
            if name not in known or (group == VIT and overrides.get("backbone.name") == NONE):
                continue
            network, line = backbones.of(group, name), None
            if group == VIT:
                line = _line(preset, None, label, overrides)
            elif network is not None:
                own = {"backbone.name": network, **(IMAGENET if (group, name) == (RESNET152, BOUND) else {})}
                line = _line(preset, recipe, label, own | common)
            found.append(Entry(group, label, line, paper.TABLE_2.get((group, label))))
    return found


# Fine-tuning of pre-trained weights needs none of what training from scratch does.
IMAGENET: dict[str, Any] = {
    "train.lr": 0.01,
    "train.schedule": "cosine",
    "train.warmup_epochs": 0,
    "train.milestones": [],
    "method.zero_residuals": False,
}


def _line(preset: str, recipe: str | None, label: str, overrides: dict[str, Any]) -> Line:
    name, options = read_line(label)
    given = overrides | options | {"method.name": name}
    try:
        config, where = compose(preset, recipe, given), origins(preset, recipe, given)
        buffer = getattr(method_config(config.method), "buffer_size", None)
    except DualPromptError as error:
        raise DualPromptError(f"{label}: {error}") from None
    return Line(label, buffer, config, origins=where)


def rows(entries: Sequence[Entry], runs: Sequence[TableRow]) -> list[Row]:
    """Return every place with its runs, and with those of the upper bound in its group."""
    of_line = {id(row.line): row for row in runs}
    found = [(each, of_line.get(id(each.line)) if each.line else None) for each in entries]
    bounds = {each.group: row for each, row in found if each.method == BOUND}
    return [Row(each, row, bounds.get(each.group)) for each, row in found if row or each.line is None]


def sheet(rows: Sequence[Row]) -> Sheet:
    """Return the table as the paper lays it out, with its own numbers beside ours."""
    columns = (
        Column("method", right=False),
        Column("backbone", right=False),
        Column("last A (%)"),
        Column("mean over\nsteps (%)"),
        Column("Diff\n(last)"),
        Column("Diff\n(mean)"),
        Column("buffer"),
        Column("added (MB)"),
        Column("added (%)"),
        Column("paper's A (%)"),
        Column("paper's Diff"),
        Column("which is", right=False, lesser=True),
        Column("paper's\nbuffer", lesser=True),
        Column("paper's\nMB", lesser=True),
        Column("paper's\n%", lesser=True),
        Column("seeds", lesser=True),
        Column("training (s)", lesser=True),
    )
    groups: dict[str, list[tuple[str, ...]]] = {}
    for row in rows:
        groups.setdefault(row.entry.group, []).append(_cells(row))
    done = [row.runs for row in rows if row.runs]
    config = next((row.line.config for row in done), None)
    remarks = [LIKE, MIXED, SIZES, *explained(len(row.finished) for row in done), *settings(done)]
    remarks += [*fairness(done), *other_code(done)]
    if any(row.entry.line is None for row in rows):
        remarks.append(f"{RESNET152}: {NO_WEIGHTS}")
    return Sheet(_title(config), columns, tuple(map(tuple, groups.values())), tuple(remarks))


def steps(rows: Sequence[Row]) -> Sheet | None:
    """Return A after each step of every line that has runs, and beside DynaER's its authors'.

    None where there is none, or one step alone: the table above has said it.
    """
    found = [(row.entry, row.runs, values) for row in rows if row.runs and (values := row.steps())]
    count = max((len(values) for _, _, values in found), default=0)
    if count < 2:
        return None
    lines = [
        (entry.label, _network(entry), *map(_tenth, values), str(len(runs.finished))) for entry, runs, values in found
    ]
    remarks = ["mean over tasks so far, in the mean over the seeds"]
    theirs = paper.DYNAER_STEPS
    if any(entry.method == "dynaer" and _as_theirs(runs.line.config) for entry, runs, _ in found):
        lines.append(("dynaer, its authors'", RESNET18, *map(_tenth, theirs), "1"))
        remarks.append("its authors': their log, without masks; their class order and epochs")
    columns = (
        Column("method", right=False),
        Column("backbone", right=False, lesser=True),
        *(Column(str(step)) for step in range(1, count + 1)),
        Column("seeds", lesser=True),
    )
    return Sheet(STEPS, columns, (tuple(lines),), tuple(remarks))


def _as_theirs(config: RunConfig) -> bool:
    """Return whether a line is of DynaER's benchmark: all of CIFAR-100 in ten equal steps, in whatever order."""
    theirs = BenchmarkConfig(name="theirs", dataset="cifar100", tasks=len(paper.DYNAER_STEPS))
    free = {"name", "root", "class_order", "class_order_seed"}
    return config.benchmark.model_dump(exclude=free) == theirs.model_dump(exclude=free)


def _tenth(value: float) -> str:
    return f"{value:.1f}"


def _network(entry: Entry) -> str:
    return entry.line.config.backbone.name.rpartition("/")[2] if entry.line else entry.group


def _title(config: RunConfig | None) -> str:
    return "architecture-based methods" if config is None else f"{config.benchmark.name}: architecture-based methods"


def _cells(row: Row) -> tuple[str, ...]:
    entry, runs, added, theirs = row.entry, row.runs, row.added(), row.entry.published
    accuracies = ("not run", ABSENT) if runs is None else ("failed", ABSENT)
    if runs is not None and runs.finished:
        accuracies = tuple(over_seeds(runs.numbers(key)) for key in (LAST, MEAN))
    return (
        entry.label,
        _network(entry),
        *accuracies,
        _number(row.diff(LAST)),
        _number(row.diff(MEAN)),
        ABSENT if entry.line is None or METHODS[entry.method].joint else str(entry.line.buffer or 0),
        _number(added and added[0]),
        _number(added and added[1]),
        *_published(theirs),
        ABSENT if runs is None else f"{len(runs.finished)} of {len(runs.obtained)}",
        ABSENT if runs is None or runs.seconds is None else f"{runs.seconds:,.0f}",
    )


def _published(row: paper.Published2 | None) -> tuple[str, ...]:
    if row is None:
        return (ABSENT,) * 6
    accuracy = f"{row.accuracy:.2f}" if row.accuracy_std is None else plus_minus(row.accuracy, row.accuracy_std)
    sizes = (ABSENT if value is None else f"{value:g}" for value in (row.buffer, row.mb, row.percent))
    return accuracy, _number(row.diff), row.metric, *sizes


def _number(value: float | None) -> str:
    return ABSENT if value is None else f"{value:.2f}"


def combined(rows: Sequence[Row]) -> dict[str, Any]:
    """Return one object for `--json`."""
    return {
        "note": MIXED.replace("\n", " "),
        "rows": [
            row.values()
            | {
                "seeds": [each.config.seed for each in row.runs.finished] if row.runs else [],
                "steps": row.steps(),
                "runs": [str(each.run.folder) for each in row.runs.finished] if row.runs else [],
                "settings_from": dict(row.entry.line.origins) if row.entry.line else {},
                "errors": [f"{e.name}: {e.error}" for e in row.runs.obtained if e.error] if row.runs else [],
            }
            for row in rows
        ],
    }
