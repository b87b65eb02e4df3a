"""How to attach prompts: Prompt Tuning (Pro-T) or Prefix Tuning (Pre-T)."""

from __future__ import annotations

from dualprompt.studies import paper
from dualprompt.studies.figures import curves
from dualprompt.studies.study import Lab, Outcome, Setting, Study
from dualprompt.studies.words import about, difference, table


def run(lab: Lab) -> Outcome:
    """Return both on the test set, at equal lengths and layers."""
    names = {"pro-t": "Pro-T", "pre-t": "Pre-T"}
    rows = lab.test([Setting(label, {"method.prompting": name}) for name, label in names.items()])
    benchmark = rows[0].obtained[0].config.benchmark.name
    theirs = paper.PROMPTING.get(benchmark)
    known = {names[key]: numbers for key, numbers in theirs.items()} if theirs else None
    gap = difference(rows[1], rows[0])
    sentence = "Too many runs failed to compare Pro-T and Pre-T."
    if gap is not None:
        source = benchmark if theirs else "split-cifar100"
        table_3 = paper.PROMPTING[source]
        said = f"{table_3['pre-t'][0] - table_3['pro-t'][0]:+.2f} on {source}"
        sentence = f"The paper's finding that Pre-T beats Pro-T {gap.verdict()}: {gap}; the paper: {said}."
    labelled = [result | {"label": row.setting.label} for row in rows for result in row.results]
    accuracy, forgetting = curves(labelled) if labelled else (None, None)
    return Outcome(
        sentence,
        (table(f"prompting: {about(rows)}", "prompting function", [rows], known, benchmark if theirs else ""),),
        {"accuracy": accuracy, "forgetting": forgetting} if accuracy and forgetting else {},
        tuple(rows),
    )


STUDY = Study(
    "prompting",
    "How to attach prompts: Pro-T v Pre-T",
    "Prefix Tuning is better than Prompt Tuning in accuracy and forgetting",
    run,
    seeds=3,
)
