"""The table of a published set-up: our run beside the number that a paper reports.

A difference says something only where weights, order of classes and split are the same: each line says whether so.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from dualprompt.backbones import weights
from dualprompt.backbones.known import known_as
from dualprompt.config import RunConfig, changes_recipe, compose
from dualprompt.data.sources import DATASETS
from dualprompt.data.stream import expanded, is_registered, load_dataset, names_of
from dualprompt.errors import DualPromptError, nearest
from dualprompt.files import with_home
from dualprompt.methods.base import METHODS, method_config
from dualprompt.progress import SILENT, Progress
from dualprompt.report.sheet import Column, Sheet
from dualprompt.report.tables import ABSENT, explained, over_seeds, plus_minus
from dualprompt.sweeps.obtained import Obtained, Workers
from dualprompt.sweeps.protocols import Metric, Protocol, ProtocolLine, Setup, protocols
from dualprompt.sweeps.runs import OverSeeds
from dualprompt.sweeps.store import Fresh, finished, obtain
from dualprompt.values import flat, merge

NO_WEIGHTS, NO_DATA, NOT_OURS = "weights not here", "data not here", "not in this version"
METRICS = {"average_accuracy": "mean over tasks", "image_weighted_accuracy": "over all images"}


@dataclass(frozen=True)
class Place:
    """A place in the table: a line of a set-up, and how it would be run."""

    protocol: str
    setup: str
    line: ProtocolLine
    backbone: str  # the paper's
    seeds: tuple[int, ...]
    metric: Metric
    config: RunConfig | None  # None: this version cannot run it
    not_run: str | None  # why it is not run, in short
    details: str  # and in full
    obstacles: tuple[str, ...]  # why its number would not be comparable

    @property
    def label(self) -> str:
        """What JSON and publications call it."""
        return f"{self.setup}: {self.line.label}"


@dataclass(frozen=True)
class ProtocolRow(OverSeeds):
    """A place and its runs, one for each seed."""

    place: Place
    obtained: tuple[Obtained, ...]

    @property
    def difference(self) -> float | None:
        """Ours less the reported accuracy after the last task."""
        ours = self.metrics()[self.place.metric]
        return None if ours is None else ours - self.place.line.reported.accuracy

    @property
    def comparable(self) -> bool | None:
        """Whether weights, order and split are the paper's, and nothing was changed; None: there is no run."""
        return not self.place.obstacles if self.finished else None

    def values(self) -> dict[str, Any]:
        """Return what JSON and CSV say of the place, in full precision."""
        place, found = self.place, self.metrics()
        config = place.config
        names = (place.metric, "mean_over_steps", "forgetting")
        ours = {key: found[key] for name in names for key in (name, f"{name}_std")}
        return {
            "protocol": place.protocol,
            "setup": place.setup,
            "method": place.line.label,
            "backbone": config and config.backbone.name,
            "papers_backbone": place.backbone,
            "metric": place.metric,
            "accuracy": ours.pop(place.metric),
            "accuracy_std": ours.pop(f"{place.metric}_std"),
            **ours,
            **{f"reported_{key}": value for key, value in place.line.reported.model_dump().items()},
            "difference": self.difference,
            "comparable": self.comparable,
            "not_comparable_because": "; ".join(place.obstacles),
            "seeds": len(self.finished),
            "not_run": place.not_run,
            "not_run_because": place.details,
        }


class Data(NamedTuple):
    """What was found out about a dataset that is to be run."""

    missing: str | None = None  # why it cannot be read
    other: str | None = None  # how it differs from the published one


@dataclass(frozen=True)
class Asked:
    """What the command line asks of a protocol's table."""

    methods: Sequence[str] = ()  # whose lines are wanted; none: all
    backbone: str | None = None  # to run with in place of the paper's, whether it is here or not
    seeds: int | None = None  # how many of the protocol's; None: all
    overrides: dict[str, Any] = field(default_factory=dict)  # dotted

    @property
    def root(self) -> Path | None:
        """Where the datasets lie."""
        root = self.overrides.get("benchmark.root")
        return None if root is None else with_home(str(root))

    @property
    def changed(self) -> list[str]:
        """The options that decide the result: with them it is another set-up."""
        return [key for key in self.overrides if changes_recipe(key) or key.startswith(("benchmark.", "backbone."))]


