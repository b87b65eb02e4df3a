"""What a run answered for every test image after each task: one file, `predictions.npz`, for plain NumPy.

    with np.load("predictions.npz") as file:
        right = file["answer"][-1] == file["truth"]

Rows of its tables are evaluations, columns are images. An image that an evaluation did not show has the answer −1.
"""

from __future__ import annotations

import io
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from dualprompt.data.arrays import BROKEN, read_arrays, write_arrays
from dualprompt.data.stream import Stream
from dualprompt.errors import DualPromptError
from dualprompt.files import atomic, read_bytes

if TYPE_CHECKING:
    from pandas import DataFrame

MOST_BYTES = 2**30
PACKED = 500  # times: so much smaller are tables in which most is −1


class Evaluation(NamedTuple):
    """What was answered in one evaluation, image by image; −1: it was not shown, or there is no such answer."""

    answer: np.ndarray  # (images,) the class
    task_known_answer: np.ndarray  # (images,) the class among those of the image's task
    selected: np.ndarray  # (images,) the task whose E-Prompt was used; −1: the method selects none
    probability: np.ndarray  # (images,) of `answer`, among all classes seen


@dataclass(frozen=True, eq=False)
class Predictions:
    """All evaluations of a run, and the images: those of each task in the order of its subset, task after task.

    Classes are numbers in the order in which the stream brings them, and tasks count from 0.
    """

    classes: np.ndarray  # (classes,) names
    classes_seen: np.ndarray  # (tasks,) how many classes there were after each task
    dataset: np.ndarray  # (images,) the name of its dataset
    split: np.ndarray  # (images,) train or test: of the dataset
    index: np.ndarray  # (images,) its place in that split
    filename: np.ndarray  # (images,) its file, below the folder of the split's files; empty where it has none
    task: np.ndarray  # (images,)
    truth: np.ndarray  # (images,) the class
    answer: np.ndarray  # (evaluations, images), as are the following: see Evaluation
    task_known_answer: np.ndarray
    selected: np.ndarray
    probability: np.ndarray

    def __len__(self) -> int:
        """The number of evaluations."""
        return len(self.answer)

    @property
    def tasks(self) -> int:
        """The number of tasks, learned or to come."""
        return len(self.classes_seen)

    @property
    def right(self) -> np.ndarray:
        """Which answers are right, (evaluations, images)."""
        return self.answer == self.truth

    def judged(self, evaluation: int) -> np.ndarray | None:
        """Return which images an evaluation is about: those of the tasks learned; None if it was not kept."""
        found = self.task <= evaluation
        return found if (self.answer[evaluation][found] >= 0).all() else None

    def added(self, number: int, evaluation: Evaluation) -> Predictions:
        """Return them with the `number`-th evaluation, from 0; others from there on are dropped, missing ones empty."""
        changed = {}
        for name, new in evaluation._asdict().items():
            table = getattr(self, name)[:number]
            empty = np.full((number - len(table), len(self.truth)), -1 if name != "probability" else 0, table.dtype)
            changed[name] = np.concatenate([table, empty, new[None].astype(table.dtype)])
        return replace(self, **changed)

    def frame(self) -> DataFrame:
        """Return a row for each image that each evaluation showed, as a pandas DataFrame."""
        from pandas import DataFrame  # an extra

        after, image = np.nonzero(self.answer >= 0)
        known = self.task_known_answer[after, image]
        columns = {name: getattr(self, name)[image] for name in ("dataset", "split", "index", "filename", "task")}
        return DataFrame(
            {
                "after_task": after,
                **columns,
                "truth": self.classes[self.truth[image]],
                "answer": self.classes[self.answer[after, image]],
                "right": self.right[after, image],
                "probability": self.probability[after, image],
                "task_known_answer": np.where(known >= 0, self.classes[known], ""),
                "selected": self.selected[after, image],
            }
        )


# The kinds of NumPy types that each column may have: numbers, but for names and shares.
KINDS = dict.fromkeys((each.name for each in fields(Predictions)), "iu")
KINDS |= {"classes": "U", "dataset": "U", "split": "U", "filename": "U", "probability": "f"}


