"""What rehearsal buys: accuracy by the number of images kept, beside methods that keep none."""

from __future__ import annotations

from collections.abc import Sequence

from dualprompt.config import BUFFER_SIZE
from dualprompt.errors import DualPromptError
from dualprompt.metrics import mean_and_deviation
from dualprompt.studies import paper
from dualprompt.studies.pictures import Line, Lines
from dualprompt.studies.study import Lab, Outcome, Row, Setting, Study, rehearses
from dualprompt.studies.words import about, counted, judged, table

REHEARSAL = ("er", "gdumb", "der++")  # those of the paper's first figure
WITHOUT = ("dualprompt", "l2p")
SIZES = {"mini": (50, 200)}
USUAL = (100, 500, 1000, 2000, 5000)


def run(lab: Lab) -> Outcome:
    """Return the curves of rehearsal methods, and the levels of those that keep no image."""
    given = lab.methods or (REHEARSAL[:2] if lab.preset == "mini" else REHEARSAL) + WITHOUT
    keep, without = [n for n in given if rehearses(n)], [n for n in given if not rehearses(n)]
    if not keep or "dualprompt" not in without:
        raise DualPromptError("--methods of a study of buffers must name dualprompt and a rehearsal method, as er")
    sizes = sorted(lab.buffers or SIZES.get(lab.preset, USUAL))
    with_buffer = [Setting(f"{n}, {s} images", {"method.name": n, BUFFER_SIZE: s}) for n in keep for s in sizes]
    rows = lab.test(with_buffer + [Setting(name, {"method.name": name}) for name in without])
    curves = {name: rows[i * len(sizes) : (i + 1) * len(sizes)] for i, name in enumerate(keep)}
    levels = dict(zip(without, rows[len(with_buffer) :], strict=True))
    groups = [*curves.values(), list(levels.values())]
    return Outcome(
        _sentence(curves, levels["dualprompt"], sizes),
        (table(f"buffers: {about(rows)}", "method", groups),),
        {"buffers": _picture(curves, levels, sizes)},
        tuple(rows),
    )


def _sentence(curves: dict[str, list[Row]], dualprompt: Row, sizes: Sequence[int]) -> str:
    """Say from which buffer size on each method is as good as DualPrompt, and what shrinking the buffer costs."""
    level = dualprompt.mean()
    if level is None:
        return "DualPrompt's runs failed, so there is nothing to compare with."
    images = sum(task["train"] for task in dualprompt.obtained[0].run.manifest()["tasks"])
    told, falls = [], 0
    for name, rows in curves.items():
        means = [row.mean() for row in rows]
        enough = [size for size, mean in zip(sizes, means, strict=True) if mean is not None and mean >= level]
        falls += means[0] is not None and means[-1] is not None and means[0] < means[-1]
        reached = f"reaches it with {enough[0]}" if enough else f"not even with {sizes[-1]}"
        told.append(f"{name} {reached} ({(enough or sizes[-1:])[0] / images:.0%} of the training images)")
    verdict = "holds" if falls == len(curves) else f"holds for {falls} of {len(curves)} methods"
    return (
        f"DualPrompt, without a buffer, has A = {level:.2f} ({counted(len(dualprompt.results), 'seed')}); of images "
        f"kept, {', '.join(told)}. The paper's finding that rehearsal loses accuracy as its buffer shrinks {verdict} "
        "here; there they need about 5000 images of Split ImageNet-R, 20%, to close the gap."
    )


def _picture(curves: dict[str, list[Row]], levels: dict[str, Row], sizes: Sequence[int]) -> Lines:
    lines = []
    for name, rows in (*curves.items(), *((name, [row]) for name, row in levels.items())):
        level = name in levels
        places = [(x, row) for x, row in enumerate([rows[0]] if level else rows) if row.results]
        means = [mean_and_deviation(row.numbers("average_accuracy")) for _, row in places]
        if means:
            spread = [deviation for _, deviation in means] if len(rows[0].obtained) > 1 else None
            lines.append(Line(name, [float(x) for x, _ in places], [mean for mean, _ in means], spread, level))
    return Lines(
        f"accuracy by buffer size: {judged(next(iter(curves.values())))}",
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
