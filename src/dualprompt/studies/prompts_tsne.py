"""What prompts look like: E-Prompts of the final model, and the G-Prompt after each task, in a t-SNE plane."""

from __future__ import annotations

import numpy as np

from dualprompt.report.prompt_map import collect, plane
from dualprompt.report.sheet import Column, Sheet
from dualprompt.report.tables import ABSENT, explained
from dualprompt.report.tables import over_seeds as shown
from dualprompt.report.verdict import RULE, over_seeds, verdict_on
from dualprompt.studies.study import Context, Outcome, Setting, Study
from dualprompt.studies.words import about, finding


def movement(vectors: np.ndarray) -> float | None:
    """Return how far the vectors of different tasks lie apart at the same place, in units of their mean length."""
    tasks, count, _ = vectors.shape
    if tasks < 2 or not count:
        return None
    apart = [np.linalg.norm(vectors[a] - vectors[b], axis=-1).mean() for a in range(tasks) for b in range(a)]
    return float(np.mean(apart) / np.linalg.norm(vectors, axis=-1).mean())


def run(context: Context) -> Outcome:
    """Return the plane of the first seed, and how far prompts move between tasks."""
    rows = context.test([Setting("DualPrompt", {"method.name": "dualprompt"})])
    finished = [each for each in rows[0].obtained if not each.error]
    if not finished:
        return Outcome("Every run failed.", (), rows=tuple(rows))
    every = [prompts for each in finished if (prompts := collect(each.run)) is not None]
    e, g = ([movement(getattr(prompts, kind)) for prompts in every] for kind in ("e", "g"))
    pairs = [(one, other) for one, other in zip(e, g, strict=True) if one is not None and other is not None]
    sentence, verdicts = "There is no G-Prompt or no E-Prompt, or one task only: nothing to compare.", []
    if pairs:
        far, near = (float(np.mean(values)) for values in zip(*pairs, strict=True))
        sentence = (
            f"Between tasks E-Prompts lie {far:.2f} of their length apart and G-Prompts {near:.2f}, a ratio of "
            f"{far / near if near else float('inf'):.1f}."
        )
        gap = over_seeds([one - other for one, other in pairs])
        verdicts = [
            verdict_on("E-Prompts of different tasks lie further apart than G moves", gap, unit=" of their length")
        ]
    lines = [
        (kind, f"{vectors[0].size:,}", ABSENT if values[0] is None else shown(values))
        for kind, vectors, values in (("E-Prompt", every[0].e, e), ("G-Prompt", every[0].g, g))
    ]
    sheet = Sheet(
        f"prompts: {about(rows)}",
        (Column("prompt", right=False), Column("numbers a task"), Column("distance between tasks / length")),
        (tuple(lines),),
        (*(explained([len(every)]) or [f"seed {finished[0].config.seed}"]), RULE),
    )
    return Outcome(
        finding(sentence, verdicts),
        (sheet,),
        {"prompts-tsne": plane(every[0])},
        tuple(rows),
        verdicts=tuple(verdicts),
    )


STUDY = Study(
    "prompts-tsne",
    "What prompts look like",
    "E-Prompts of different tasks are well separated, the G-Prompt hardly moves",
    run,
)
