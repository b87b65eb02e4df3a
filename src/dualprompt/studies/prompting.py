"""How to attach prompts: Prompt Tuning (Pro-T) or Prefix Tuning (Pre-T)."""

from __future__ import annotations

from dualprompt.report.figures import curves
from dualprompt.report.verdict import Verdict, verdict_on
from dualprompt.studies.study import Context, Outcome, Row, Setting, Study
from dualprompt.studies.words import about, between, finding, table
from dualprompt.sweeps import paper


def run(context: Context) -> Outcome:
    """Return both on the test set, at equal lengths and layers."""
    names = {"pro-t": "Pro-T", "pre-t": "Pre-T"}
    rows = context.test([Setting(label, {"method.prompting": name}) for name, label in names.items()])
    benchmark = rows[0].obtained[0].config.benchmark.name
    theirs = paper.PROMPTING.get(benchmark)
    known = {names[key]: numbers for key, numbers in theirs.items()} if theirs else None
    verdicts = _verdicts(rows[0], rows[1], benchmark if theirs else "split-cifar100")
    labelled = [result | {"label": row.setting.label} for row in rows for result in row.results]
    accuracy, forgetting = curves(labelled) if labelled else (None, None)
    return Outcome(
        finding("", verdicts),
        (table(f"prompting: {about(rows)}", "prompting function", [rows], known, benchmark if theirs else ""),),
        {"accuracy": accuracy, "forgetting": forgetting} if accuracy and forgetting else {},
        tuple(rows),
        verdicts=tuple(verdicts),
    )


def _verdicts(pro: Row, pre: Row, source: str) -> list[Verdict]:
    """Judge accuracy and forgetting; the paper's numbers are those of the benchmark `source`."""
    theirs = [f"{b - a:+.2f} on {source}" for a, b in zip(*paper.PROMPTING[source].values(), strict=True)]
    return [
        verdict_on("Pre-T beats Pro-T", between(pre, pro), paper=theirs[0]),
        verdict_on("Pre-T forgets less than Pro-T", between(pre, pro, "forgetting"), -1, paper=theirs[1], of="of F"),
    ]


STUDY = Study(
    "prompting",
    "How to attach prompts: Pro-T v Pre-T",
    "Prefix Tuning is better than Prompt Tuning in accuracy and forgetting",
    run,
    seeds=3,
)
