"""Changing what a model knows without new classes: more images of a class, another name, several that become one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dualprompt.errors import DualPromptError
from dualprompt.learner import ContinualLearner
from dualprompt.methods.dualprompt_rp import DualPromptRP
from dualprompt.methods.heads import with_one
from dualprompt.methods.ridge import Ridge
from dualprompt.methods.ridge_head import RidgeHead
from helpers import batch_of, seeded, task_view
from sandbox import CLASSES, World, call, contents, pictures

PROMPTS = {"g_layers": [1], "e_layers": [2, 3], "g_length": 2, "e_length": 3, "train.batch_size": 4, "train.epochs": 1}
OPTIONS: dict[str, dict[str, Any]] = {
    "lda": {},
    "klda": {"projection": 40},
    "ridge": {"strength": 3.0},
    "fecam": {},
    "ranpac": {"projection": 40, "strength": 3.0},
    "dualprompt-rp": {**PROMPTS, "projection": 40},
    "dualprompt": PROMPTS,
    "dualprompt-lda": {},
    "simple-cil": {},
}
EXACT = ("lda", "klda", "ridge", "ranpac", "fecam")
SEVERAL = (*EXACT, "dualprompt-rp", "dualprompt-lda", "dualprompt", "simple-cil")


def made(world: World, method: str, **options: Any) -> ContinualLearner:
    return ContinualLearner(str(world.weights), method, options=OPTIONS[method] | options, device="cpu")


def lesson(world: World, *names: str, part: slice = slice(None)) -> dict[str, list[Path]]:
    return {name: pictures(world, name)[part] for name in names}


def seen(world: World, *names: str) -> list[Path]:
    return [image for name in names or CLASSES for image in pictures(world, name, "test")]


def logits(learner: ContinualLearner, images: list[Path]) -> torch.Tensor:
    with torch.inference_mode():
        return learner.network()(torch.from_numpy(np.stack([learner.pixels(path) for path in images])))[0]


def taught(world: World, method: str, **options: Any) -> ContinualLearner:
    learner = made(world, method, **options)
    learner.learn(lesson(world, "ash", "birch", "cedar"), "first")
    learner.learn(lesson(world, "elm", "fir"), "second")
    return learner


@pytest.mark.parametrize("method", EXACT)
def test_images_that_come_later_count_as_those_that_came_at_once(world: World, method: str) -> None:
    at_once, later = made(world, method), made(world, method)
    at_once.learn(lesson(world, "ash", "birch", part=slice(0, 4)), "first")  # of four images none is held out
    later.learn(lesson(world, "ash", "birch", part=slice(0, 2)), "first")
    for learner in (at_once, later):
        learner.learn(lesson(world, "elm", "fir", part=slice(0, 4)), "second")
    [task] = later.more(lesson(world, "ash", part=slice(2, 4)))
    assert (task.id, task.images) == (1, 6)
    later.more(lesson(world, "birch", part=slice(2, 3)))
    later.more(lesson(world, "birch", part=slice(3, 4)))
    assert [task.images for task in later.tasks] == [task.images for task in at_once.tasks]
    images = seen(world)
    if method == "klda":  # whose map is drawn by the first lesson's features
        assert later.predict(images[0]).label in later.classes
    else:
        torch.testing.assert_close(logits(later, images), logits(at_once, images), rtol=1e-3, atol=1e-3)


def test_more_images_are_seen_with_the_prompts_of_their_own_task(world: World) -> None:
    learner, images = taught(world, "dualprompt-rp"), pictures(world, "elm")[:4]
    before = learner._model.method
    learner.more({"elm": images})
    after = learner._model.method
    assert isinstance(before, DualPromptRP)
    assert isinstance(after, DualPromptRP)
    pixels = torch.from_numpy(np.stack([learner.pixels(path) for path in images]))
    shown = pixels.permute(0, 3, 1, 2).float() / 127.5 - 1
    with torch.no_grad():
        tokens = before.tokens(batch_of(shown))
        own = before.read(tokens, before.bank.prompts_for(torch.ones(4, dtype=torch.int64), tokens.dtype))
        other = before.read(tokens, before.bank.shared_prompts(before.shared_prompt))
    assert not torch.allclose(own, other, rtol=1e-2)
    for name, features in (("by_own", own), ("by_shared", other)):
        was, now = getattr(before, name), getattr(after, name)
        added = now.ridge.sums[1][:, 0] - was.ridge.sums[1][:, 0]
        torch.testing.assert_close(added, was.expand(features).sum(dim=0), rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(now.ridge.sums[0], was.ridge.sums[0])


@pytest.mark.parametrize("strength", [1e-2, 0.37, 1e3])
def test_the_strength_is_found_again_in_the_weights(strength: float) -> None:
    """So that a λ which was chosen on a lesson is not chosen again on two images."""
    ridge, labels = Ridge(9, with_one), torch.arange(6).repeat(5) % 3
    features = torch.randn(30, 8, generator=seeded(1))
    ridge.add(features, task_view(0, labels=labels), strength, seeded(2))
    assert ridge.strength_of(ridge.solve(strength)) == pytest.approx(strength, rel=1e-2)


def test_a_strength_that_was_chosen_stays(world: World) -> None:
    learner = taught(world, "ridge", strength=None)
    before = learner._model.method
    assert isinstance(before, RidgeHead)
    weights = [torch.cat([w, b[:, None]], 1) for w, b in zip(before.head.weight, before.head.bias, strict=True)]
    strength = before.ridge.strength_of(weights)
    learner.more(lesson(world, "ash", part=slice(0, 2)))
    after = learner._model.method
    assert isinstance(after, RidgeHead)
    solved = torch.cat(after.ridge.solve(strength))
    torch.testing.assert_close(torch.cat(list(after.head.weight)), solved[:, :-1], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("method", SEVERAL)
def test_after_any_change_what_is_forgotten_is_never_answered(world: World, method: str, tmp_path: Path) -> None:
    learner = taught(world, method)
    learner.rename("ash", "rowan")
    learner.merge(["rowan", "elm"], "shrub")  # of two tasks
    learner.merge(["birch", "cedar"], "tree")  # of one
    assert learner.classes == ("shrub", "tree", "fir")
    tasks = learner.more({"shrub": pictures(world, "ash")[:3], "tree": pictures(world, "cedar")})
    if learner._model.method.takes_more:
        assert {task.name for task in tasks} <= {"first", "second"}
        assert sum(task.images for task in learner.tasks) == 32 + 9  # of which one is held out
    else:
        assert [task.classes for task in tasks] == [("shrub", "tree")]
    learner = ContinualLearner.load(learner.save(tmp_path / "model"), "cpu")
    images = seen(world)
    assert {score.label for answer in learner.predict(images) for score in answer.top} == {"shrub", "tree", "fir"}
    learner.forget("tree")
    learner = ContinualLearner.load(learner.save(tmp_path / "model"), "cpu")
    assert learner.classes == ("shrub", "fir")
    for answer in learner.predict(images):
        assert {score.label for score in answer.top} == {"shrub", "fir"}
        assert sum(score.probability for score in answer.top) == pytest.approx(1)
    learner.learn(lesson(world, "hazel", "birch"), "third")  # a forgotten class may be taught anew, under its own name
    assert learner.classes == ("shrub", "fir", "birch", "hazel")
    learner.forget("shrub")
    assert learner.classes == ("fir", "birch", "hazel")
    assert logits(ContinualLearner.load(learner.save(tmp_path / "model")), images).isfinite().all()


@pytest.mark.parametrize("method", ["dualprompt", "ranpac"])
def test_probabilities_of_merged_classes_add_up(world: World, method: str) -> None:
    learner, images = taught(world, method), seen(world)
    before = [{score.label: score.probability for score in answer.top} for answer in learner.predict(images)]
    learner.merge(["ash", "elm"], "elm")
    learner.merge(["birch"], "cedar")  # a class that is there is merged as well
    assert learner.classes == ("elm", "cedar", "fir")
    assert [task.classes for task in learner.tasks] == [("elm", "cedar"), ("elm", "fir")]
    for old, answer in zip(before, learner.predict(images), strict=True):
        new = {score.label: score.probability for score in answer.top}
        assert new == {
            "elm": pytest.approx(old["ash"] + old["elm"], abs=1e-6),
            "cedar": pytest.approx(old["birch"] + old["cedar"], abs=1e-6),
            "fir": pytest.approx(old["fir"], abs=1e-6),
        }
        assert answer.label == max(new, key=lambda name: new[name])


def test_another_name_changes_nothing_else(world: World, tmp_path: Path) -> None:
    learner, images = taught(world, "lda"), seen(world)
    before, scores = logits(learner, images), learner.calibrate().threshold
    learner.rename("birch", "cafe\u0301")
    assert learner.classes == ("ash", "caf\u00e9", "cedar", "elm", "fir")  # in the one form of names
    learner.rename("ash", "Ash")  # other names by case only are refused, the own is not
    learner = ContinualLearner.load(learner.save(tmp_path / "model"), "cpu")
    assert torch.equal(logits(learner, images), before)
    assert learner.calibrate().threshold == scores
    assert learner.forget("caf\u00e9") == "caf\u00e9"


def test_bad_changes_are_one_line_and_change_nothing(world: World, tmp_path: Path) -> None:
    model = taught(world, "lda").save(tmp_path / "model")
    before = contents(model)
    unknown, broken = tmp_path / "unknown" / "yew", tmp_path / "broken" / "ash"
    for folder in (unknown, broken):
        folder.mkdir(parents=True)
        (folder / "picture.png").write_bytes(pictures(world, "ash")[0].read_bytes() if folder is unknown else b"none")
    for words, message in {
        ("rename", model, "yew", "rowan"): "class 'yew' is not known; ",
        ("rename", model, "ash", "elm"): "a class is called 'elm' already; ",
        ("rename", model, "ash", "ELM"): "'elm' and 'ELM' differ by case only",
        ("rename", model, "ash", "a\nb"): "cannot be the name of a class",
        ("rename", model, "ash", " "): "cannot be the name of a class",
        ("merge", model, "ash", "yew", "--into", "elm"): "class 'yew' is not known",
        ("merge", model, "ash", "--into", "rowan"): "'ash' alone cannot be merged",
        ("merge", model, "ash", "ash", "--into", "ash"): "'ash' alone cannot be merged",
        ("merge", model, "ash", "birch", "--into", "FIR"): "differ by case only",
        ("more", model, unknown.parent): "class 'yew' is not known; ",
        ("more", model, broken.parent): "cannot be read",
        ("more", model, tmp_path / "nothing"): "does not exist",
    }.items():
        assert message in call(*words).error
        assert contents(model) == before | {".lock": b""}
    with pytest.raises(DualPromptError, match="class 'yew' is not known"):
        ContinualLearner.load(model).merge(["yew", "ash"], "elm")


def test_commands(world: World, tmp_path: Path) -> None:
    model = taught(world, "lda").save(tmp_path / "model")
    folder = tmp_path / "more" / "ash"
    folder.mkdir(parents=True)
    for image in pictures(world, "ash", "test"):
        (folder / image.name).write_bytes(image.read_bytes())
    assert "added 5 images to 'first'" in call("more", model, folder.parent).out
    assert call("rename", model, "ash", "[red] rowan", "--json").json["classes"][0] == "[red] rowan"
    told = call("merge", model, "fir", "elm", "--into", "conifer")
    assert "fir, elm: one class now, 'conifer'" in told.out
    listed = call("versions", model, "--json").json["versions"]
    assert [version["why"] for version in listed] == [
        "learned 'first'; learned 'second'",
        "added 5 images of ash",
        "renamed 'ash' to '[red] rowan'",
        "merged fir, elm into 'conifer'",
    ]
    assert "[red] rowan" in call("versions", model).out
    assert call("rollback", model).code == 0
    assert call("info", model, "--json").json["classes"] == ["[red] rowan", "birch", "cedar", "elm", "fir"]


def test_images_of_a_merged_class_go_where_they_fit(world: World) -> None:
    learner = taught(world, "lda")
    learner.merge(["ash", "elm"], "tree")
    before = {task.name: task.images for task in learner.tasks}
    learner.more({"tree": pictures(world, "elm")})
    after = {task.name: task.images for task in learner.tasks}
    assert after["second"] - before["second"] > after["first"] - before["first"]
    learner.more({"tree": pictures(world, "ash")})
    assert {task.name: task.images for task in learner.tasks}["first"] > after["first"] + 3


def test_accuracy_is_of_all_images_held_out(world: World) -> None:
    learner = taught(world, "lda")
    before = learner.tasks[0]
    held = sum(map(len, learner._model.trust[1].values()))
    assert held == 3
    assert before.accuracy is not None
    wrong = {"ash": pictures(world, "fir")}  # 6 images, one of which is held out
    learner.more(wrong)
    assert sum(map(len, learner._model.trust[1].values())) == 4
    right = round(before.accuracy * held / 100)
    assert learner.tasks[0].accuracy in (pytest.approx(100 * right / 4), pytest.approx(100 * (right + 1) / 4))
