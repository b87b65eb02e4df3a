"""The prompts that a run learned, and a t-SNE plane of them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dualprompt.errors import DualPromptError
from dualprompt.pictures.kinds import Cloud, Points
from dualprompt.run.folder import Run

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


def plane(prompts: Prompts) -> Points:
    """Return all prompts in one t-SNE plane: crosses are G, dots E, a colour for each task."""
    from sklearn.manifold import TSNE

    kinds = {"E": _thinned(prompts.e), "G": _thinned(prompts.g)}
    flat = np.concatenate([vectors.reshape(-1, vectors.shape[-1]) for vectors in kinds.values()])
    if len(flat) < 3:
        raise DualPromptError("a t-SNE needs at least 3 prompt vectors; attach longer prompts or to more layers")
    perplexity = min(30.0, (len(flat) - 1) / 3)
    places = TSNE(2, perplexity=perplexity, init="pca", random_state=0).fit_transform(flat).astype(float)
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
    drawn = min(count, max(1, MOST // tasks))
    return vectors[:, [place * count // drawn for place in range(drawn)]] if count else vectors
