"""What each part is worth: G-Prompt, E-Prompt, several layers; each on or off."""

from __future__ import annotations

from dualprompt.report.figures import curves
from dualprompt.report.verdict import Verdict, tally, verdict_on
from dualprompt.studies.study import Context, Outcome, Row, Setting, Study
from dualprompt.studies.words import about, between, finding, table
from dualprompt.sweeps import paper

Parts = tuple[bool, bool, bool]  # G-Prompt, E-Prompt, multi-layer


def setting(parts: Parts, g_layers: list[int], e_layers: list[int]) -> Setting:
    """Return a row of the table; a single-layer prompt is at the last of its layers, as in the paper."""
    g, e, several = parts
    if not (g or e):
        return Setting("none (frozen head)", {"method.name": "frozen-head"})
    label = " + ".join(name for name, there in (("G", g), ("E", e)) if there) + (", multi-layer" if several else "")
    return Setting(
        label,
        {
            "method.g_layers": (g_layers if several else g_layers[-1:]) if g else [],
            "method.e_layers": (e_layers if several else e_layers[-1:]) if e else [],
        },
    )


def run(context: Context) -> Outcome:
    """Return the paper's seven rows on the test set."""
    g_layers = _layers(context, "method.g_layers", paper.G_LAYERS)
    e_layers = _layers(context, "method.e_layers", paper.E_LAYERS)
    settings = {parts: setting(parts, g_layers, e_layers) for parts in paper.ABLATION}
    rows = dict(zip(settings, context.test(list(settings.values())), strict=True))
    known = {settings[parts].label: numbers for parts, numbers in paper.ABLATION.items()}
    listed = list(rows.values())
    labelled = [result | {"label": row.setting.label} for row in listed for result in row.results]
    verdicts = _verdicts(rows)
    return Outcome(
        finding(f"Of the paper's {len(verdicts)} steps {tally(verdicts)}.", verdicts),
        (table(f"ablation: {about(listed)}", "parts", [listed], known, paper.SEARCHED_ON),),
        {"accuracy": curves(labelled)[0]} if labelled else {},
        tuple(listed),
        verdicts=tuple(verdicts),
    )


def _layers(context: Context, option: str, papers: tuple[int, ...]) -> list[int]:
    """Return the layers that the user gave, or the paper's as far as the backbone has them."""
    given = context.overrides.get(option)
    if given:
        return [given] if isinstance(given, int) else list(given)
    return [layer for layer in papers if layer <= context.depth] or [context.depth]


def _verdicts(rows: dict[Parts, Row]) -> list[Verdict]:
    """Judge each step that the paper takes from the bare backbone to the full method."""
    steps = (
        ("G alone beats none", (True, False, False), (False, False, False)),
        ("E alone beats G alone", (False, True, False), (True, False, False)),
        ("both beat E alone", (True, True, False), (False, True, False)),
        ("several layers beat one", (True, True, True), (True, True, False)),
    )
    return [
        verdict_on(
            claim,
            between(rows[better], rows[worse]),
            paper=f"{paper.ABLATION[better][0] - paper.ABLATION[worse][0]:+.2f}",
        )
        for claim, better, worse in steps
    ]


STUDY = Study(
    "ablation",
    "What each part is worth",
    "G-Prompt, E-Prompt and several layers each add accuracy",
    run,
    seeds=3,
)
