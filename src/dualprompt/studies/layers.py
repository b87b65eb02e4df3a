"""How many layers to attach prompts to: contiguous spans around the best single layers, of E and then of G."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dualprompt.pictures.kinds import Line, Lines
from dualprompt.progress import counted
from dualprompt.report.verdict import Verdict, verdict_on
from dualprompt.studies.positions import attached, e_layers, g_layers, sweeps
from dualprompt.studies.study import Context, Outcome, Row, Study, best
from dualprompt.studies.words import (
    Published,
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

Span = tuple[int, int]
Layers = Callable[[Row], tuple[int, ...]]


def around_e(layer: int, depth: int) -> list[Span]:
    """Return the paper's pattern of spans around the best layer of E, which gives its own table for layer 5."""
    ends = ((0, 0), (-2, 0), (-1, 0), (0, 1), (-2, -1), (-1, 1), (0, 2))
    return _inside([(layer + a, layer + b) for a, b in ends], (3, 5), depth)


def around_g(layer: int, depth: int) -> list[Span]:
    """Return the paper's pattern of spans around the best layer of G, which gives its own table for layer 2."""
    ends = ((0, 0), (-1, 0), (-1, 1), (-1, 3), (4, 6))
    return _inside([(layer + a, layer + b) for a, b in ends], (1, 2), depth)


def _inside(spans: Sequence[Span], papers: Span, depth: int) -> list[Span]:
    """Return what lies inside the backbone, the single layer first; the paper's choice and all layers are there too."""
    single, *others = spans
    every = dict.fromkeys([single, papers, (1, depth), *others])
    return [each for each in every if each[0] >= 1 and each[1] <= depth]


def _layers(ends: Span) -> range:
    return range(ends[0], ends[1] + 1)


def run(context: Context) -> Outcome:
    """Search E, then G beside the best E; say how the choice does on the test set beside the paper's."""
    e_single, g_single = sweeps(context)
    e_at, g_at = e_layers(best(e_single))[0], g_layers(best(g_single))[0]
    spans = around_e(e_at, context.depth)[: context.budget]
    e_rows = context.search("span of E, no G", [attached((), _layers(each)) for each in spans])
    e_best = e_layers(best(e_rows))
    spans = around_g(g_at, context.depth)[: context.budget]
    g_rows = context.search(f"span of G, E at {span(e_best)}", [attached(_layers(each), e_best) for each in spans])
    chosen = best(g_rows)
    papers = attached(paper.G_LAYERS, paper.E_LAYERS) if context.depth >= paper.E_LAYERS[-1] else None
    tested, verdicts = papers_choice(context, g_rows, papers)
    verdicts += [_several("E", e_rows, e_layers), _several("G", g_rows, g_layers), _everywhere(g_rows, context.depth)]
    summary = (
        f"On validation images ({counted(context.seeds, 'seed')}), of spans of E: "
        f"{leader(e_rows, lambda row: span(e_layers(row)))}; then of G: "
        f"{leader(g_rows, lambda row: span(g_layers(row)))}; the paper: E {span(paper.E_LAYERS)} and "
        f"G {span(paper.G_LAYERS)}."
    )
    published: dict[str, Published] = {f"G none, E {_name(ends)}": (a, None) for ends, a in paper.E_SPANS.items()}
    if e_best == paper.E_LAYERS:
        published |= {f"G {_name(ends)}, E {span(e_best)}": (a, None) for ends, a in paper.G_SPANS.items()}
    known = published if any(row.setting.label in published for row in (*e_rows, *g_rows)) else None
    return Outcome(
        finding(summary, verdicts),
        (
            table(
                f"layers: {about(e_rows)}",
                "layers",
                [e_rows, g_rows, tested],
                known,
                f"{paper.SEARCHED_ON}, validation",
                [best(e_rows), chosen],
            ),
        ),
        {"e-spans": _picture("E", e_rows), "g-spans": _picture("G", g_rows)},
        (*e_rows, *g_rows, *tested),
        chosen.setting.options,
        verdicts=tuple(verdicts),
    )


def _several(name: str, rows: Sequence[Row], layers: Layers) -> Verdict:
    """Hold the best span of several layers against the single one."""
    several = [row for row in rows if len(layers(row)) > 1 and row.results]
    single = next(row for row in rows if len(layers(row)) == 1)
    return verdict_on(f"several layers of {name} beat one", between(best(several), single) if several else None)


def _everywhere(rows: Sequence[Row], depth: int) -> Verdict:
    """Hold the best of the other spans of G against all layers."""
    others = [row for row in rows if len(g_layers(row)) < depth and row.results]
    every = [row for row in rows if len(g_layers(row)) == depth]
    return verdict_on("G at every layer harms", between(best(others), every[0]) if others and every else None)


def _name(ends: Span) -> str:
    return span(_layers(ends))


def _picture(which: str, rows: Sequence[Row]) -> Lines:
    layers: Layers = e_layers if which == "E" else g_layers
    finished = sorted((row for row in rows if row.results), key=layers)
    means = [row.mean() or 0.0 for row in finished]
    return Lines(
        pictured(f"layers of the {which}-Prompt", rows),
        "layers",
        "average accuracy A (%)",
        [Line("", list(map(float, range(len(finished)))), means, spread(finished))],
        [span(layers(row)) for row in finished],
        mark_best=True,
        joined=False,
    )


STUDY = Study(
    "layers",
    "Where to attach prompts: several layers",
    "E at layers 3–5 and G at layers 1–2 are best; G at every layer harms",
    run,
    searches=True,
    mini_budget=3,
)
