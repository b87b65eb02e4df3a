"""The sentences and tables that studies have in common."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from dualprompt.metrics import mean_and_deviation
from dualprompt.progress import counted
from dualprompt.report.sheet import Column, Sheet
from dualprompt.report.tables import ABSENT, ERRORS, explained, over_seeds
from dualprompt.report.verdict import RULE, Difference, Verdict, paired, two_errors, verdict_on
from dualprompt.studies.study import Context, Row, Setting, at_top, best
from dualprompt.sweeps import paper

Published = tuple[float | None, float | None]  # accuracy and forgetting


def between(row: Row, other: Row, key: str = "average_accuracy") -> Difference | None:
    """Compare two rows over the seeds that both have."""
    return paired(row.results, other.results, key)


def papers_choice(context: Context, rows: Sequence[Row], papers: Setting | None) -> tuple[list[Row], list[Verdict]]:
    """Run a search's choice and the paper's once on the test images; return both rows, and whether the paper's is best.

    If the search chose the paper's, it is held against the second on the validation images. There is no verdict where
    the backbone has not the paper's layers.
    """
    chosen = best(rows)
    if papers is None:
        return context.test([chosen.setting]), []
    claim = f"the paper's choice, {papers.label}, is the best"
    if chosen.setting.options != papers.options:
        tested = context.test([chosen.setting, papers])
        of = f"against {chosen.setting.label}, on test images"
        return tested, [verdict_on(claim, between(tested[1], tested[0]), of=of)]
    others = [row for row in rows if row is not chosen and row.results]
    second = best(others) if others else None
    gap = between(chosen, second) if second else None
    of = f"against {second.setting.label}, on validation images" if second else ""
    return context.test([chosen.setting]), [verdict_on(claim, gap, of=of)]


def leader(rows: Sequence[Row], name: Callable[[Row], str]) -> str:
    """Say which row is best, or which are equal."""
    chosen, equal = best(rows), at_top(rows)
    if len(equal) == 1:
        return f"{name(chosen)} is best (A = {chosen.mean():.2f})"
    return f"{', '.join(map(name, equal))} are equal (A = {chosen.mean():.2f}), {name(chosen)} is taken"


def spread(rows: Sequence[Row]) -> list[float | None] | None:
    """Return what stands behind ± in a picture: the deviation of each row's accuracy over its seeds.

    Where every row has one seed, it is two standard errors of the accuracy; None where the images were not counted.
    """
    if _single(rows):
        return [two_errors(row.results[0]) if row.results else None for row in rows]
    numbers = [row.numbers("average_accuracy") for row in rows]
    found = [mean_and_deviation(each)[1] if len(each) > 1 else None for each in numbers]
    return None if set(found) <= {None} else found


def finding(summary: str, verdicts: Sequence[Verdict]) -> str:
    """Return what was found, and the sentence of every verdict."""
    return " ".join([summary, *(verdict.sentence for verdict in verdicts)]).strip()


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


def evaluated_on(rows: Sequence[Row]) -> str:
    """Return what rows were evaluated on, and how often."""
    benchmark = rows[0].obtained[0].config.benchmark
    where = "test images"
    if benchmark.evaluate_on == "validation":
        where = f"{100 * benchmark.validation:.0f} % of the training images, held out"
    return f"{where}, {counted(len(rows[0].obtained), 'seed')}"


def pictured(title: str, rows: Sequence[Row]) -> str:
    """Return the title of a picture: what rows were evaluated on, how often, and what its bars are."""
    bars = [ERRORS] if _single(rows) else explained(len(row.results) for row in rows)
    return "; ".join([f"{title}: {evaluated_on(rows)}", *bars])


def _single(rows: Sequence[Row]) -> bool:
    """Return whether rows have one seed each, whose images were counted."""
    found = [row.results for row in rows if row.results]
    return bool(found) and all(len(results) == 1 and results[0]["judged_images"] for results in found)


def _notes(groups: Sequence[Sequence[Row]], marked: Sequence[Row]) -> dict[int, str]:
    """Return what is said of rows: the best of a search, or those that are equal there; the choice and the paper's."""
    notes: dict[int, str] = {}
    for chosen in marked:
        group = next((rows for rows in groups if any(row is chosen for row in rows)), [chosen])
        equal = at_top(group)
        notes |= {id(row): "equal" for row in equal}
        notes[id(chosen)] = "best" if len(equal) == 1 else "equal, taken"
    if marked:
        notes |= {id(row): note for row, note in zip(groups[-1], ("chosen", "the paper's"), strict=False)}
    return notes


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
    notes = _notes(groups, marked)
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
    conditions = dict.fromkeys(
        f"{rows[0].part}: {evaluated_on(rows)}".removeprefix("test: ") for rows in groups if rows
    )
    conditions |= dict.fromkeys(explained(len(row.results) for rows in groups for row in rows))
    return Sheet(title, tuple(columns), tuple(body), (*conditions, RULE, *remarks))
