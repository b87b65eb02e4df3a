"""The paper's main table: every method on one benchmark, rehearsal methods at each buffer size, over seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dualprompt.config import BUFFER_SIZE, RunConfig, compose, load_preset, origins, read_line
from dualprompt.errors import DualPromptError, nearest
from dualprompt.methods.base import METHODS, method_config
from dualprompt.metrics import mean_and_deviation
from dualprompt.progress import SILENT, Progress
from dualprompt.report.columns import Measure, notes
from dualprompt.report.sheet import Column, Sheet
from dualprompt.report.tables import ABSENT, ONLINE, explained, is_online, over_seeds, plus_minus, unfair
from dualprompt.report.verdict import RULE, Difference, decide, paired
from dualprompt.sweeps import paper
from dualprompt.sweeps.obtained import Obtained, Workers
from dualprompt.sweeps.runs import OverSeeds, rehearses
from dualprompt.sweeps.store import Fresh, finished, obtain

LONGER = "epochs_factor=4"  # the option of a second line of joint training, beside that with the budget of all others
REFERENCE = "dualprompt"
SETTERS = {
    "method": "not the recipe's, but the method's own",
    "preset": "set by the preset",
    "command line": "set on the command line",
}
LESSER = (
    ("matching_accuracy", "matching (%)"),
    ("image_weighted_accuracy", "image-weighted\nA (%)"),
    ("mean_over_steps", "mean over\nsteps (%)"),
)
PLACES = {"holds": "above", "does not hold": "below", "cannot be told": "cannot be told"}


@dataclass(frozen=True)
class Line:
    """One line of the table: a method, at a buffer size if it rehearses."""

    label: str  # as --methods says it: a method's name, and options of its own where they are not the recipe's
    buffer: int | None  # None: no rehearsal
    config: RunConfig  # with the first seed
    budget: str | None = None  # of joint training: beside learning task after task
    origins: Mapping[str, str] = field(default_factory=dict)  # where its settings come from: see config.origins

    @property
    def title(self) -> str:
        """What the table calls it."""
        return self.label if self.budget is None else f"{self.label} ({self.budget})"

    @property
    def method(self) -> str:
        """The method's name."""
        return self.config.method["name"]

    @property
    def joint(self) -> bool:
        """Whether it trains on all tasks at once, so that forgetting says nothing of it."""
        return METHODS[self.method].joint

    @property
    def finetunes(self) -> bool:
        """Whether it trains the backbone, which takes longer than prompts and heads."""
        return bool(getattr(method_config(self.config.method), "train_backbone", False))

    @property
    def name(self) -> str:
        """What `--against` calls it."""
        return self.label if self.buffer is None else f"{self.label}@{self.buffer}"


@dataclass(frozen=True)
class TableRow(OverSeeds):
    """A line and its runs, one for each seed."""

    line: Line
    obtained: tuple[Obtained, ...]
    published: paper.Published | None

    @property
    def seconds(self) -> float | None:
        """How long a finished run trained, in the mean."""
        return mean_and_deviation([each.seconds for each in self.finished])[0] if self.finished else None

    def against(self, reference: TableRow | None) -> Difference | None:
        """Return how much higher its A is than the reference's, over the seeds that both have."""
        return None if reference is None or reference is self else paired(self.results, reference.results)

    def values(self, reference: TableRow | None = None) -> dict[str, Any]:
        """Return what JSON and CSV say of the line, in full precision."""
        first = self.results[0] if self.results else None
        gap = self.against(reference)
        buffer = (first or {}).get("buffer") or {}
        published = self.published or (None,) * len(paper.Published._fields)
        return {
            "benchmark": self.line.config.benchmark.name,
            "backbone": self.line.config.backbone.name,
            "recipe": self.line.config.train.recipe,
            "method": self.line.label,
            "budget": self.line.budget,
            "buffer_size": self.line.buffer or 0,
            "seeds": len(self.finished),
            **self.metrics(),
            "against": reference.line.name if reference and gap else None,
            "difference": gap and gap.mean,
            "difference_std": gap and gap.deviation,
            "difference_margin": gap and gap.margin,
            "difference_seeds": gap and gap.seeds,
            "difference_verdict": gap and PLACES[decide(gap)],
            **{f"paper_{name}": value for name, value in zip(paper.Published._fields, published, strict=True)},
            "buffer_images": buffer.get("images"),
            "buffer_bytes": buffer.get("bytes"),
            "kept_mb": first and first["parameters"].get("kept", {}).get("mb"),
            "additional_parameters": first and first["parameters"]["additional"]["count"],
            "training_seconds": self.seconds,
        }