def places(name: str, asked: Asked) -> list[Place]:
    """Return the places of the table of a protocol, or of one set-up of it: PROTOCOL/SETUP."""
    wanted, _, only = name.partition("/")
    if wanted not in protocols():
        raise DualPromptError(f"unknown protocol '{wanted[:80]}'; {nearest(wanted, protocols())}")
    protocol = protocols()[wanted]
    if only and only not in protocol.setups:
        raise DualPromptError(f"protocol {wanted} has no set-up '{only[:80]}'; {nearest(only, protocol.setups)}")
    if asked.seeds is not None and not 1 <= asked.seeds <= len(protocol.seeds):
        raise DualPromptError(f"--seeds: protocol {wanted} has 1 to {len(protocol.seeds)} seeds, found {asked.seeds}")
    known = {line.method for setup in protocol.setups.values() for line in setup.lines}
    if strange := next((method for method in asked.methods if method not in known), None):
        raise DualPromptError(f"--methods: protocol {wanted} has no method '{strange}'; {nearest(strange, known)}")
    data = functools.cache(functools.partial(_data, root=asked.root))
    return [
        _place(wanted, setup, line, asked, data)
        for setup in ([only] if only else protocol.setups)
        for line in protocol.setups[setup].lines
        if not asked.methods or line.method in asked.methods
    ]


def _place(name: str, setup: str, line: ProtocolLine, asked: Asked, data: Callable[[str], Data]) -> Place:
    protocol = protocols()[name]
    own = protocol.setups[setup]
    backbone = own.backbone or protocol.backbone
    obstacles = [own.not_comparable] if own.not_comparable else []
    if asked.backbone is not None and not _same_weights(asked.backbone, backbone):
        obstacles.append(f"other weights ({Path(asked.backbone).name}) than the paper's ({backbone})")
    changed = [key for key in asked.changed if key != "benchmark.root"]
    obstacles += [f"changed: {', '.join(changed)}"] if changed else []
    config, not_run, details = None, None, ""
    try:
        config = _config(protocol, own, line, name, {"backbone.name": asked.backbone or backbone})
    except DualPromptError as error:
        not_run, details = NOT_OURS, str(error)
    else:  # a mistake in what was asked is nobody's lack
        config = _config(protocol, own, line, name, {"backbone.name": asked.backbone or backbone} | asked.overrides)
        if asked.backbone is None and not weights.is_here(backbone):
            not_run, details = NO_WEIGHTS, f"--backbone {backbone} fetches them, --backbone embedded runs without them"
        else:
            found = [data(dataset) for dataset in names_of(expanded(config.benchmark))]
            if missing := next((each.missing for each in found if each.missing), None):
                not_run, details = NO_DATA, missing
            obstacles += [each.other for each in found if each.other]
    return Place(
        protocol=name,
        setup=setup,
        line=line,
        backbone=backbone,
        seeds=tuple(protocol.seeds[: asked.seeds]),
        metric=protocol.metric,
        config=config,
        not_run=not_run,
        details=details,
        obstacles=tuple(obstacles),
    )


def _config(protocol: Protocol, setup: Setup, line: ProtocolLine, name: str, overrides: dict[str, Any]) -> RunConfig:
    """Return the run of a line, with the protocol's first seed; refuse what this version does not have."""
    train = merge(merge(protocol.train, setup.train), line.train)
    values = flat(
        {
            "benchmark": setup.benchmark,
            "evaluate": merge(protocol.evaluate, setup.evaluate),
            "train": train | {"recipe": f"{name}'s"},
            "method": line.options,
            "seed": protocol.seeds[0],
        }
    )
    if line.method not in METHODS:
        raise DualPromptError(f"unknown method '{line.method}'")
    config = compose(setup.preset, protocol.recipe, values | {"method.name": line.method} | overrides)
    method_config(config.method)
    return config


def _same_weights(one: str, other: str) -> bool:
    known = known_as(one)
    return one == other or (known is not None and known is known_as(other))


def _data(dataset: str, root: Path | None) -> Data:
    """Say whether a dataset can be read, and whether it has as many images as the published one."""
    try:
        found = load_dataset(dataset, root)
    except DualPromptError as error:
        return Data(missing=str(error))
    if not is_registered(dataset):
        return Data(other=f"other data: {dataset} is a folder")
    here, published = (len(found.train), len(found.test)), DATASETS[dataset].images
    if all(theirs in (None, ours) for ours, theirs in zip(here, published, strict=True)):
        return Data()
    told = (" + ".join("?" if each is None else f"{each:,}" for each in counts) for counts in (here, published))
    return Data(other="other data: {} has {} images to learn from and to test on, published {}".format(dataset, *told))


