"""The sentences and tables that studies have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dualprompt.metrics import mean_and_deviation
from dualprompt.studies import paper
from dualprompt.studies.sheet import Column, Sheet
from dualprompt.studies.study import Lab, Row, Setting
from dualprompt.studies.tables import ABSENT, over_seeds

Published = tuple[float | None, float | None]  # accuracy and forgetting


@dataclass(frozen=True)
class Difference:
    """How much better one row is than another, seed by seed."""

    mean: float
    deviation: float
    seeds: int

    @property
    def clear(self) -> bool:
        """Whether it is larger than its spread over seeds; a single seed never shows that."""
        return self.seeds > 1 and abs(self.mean) > self.deviation

    def __str__(self) -> str:
        around = f" ± {self.deviation:.2f}" if self.seeds > 1 else ""
        return f"{self.mean:+.2f}{around} points ({counted(self.seeds, 'seed')})"

    def verdict(self, expected: float = 1.0) -> str:
        """Say whether it has the sign that the paper found."""
        if self.mean * expected <= 0:
            return "does not hold here" if self.clear or self.seeds == 1 else "is not seen here"
        if self.clear:
            return "holds here"
        return "is seen here, on a single seed" if self.seeds == 1 else "is seen here, but within the spread over seeds"


def difference(row: Row, other: Row, key: str = "average_accuracy") -> Difference | None:
    """Compare two rows over the seeds that both have."""
    mine, theirs = ({result["seed"]: result[key] for result in each.results} for each in (row, other))
    gaps = [mine[seed] - theirs[seed] for seed in mine if seed in theirs]
    return Difference(*mean_and_deviation(gaps), len(gaps)) if gaps else None


def on_test(lab: Lab, chosen: Setting, papers: Setting | None) -> tuple[list[Row], str]:
    """Run a search's choice and the paper's once on the test images; return both rows and a sentence on them.

    There is no row of the paper's where the backbone has not the layers, and no sentence where there is one row.
    """
    rows = lab.test([chosen] if papers is None or chosen.options == papers.options else [chosen, papers])
    gap = difference(rows[0], rows[1]) if len(rows) == 2 else None
    return rows, "" if gap is None else f" On the test images the choice differs from the paper's by {gap}."


def counted(count: int, noun: str) -> str:
    """Return a number with its noun."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def span(layers: Sequence[int]) -> str:
    """Return how the paper writes layers: 3–5, 12, none; or a list where they are not contiguous."""
    if not layers:
        return "none"
    if list(layers) == list(range(layers[0], layers[-1] + 1)):
        return str(layers[0]) if len(layers) == 1 else f"{layers[0]}–{layers[-1]}"
    return ",".join(map(str, layers))


def about(rows: Sequence[Row]) -> str:
    """Return the benchmark, backbone and recipe of a study, for titles."""
    config = rows[0].obtained[0].config
    backbone = config.backbone.name.rsplit("/", 1)[-1]
    return f"{config.benchmark.name}, {backbone}, recipe {config.train.recipe.removesuffix(', changed')}"


def whose(source: str) -> str:
    """Return the lines of a heading that say what the paper's numbers are of."""
    return f"\n({source},\n{paper.BACKBONE_TITLE})" if source else ""


def judged(rows: Sequence[Row]) -> str:
    """Return what rows were judged on, and how often."""
    benchmark = rows[0].obtained[0].config.benchmark
    where = "test images"
    if benchmark.evaluate_on == "validation":
        where = f"{benchmark.validation:.0%} of the training images, held out"
    return f"{where}, {counted(len(rows[0].obtained), 'seed')}"


def table(
    title: str,
    heading: str,
    groups: Sequence[Sequence[Row]],
    published: Mapping[str, Published] | None = None,
    source: str = "",
    marked: Sequence[Row] = (),
    remarks: Sequence[str] = (),
) -> Sheet:
    """Return rows as a table, in groups; `published` are the paper's numbers by the settings' labels.

    Rows that a search found best are `marked`; then its last group holds the choice and the paper's, on test images.
    """
    notes = {id(row): "best" for row in marked}
    if marked:
        notes |= {id(row): note for row, note in zip(groups[-1], ("chosen", "the paper's"), strict=False)}
    parts = len({row.part for rows in groups for row in rows}) > 1
    theirs = [f"paper's A (%){whose(source)}", "paper's F (%)"] if published else []
    if published and all(forgetting is None for _, forgetting in published.values()):
        theirs.pop()
    columns = [Column("", right=False)] if parts else []
    columns += [Column(heading, right=False), Column("A (%)"), Column("F (%)"), Column("matching (%)", lesser=True)]
    columns += [Column(heading, lesser=number > 0) for number, heading in enumerate(theirs)]
    columns += [Column("", right=False)] if notes else []
    body = []
    for rows in groups:
        lines = []
        for row in rows:
            searched = len(groups) > 1 and row.part == "test"  # the paper's are of the search
            numbers = (None, None) if searched else (published or {}).get(row.setting.label, (None, None))
            cells = [row.part] if parts else []
            cells += [
                row.setting.label,
                over_seeds(row.numbers("average_accuracy")) if row.results else "failed",
                over_seeds(row.numbers("forgetting")),
                over_seeds(row.numbers("matching_accuracy")),
            ]
            cells += [ABSENT if value is None else f"{value:.2f}" for value in numbers[: len(theirs)]]
            cells += [notes.get(id(row), "")] if notes else []
            lines.append(tuple(cells))
        body.append(tuple(lines))
    told = dict.fromkeys(f"{rows[0].part}: {judged(rows)}".removeprefix("test: ") for rows in groups if rows)
    return Sheet(title, tuple(columns), tuple(body), (*told, *remarks))