def default_methods() -> list[str]:
    """Return every method but those of Table 2: the paper's in its order, then the others; last joint training."""
    names = [name for name in METHODS.names() if name not in paper.ARCHITECTURES]
    known = sorted(names, key=lambda name: (*paper.ORDER, name).index(name))
    joint = [name for name in known if METHODS[name].joint]
    others = [name for name in known if name not in joint]
    return [*others, *(label for name in joint for label in (name, f"{name}:{LONGER}"))]


def lines(
    preset: str, recipe: str | None, methods: Sequence[str], buffers: Sequence[int], overrides: dict[str, Any]
) -> list[Line]:
    """Return the lines of the table, in its order: by buffer size, then without rehearsal, then joint training.

    Without `buffers` the paper's sizes are used, or the recipe's where the paper does not have the benchmark.
    """
    if BUFFER_SIZE in overrides:
        raise DualPromptError(f"give buffer sizes with --buffers, not --{BUFFER_SIZE}: some methods keep no images")
    sizes: Sequence[int | None] = buffers or paper.buffers(_benchmark(preset)) or [None]
    found = []
    for label in methods:
        name, options = read_line(label)
        for size in sizes if rehearses(name) else [None]:
            at = {} if size is None else {BUFFER_SIZE: size}
            try:
                given = overrides | options | at | {"method.name": name}
                config, where = compose(preset, recipe, given), origins(preset, recipe, given)
                kept = getattr(method_config(config.method), "buffer_size", None)
            except DualPromptError as error:
                raise DualPromptError(f"{label}: {error}") from None
            budget = _budget(config, preset, recipe, overrides) if METHODS[name].joint else None
            found.append(Line(label, kept, config, budget, where))
    return sorted(found, key=lambda line: (line.joint, line.buffer is None, line.buffer or 0))


def _budget(config: RunConfig, preset: str, recipe: str | None, overrides: dict[str, Any]) -> str:
    """Say whether joint training sees each image as often as FT-seq does, or more often."""
    epochs = config.train.epochs * method_config(config.method).model_dump().get("epochs_factor", 1)
    usual = compose(preset, recipe, overrides | {"method.name": "ft-seq"}).train.epochs
    return f"joint, {'same budget' if epochs == usual else 'longer' if epochs > usual else 'shorter'}"


def _benchmark(preset: str) -> str:
    """Return the benchmark's name before anybody renames it, by which the paper's numbers are found."""
    benchmark = load_preset(preset).get("benchmark")
    return str(benchmark.get("name")) if isinstance(benchmark, dict) else ""


@dataclass(frozen=True)
class Seeds:
    """How many seeds a line gets."""

    usual: int
    finetune: int | None = None  # of methods that train the backbone; None: as many as the others

    def of(self, line: Line) -> int:
        """Return the number of seeds of a line."""
        return self.finetune if self.finetune is not None and line.finetunes else self.usual

    def check(self) -> None:
        """Refuse fewer than one."""
        for option, count in (("--seeds", self.usual), ("--seeds-finetune", self.finetune)):
            if count is not None and count < 1:
                raise DualPromptError(f"{option} must be at least 1, found {count}")


def rows(
    preset: str,
    lines: Sequence[Line],
    seeds: Seeds,
    root: Path,
    progress: Progress = SILENT,
    jobs: int | Workers = 1,
    stored: bool = False,
    any_code: bool = False,
    fresh: Fresh | None = None,
) -> list[TableRow]:
    """Run or reuse what each line needs. Seed after seed, so that methods share the images of one class order.

    With `stored` nothing is run: a line has the seeds that are finished below `root`, and is left out if it has none.
    See `store.finished` for `any_code`, `store.obtain` for `fresh`.
    """
    seeds.check()
    asked = [(n, line) for n in range(max(map(seeds.of, lines))) for line in lines if n < seeds.of(line)]
    configs = [line.config.model_copy(update={"seed": line.config.seed + n}) for n, line in asked]
    got = finished(configs, root, progress, any_code) if stored else obtain(configs, root, progress, jobs, fresh)
    found = [(line, each) for (_, line), each in zip(asked, got, strict=True) if each is not None]
    if not found:
        raise DualPromptError(f"none of the {len(configs)} runs is finished in {root}; leave --stored out to run them")
    published = paper.TABLES.get(_benchmark(preset), {})
    table = [
        TableRow(line, tuple(run for own, run in found if own is line), _papers(published, line)) for line in lines
    ]
    return [row for row in table if row.obtained]


