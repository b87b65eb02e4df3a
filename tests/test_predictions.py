"""What a run keeps of each test image: what it answered, how surely, and after which match."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dualprompt.errors import DualPromptError
from dualprompt.run.predictions import Predictions, read
from dualprompt.training import group
from dualprompt.training.setup import prepare
from sandbox import World, call, start

FILE = "predictions.safetensors"
STRONG = ("--method.init", "wide", "--method.e_init", "fresh")  # so that it matters which prompt is selected


@pytest.fixture(scope="module")
def run(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("predictions") / "run"
    assert call("run", world.preset, "--out", out, *STRONG).code == 0
    return out


def test_they_are_what_the_result_counts(run: Path) -> None:
    for folder in (run, run / "baseline"):
        result, found = json.loads((folder / "result.json").read_text()), read(folder / FILE)
        assert found.counts.tolist() == [9, 9, 9]
        for task, accuracy in enumerate(result["accuracy_matrix"][-1]):
            assert 100 * found.right[found.task == task].float().mean() == pytest.approx(accuracy)
        if result["matching_confusion"] is None:
            assert set(found.selected.tolist()) == {-1}
            continue
        for task, row in enumerate(result["matching_confusion"]):
            assert found.selected[found.task == task].bincount(minlength=3).tolist() == row


def test_each_is_the_method_s_answer_to_that_image(run: Path) -> None:
    """Asked one image at a time, the finished method says what the file says in that place."""
    (member, _) = group.members_of(run)
    setup = prepare(member.config)
    method = setup.method
    method.load_state(member.run(run).checkpoints.after_task(2))
    method.eval()
    found, row = read(run / FILE), 0
    for subset in setup.evaluated(3):
        for place in range(len(subset)):
            batch = setup.feed.batch(subset.images, setup.feed.fixed(subset, torch.tensor([place])))
            with torch.no_grad():
                said = method.predict(batch)
            probability, label = said.logits.softmax(dim=1).max(dim=1)
            assert said.selected is not None
            assert (int(label), int(said.selected)) == (int(found.label[row]), int(found.selected[row]))
            assert float(probability) == pytest.approx(float(found.probability[row]), abs=1e-5)
            assert int(subset.labels[place]) == int(found.truth[row])
            row += 1
    assert row == len(found.truth)
    assert len(set(found.label.tolist())) > 1


@pytest.mark.parametrize(
    "at", [f"os.rename .{FILE}", "os.rename checkpoints/.task-0003", "os.rename .result.json"], ids=lambda at: at[10:]
)
def test_a_kill_around_their_writing_leaves_none_out(at: str, world: World, run: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    life = start(tmp_path / "log", "run", world.preset, "--out", out, *STRONG, "--no-baseline", watch=out, at=at)
    assert life.end() == -signal.SIGKILL, life.text
    assert call("resume", out).code == 0
    assert (out / FILE).read_bytes() == (run / FILE).read_bytes()


def change(**tensors: torch.Tensor) -> dict[str, torch.Tensor]:
    return tensors


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        (change(label=torch.zeros(26, dtype=torch.int32)), "not equally long"),
        (change(counts=torch.tensor([9, 9, 8])), "do not fit"),
        (change(counts=torch.tensor([27, 9, -9])), "do not fit"),
        (change(counts=torch.zeros(0, dtype=torch.int32)), "do not fit"),
        (change(truth=torch.full((27,), -1)), "below 0"),
        (change(selected=torch.full((27,), -2)), "below 0"),
        (change(probability=torch.full((27,), torch.nan)), "not between 0 and 1"),
        (change(probability=torch.full((27,), 1.5)), "not between 0 and 1"),
    ],
)
def test_what_cannot_have_been_written_is_refused(
    tensors: dict[str, torch.Tensor], reason: str, run: Path, tmp_path: Path
) -> None:
    save_file(load_file(run / FILE) | tensors, tmp_path / FILE)
    with pytest.raises(DualPromptError, match=f"damaged .*{reason}.*restore it, or make the run again"):
        read(tmp_path / FILE)


def test_a_file_that_is_cut_short_or_lacks_a_column_is_refused(run: Path, tmp_path: Path) -> None:
    path = tmp_path / FILE
    path.write_bytes((run / FILE).read_bytes()[:-7])
    with pytest.raises(DualPromptError, match="is damaged"):
        read(path)
    save_file({name: value for name, value in load_file(run / FILE).items() if name != "label"}, path)
    with pytest.raises(DualPromptError, match="is damaged"):
        read(path)
    with pytest.raises(DualPromptError, match="does not exist"):
        read(tmp_path / "none")


def test_right_and_task_of_each_image() -> None:
    found = Predictions(
        counts=torch.tensor([1, 2]),
        truth=torch.tensor([0, 2, 3]),
        label=torch.tensor([0, 3, 3]),
        probability=torch.ones(3),
        selected=torch.tensor([0, 1, 1]),
    )
    assert found.right.tolist() == [True, False, True]
    assert found.task.tolist() == [0, 1, 1]


def test_a_run_without_them_is_shown_as_ever(run: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(run, tmp_path / "copy"))
    (copy / FILE).unlink()
    assert call("show", copy).code == 0
