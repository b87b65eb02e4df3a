"""Test pictures with what every method answered: some that the best one gets right, some that it gets wrong."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image
from pydantic import TypeAdapter

from dualprompt.backbones.weights import CheckpointInfo
from dualprompt.data.gallery import spread
from dualprompt.data.stream import Stream, build_stream
from dualprompt.errors import DualPromptError
from dualprompt.progress import SILENT, Progress
from dualprompt.report.page import Answer, Card, Item, Shown, Strip, Text
from dualprompt.report.sheet import Column, Sheet
from dualprompt.report.tables import Result, label
from dualprompt.run import predictions
from dualprompt.run.folder import Run
from dualprompt.run.predictions import Predictions
from dualprompt.training.group import BASELINE
from dualprompt.training.setup import view_of

EACH = 6  # pictures of a task: a row of the page
MOST = 96  # pictures of a page
METHODS = 5  # that answer on a card
SIDE = 128  # pixels
COARSE = 64  # pixels; a picture of fewer is enlarged, and shows its pixels
BYTES = 1_500_000  # of all pictures of a page
QUALITIES = (85, 70, 50)  # of JPEG, the first at which the pictures fit


@dataclass(frozen=True, eq=False)
class Evaluated:
    """A run, and what it answered."""

    name: str
    run: Run
    result: Result
    answers: Predictions

    @property
    def right(self) -> np.ndarray:
        """Which test images it gets right after the last task."""
        return self.answers.right[-1]


def items(labelled: Sequence[tuple[Run, Result]], progress: Progress = SILENT) -> list[Item]:
    """Return a strip of test pictures for each task of each benchmark, and how many each method gets right."""
    benchmarks: dict[str, list[tuple[Run, Result]]] = {}
    for run, result in labelled:
        benchmarks.setdefault(result["benchmark"], []).append((run, result))
    found: list[Item] = []
    for group in benchmarks.values():
        found += _of_benchmark(group, MOST // len(benchmarks), progress)
    return found


def _of_benchmark(group: Sequence[tuple[Run, Result]], most: int, progress: Progress) -> list[Item]:
    evaluated, remarks = _evaluated(group)
    if not evaluated:
        return [Text(remark) for remark in remarks]
    best = max(evaluated, key=lambda each: each.result["average_accuracy"])
    base = next((each for each in evaluated if each.name == BASELINE), evaluated[0])
    counts = Shown(_counts(evaluated, base))
    notes = [Text(remark) for remark in remarks]
    try:
        stream = _stream(evaluated[0].run, progress)
        _check(evaluated, stream)
    except DualPromptError as error:
        return [counts, *notes, Text(f"The pictures themselves are not shown: {error}.")]
    return [counts, *notes, Text(_explained(base, best, len(evaluated))), *_strips(evaluated, base, best, stream, most)]


def _evaluated(group: Sequence[tuple[Run, Result]]) -> tuple[list[Evaluated], list[str]]:
    """Return the first run of every method that saw the first one's images, and what is to be said of the others."""
    found: list[Evaluated] = []
    remarks: list[str] = []
    seen: set[str] = set()
    data = group[0][0].manifest()["identity"]["data"]
    for run, result in group:
        name = label(result)
        if name in seen or run.manifest()["identity"]["data"] != data:
            continue
        seen.add(name)
        try:
            answers = predictions.read(run.predictions_path)
            if len(answers) < answers.tasks:
                raise DualPromptError(f"{run.predictions_path} has no answers after the last task; run it again")
        except DualPromptError as error:
            remarks.append(f"{name} is left out here: {error}.")
            continue
        if found and not np.array_equal(found[0].answers.truth, answers.truth):
            remarks.append(f"{name} is left out here: it was evaluated on other images.")
            continue
        found.append(Evaluated(name, run, result, answers))
    return found, remarks


def _counts(evaluated: Sequence[Evaluated], base: Evaluated) -> Sheet:
    """Return how many of all test images each method gets right, and where that differs from the baseline."""
    rows = []
    for each in evaluated:
        right, total = each.right, len(each.right)
        cells = (each.name, f"{int(right.sum()):,}", f"{total:,}", f"{100 * right.mean():.1f}")
        gains = (f"{int((right & ~base.right).sum()):,}", f"{int((~right & base.right).sum()):,}")
        rows.append((*cells, *(gains if each is not base else ("", ""))))
    columns = [Column("method", right=False), Column("right"), Column("of"), Column("%")]
    columns += [Column(f"right where\n{base.name} is wrong"), Column(f"wrong where\n{base.name} is right")]
    alone = len(evaluated) == 1
    return Sheet(
        f"all test images after the last task, seed {evaluated[0].result['seed']}",
        tuple(columns[:4] if alone else columns),
        (tuple(row[:4] if alone else row for row in rows),),
        ("%: of all images; A is the mean over tasks, which may have different numbers of images",),
    )


def _explained(base: Evaluated, best: Evaluated, methods: int) -> str:
    order = f"first some that {best.name} gets right, then some that it gets wrong"
    if base is not best:
        order = (
            f"first some that {best.name} gets right and {base.name} wrong, then some that no method gets right, some "
            f"that both get right, and some that {best.name} gets wrong and another method right"
        )
    more = f" Of {methods} methods, {METHODS} are shown." if methods > METHODS else ""
    return (
        f"For each task a few test pictures, {order}. They are chosen by a rule, evenly over the images of each kind: "
        "their shares say nothing of the accuracy: the table above does. ✓ is a right answer, ✗ a wrong one; the "
        f"percentage is how probable the method thinks its answer is.{more}"
    )