def _papers(published: paper.Table, line: Line) -> paper.Published | None:
    return published.get(line.buffer or 0, {}).get(line.label)


def reference(lines: Sequence[Line], against: str | None) -> Line | None:
    """Return the line that the others are held against: the one that is asked for, or DualPrompt's if it is there."""
    if against == "none":
        return None
    named = [line for line in lines if (against or REFERENCE) in (line.name, line.label)]
    if len(named) == 1:
        return named[0]
    if against is None:
        return None
    several = f"is there more than once: write {' or '.join(line.name for line in named)}"
    missing = nearest(against, [line.name for line in lines])
    raise DualPromptError(f"--against: '{against}' {several if named else f'is no line of the table; {missing}'}")


def sheet(rows: Sequence[TableRow], reference: TableRow | None = None) -> Sheet:
    """Return the table as the paper lays it out, with its own numbers beside ours where it has any.

    With a reference, each line says how its A differs from the reference's on the same seeds.
    """
    config = rows[0].line.config
    backbone = Path(config.backbone.name).name
    same = paper.is_its_backbone(config.backbone.name)
    theirs = [("paper's A (%)", 0), ("paper's F (%)", 2)] if any(row.published for row in rows) else []
    mark = "" if same else f"\n(other backbone:\n{paper.BACKBONE_TITLE})"
    online = all(is_online(result) for row in rows for result in row.results)
    main = ONLINE if online else (("average_accuracy", "A (%)"), ("forgetting", "F (%)"))
    lesser = () if online else LESSER
    columns = (
        Column("method", right=False),
        Column("buffer"),
        *(Column(heading) for _, heading in main),
        *(Column(heading + mark) for heading, _ in theirs),
        Column("seeds"),
        *(
            [Column(f"A − A of\n{reference.line.name}", lesser=True), Column("verdict", lesser=True)]
            if reference
            else []
        ),
        *(Column(heading, lesser=True) for _, heading in lesser),
        Column("buffer (MB)", lesser=True),
        Column("statistics\n(MB)", lesser=True),
        Column("additional\nparameters", lesser=True),
        Column("training (s)", lesser=True),
    )
    groups: dict[tuple[bool, int | None], list[tuple[str, ...]]] = {}
    for row in rows:
        values, line, done, asked = row.values(), row.line, len(row.finished), len(row.obtained)
        cells = (
            line.title,
            ABSENT if line.joint else str(line.buffer or 0),
            *(
                over_seeds(row.numbers(key)) if row.finished or place else "failed"
                for place, (key, _) in enumerate(main)
            ),
            *(_published(row.published, place) for _, place in theirs),
            str(done) if done == asked else f"{done} of {asked}",
            *(_compared(row.against(reference)) if reference else ()),
            *(over_seeds(row.numbers(key)) for key, _ in lesser),
            ABSENT if values["buffer_bytes"] is None else f"{values['buffer_bytes'] / 1e6:.2f}",
            f"{values['kept_mb']:.2f}" if values["kept_mb"] else ABSENT,
            ABSENT if values["additional_parameters"] is None else f"{values['additional_parameters']:,}",
            ABSENT if values["training_seconds"] is None else f"{values['training_seconds']:,.1f}",
        )
        groups.setdefault((line.joint, line.buffer), []).append(cells)
    remarks = explained(len(row.finished) for row in rows) or [f"seed {config.seed}"]
    remarks += [f"differences are over the seeds that both lines have; {RULE}"] if reference else []
    remarks += [*settings(rows), *fairness(rows), *other_code(rows)]
    if theirs and not same:
        remarks.append(
            f"the paper's numbers are of another backbone ({paper.BACKBONE_TITLE}): not comparable with {backbone}"
        )
    title = f"{config.benchmark.name}, {backbone}, recipe {config.train.recipe}"
    return Sheet(title, columns, tuple(tuple(group) for group in groups.values()), tuple(remarks))