def of_stream(stream: Stream, evaluate_on: Literal["test", "validation"]) -> Predictions:
    """Return the images that a stream is evaluated on, before any evaluation."""
    subsets = [task.judged(evaluate_on) for task in stream.experiences]
    parts: dict[str, list[Any]] = {name: [] for name in ("dataset", "split", "index", "filename")}
    for subset in subsets:
        origin, rows = subset.images.origin, subset.indices.numpy()
        parts["dataset"] += [origin.dataset if origin else ""] * len(rows)
        parts["split"] += [origin.split if origin else ""] * len(rows)
        parts["index"] += (origin.kept[rows] if origin else rows).tolist()
        parts["filename"] += origin.files(rows) if origin else [""] * len(rows)
    counts = [len(subset) for subset in subsets]
    none = np.zeros((0, sum(counts)), np.int64)
    return Predictions(
        classes=np.array(stream.classes, dtype=np.str_),
        classes_seen=np.array([len(task.seen) for task in stream.experiences]),
        dataset=np.array(parts["dataset"], dtype=np.str_),
        split=np.array(parts["split"], dtype=np.str_),
        index=np.array(parts["index"], dtype=np.int64),
        filename=np.array(parts["filename"], dtype=np.str_),
        task=np.repeat(np.arange(len(subsets)), counts),
        truth=np.concatenate([subset.labels.numpy() for subset in subsets]),
        answer=none,
        task_known_answer=none,
        selected=none,
        probability=none.astype(np.float32),
    )


def keep(path: Path, blank: Predictions, number: int, evaluation: Evaluation) -> None:
    """Add an evaluation to a run's file: the `number`-th, from 0, in place of any that a killed process left there.

    `blank` has the run's images. Where the file is gone, evaluations before this one stay empty.
    """
    known = read(path) if path.is_file() else blank
    if not all(np.array_equal(getattr(known, name), getattr(blank, name)) for name in ("truth", "task", "index")):
        raise _damaged(path, "it is of other images than the run's", remedy="delete it to go on without what it holds")
    if (most := int(evaluation.selected.max(initial=-1))) >= blank.tasks:
        raise DualPromptError(
            f"an image is said to have used the E-Prompt of task {most + 1}, but there are {blank.tasks} tasks; mend "
            "what the method's predict returns as selected"
        )
    write(path, known.added(number, evaluation))


def write(path: Path, predictions: Predictions) -> None:
    """Keep predictions in a file, atomically."""
    columns = {name: _small(getattr(predictions, name)) for name in KINDS}
    with atomic(path) as partial, partial.open("wb") as file:
        write_arrays(file, columns)


def _small(values: np.ndarray) -> np.ndarray:
    if values.dtype.kind not in "iu":
        return values
    return values.astype(np.int16 if values.max(initial=0) < 2**15 else np.int32)


def read(path: Path) -> Predictions:
    """Return the predictions in a file that `write` made; one that cannot have been is refused."""
    if not path.is_file():
        raise DualPromptError(f"{path} does not exist: the run was made before predictions were kept; run it again")
    try:
        content = read_bytes(path, MOST_BYTES)
        found = read_arrays(io.BytesIO(content), min(MOST_BYTES, max(2**26, PACKED * len(content))))
        columns = {name: _column(found[name], kinds) for name, kinds in KINDS.items()}
    except BROKEN as error:
        raise _damaged(path, str(error)) from None
    predictions = Predictions(**columns)
    _check(path, predictions)
    return predictions


def _column(values: np.ndarray, kinds: str) -> np.ndarray:
    if values.dtype.kind not in kinds:
        raise ValueError(f"a column is of another type, {values.dtype}")
    if not values.ndim:
        raise ValueError("a column is one value")
    return values if kinds == "U" else values.astype(np.float32 if kinds == "f" else np.int64)


def _check(path: Path, found: Predictions) -> None:
    """Refuse what no run can have answered."""
    images, evaluations, tasks, classes = len(found.truth), len(found.answer), found.tasks, len(found.classes)
    for name in KINDS:
        wide = name in Evaluation._fields
        length = {"classes": classes, "classes_seen": tasks}.get(name, images)
        if getattr(found, name).shape != ((evaluations, length) if wide else (length,)):
            raise _damaged(path, "its columns are not equally long")
    if not images or not 1 <= evaluations <= tasks:
        raise _damaged(path, "its evaluations do not fit its tasks")
    if (np.diff(found.task) < 0).any() or not 0 <= found.task[0] <= found.task[-1] < tasks:
        raise _damaged(path, "its images do not fit its tasks")
    if (np.diff(found.classes_seen) < 0).any() or found.classes_seen[-1] != classes:
        raise _damaged(path, "its classes do not fit its tasks")
    bounds = {
        "truth": (0, classes),
        "answer": (-1, classes),
        "task_known_answer": (-1, classes),
        "selected": (-1, tasks),
    }
    for name, (least, most) in bounds.items():
        if not ((getattr(found, name) >= least) & (getattr(found, name) < most)).all():
            raise _damaged(path, "it names a class or task that there is not")
    if not ((found.probability >= 0) & (found.probability <= 1)).all():
        raise _damaged(path, "a probability is not between 0 and 1")


def _damaged(path: Path, reason: str, remedy: str = "restore it, or make the run again") -> DualPromptError:
    return DualPromptError(f"{path} is damaged ({' '.join(reason.split())[:200]}); {remedy}")
