"""Every number of a result that a table can have as a column, by the name that `--columns` gives it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dualprompt.errors import DualPromptError, nearest
from dualprompt.report.sheet import Column, Sheet
from dualprompt.report.tables import Result, by_method, explained, over_seeds, unfair

ALL = "all"


@dataclass(frozen=True)
class Measure:
    """One number of a result; docs/metrics.md says what each means."""

    name: str  # as --columns gives it
    heading: str
    path: tuple[str, ...]  # where a result has it
    note: str = ""
    scale: float = 1.0
    of_old_tasks: bool = False  # says nothing of joint training, which has none
    repeatable: bool = True  # the same whenever the run is made

    @property
    def key(self) -> str:
        """What JSON and CSV call it."""
        return "_".join(self.path)

    def of(self, result: Result) -> float | None:
        """Return it; None for a result that does not have it."""
        found = result
        for key in self.path:
            found = None if found is None else found.get(key)
        return None if found is None else self.scale * found  # pyright: ignore[reportOperatorIssue]


MEASURES = (
    Measure("A", "A (%)", ("average_accuracy",)),
    Measure("F", "F (%)", ("forgetting",), of_old_tasks=True),
    Measure("matching", "matching (%)", ("matching_accuracy",)),
    Measure("images", "image-weighted\nA (%)", ("image_weighted_accuracy",)),
    Measure("steps", "mean over\nsteps (%)", ("mean_over_steps",)),
    Measure(
        "A_auc", "A_auc (%)", ("area_under_curve",),
        "A_auc: mean accuracy on all classes so far, over evaluations on the way of an online stream",
    ),
    Measure("A_last", "A_last (%)", ("last_accuracy",), "A_last: accuracy at the end of an online stream"),
    Measure("learning", "right after\nlearning (%)", ("learning_accuracy",)),
    Measure("BWT", "BWT", ("backward_transfer",), of_old_tasks=True),
    Measure("FWT", "FWT", ("forward_transfer",), "FWT: accuracy on the next task before it is learned, above guessing"),
    Measure(
        "CODA-F", "CODA's F (%)", ("coda_forgetting",), "CODA's F: as its code has it, drops step by step",
        of_old_tasks=True,
    ),
    Measure(
        "task-known", "task known (%)", ("task_known_accuracy",),
        "task known: the answer among the classes of the image's task, which a learner is not told; not A",
    ),
    Measure("ECE", "ECE (%)", ("calibration_error",), "ECE: how far off probabilities are, in 15 bins"),
    Measure(
        "AUROC", "AUROC of\nunseen (%)", ("unseen_auroc",),
        "AUROC of unseen: known classes against those to come, by the probability of the answer; 50 is guessing",
    ),
    Measure(
        "train-passes", "passes in\ntraining", ("cost", "train", "passes"),
        "passes, GFLOPs: of an image, through the backbone; in training over all epochs",
    ),
    Measure("train-GFLOPs", "GFLOPs in\ntraining", ("cost", "train", "gflops")),
    Measure("passes", "passes in\nprediction", ("cost", "predict", "passes")),
    Measure("GFLOPs", "GFLOPs in\nprediction", ("cost", "predict", "gflops")),
    Measure("MB-trained", "trained (MB)", ("parameters", "mb")),
    Measure("MB-kept", "statistics\n(MB)", ("parameters", "kept", "mb")),
    Measure("MB-buffer", "buffer (MB)", ("buffer", "bytes"), scale=1e-6),
    Measure("train-s", "training (s)", ("seconds", "train"), repeatable=False),
    Measure("eval-s", "evaluation (s)", ("seconds", "evaluate"), repeatable=False),
)  # fmt: skip
NAMED = {each.name: each for each in MEASURES}


def chosen(names: Sequence[str]) -> list[Measure]:
    """Return the columns of these names, in their order; `all` is all of them."""
    for name in names:
        if name != ALL and name not in NAMED:
            raise DualPromptError(f"--columns: there is no column '{name}'; {nearest(name, [*NAMED, ALL])}")
    return list(MEASURES) if ALL in names else [NAMED[name] for name in names]


def notes(columns: Sequence[Measure]) -> list[str]:
    """Return what is to be said of columns that do not speak for themselves."""
    return [each.note for each in columns if each.note]


def sheet(results: Sequence[Result], columns: Sequence[Measure], title: str) -> Sheet:
    """Return a table of one row a method: the mean over seeds of these numbers."""
    rows = [
        (name, str(len(group)), *(over_seeds([each.of(result) for result in group]) for each in columns))
        for name, group in by_method(results).items()
    ]
    heads = (Column("method", right=False), Column("seeds"), *(Column(each.heading) for each in columns))
    seeds = explained(len(group) for group in by_method(results).values())
    return Sheet(title, heads, (tuple(rows),), (*seeds, *notes(columns), *unfair(results)))
