"""How long prompts should be: a grid of L_g and L_e."""

from __future__ import annotations

import math
from collections.abc import Sequence

from dualprompt.errors import DualPromptError
from dualprompt.studies import paper
from dualprompt.studies.pictures import Grid
from dualprompt.studies.study import Lab, Outcome, Row, Setting, Study, best
from dualprompt.studies.words import about, difference, judged, on_test, table


def setting(g_length: int, e_length: int) -> Setting:
    """Return the setting with prompts of these lengths."""
    return Setting(f"L_g {g_length}, L_e {e_length}", {"method.g_length": g_length, "method.e_length": e_length})


def tried(budget: int | None) -> Sequence[int]:
    """Return the lengths of the largest square grid within a budget; the paper's two come first."""
    if budget is not None and budget < 4:
        raise DualPromptError(f"--budget of a grid of lengths must be at least 4, found {budget}")
    side = len(paper.LENGTHS) if budget is None else min(len(paper.LENGTHS), math.isqrt(budget))
    order = (paper.G_LENGTH, paper.E_LENGTH, *paper.LENGTHS)
    return sorted(list(dict.fromkeys(order))[:side])


def run(lab: Lab) -> Outcome:
    """Return the grid, the choice, and how it does on the test set beside the paper's."""
    lengths = tried(lab.budget)
    rows = lab.search("grid", [setting(g, e) for g in lengths for e in lengths])
    chosen, papers = best(rows), setting(paper.G_LENGTH, paper.E_LENGTH)
    tested, outcome = on_test(lab, chosen.setting, papers)
    theirs = next(row for row in rows if row.setting == papers)
    finished = [row for row in rows if row.results]
    means = [row.mean() or 0 for row in finished]
    sentence = (
        f"On validation images {chosen.setting.label} is the best of {len(finished)} (A = {chosen.mean():.2f}), "
        f"which span {max(means) - min(means):.2f} points; "
        f"the paper's {papers.label} "
    )
    if not theirs.results:
        sentence += "failed."
    elif chosen is theirs:
        sentence += "is that choice: its finding holds here."
    elif theirs.mean() == chosen.mean():
        sentence += "is as accurate: its finding is neither confirmed nor refuted here."
    else:
        place = 1 + sum((row.mean() or 0) > (theirs.mean() or 0) for row in finished)
        gap = difference(theirs, chosen)
        sentence += f"comes in place {place}, {gap}: its finding does not hold here.{outcome}"
    return Outcome(
        sentence,
        (table(f"lengths: {about(rows)}", "lengths", [rows, tested], marked=[chosen]),),
        {"lengths": _picture(rows, lengths, chosen)},
        (*rows, *tested),
        chosen.setting.options,
    )


def _picture(rows: Sequence[Row], lengths: Sequence[int], chosen: Row) -> Grid:
    values = [row.mean() for row in rows]
    side, names = len(lengths), [str(length) for length in lengths]
    place = next(number for number, row in enumerate(rows) if row is chosen)
    return Grid(
        f"accuracy by prompt length: {judged(rows)}",
        "length of the E-Prompt",
        "length of the G-Prompt",
        names,
        names,
        [values[i * side : (i + 1) * side] for i in range(side)],
        "average accuracy A (%)",
        low=None,
        high=None,
        digits=2,
        framed=[list(divmod(place, side))],
    )


STUDY = Study(
    "lengths",
    "How long prompts should be",
    "L_g = 5 and L_e = 20 are best of {5, 10, 20, 40}²",
    run,
    searches=True,
    mini_budget=4,
)
