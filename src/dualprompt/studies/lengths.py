"""How long prompts should be: a grid of L_g and L_e."""

from __future__ import annotations

import math
from collections.abc import Sequence

from dualprompt.errors import DualPromptError
from dualprompt.pictures.kinds import Grid
from dualprompt.progress import counted
from dualprompt.studies.study import Context, Outcome, Row, Setting, Study, at_top, best
from dualprompt.studies.words import about, finding, leader, papers_choice, pictured, spread, table
from dualprompt.sweeps import paper


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


def run(context: Context) -> Outcome:
    """Return the grid, the choice, and how it does on the test set beside the paper's."""
    lengths = tried(context.budget)
    rows = context.search("grid", [setting(g, e) for g in lengths for e in lengths])
    chosen, papers = best(rows), setting(paper.G_LENGTH, paper.E_LENGTH)
    tested, verdicts = papers_choice(context, rows, papers)
    theirs = next(row for row in rows if row.setting == papers)
    finished = [row for row in rows if row.results]
    means = [row.mean() or 0 for row in finished]
    place = 1 + sum(mean > (theirs.mean() or 0) for mean in means)
    summary = (
        f"On validation images ({counted(context.seeds, 'seed')}), of {len(finished)} settings "
        f"{leader(rows, lambda row: row.setting.label)}; they span {max(means) - min(means):.2f} points, and the "
        f"paper's {papers.label} {f'comes in place {place}' if theirs.results else 'failed'}."
    )
    return Outcome(
        finding(summary, verdicts),
        (table(f"lengths: {about(rows)}", "lengths", [rows, tested], marked=[chosen]),),
        {"lengths": _picture(rows, lengths)},
        (*rows, *tested),
        chosen.setting.options,
        verdicts=tuple(verdicts),
    )


def _picture(rows: Sequence[Row], lengths: Sequence[int]) -> Grid:
    """Return the grid; the best cell is framed if it is alone at the top."""
    side, names, deviations = len(lengths), [str(length) for length in lengths], spread(rows)
    top = at_top(rows)
    place = next(number for number, row in enumerate(rows) if row is top[0])

    def square(values: Sequence[float | None]) -> list[list[float | None]]:
        return [list(values[i * side : (i + 1) * side]) for i in range(side)]

    return Grid(
        pictured("accuracy by prompt length", rows),
        "length of the E-Prompt",
        "length of the G-Prompt",
        names,
        names,
        square([row.mean() for row in rows]),
        "average accuracy A (%)",
        low=None,
        high=None,
        digits=2,
        framed=[list(divmod(place, side))] if len(top) == 1 else [],
        spread=square(deviations) if deviations else None,
    )


STUDY = Study(
    "lengths",
    "How long prompts should be",
    "L_g = 5 and L_e = 20 are best of {5, 10, 20, 40}²",
    run,
    searches=True,
    mini_budget=4,
)
