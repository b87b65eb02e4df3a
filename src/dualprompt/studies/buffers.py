"""What rehearsal buys: accuracy by the number of images kept, beside methods that keep none."""

from __future__ import annotations

from collections.abc import Sequence

from dualprompt.config import BUFFER_SIZE
from dualprompt.errors import DualPromptError
from dualprompt.pictures.kinds import Line, Lines
from dualprompt.progress import counted
from dualprompt.report.verdict import Verdict, decide, verdict_on
from dualprompt.studies.study import Context, Outcome, Row, Setting, Study
from dualprompt.studies.words import about, between, finding, pictured, spread, table
from dualprompt.sweeps import paper
from dualprompt.sweeps.runs import rehearses

REHEARSAL = ("er", "gdumb", "der++")  # those of the paper's first figure
WITHOUT = ("dualprompt", "l2p")
SIZES = {"mini": (50, 200)}
USUAL = (100, 500, 1000, 2000, 5000)


def run(context: Context) -> Outcome:
    """Return the curves of rehearsal methods, and the levels of those that keep no image."""
    given = context.methods or (REHEARSAL[:2] if context.preset == "mini" else REHEARSAL) + WITHOUT
    rehearsing, without = [n for n in given if rehearses(n)], [n for n in given if not rehearses(n)]
    if not rehearsing or "dualprompt" not in without:
        raise DualPromptError("--methods of a study of buffers must name dualprompt and a rehearsal method, as er")
    sizes = sorted(context.buffers or SIZES.get(context.preset, USUAL))
    with_buffer = [Setting(f"{n}, {s} images", {"method.name": n, BUFFER_SIZE: s}) for n in rehearsing for s in sizes]
    rows = context.test(with_buffer + [Setting(name, {"method.name": name}) for name in without])
    curves = {name: rows[i * len(sizes) : (i + 1) * len(sizes)] for i, name in enumerate(rehearsing)}
    levels = dict(zip(without, rows[len(with_buffer) :], strict=True))
    groups = [*curves.values(), list(levels.values())]
    verdicts = _verdicts(curves, sizes)
    return Outcome(
        finding(_summary(curves, levels["dualprompt"], sizes), verdicts),
        (table(f"buffers: {about(rows)}", "method", groups),),
        {"buffers": _picture(curves, levels, sizes)},
        tuple(rows),
        verdicts=tuple(verdicts),
    )


def _summary(curves: dict[str, list[Row]], dualprompt: Row, sizes: Sequence[int]) -> str:
    """Say at which buffer sizes each method is above DualPrompt, below it, or not to be told apart."""
    level = dualprompt.mean()
    if level is None:
        return "DualPrompt's runs failed, so there is nothing to compare with."
    images = sum(task["train"] for task in dualprompt.obtained[0].run.manifest()["tasks"])
    words = {"does not hold": "below it", "cannot be told": "not told apart", "holds": "above it"}
    parts = []
    for name, rows in curves.items():
        places: dict[str, list[str]] = {}
        for size, row in zip(sizes, rows, strict=True):
            place = words[decide(between(row, dualprompt))] if row.results else "failed"
            places.setdefault(place, []).append(f"{size} ({size / images:.0%})")
        parts.append(f"{name}: " + ", ".join(f"{place} with {' and '.join(at)}" for place, at in places.items()))
    return (
        f"DualPrompt, without a buffer, has A = {level:.2f} ({counted(len(dualprompt.results), 'seed')}). With so many "
        f"images kept, of the training images: {'; '.join(parts)}. In the paper rehearsal needs about 5000 images of "
        "Split ImageNet-R, 20%, to close the gap."
    )


def _verdicts(curves: dict[str, list[Row]], sizes: Sequence[int]) -> list[Verdict]:
    """Judge what shrinking the buffer costs each method."""
    if len(sizes) < 2:
        return []
    claim = f"loses accuracy as its buffer shrinks from {sizes[-1]} to {sizes[0]} images"
    return [verdict_on(f"{name} {claim}", between(rows[-1], rows[0])) for name, rows in curves.items()]


def _picture(curves: dict[str, list[Row]], levels: dict[str, Row], sizes: Sequence[int]) -> Lines:
    lines = []
    for name, rows in (*curves.items(), *((name, [row]) for name, row in levels.items())):
        places = [(float(x), row) for x, row in enumerate(rows) if row.results]
        finished = [row for _, row in places]
        if finished:
            means = [row.mean() or 0.0 for row in finished]
            lines.append(Line(name, [x for x, _ in places], means, spread(finished), name in levels))
    return Lines(
        pictured("accuracy by buffer size", [row for rows in curves.values() for row in rows]),
        "images kept (buffer size)",
        "average accuracy A (%)",
        lines,
        [str(size) for size in sizes],
    )


STUDY = Study(
    "buffers",
    "What rehearsal buys",
    f"rehearsal needs a large buffer (5000 images of {paper.SEARCHED_ON}) to come near DualPrompt",
    run,
)
