"""How many layers to attach prompts to: contiguous spans around the best single layers, of E and then of G."""

from __future__ import annotations

from collections.abc import Sequence

from dualprompt.studies import paper
from dualprompt.studies.pictures import Line, Lines
from dualprompt.studies.positions import attached, e_layers, g_layers, sweeps
from dualprompt.studies.study import Lab, Outcome, Row, Study, best
from dualprompt.studies.words import Published, about, counted, judged, on_test, span, table

Span = tuple[int, int]


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


def run(lab: Lab) -> Outcome:
    """Search E, then G beside the best E; say how the choice does on the test set beside the paper's."""
    e_single, g_single = sweeps(lab)
    e_at, g_at = e_layers(best(e_single))[0], g_layers(best(g_single))[0]
    spans = around_e(e_at, lab.depth)[: lab.budget]
    e_rows = lab.search("span of E, no G", [attached((), _layers(each)) for each in spans])
    e_best = e_layers(best(e_rows))
    spans = around_g(g_at, lab.depth)[: lab.budget]
    g_rows = lab.search(f"span of G, E at {span(e_best)}", [attached(_layers(each), e_best) for each in spans])
    chosen = best(g_rows)
    papers = attached(paper.G_LAYERS, paper.E_LAYERS) if lab.depth >= paper.E_LAYERS[-1] else None
    tested, outcome = on_test(lab, chosen.setting, papers)
    more = [name for name, layers in (("E", e_layers(chosen)), ("G", g_layers(chosen))) if len(layers) > 1]
    holds = "holds" if len(more) == 2 else f"holds for {more[0]} only" if more else "does not hold"
    sentence = (
        f"On validation images ({counted(lab.seeds, 'seed')}) the best spans are E {span(e_best)} and "
        f"G {span(g_layers(chosen))}; the paper: E {span(paper.E_LAYERS)} and G {span(paper.G_LAYERS)}. Its "
        f"finding that several layers beat the best single one {holds} here.{outcome}"
    )
    published: dict[str, Published] = {f"G none, E {_name(ends)}": (a, None) for ends, a in paper.E_SPANS.items()}
    if e_best == paper.E_LAYERS:
        published |= {f"G {_name(ends)}, E {span(e_best)}": (a, None) for ends, a in paper.G_SPANS.items()}
    known = published if any(row.setting.label in published for row in (*e_rows, *g_rows)) else None
    return Outcome(
        sentence,
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
    )


def _name(ends: Span) -> str:
    return span(_layers(ends))


def _picture(which: str, rows: Sequence[Row]) -> Lines:
    layers = e_layers if which == "E" else g_layers
    finished = sorted((row for row in rows if row.results), key=layers)
    means = [row.mean() or 0.0 for row in finished]
    return Lines(
        f"layers of the {which}-Prompt: {judged(rows)}",
        "layers",
        "average accuracy A (%)",
        [Line("", list(map(float, range(len(finished)))), means)],
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
