"""What a run keeps of each test image: what it answered after each task, how surely, and after which match."""

from __future__ import annotations

import io
import json
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dualprompt.data.ahead import images_ahead
from dualprompt.data.arrays import write_arrays
from dualprompt.errors import DualPromptError
from dualprompt.run import predictions
from dualprompt.run.predictions import Evaluation, Predictions, read
from dualprompt.training import group
from dualprompt.training.setup import prepare
from sandbox import CLASSES, World, call, start

FILE = "predictions.npz"
STRONG = ("--method.init", "wide", "--method.e_init", "fresh")  # so that it matters which prompt is selected


@pytest.fixture(scope="module")
def run(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("predictions") / "run"
    assert call("run", world.preset, "--out", out, *STRONG).code == 0
    return out


def test_they_are_what_the_result_counts(run: Path) -> None:
    for folder in (run, run / "baseline"):
        result, found = json.loads((folder / "result.json").read_text()), read(folder / FILE)
        assert np.bincount(found.task).tolist() == [9, 9, 9]
        for after, row in enumerate(result["accuracy_matrix"]):
            for task, accuracy in enumerate(row):
                assert 100 * found.right[after][found.task == task].mean() == pytest.approx(accuracy)
        if result["matching_confusion"] is None:
            assert set(found.selected.flat) == {-1}
            continue
        for task, row in enumerate(result["matching_confusion"]):
            assert np.bincount(found.selected[-1][found.task == task], minlength=3).tolist() == row


def test_plain_numpy_reads_them_and_finds_the_images(run: Path, world: World) -> None:
    with np.load(run / FILE, allow_pickle=False) as file:
        columns = {name: file[name] for name in file.files}
    assert columns["classes"].tolist() == list(CLASSES)
    assert columns["classes_seen"].tolist() == [2, 4, 6]
    assert columns["answer"].shape == columns["probability"].shape == (3, 27)
    assert set(columns["dataset"]) == {world.images.name}
    assert set(columns["split"]) == {"test"}
    for file_name, truth in zip(columns["filename"], columns["truth"], strict=True):
        assert (world.images / "test" / str(file_name)).is_file()
        assert str(file_name).split("/")[0] == CLASSES[truth]
    assert sorted(columns["index"]) == list(range(27))


def test_each_is_the_method_s_answer_to_that_image(run: Path) -> None:
    """Asked one image at a time, the method as it was after each task says what the file says in that place."""
    (member, _) = group.members_of(run)
    setup = prepare(member.config)
    method, found = setup.method, read(run / FILE)
    for after in range(3):
        method.load_state(member.run(run).checkpoints.after_task(after))
        method.eval()
        row = 0
        for subset, task in zip(setup.evaluated(3), setup.stream.experiences, strict=True):
            for place in range(len(subset)):
                batch = setup.feed.batch(subset.images, setup.feed.fixed(subset, torch.tensor([place])))
                with torch.no_grad():
                    said = method.predict(batch)
                [probability], [label] = said.logits.softmax(dim=1).max(dim=1)
                assert said.selected is not None
                assert (int(label), int(said.selected)) == (found.answer[after, row], found.selected[after, row])
                assert float(probability) == pytest.approx(found.probability[after, row], abs=1e-5)
                own = [label for label in task.labels if task.index <= after]
                known = own[int(said.logits[0, own].argmax())] if own else -1
                assert found.task_known_answer[after, row] == known
                assert subset.labels[place] == found.truth[row]
                row += 1
    assert (found.task_known_answer[1] != found.answer[1]).any()
    assert len(set(found.answer[-1])) > 1


def test_images_of_tasks_to_come_are_shown_as_many_as_asked_for(world: World, tmp_path: Path) -> None:
    command = ("run", world.preset, "--no-baseline", "--train.epochs", 1, "--evaluate.ahead")
    for most, counts in ((5, [14, 23, 27]), (0, [9, 18, 27])):
        assert call(*command, most, "--out", tmp_path / str(most)).code == 0
        found = read(tmp_path / str(most) / FILE)
        assert (found.answer >= 0).sum(axis=1).tolist() == counts
        assert [(found.task[found.answer[after] >= 0] > after).sum() for after in range(3)] == [most, most, 0]
    some = json.loads((tmp_path / "5" / "result.json").read_text())
    none = json.loads((tmp_path / "0" / "result.json").read_text())
    assert len(some["unseen_auroc_over_tasks"]) == 2
    assert (none["unseen_auroc"], none["unseen_auroc_over_tasks"]) == (None, None)
    for key in ("accuracy_matrix", "calibration", "task_known_matrix", "matching_confusion"):
        assert some[key] == none[key], "what is ahead changes nothing else"


def test_images_ahead_are_spread_over_the_classes_to_come(run: Path) -> None:
    setup = prepare(group.members_of(run)[0].config)
    tasks, on = setup.stream.experiences, setup.config.benchmark.evaluate_on
    assert images_ahead(tasks, 1, on, 500).tolist() == list(range(9, 27))
    assert images_ahead(tasks, 1, on, 4).tolist() == [9, 15, 20, 26]
    assert images_ahead(tasks, 3, on, 500).tolist() == []
    assert images_ahead(tasks, 2, on, 1).tolist() == [18]


@pytest.mark.parametrize(
    "at",
    [
        ("os.rename .predictions", 2),
        "os.rename checkpoints/.task-0002",
        f"os.rename .{FILE}",
        "os.rename checkpoints/.task-0003",
        "os.rename .result.json",
    ],
    ids=str,
)
def test_a_kill_around_their_writing_leaves_none_out(at: Any, world: World, run: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    life = start(tmp_path / "log", "run", world.preset, "--out", out, *STRONG, "--no-baseline", watch=out, at=at)
    assert life.end() == -signal.SIGKILL, life.text
    assert call("resume", out).code == 0
    assert (out / FILE).read_bytes() == (run / FILE).read_bytes()


def save(path: Path, columns: dict[str, np.ndarray]) -> None:
    with path.open("wb") as file:
        write_arrays(file, columns)


def columns_of(path: Path) -> dict[str, np.ndarray]:
    with np.load(path) as file:
        return {name: file[name] for name in file.files}


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        ({"answer": np.zeros((3, 26), int)}, "not equally long"),
        ({"answer": np.zeros((2, 27), int)}, "not equally long"),
        ({"truth": np.zeros(26, int)}, "not equally long"),
        ({"filename": np.array(["a"] * 26)}, "not equally long"),
        ({"task": np.arange(27)}, "do not fit its tasks"),
        ({"task": np.arange(27)[::-1] // 9}, "do not fit its tasks"),
        ({"task": np.arange(27) // 9 - 1}, "do not fit its tasks"),
        ({"classes_seen": np.array([4, 2, 6])}, "classes do not fit"),
        ({"classes_seen": np.array([2, 4, 7])}, "classes do not fit"),
        ({"truth": np.full(27, -1)}, "class or task that there is not"),
        ({"answer": np.full((3, 27), 6)}, "class or task that there is not"),
        ({"selected": np.full((3, 27), -2)}, "class or task that there is not"),
        ({"selected": np.full((3, 27), 3)}, "class or task that there is not"),
        ({"probability": np.full((3, 27), np.nan)}, "not between 0 and 1"),
        ({"probability": np.full((3, 27), 1.5)}, "not between 0 and 1"),
        ({"truth": np.zeros(27)}, "another type"),
        ({"classes": np.arange(6)}, "another type"),
        ({"truth": np.array(1)}, "one value"),
        ({"classes_seen": np.array(6)}, "one value"),
        ({"classes": np.frombuffer(b"\xff\xff\xff\x7f" * 6, "<U1")}, "letters that there are not"),
        ({"classes": np.frombuffer(b"\0\0\xd8\0" * 6, ">U1")}, "letters that there are not"),
    ],
)
def test_what_cannot_have_been_written_is_refused(
    columns: dict[str, np.ndarray], reason: str, run: Path, tmp_path: Path
) -> None:
    save(tmp_path / FILE, columns_of(run / FILE) | columns)
    with pytest.raises(DualPromptError, match=f"damaged .*{reason}.*restore it, or make the run again"):
        read(tmp_path / FILE)


def test_a_file_that_is_cut_short_or_lacks_a_column_or_holds_objects_is_refused(run: Path, tmp_path: Path) -> None:
    path = tmp_path / FILE
    path.write_bytes((run / FILE).read_bytes()[:-7])
    with pytest.raises(DualPromptError, match="is damaged"):
        read(path)
    whole = columns_of(run / FILE)
    save(path, {name: value for name, value in whole.items() if name != "answer"})
    with pytest.raises(DualPromptError, match="is damaged"):
        read(path)
    np.savez(path, filename=np.array([print] * 27, dtype=object))
    with pytest.raises(DualPromptError, match="is damaged"):
        read(path)
    with pytest.raises(DualPromptError, match="does not exist"):
        read(tmp_path / "none")


def test_an_archive_that_would_fill_the_memory_is_refused(tmp_path: Path) -> None:
    held = io.BytesIO()
    np.savez_compressed(held, answer=np.zeros((100, 10**6), np.int16))
    assert len(held.getvalue()) < 10**6
    (tmp_path / FILE).write_bytes(held.getvalue())
    with pytest.raises(DualPromptError, match="unpack to far more"):
        read(tmp_path / FILE)


def small(tasks: int = 2) -> Predictions:
    """Two images a task, of two classes each, before any evaluation."""
    count, none = 2 * tasks, np.zeros((0, 2 * tasks), np.int64)
    names = np.array(["x"] * count)
    return Predictions(
        classes=np.array([f"k{n}" for n in range(count)]),
        classes_seen=2 * np.arange(1, tasks + 1),
        dataset=names,
        split=names,
        index=np.arange(count),
        filename=names,
        task=np.arange(count) // 2,
        truth=np.arange(count),
        answer=none,
        task_known_answer=none,
        selected=none,
        probability=none.astype(np.float32),
    )


def said(*answers: int) -> Evaluation:
    values = np.array(answers)
    return Evaluation(values, values, np.full(len(values), -1), (values >= 0).astype(np.float32))


def test_an_evaluation_is_added_in_its_place(tmp_path: Path) -> None:
    path = tmp_path / FILE
    predictions.keep(path, small(), 0, said(0, 1, -1, -1))
    predictions.keep(path, small(), 1, said(0, 0, 2, 2))
    assert read(path).answer.tolist() == [[0, 1, -1, -1], [0, 0, 2, 2]]
    assert read(path).right.tolist() == [[True, True, False, False], [True, False, True, False]]
    predictions.keep(path, small(), 0, said(1, 1, 1, 1))  # what was killed after it is done again
    assert read(path).answer.tolist() == [[1, 1, 1, 1]]
    path.unlink()
    predictions.keep(path, small(), 1, said(0, 0, 2, 2))
    found = read(path)
    assert found.answer.tolist() == [[-1] * 4, [0, 0, 2, 2]]
    assert found.judged(0) is None
    assert found.judged(1) is not None
    with pytest.raises(DualPromptError, match=r"of other images .*delete it to go on without"):
        predictions.keep(path, small(3), 2, said(0, 0, 2, 2, 4, 4))


def test_as_a_table(run: Path) -> None:
    frame = read(run / FILE).frame()
    assert len(frame) == 3 * 27
    last = frame[frame.after_task == 2]
    assert (last.truth == last.answer).tolist() == read(run / FILE).right[2].tolist()
    assert set(frame[(frame.after_task == 0) & (frame.task > 0)].task_known_answer) == {""}


def test_a_run_without_them_is_shown_as_ever(run: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(run, tmp_path / "copy"))
    (copy / FILE).unlink()
    assert call("show", copy).code == 0


def test_a_run_that_lost_them_goes_on_without(world: World, tmp_path: Path) -> None:
    """Numbers that need no old answers are there, and those that do are not given."""
    out = tmp_path / "run"
    command = ("run", world.preset, "--out", out, "--no-baseline", "--train.epochs", 1)
    life = start(tmp_path / "log", *command, watch=out, at="os.rename checkpoints/.task-0003")
    assert life.end() == -signal.SIGKILL, life.text
    (out / FILE).unlink()
    assert call("resume", out).code == 0
    result = json.loads((out / "result.json").read_text())
    assert len(result["class_accuracy"]) == 6
    assert result["calibration_error"] is not None
    assert (result["task_known_matrix"], result["unseen_auroc"]) == (None, None)