def _stream(run: Run, progress: Progress) -> Stream:
    """Return the images of a run as it saw them, if they are still the same."""
    manifest, config = run.manifest(), run.config()
    try:
        info: CheckpointInfo = TypeAdapter(CheckpointInfo).validate_python(manifest["backbone"])
        store = view_of(config, info).store
    except ValueError:
        raise DualPromptError(f"{run.manifest_path} is damaged (it has no whole backbone); restore it") from None
    stream = build_stream(config.benchmark, config.seed, store, progress)
    if stream.fingerprint != manifest["identity"]["data"]:
        raise DualPromptError("the images have changed since the run was made")
    return stream


def _check(evaluated: Sequence[Evaluated], stream: Stream) -> None:
    """Refuse predictions that are not of these images."""
    config = evaluated[0].run.config().benchmark
    subsets = [task.judged(config.evaluate_on) for task in stream.experiences]
    truth = np.concatenate([subset.labels.numpy() for subset in subsets])
    for each in evaluated:
        path, answers = each.run.predictions_path, each.answers
        counts = np.bincount(answers.task, minlength=answers.tasks).tolist()
        if counts != list(map(len, subsets)) or not np.array_equal(answers.truth, truth):
            raise DualPromptError(f"{path} is of other images than the run's; restore it, or make the run again")
        if answers.classes.tolist() != list(stream.classes) or answers.judged(len(subsets) - 1) is None:
            raise DualPromptError(f"{path} is not the run's, or lacks answers; restore it, or make the run again")


def _strips(evaluated: Sequence[Evaluated], base: Evaluated, best: Evaluated, stream: Stream, most: int) -> list[Item]:
    each = min(EACH, max(1, most // len(stream.experiences)))
    shown = [one for one in evaluated if one in (base, best)]
    shown += [one for one in evaluated if one not in shown][: METHODS - len(shown)]
    shown = [one for one in evaluated if one in shown]
    chosen = chosen_images(
        best.right, base.right, np.any([one.right for one in evaluated], axis=0), best.answers.task, each
    )
    config = best.run.config().benchmark
    pictures, places = [], []
    first = 0
    for task, rows in zip(stream.experiences, chosen, strict=True):
        subset = task.judged(config.evaluate_on)
        for row in rows:
            pictures.append(subset.images.image(int(subset.indices[row - first])))
            places.append((task.index, row))
        first += len(subset)
    cards: dict[int, list[Card]] = {task.index: [] for task in stream.experiences}
    for (task, row), picture, jpeg in zip(places, pictures, _encoded(pictures), strict=True):
        answers = tuple(_answer(one, row, task, stream) for one in shown)
        truth = _class(stream, int(best.answers.truth[row]), task)
        cards[task].append(Card(jpeg, truth, answers, max(picture.shape[:2]) < COARSE))
    return [Strip(_title(stream, index), tuple(found)) for index, found in cards.items() if found]


def chosen_images(
    best: np.ndarray, base: np.ndarray, anyone: np.ndarray, tasks: np.ndarray, each: int
) -> list[list[int]]:
    """Return the rows of `each` images of every task, by what the best method, the baseline and anyone get right.

    `tasks` are those of the images.

    Of four kinds in turn: the best right and the baseline wrong; nobody right; both right; the best wrong and someone
    right. Where one kind has too few, the others fill up. Within a kind they are spread evenly.
    """
    kinds = (best & ~base, ~anyone, best & base, ~best & anyone)
    chosen = []
    for task in range(tasks.max() + 1):
        here = tasks == task
        candidates = [np.flatnonzero(kind & here) for kind in kinds]
        quota = [0] * len(kinds)
        while sum(quota) < min(each, int(here.sum())):
            for number, rows in enumerate(candidates):
                if quota[number] < len(rows) and sum(quota) < each:
                    quota[number] += 1
        picked = [spread(rows, count) for rows, count in zip(candidates, quota, strict=True) if count]
        chosen.append([row for rows in picked for row in rows])
    return chosen


def _answer(evaluated: Evaluated, row: int, task: int, stream: Stream) -> Answer:
    answers = evaluated.answers
    said, selected = int(answers.answer[-1, row]), int(answers.selected[-1, row])
    remark = f"matched to task {selected + 1}" if selected not in (-1, task) else ""
    percent = round(100 * float(answers.probability[-1, row]))
    return Answer(evaluated.name, _class(stream, said, task), percent, bool(evaluated.right[row]), remark)


def _class(stream: Stream, number: int, task: int) -> str:
    """Return the name of a class beside images of a task: without that of its own dataset, with that of another."""
    owner = next(each for each in stream.experiences if number in each.new_labels)
    name = stream.classes[number].removeprefix(f"{owner.name}/")
    return name if number in stream.experiences[task].labels else f"{name} (task {owner.index + 1})"


def _title(stream: Stream, index: int) -> str:
    name = stream.experiences[index].name
    return name if name == f"task {index + 1}" else f"task {index + 1}: {Path(name).name}"


def _encoded(pictures: Sequence[np.ndarray]) -> list[str]:
    """Return pictures as small JPEGs, in base64; the more they take, the less exact they are."""
    found: list[str] = []
    for quality in QUALITIES:
        found = [_jpeg(picture, quality) for picture in pictures]
        if sum(map(len, found)) <= BYTES:
            break
    return found


def _jpeg(picture: np.ndarray, quality: int) -> str:
    image = Image.fromarray(picture)
    image.thumbnail((SIDE, SIDE), Image.Resampling.LANCZOS)
    out = io.BytesIO()
    image.save(out, format="JPEG", quality=quality, optimize=True, subsampling=0 if max(image.size) < COARSE else -1)
    return base64.b64encode(out.getvalue()).decode()