def rows(
    places: Sequence[Place],
    root: Path,
    progress: Progress = SILENT,
    jobs: int | Workers = 1,
    stored: bool = False,
    any_code: bool = False,
    fresh: Fresh | None = None,
) -> list[ProtocolRow]:
    """Run or reuse what every place needs, as `main_table.rows` does; places that cannot be run keep their row."""
    asked = [
        (place, place.config.model_copy(update={"seed": seed}))
        for place in places
        if place.config is not None and place.not_run is None
        for seed in place.seeds
    ]
    configs = [config for _, config in asked]
    got: Sequence[Obtained | None] = []
    if configs:
        got = finished(configs, root, progress, any_code) if stored else obtain(configs, root, progress, jobs, fresh)
    runs = [(place, each) for (place, _), each in zip(asked, got, strict=True) if each is not None]
    return [ProtocolRow(place, tuple(run for own, run in runs if own is place)) for place in places]


def sheet(rows: Sequence[ProtocolRow]) -> Sheet:
    """Return the table: reported beside ours, a group for each set-up."""
    protocol = protocols()[rows[0].place.protocol]
    columns = (
        Column("set-up", right=False),
        Column("method", right=False),
        Column("reported (%)"),
        Column("ours (%)"),
        Column("difference"),
        Column("comparable", right=False),
        Column("reported mean\nover steps (%)", lesser=True),
        Column("ours", lesser=True),
        Column("reported F (%)", lesser=True),
        Column("our F (%)", lesser=True),
        Column("seeds", lesser=True),
    )
    groups: dict[str, list[tuple[str, ...]]] = {}
    for row in rows:
        groups.setdefault(row.place.setup, []).append(_cells(row))
    reasons = [(row.place.setup, reason) for row in rows for reason in row.place.obstacles]
    not_run = [(row.place.setup, f"{row.place.not_run} ({row.place.details})") for row in rows if row.place.not_run]
    remarks = [
        f"reported: {protocol.source}; accuracy after the last task, {METRICS[protocol.metric]}",
        f"the paper's weights: {', '.join(dict.fromkeys(row.place.backbone for row in rows))}",
        *(f"ours departs: {departure}" for departure in protocol.departures),
        *(f"not comparable: {why}" for why in _grouped(reasons)),
        *(f"not run: {why}" for why in _grouped(not_run)),
        *explained(len(row.finished) for row in rows),
    ]
    return Sheet(
        f"protocol {rows[0].place.protocol}: {protocol.title}",
        columns,
        tuple(map(tuple, groups.values())),
        tuple(remarks),
    )


def _grouped(reasons: Sequence[tuple[str, str]]) -> list[str]:
    """Return each reason once, with the set-ups that it holds for."""
    setups: dict[str, dict[str, None]] = {}
    for setup, reason in reasons:
        setups.setdefault(reason, {})[setup] = None
    return [f"{', '.join(names)}: {reason}" for reason, names in setups.items()]


def _cells(row: ProtocolRow) -> tuple[str, ...]:
    place, told = row.place, row.place.line.reported
    ours = over_seeds(row.numbers(place.metric)) if row.finished else "failed"
    if not row.obtained:
        ours = f"not run: {place.not_run or 'not stored'}"
    return (
        place.setup,
        place.line.label,
        _number(told.accuracy, told.accuracy_std),
        ours,
        f"{row.difference:+.2f}" if row.difference is not None and row.comparable else ABSENT,
        {True: "yes", False: "not comparable", None: ABSENT}[row.comparable],
        _number(told.mean, told.mean_std),
        over_seeds(row.numbers("mean_over_steps")),
        _number(told.forgetting, told.forgetting_std),
        over_seeds(row.numbers("forgetting")),
        f"{len(row.finished)} of {len(place.seeds)}",
    )


def _number(value: float | None, deviation: float | None) -> str:
    if value is None:
        return ABSENT
    return f"{value:.2f}" if deviation is None else plus_minus(value, deviation)


def combined(rows: Sequence[ProtocolRow]) -> dict[str, Any]:
    """Return one object for `--json`."""
    name = rows[0].place.protocol
    protocol = protocols()[name]
    return {
        "protocol": name,
        "title": protocol.title,
        "source": protocol.source,
        "departures": protocol.departures,
        "rows": [
            row.values()
            | {
                "not_comparable_because": list(row.place.obstacles),
                "seeds": [each.config.seed for each in row.finished],
                "runs": [str(each.run.folder) for each in row.finished],
                "errors": [f"{each.name}: {each.error}" for each in row.obtained if each.error],
            }
            for row in rows
        ],
    }
