"""Where to attach prompts: an E-Prompt at each single layer, then a G-Prompt at each beside the best E-Prompt."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dualprompt.pictures.kinds import Line, Lines
from dualprompt.progress import counted
from dualprompt.report.verdict import Verdict, verdict_on
from dualprompt.studies.study import Context, Outcome, Row, Setting, Study, best, spread_out
from dualprompt.studies.words import (
    about,
    between,
    finding,
    leader,
    papers_choice,
    pictured,
    span,
    spread,
    table,
)
from dualprompt.sweeps import paper

E_ALONE = "E-Prompt alone"


def attached(g_layers: Sequence[int], e_layers: Sequence[int]) -> Setting:
    """Return the setting that attaches prompts to these layers."""
    options = {"method.g_layers": list(g_layers), "method.e_layers": list(e_layers)}
    return Setting(f"G {span(g_layers)}, E {span(e_layers)}", options)


def e_layers(row: Row) -> tuple[int, ...]:
    """Return the layers of a row's E-Prompt."""
    return tuple(row.setting.options["method.e_layers"])


def g_layers(row: Row) -> tuple[int, ...]:
    """Return the layers of a row's G-Prompt."""
    return tuple(row.setting.options["method.g_layers"])


def sweeps(context: Context) -> tuple[list[Row], list[Row]]:
    """Sweep E over single layers without G, then G over single layers with the best E."""
    everywhere = range(1, context.depth + 1)
    e_rows = context.search(
        E_ALONE, [attached((), (n,)) for n in spread_out(everywhere, context.budget, [paper.SINGLE_E])]
    )
    e_best = e_layers(best(e_rows))
    part = f"G-Prompt beside E at {span(e_best)}"
    g_tried = spread_out(everywhere, context.budget, [paper.SINGLE_G])
    return e_rows, context.search(part, [attached((n,), e_best) for n in g_tried])


def run(context: Context) -> Outcome:
    """Return both curves, the choice, and how it does on the test set beside the paper's."""
    e_rows, g_rows = sweeps(context)
    chosen = best(g_rows)
    papers = attached([paper.SINGLE_G], [paper.SINGLE_E]) if context.depth >= paper.SINGLE_E else None
    tested, verdicts = papers_choice(context, g_rows, papers)
    verdicts += [_shallower(g_rows, e_layers(chosen)[0]), _top_is_worst("E", e_rows), _top_is_worst("G", g_rows)]
    summary = (
        f"On validation images ({counted(context.seeds, 'seed')}), of E: {leader(e_rows, _layer(e_layers))}; "
        f"then of G: {leader(g_rows, _layer(g_layers))}; the paper: layers {paper.SINGLE_E} and {paper.SINGLE_G}."
    )
    return Outcome(
        finding(summary, verdicts),
        (table(f"positions: {about(e_rows)}", "layers", [e_rows, g_rows, tested], marked=[best(e_rows), chosen]),),
        {"positions": curves(e_rows, g_rows)},
        (*e_rows, *g_rows, *tested),
        chosen.setting.options,
        verdicts=tuple(verdicts),
    )


def _layer(layers: Callable[[Row], tuple[int, ...]]) -> Callable[[Row], str]:
    return lambda row: f"layer {layers(row)[0]}"


def _shallower(g_rows: Sequence[Row], e_at: int) -> Verdict:
    """Hold the best layer of G below E's against the best of the others."""
    finished = [row for row in g_rows if row.results]
    below = [row for row in finished if g_layers(row)[0] < e_at]
    others = [row for row in finished if row not in below]
    gap = between(best(below), best(others)) if below and others else None
    return verdict_on("G belongs in a shallower layer than E", gap)


def _top_is_worst(name: str, rows: Sequence[Row]) -> Verdict:
    """Hold the worst of the other layers against the top layer."""
    others = [row for row in rows[:-1] if row.results]
    worst = min(others, key=lambda row: row.mean() or 0) if others else None
    return verdict_on(f"the top layer is the worst place of {name}", between(worst, rows[-1]) if worst else None)


def curves(e_rows: Sequence[Row], g_rows: Sequence[Row]) -> Lines:
    """Return accuracy by layer, a line for each kind of prompt."""
    lines = []
    for rows, layers in ((e_rows, e_layers), (g_rows, g_layers)):
        finished = [row for row in rows if row.results]
        places = [float(layers(row)[0]) for row in finished]
        lines.append(Line(finished[0].part, places, [row.mean() or 0.0 for row in finished], spread(finished)))
    title = pictured("position of prompts", [*e_rows, *g_rows])
    return Lines(title, "layer", "average accuracy A (%)", lines, mark_best=True)


STUDY = Study(
    "positions",
    "Where to attach prompts: single layers",
    "E is best at layer 5 and G at layer 2; both are worst at the top layers",
    run,
    searches=True,
    mini_budget=4,
)
