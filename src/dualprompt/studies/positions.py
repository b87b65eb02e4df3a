"""Where to attach prompts: an E-Prompt at each single layer, then a G-Prompt at each beside the best E-Prompt."""

from __future__ import annotations

from collections.abc import Sequence

from dualprompt.metrics import mean_and_deviation
from dualprompt.studies import paper
from dualprompt.studies.pictures import Line, Lines
from dualprompt.studies.study import Lab, Outcome, Row, Setting, Study, best, spread
from dualprompt.studies.words import about, counted, judged, on_test, span, table

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


def sweeps(lab: Lab) -> tuple[list[Row], list[Row]]:
    """Sweep E over single layers without G, then G over single layers with the best E."""
    everywhere = range(1, lab.depth + 1)
    e_rows = lab.search(E_ALONE, [attached((), (n,)) for n in spread(everywhere, lab.budget, [paper.SINGLE_E])])
    e_best = e_layers(best(e_rows))
    part = f"G-Prompt beside E at {span(e_best)}"
    return e_rows, lab.search(part, [attached((n,), e_best) for n in spread(everywhere, lab.budget, [paper.SINGLE_G])])


def run(lab: Lab) -> Outcome:
    """Return both curves, the choice, and how it does on the test set beside the paper's."""
    e_rows, g_rows = sweeps(lab)
    chosen = best(g_rows)
    papers = attached([paper.SINGLE_G], [paper.SINGLE_E]) if lab.depth >= paper.SINGLE_E else None
    tested, outcome = on_test(lab, chosen.setting, papers)
    e_at, g_at = e_layers(chosen)[0], g_layers(chosen)[0]
    sentence = (
        f"On validation images ({counted(lab.seeds, 'seed')}) E is best at layer {e_at} "
        f"(A = {best(e_rows).mean():.2f}), then G at layer {g_at} ({chosen.mean():.2f}); the paper: {paper.SINGLE_E} "
        f"and {paper.SINGLE_G}. Its finding that G belongs in a shallower layer than E "
        f"{'holds' if g_at < e_at else 'does not hold'} here; that the top layer is the worst place "
        f"{_top_is_worst(e_rows, g_rows)}.{outcome}"
    )
    return Outcome(
        sentence,
        (table(f"positions: {about(e_rows)}", "layers", [e_rows, g_rows, tested], marked=[best(e_rows), chosen]),),
        {"positions": curves(e_rows, g_rows)},
        (*e_rows, *g_rows, *tested),
        chosen.setting.options,
    )


def _top_is_worst(e_rows: Sequence[Row], g_rows: Sequence[Row]) -> str:
    found = []
    for name, rows in (("E", e_rows), ("G", g_rows)):
        finished = [row for row in rows if row.results]
        if len(finished) > 1 and min(finished, key=lambda row: row.mean() or 0) is rows[-1]:
            found.append(name)
    return {0: "does not hold", 1: f"holds for {''.join(found)} only", 2: "holds"}[len(found)]


def curves(e_rows: Sequence[Row], g_rows: Sequence[Row]) -> Lines:
    """Return accuracy by layer, a line for each kind of prompt."""
    lines = []
    for rows, layers in ((e_rows, e_layers), (g_rows, g_layers)):
        finished = [row for row in rows if row.results]
        means = [mean_and_deviation(row.numbers("average_accuracy")) for row in finished]
        several = len(finished[0].obtained) > 1
        lines.append(
            Line(
                finished[0].part,
                [float(layers(row)[0]) for row in finished],
                [mean for mean, _ in means],
                [deviation for _, deviation in means] if several else None,
            )
        )
    return Lines(f"position of prompts: {judged(e_rows)}", "layer", "average accuracy A (%)", lines, mark_best=True)


STUDY = Study(
    "positions",
    "Where to attach prompts: single layers",
    "E is best at layer 5 and G at layer 2; both are worst at the top layers",
    run,
    searches=True,
    mini_budget=4,
)
