"""What the match is worth: E-Prompts found by query against those of the true task. Nothing is trained twice."""

from __future__ import annotations

from typing import Any

from dualprompt.files import write_json
from dualprompt.metrics import mean_and_deviation
from dualprompt.report import figures
from dualprompt.report.sheet import Column, Sheet
from dualprompt.report.tables import explained, over_seeds
from dualprompt.report.verdict import RULE, Difference, Verdict, paired, verdict_on
from dualprompt.run.folder import Run
from dualprompt.studies.study import Context, Outcome, Row, Setting, Study
from dualprompt.studies.words import about, evaluated_on, finding, whose
from dualprompt.sweeps import paper
from dualprompt.training import group
from dualprompt.training.evaluate import evaluate_again
from dualprompt.training.setup import prepare

TITLES = {"query": "query", "oracle": "perfect match"}


def run(context: Context) -> Outcome:
    """Return the runs as they are, and evaluated anew with the true task."""
    rows = context.test([Setting("DualPrompt", {"method.selection": "query"})])
    asked = rows[0].results
    with_oracle = perfect(context, rows[0])
    if not asked:
        return Outcome("Every run failed.", (), rows=tuple(rows))
    by_selection = {"query": asked, "oracle": with_oracle}
    right = mean_and_deviation([result["matching_accuracy"] for result in asked])[0]
    verdicts = _verdicts(paired(with_oracle, asked))
    sentence = (
        f"Queries find the right task for {right:.1f} % of the images; the paper: {paper.MATCHING['query'][0]:.1f} % "
        f"on {paper.SEARCHED_ON}."
    )
    labelled = [result | {"label": TITLES[name]} for name, results in by_selection.items() for result in results]
    pictures: dict[str, Any] = {"accuracy": figures.curves(labelled)[0]}
    if all(result.get("matching_confusion") for result in asked):
        pictures["confusion"] = figures.confusion_grid(asked)
    sheets = (_sheet(rows, by_selection),)
    return Outcome(finding(sentence, verdicts), sheets, pictures, tuple(rows), verdicts=tuple(verdicts))


def _verdicts(gap: Difference | None) -> list[Verdict]:
    """Judge what a perfect match adds, and whether that is less than it added in the paper."""
    theirs = paper.MATCHING["oracle"][1] - paper.MATCHING["query"][1]
    near = verdict_on(
        f"accuracy is closer to that of a perfect match than the {theirs:.2f} points of the paper",
        gap and gap.beyond(theirs),
        -1,
        of=f"from {theirs:.2f}",
    )
    return [verdict_on("a perfect match adds accuracy", gap, paper=f"{theirs:+.2f} on {paper.SEARCHED_ON}"), near]


def perfect(context: Context, row: Row) -> list[dict[str, Any]]:
    """Return the results of a row's runs under a perfect match, evaluated once and kept in the runs' folders."""
    results, setup = [], None
    for each in row.obtained:
        if each.error:
            continue
        kept = each.run.folder / "eval-oracle.json"
        if not kept.is_file():
            setup = prepare(group.elsewhere_config(each.run.folder, each.config, {}), context.progress, share=setup)
            each.run.check_same(setup.identity)
            write_json(kept, evaluate_again(setup, Run(each.run.folder), "oracle", context.progress))
        results.append(each.run.read_result(kept))
    return results


def _sheet(rows: list[Row], by_selection: dict[str, list[dict[str, Any]]]) -> Sheet:
    keys = ("matching_accuracy", "average_accuracy", "forgetting")
    lines = []
    for name, results in by_selection.items():
        ours = [over_seeds([result[key] for result in results]) for key in keys]
        lines.append((TITLES[name], *ours, *(f"{value:.2f}" for value in paper.MATCHING[name])))
    return Sheet(
        f"matching: {about(rows)}",
        (
            Column("E-Prompt by", right=False),
            *(Column(heading) for heading in ("matching (%)", "A (%)", "F (%)")),
            Column("paper's matching (%)", lesser=True),
            Column(f"paper's A (%){whose(paper.SEARCHED_ON)}"),
            Column("paper's F (%)", lesser=True),
        ),
        (tuple(lines),),
        (evaluated_on(rows), *explained(len(results) for results in by_selection.values()), RULE),
    )


STUDY = Study(
    "matching",
    "What a perfect match would add",
    "accuracy is close to that of a perfect match although many matches are wrong",
    run,
    seeds=3,
)
