"""A learner forgets a task or a class: that is gone, and all else answers as before."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dualprompt.errors import DualPromptError
from dualprompt.learner import ContinualLearner, TaskInfo
from learning import ALL, empty, outputs, reloaded, trees
from sandbox import World, call


@pytest.mark.parametrize("what", ["spring", "summer", "autumn", 2])
def test_forgetting_a_task_leaves_the_others_bit_for_bit(world: World, kept: Path, what: str | int) -> None:
    learner = ContinualLearner.load(kept)
    images = trees(world, *ALL)
    logits, task, _ = outputs(learner, images)
    gone = learner.forget(what)
    assert isinstance(gone, TaskInfo)
    place = gone.id - 1
    stay = [number for number, label in enumerate(ALL) if label not in gone.classes]
    others = task != place  # images that were matched to it must now be matched to another
    renumbered = task - (task > place).long()
    for asked in (learner, reloaded(learner, kept.parent / "forgetful")):
        after, matched, _ = outputs(asked, images)
        assert torch.equal(matched[others], renumbered[others])
        assert torch.equal(after[others], logits[others][:, stay])
        assert asked.classes == tuple(ALL[number] for number in stay)
    assert others.sum() > 10
    answers = learner.predict(images, top_k=99)
    assert not {score.label for answer in answers for score in answer.top} & set(gone.classes)


def test_forgetting_a_class_leaves_the_others_bit_for_bit(world: World, kept: Path) -> None:
    learner = ContinualLearner.load(kept)
    images = trees(world, *ALL)
    logits, task, _ = outputs(learner, images)
    assert learner.forget("cedar") == "cedar"
    after, matched, _ = outputs(learner, images)
    same = matched == task
    assert same[[label not in ("cedar",) for label in ALL for _ in trees(world, label)]].float().mean() > 0.8
    assert torch.equal(after[same], logits[same][:, [0, 1, 3, 4, 5]])
    assert learner.tasks[1].classes == ("elm",)
    assert learner.classes == ("ash", "birch", "elm", "fir", "hazel")


def test_what_is_forgotten_is_not_on_disk(kept: Path, tmp_path: Path) -> None:
    before = load_file(next(kept.glob("weights-*")))
    learner = ContinualLearner.load(kept)
    learner.forget("cedar")
    learner.forget("autumn")
    after = load_file(next(learner.save(tmp_path / "model").glob("weights-*")))
    kept_rows = [row for value in after.values() if value.ndim for row in value.reshape(-1, value.shape[-1])]
    rows = {row.numpy().tobytes() for row in kept_rows}
    for name, value in before.items():
        forgotten = name.endswith(".2") or name in ("gaussians.means.1", "matching.means.1", "head.weight.1")
        if forgotten and name != "head.bias.2":
            gone = value if name.endswith(".2") else value[:1]
            assert not {row.numpy().tobytes() for row in gone.reshape(-1, value.shape[-1])} & rows, name
    text = (tmp_path / "model" / "model.json").read_text() + (tmp_path / "model" / "README.md").read_text()
    assert not any(word in text for word in ("cedar", "fir", "hazel", "autumn"))
    assert "elm" in text


def test_after_forgetting_it_learns_on(world: World, folders: dict[str, Path], kept: Path, tmp_path: Path) -> None:
    learner = ContinualLearner.load(kept)
    learner.forget("summer")
    learner.forget("ash")
    task = reloaded(learner, tmp_path / "model").learn(folders["summer"])
    assert (task.id, task.name) == (4, "summer")
    task = learner.learn(folders["summer"], "summer again")
    assert (task.id, task.name) == (4, "summer again")  # ids are never given twice
    assert learner.classes == ("birch", "fir", "hazel", "cedar", "elm")
    assert all(len(row) == 16 for row in torch.cat(list(learner._model.method.head.weight)))  # pyright: ignore
    assert sum(len(b) for b in learner._model.method.head.bias) == 5  # pyright: ignore
    found = learner.evaluate({label: trees(world, label) for label in learner.classes})
    assert found.accuracy > 60


def test_forgetting_everything_leaves_an_empty_learner(world: World, kept: Path, folders: dict[str, Path]) -> None:
    learner = ContinualLearner.load(kept)
    for label in ALL:
        learner.forget(label)
    learner = reloaded(learner, kept.parent / "empty")
    assert (learner.tasks, learner.classes) == ((), ())
    for ask in (lambda: learner.predict(trees(world, "ash")), learner.network, learner.calibrate):
        with pytest.raises(DualPromptError, match="knows no classes yet; teach it"):
            ask()
    again, new = learner.learn(folders["spring"]), empty(world)
    new.learn(folders["spring"])
    assert again.id == 4
    images = trees(world, "ash", "birch")
    assert learner.predict(images) == new.predict(images)  # nothing of the past is left


def test_names_for_forgetting_are_never_guessed(world: World) -> None:
    learner = empty(world)
    learner.learn({"ash": trees(world, "ash"), "birch": trees(world, "birch")}, "ash")
    with pytest.raises(DualPromptError, match="'ash' is a task and a class"):
        learner.forget("ash")
    with pytest.raises(DualPromptError, match="there is no class 'oak'"):
        learner.forget("oak", "class")
    assert learner.forget("ash", "class") == "ash"
    assert learner.classes == ("birch",)
    assert isinstance(learner.forget("ash", "task"), TaskInfo)
    assert learner.classes == ()


@pytest.mark.parametrize("other", [(), ("elm",)])
def test_a_class_of_several_tasks_is_forgotten_in_all(world: World, other: tuple[str, ...], tmp_path: Path) -> None:
    learner = empty(world)
    learner.learn({"ash": trees(world, "ash")}, "alone", epochs=1)
    learner.learn({name: trees(world, name) for name in ("ash", *other)}, "again", epochs=1, again=True)
    learner.learn({"fir": trees(world, "fir")}, "last", epochs=1)
    learner.evaluate({"ash": trees(world, "ash"), "fir": trees(world, "fir")}, record=True)
    assert learner.forget("ash") == "ash"
    for asked in (learner, reloaded(learner, tmp_path / "model")):
        assert asked.classes == (*other, "fir")
        assert [(task.name, task.classes) for task in asked.tasks] == [("again", other)] * bool(other) + [
            ("last", ("fir",))
        ]
        assert {score.label for score in asked.predict(trees(world, "fir")[0]).top} == set(asked.classes)
        assert asked.tasks[-1].measured.keys() == {3}  # what was measured with the forgotten class goes too
    learner.learn({"ash": trees(world, "ash")}, epochs=1)  # it is not known any more
    learner.forget("ash")
    with pytest.raises(DualPromptError, match="no task or class 'ash'"):
        learner.forget("ash")


def test_what_was_measured_with_a_forgotten_class_is_dropped(world: World, kept: Path) -> None:
    learner = ContinualLearner.load(kept, "cpu")
    learner.evaluate({label: trees(world, label) for label in ALL}, record=True)
    before = {task.name: task for task in learner.tasks}
    label = before["spring"].classes[0]
    learner.forget(label)
    after = {task.name: task for task in learner.tasks}
    own = learner._model.trust[1]["birch"]
    assert (before["spring"].held, after["spring"].held) == (2, len(own)) == (2, 1)
    assert after["spring"].accuracy == 100 * sum(each.ranked[0] == "birch" for each in own)
    assert after["summer"].accuracy == before["summer"].accuracy
    said = {name for task in learner._model.trust.values() for own in task.values() for e in own for name in e.ranked}
    assert label not in said
    assert {task for row in after.values() for task in row.measured} == {2, 3}


def test_what_forgets_only_rows_says_so(world: World, folders: dict[str, Path], tmp_path: Path) -> None:
    flags = ["--backbone", world.weights, "--method", "coda-prompt", "--method.layers", "1,2", "--epochs", 1]
    assert call("learn", tmp_path / "model", folders["spring"], "--device", "cpu", *flags).code == 0
    assert "what tasks share was shaped by it, and stays" in call("forget", tmp_path / "model", "ash").out
    assert "stays" not in call("forget", tmp_path / "model", "1").out, "nothing is left that could stay"


def test_forgetting_a_task_takes_its_prompts_from_dualprompt_rp(
    world: World, folders: dict[str, Path], tmp_path: Path
) -> None:
    options = {"g_layers": [1], "e_layers": [2], "projection": 32, "train.batch_size": 4, "train.epochs": 1}
    learner = ContinualLearner(str(world.weights), "dualprompt-rp", options=options, device="cpu")
    for name in ("spring", "summer"):
        learner.learn(folders[name])
    images = trees(world, *ALL[:4])
    for gone, left in (("spring", ("cedar", "elm")), ("elm", ("cedar",))):
        learner.forget(gone)
        answers = [answer.label for answer in learner.predict(images)]
        learner = reloaded(learner, tmp_path / gone)
        assert learner.classes == left
        assert [answer.label for answer in learner.predict(images)] == answers
        assert set(answers) <= set(left)
    learner.learn(folders["autumn"])
    assert learner.classes == ("cedar", "fir", "hazel")
    known = trees(world, "fir")
    assert [answer.label for answer in learner.predict(known)].count("fir") > len(known) / 2


def test_forgetting_a_task_takes_its_prompts_from_l2p(world: World, folders: dict[str, Path], tmp_path: Path) -> None:
    options = {"pool": "by_task", "top_n": 2, "length": 2, "train.batch_size": 4, "train.epochs": 1}
    learner = ContinualLearner(str(world.weights), "l2p", options=options, device="cpu")
    for name in ("spring", "summer"):
        learner.learn(folders[name])
    before = dict(learner._model.state)
    learner.forget("spring")
    learner = reloaded(learner, tmp_path / "model")
    left = learner._model.state
    for name in ("prompts", "keys"):
        assert torch.equal(left[f"{name}.0"], before[f"{name}.1"])
        assert f"{name}.1" not in left
    learner.learn(folders["autumn"])
    assert torch.equal(learner._model.state["prompts.0"], before["prompts.1"])
    assert learner.classes == ("cedar", "elm", "fir", "hazel")
    images = trees(world, *ALL[:4])
    assert all(answer.label in learner.classes for answer in learner.predict(images))
