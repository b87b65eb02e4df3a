"""What prompts look like: E-Prompts of the final model, and the G-Prompt after each task, in a t-SNE plane."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dualprompt.errors import DualPromptError
from dualprompt.run.folder import Run
from dualprompt.studies.pictures import Cloud, Points
from dualprompt.studies.sheet import Column, Sheet
from dualprompt.studies.study import Lab, Outcome, Setting, Study
from dualprompt.studies.tables import ABSENT, explained
from dualprompt.studies.tables import over_seeds as shown
from dualprompt.studies.verdict import RULE, judge, over_seeds
from dualprompt.studies.words import about, finding

MOST = 800  # points of a kind that are drawn


@dataclass(frozen=True)
class Prompts:
    """Prompt vectors by task: (tasks, vectors, dim); vector i has the same place in every task."""

    e: np.ndarray
    g: np.ndarray


def collect(run: Run) -> Prompts | None:
    """Return the prompts of a finished run from its checkpoints; None where its method has none.

    A prompt of L × D counts as L vectors of D numbers, for K and V of each layer.
    """
    tasks = len(run.result()["tasks"])
    last = run.checkpoints.after_task(tasks - 1)
    names = [f"bank.e_prompt.{task}" for task in range(tasks)]
    if "bank.g_prompt" not in last or not all(name in last for name in names):
        return None
    dim = last["bank.g_prompt"].shape[-1]
    e = np.stack([last[name].float().numpy().reshape(-1, dim) for name in names])
    snapshots = [run.checkpoints.after_task(task)["bank.g_prompt"] for task in range(tasks)]
    return Prompts(e, np.stack([g.float().numpy().reshape(-1, dim) for g in snapshots]))


def movement(vectors: np.ndarray) -> float | None:
    """Return how far the vectors of different tasks lie apart at the same place, in units of their mean length."""
    tasks, count, _ = vectors.shape
    if tasks < 2 or not count:
        return None
    apart = [np.linalg.norm(vectors[a] - vectors[b], axis=-1).mean() for a in range(tasks) for b in range(a)]
    return float(np.mean(apart) / np.linalg.norm(vectors, axis=-1).mean())


def plane(prompts: Prompts, seed: int = 0) -> Points:
    """Return all prompts in one t-SNE plane: crosses are G, dots E, a colour for each task."""
    from sklearn.manifold import TSNE

    kinds = {"E": _thinned(prompts.e), "G": _thinned(prompts.g)}
    flat = np.concatenate([vectors.reshape(-1, vectors.shape[-1]) for vectors in kinds.values()])
    if len(flat) < 3:
        raise DualPromptError("a t-SNE needs at least 3 prompt vectors; attach longer prompts or to more layers")
    perplexity = min(30.0, (len(flat) - 1) / 3)
    places = TSNE(2, perplexity=perplexity, init="pca", random_state=seed).fit_transform(flat).astype(float)
    clouds, start = [], 0
    for kind, vectors in kinds.items():
        tasks, count, _ = vectors.shape
        for task in range(tasks if count else 0):
            own = places[start : start + count].round(3)
            start += count
            marker = "o" if kind == "E" else "x"
            clouds.append(Cloud(f"{kind}, task {task + 1}", own[:, 0].tolist(), own[:, 1].tolist(), task, marker))
    return Points("t-SNE of prompts: dots are E of the final model, crosses G after each task", clouds)


def _thinned(vectors: np.ndarray) -> np.ndarray:
    """Return vectors at evenly spread places, so that no more than MOST points are drawn."""
    tasks, count, _ = vectors.shape
    keep = min(count, max(1, MOST // tasks))
    return vectors[:, [place * count // keep for place in range(keep)]] if count else vectors


def run(lab: Lab) -> Outcome:
    """Return the plane of the first seed, and how far prompts move between tasks."""
    rows = lab.test([Setting("DualPrompt", {"method.name": "dualprompt"})])
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
        verdicts = [judge("E-Prompts of different tasks lie further apart than G moves", gap, unit=" of their length")]
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