def chosen_sheet(rows: Sequence[TableRow], columns: Sequence[Measure]) -> Sheet:
    """Return a table of the same lines with other columns: the numbers that are asked for."""
    config, groups = rows[0].line.config, dict[tuple[bool, int | None], list[tuple[str, ...]]]()
    for row in rows:
        name = (row.line.title, ABSENT if row.line.joint else str(row.line.buffer or 0))
        cells = (*name, *(over_seeds(row.measured(each)) for each in columns), str(len(row.finished)))
        groups.setdefault((row.line.joint, row.line.buffer), []).append(cells)
    heads = [Column("method", right=False), Column("buffer"), *(Column(each.heading) for each in columns)]
    seeds = explained(len(row.finished) for row in rows) or [f"seed {config.seed}"]
    remarks = (*seeds, *notes(columns), *settings(rows), *fairness(rows), *other_code(rows))
    title = f"{config.benchmark.name}, {Path(config.backbone.name).name}, recipe {config.train.recipe}"
    return Sheet(title, (*heads, Column("seeds")), tuple(map(tuple, groups.values())), remarks)


def settings(rows: Sequence[TableRow]) -> list[str]:
    """Say which settings are not the recipe's, and whose they are."""
    labels = list(dict.fromkeys(row.line.label for row in rows))
    remarks = []
    for origin, words in SETTERS.items():
        alike: dict[tuple[str, ...], list[str]] = {}
        for row in rows:
            where = row.line.origins.items()
            keys = tuple(sorted(key.partition(".")[2] for key, by in where if by == origin and key != BUFFER_SIZE))
            names = alike.setdefault(keys, [])
            names += [row.line.label] if row.line.label not in names else []
        groups = [
            f"{', '.join(keys)} ({'all lines' if names == labels else ', '.join(names)})"
            for keys, names in alike.items()
            if keys
        ]
        remarks += [f"{words}: {'; '.join(groups)}"] if groups else []
    return remarks


def fairness(rows: Sequence[TableRow]) -> list[str]:
    """Say which lines were given what no learner has."""
    return unfair([result | {"label": row.line.label} for row in rows for result in row.results])


def other_code(rows: Sequence[TableRow]) -> list[str]:
    """Say which lines have runs that other code made than that at hand."""
    counts = [(row, sum(each.other_code for each in row.finished)) for row in rows]
    listed = ", ".join(f"{row.line.name} ({count} of {len(row.finished)})" for row, count in counts if count)
    return [f"made by other code than this version's: {listed}"] if listed else []


def _compared(gap: Difference | None) -> tuple[str, str]:
    if gap is None:
        return ABSENT, ABSENT
    around = "" if gap.deviation is None else f" ± {gap.deviation:.2f}"
    return f"{gap.mean:+.2f}{around} ({gap.seeds})", PLACES[decide(gap)]


def combined(rows: Sequence[TableRow], reference: TableRow | None = None) -> dict[str, Any]:
    """Return one object for `--json`."""
    config = rows[0].line.config
    return {
        "benchmark": config.benchmark.name,
        "backbone": config.backbone.name,
        "paper_backbone": paper.BACKBONE_TITLE,
        "same_backbone": paper.is_its_backbone(config.backbone.name),
        "rows": [
            row.values(reference)
            | {
                "seeds": [each.config.seed for each in row.finished],
                "runs": [str(each.run.folder) for each in row.finished],
                "settings_from": dict(row.line.origins),
                "of_other_code": [str(each.run.folder) for each in row.finished if each.other_code],
                "errors": [f"{each.name}: {each.error}" for each in row.obtained if each.error],
            }
            for row in rows
        ],
    }


def _published(numbers: paper.Published | None, place: int) -> str:
    """Return the mean at a place of the paper's numbers, with the deviation that follows it."""
    if numbers is None:
        return ABSENT
    mean, deviation = numbers[place], numbers[place + 1]
    return ABSENT if mean is None or deviation is None else plus_minus(mean, deviation)
