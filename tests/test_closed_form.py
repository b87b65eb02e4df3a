"""The learner's default: a closed form chosen on images left out, prompts where they win, thresholds, honest counts."""

from __future__ import annotations

import hashlib
import json
import signal
import threading
import time
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from dualprompt.backbones.base import sampled_layers
from dualprompt.data.sources import DATASETS
from dualprompt.errors import DualPromptError, InterruptedRunError
from dualprompt.learner import ContinualLearner
from dualprompt.methods import dualprompt_lda
from dualprompt.methods import leave_one_out as loo
from dualprompt.methods.contract import Batch
from dualprompt.methods.dualprompt_lda import DualPromptLDA
from dualprompt.methods.statistics import shrunk, within_class
from dualprompt.metrics import wilson
from dualprompt.model.outcomes import Outcome, confusion, renamed, without
from dualprompt.progress import Advanced, Event, Progress
from helpers import as_vit
from sandbox import World, call, write_weights

ALL = ("ash", "birch", "cedar", "elm", "fir", "hazel")
OPTIONS = {"e_layers": [2, 3], "e_length": 3, "train.batch_size": 4, "train.epochs": 2}


def empty(world: World, **options: Any) -> ContinualLearner:
    return ContinualLearner(str(world.weights), options=OPTIONS | options, device="cpu")


def lesson(world: World, *labels: str, split: str = "train") -> dict[str, list[Path]]:
    return {label: sorted((world.images / split / label).iterdir()) for label in labels}


def clouds(classes: int = 4, each: int = 7, dim: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(1)
    centres = 2 * torch.randn(classes, dim, generator=rng, dtype=torch.float64)
    labels = torch.arange(classes).repeat_interleave(each)
    return centres[labels] + torch.randn(len(labels), dim, generator=rng, dtype=torch.float64), labels


@pytest.mark.parametrize("choice", loo.CHOICES, ids=lambda choice: choice.name)
def test_leaving_one_out_is_making_all_without_it(choice: loo.Discriminator) -> None:
    """The twin subtracts the image from the scatter and inverts anew, image by image."""
    features, labels = clouds()
    means, scatter = within_class(features, labels, 4)
    counts = torch.bincount(labels).double()
    made = loo.whiten(choice, scatter, len(labels) - 4, means, 2)
    found = loo.distances(features, labels, means, counts, made)
    precision = made.root @ made.root.T
    width = 6 if choice.parts is None else 2 * choice.parts
    covariance = torch.linalg.inv(precision[:width, :width])
    for i, (x, y) in enumerate(zip(features[:, :width], labels, strict=True)):
        others = [j for j in range(len(labels)) if labels[j] == y and j != i]
        off = (x - means[y, :width])[:, None]
        smaller = torch.linalg.inv(covariance - made.share * 7 / 6 * off @ off.T)
        centres = means[:, :width].clone()
        centres[y] = features[others, :width].mean(dim=0)
        away = x - centres
        torch.testing.assert_close(found[i], (away @ smaller * away).sum(dim=1))


def test_the_rule_is_discriminant_analysis_with_as_many_samples_as_are_free() -> None:
    features, labels = clouds()
    means, scatter = within_class(features, labels, 4)
    made = loo.whiten(loo.CHOICES[0], scatter, 24, means, 3)
    torch.testing.assert_close(made.root @ made.root.T, torch.linalg.inv(shrunk(scatter, 24)))
    weight, bias = loo.linear(means, made, 1.0)
    away = features[:, None] - means
    far = torch.einsum("ncd,de,nce->nc", away, made.root @ made.root.T, away)
    assert torch.equal((features @ weight.T + bias).argmax(dim=1), far.argmin(dim=1))


def test_the_smallest_log_loss_on_images_left_out_is_taken_where_it_is_clearly_smaller() -> None:
    evidence = loo.Evidence()
    assert (evidence.choice(), evidence.sharpness(0)) == (0, loo.SHARPNESSES[loo.UNJUDGED])
    labels = torch.zeros(2, dtype=torch.int64)
    others = [torch.tensor([[8.0, 0.0], [0.0, 8.0]])] * (len(loo.CHOICES) - 2)  # one right, one wrong

    def judged(found: list[torch.Tensor], labels: torch.Tensor) -> None:
        for choice, scores in enumerate(found):
            evidence.add(choice, scores, labels)

    sure, unsure = torch.tensor([[0.0, 40.0]]).repeat(2, 1), torch.tensor([[0.0, 0.5]]).repeat(2, 1)
    judged([unsure, sure, *others], labels)
    assert evidence.choice() == 0  # both are right twice: log losses of 1.15 and 0
    judged([unsure, sure, *others], labels)
    assert evidence.choice(1) == 0  # among the first alone
    assert (evidence.choice(), evidence.sharpness(1)) == (1, max(loo.SHARPNESSES))
    wrong = torch.tensor([[40.0, 0.0]]).repeat(4, 1)
    judged([unsure.repeat(2, 1), wrong, *[each.repeat(2, 1) for each in others]], labels.repeat(2))
    assert evidence.choice() == 0  # over all images that were ever left out
    assert evidence.sharpness(1) == min(loo.SHARPNESSES)


def test_choices_are_judged_one_after_another(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many images and classes the distances of every choice at once would be gigabytes."""
    made: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []

    def watched(*given: Any) -> torch.Tensor:
        alive.append(sum(each() is not None for each in made))
        found = loo.distances(*given)
        made.append(weakref.ref(found))
        return found

    monkeypatch.setattr(dualprompt_lda, "distances", watched)
    ContinualLearner(str(world.weights), device="cpu").learn(lesson(world, "ash", "birch"), prompts="never")
    assert len(alive) == len(loo.CHOICES)
    assert max(alive) <= 2  # the best so far, and the one before


def features_of(learner: ContinualLearner, images: np.ndarray) -> torch.Tensor:
    """The features that the default reads: frozen class token and patches."""
    view, method = learner._base.view, learner._model.method
    shown = torch.from_numpy(images).permute(0, 3, 1, 2).float() / 255
    shown = (shown - torch.tensor(view.mean)[:, None, None]) / torch.tensor(view.std)[:, None, None]
    with torch.inference_mode():
        batch = Batch(lambda: shown, torch.zeros(len(shown)))
        return method.read(batch, method.tokens(batch)).double()  # pyright: ignore


def baselines(train: torch.Tensor, labels: torch.Tensor, test: torch.Tensor) -> dict[str, torch.Tensor]:
    """What nearest class mean and shared-covariance LDA answer, made of all training images at once."""
    classes = int(labels.max()) + 1
    means, scatter = within_class(train, labels, classes)
    inverse = torch.linalg.inv(shrunk(scatter, len(train)))
    away = test[:, None] - means
    return {
        "nearest mean": away.square().sum(dim=2).argmin(dim=1),
        "lda": torch.einsum("ncd,de,nce->nc", away, inverse, away).argmin(dim=1),
    }


@pytest.mark.parametrize("each", [3, 8])
def test_real_pictures_are_not_answered_worse_than_by_means_or_lda(each: int) -> None:
    """Taught in two lessons; the baselines have all images at once. One image of chance is allowed for in 80."""
    dataset = DATASETS["mini-leaves"].load(Path())
    names = dataset.classes[:8]
    learner = ContinualLearner(device="cpu", input_size=96)

    def pictures(split: Any, count: int) -> dict[str, list[Any]]:
        labels = np.asarray(split.labels)
        return {
            name: [np.asarray(split.source.pixels[int(i)]) for i in np.flatnonzero(labels == number)[:count]]
            for number, name in enumerate(names)
        }

    train, test = pictures(dataset.train, each), pictures(dataset.test, 10)
    for part in (names[:4], names[4:]):
        learner.learn({name: train[name] for name in part}, prompts="never")
    order = {name: number for number, name in enumerate(learner.classes)}

    def stacked(shown: dict[str, list[Any]]) -> tuple[np.ndarray, torch.Tensor]:
        pixels = np.stack([learner.pixels(image) for own in shown.values() for image in own])
        return pixels, torch.tensor([order[name] for name, own in shown.items() for _ in own])

    (shown, labels), (asked, truth) = stacked(train), stacked(test)
    answers = [order[answer.top[0].label] for answer in learner.predict_pixels(asked)]
    mine = int((torch.tensor(answers) == truth).sum())
    for name, said in baselines(features_of(learner, shown), labels, features_of(learner, asked)).items():
        assert mine >= int((said == truth).sum()) - 1, name
    assert mine > 0.6 * len(truth)


def test_lessons_in_any_order_and_more_images_are_one_sum(world: World) -> None:
    whole, parts = empty(world, prompts="never"), empty(world, prompts="never")
    whole.learn(lesson(world, *ALL))
    first = {label: images[:3] for label, images in lesson(world, *ALL).items()}
    parts.learn({label: first[label] for label in ("fir", "hazel", "ash")})
    parts.learn({label: first[label] for label in ("birch", "cedar", "elm")})
    parts.more({label: images[3:] for label, images in lesson(world, *ALL).items()})
    assert sum(task.images for task in parts.tasks) == sum(map(len, lesson(world, *ALL).values()))
    one, other = (cast(DualPromptLDA, learner._model.method).discriminant for learner in (whole, parts))
    torch.testing.assert_close(one.scatter, other.scatter, rtol=1e-3, atol=1e-3)
    means = dict(zip(parts.classes, torch.cat(list(other.means)), strict=True))
    torch.testing.assert_close(torch.cat(list(one.means)), torch.stack([means[label] for label in whole.classes]))


def test_accuracy_has_a_count_and_an_interval(world: World, tmp_path: Path) -> None:
    learner = empty(world)
    task = learner.learn(lesson(world, "ash", "birch", "cedar"))
    assert task.held == task.images == 19  # no image is set aside: each was left out once
    assert task.left_one_out
    assert task.accuracy == 100 * task.correct / 19
    assert task.interval == wilson(task.correct, 19)
    info = ContinualLearner.load(learner.save(tmp_path / "model")).info()
    assert info["tasks"] == [task.to_dict()]
    table = info["accuracy"]["confusion"]
    assert {label: sum(row.values()) for label, row in table.items()} == {"ash": 6, "birch": 7, "cedar": 6}
    assert info["accuracy"]["correct"] == sum(table[label].get(label, 0) for label in table) == task.correct


def test_wilson() -> None:
    assert wilson(9, 10) == (pytest.approx(59.6, abs=0.05), pytest.approx(98.2, abs=0.05))  # as in tables
    assert wilson(0, 5)[0] == 0
    assert wilson(5, 5)[1] == 100


def test_forgetting_measures_what_is_left(world: World) -> None:
    learner = empty(world)
    learner.learn(lesson(world, *ALL))
    kept = learner._model.trust[1]
    learner.forget("fir")
    [task] = learner.tasks
    assert task.held == sum(len(own) for label, own in kept.items() if label != "fir")
    right = 0
    for label, own in kept.items():
        ranked = [[name for name in each.ranked if name != "fir"] for each in own]
        right += sum(names[0] == label for names in ranked) if label != "fir" else 0
    assert task.correct == right
    assert "fir" not in json.dumps(learner.info())


def test_outcomes_follow_names() -> None:
    found = {1: {"a": [Outcome(0.9, None, ("a", "b")), Outcome(0.5, None, ("b", "a"))], "b": [Outcome(0.7)]}}
    assert confusion(found) == {"a": {"a": 1, "b": 1}}
    assert confusion(without(found, ["b"])) == {"a": {"a": 2}}
    merged = renamed(found, {"a": "c", "b": "c"})
    assert confusion(merged) == {"c": {"c": 2}}
    assert [each.trust for each in merged[1]["c"]] == [0.9, 0.5, 0.7]


def test_one_image_and_one_class(world: World) -> None:
    learner = empty(world)
    one = learner.learn({"ash": lesson(world, "ash")["ash"][:1]})
    assert (one.accuracy, one.held, learner.threshold) == (None, 0, None)
    alone = learner.learn({"birch": lesson(world, "birch")["birch"]})
    assert alone.held == 7
    assert alone.prompts is not None
    assert not alone.prompts.used
    learner.learn({label: images[:1] for label, images in lesson(world, "cedar", "elm").items()})
    assert len(learner.classes) == 4
    assert all(np.isfinite(answer.similarity) for answer in learner.predict(world.images / "test"))
    assert learner.predict(lesson(world, "ash")["ash"][0]).top[0].label == "ash"


def test_the_same_picture_again_and_again(world: World) -> None:
    learner = empty(world)
    picture, other = (lesson(world, label)[label][0] for label in ("ash", "birch"))
    learner.learn({"ash": [picture] * 6, "birch": [other] * 6})
    assert [learner.predict(path).top[0].label for path in (picture, other)] == ["ash", "birch"]


def test_prompts_always_never_and_why(world: World) -> None:
    learner = empty(world)
    plain = learner.learn(lesson(world, "ash", "birch"), prompts="never").prompts
    assert plain is not None
    assert (plain.used, plain.held) == (False, 0)
    frozen = learner.predict(world.images / "test", top_k=9)
    trained = learner.learn(lesson(world, "cedar", "elm"), prompts="always").prompts
    assert trained is not None
    assert trained.used
    assert trained.held == 2  # one of six, one of seven
    assert "points on 2 held-out images" in trained.why
    state = learner._model.state
    assert state["prompts.0"].numel() == 0
    assert state["prompts.1"].shape == (2, 2, 3, 16)
    assert learner.tasks[1].held == 2
    assert not learner.tasks[1].left_one_out  # what prompts were trained on judges nothing
    few = learner.learn(lesson(world, "fir", "hazel")).prompts
    assert few is not None
    assert "could not tell whether they win" in few.why
    assert len(frozen) == 27
    learner.forget("summer" if "summer" in {task.name for task in learner.tasks} else 2)
    assert not {"cedar", "elm"} & {score.label for a in learner.predict(world.images / "test") for score in a.top}


def test_prompts_share_out_what_their_task_has(world: World, tmp_path: Path) -> None:
    """How likely a task is stays what frozen features say; its prompts tell its own classes apart."""
    never, always = empty(world), empty(world)
    never.learn(lesson(world, "ash", "birch", "cedar"), prompts="never")
    always.learn(lesson(world, "ash", "birch", "cedar"), prompts="always")
    for learner in (never, always):
        learner.learn(lesson(world, "elm", "fir"), prompts="never")
    pixels = torch.from_numpy(np.stack([always.pixels(path) for path in sorted(world.images.glob("test/*/*"))]))
    always = ContinualLearner.load(always.save(tmp_path / "model"))
    with torch.inference_mode():
        before, after = (learner.network()(pixels)[0].double().softmax(dim=1) for learner in (never, always))
    first = before.argmax(dim=1) < 3
    torch.testing.assert_close(before[:, :3].sum(dim=1), after[:, :3].sum(dim=1), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(before[~first], after[~first], rtol=1e-4, atol=1e-5)
    assert (before[first, :3] / after[first, :3]).log().abs().amax() > 1


def test_prompts_that_take_too_long_are_left_out(world: World) -> None:
    learner = empty(world, **{"train.epochs": 1000})
    began = time.monotonic()
    task = learner.learn(lesson(world, *ALL), prompts="always", minutes=0.02)
    assert time.monotonic() - began < 30
    assert task.prompts is not None
    assert "took longer than 0.02 min" in task.prompts.why
    assert task.left_one_out
    with pytest.raises(DualPromptError, match="minutes must be above 0"):
        learner.learn(lesson(world, "ash"), again=True, minutes=0)
    other = ContinualLearner(str(world.weights), "lda", device="cpu")
    with pytest.raises(DualPromptError, match="'lda' has no choice of prompts"):
        other.learn(lesson(world, "ash", "birch"), prompts="always")


def test_lessons_set_the_threshold_until_a_user_does(world: World, tmp_path: Path) -> None:
    learner = empty(world)
    learner.learn(lesson(world, "ash", "birch", "cedar", "elm"))
    first = learner.threshold
    scores = sorted(each.trust for own in learner._model.trust[1].values() for each in own)
    assert first == scores[0]  # 99 % of 26
    learner.learn(lesson(world, "fir", "hazel"))
    scores = sorted(each.trust for task in learner._model.trust.values() for own in task.values() for each in own)
    assert learner.threshold == scores[0]
    other = empty(world)
    other.learn(lesson(world, "ash", "elm"))
    other._model = replace(other._model, trust={1: {"ash": [Outcome(0.01 * n) for n in range(300)]}})
    other.forget("elm")  # whatever changes a model sets it, by what is kept then
    assert other.threshold == pytest.approx(0.02)
    learner = ContinualLearner.load(learner.save(tmp_path / "model"))
    assert learner.info()["threshold_by"] == "lessons"
    does = learner.info()["threshold_does"]
    assert does["known"] == does["unknown"] == 39
    assert does["accepted"] >= 97
    learner.threshold = 0.123
    learner.forget("hazel")
    learner = ContinualLearner.load(learner.save(tmp_path / "model"))
    learner.learn({"oak": lesson(world, "hazel")["hazel"]})
    assert learner.threshold == 0.123
    assert "set by hand" in call("info", learner.save(tmp_path / "model")).out
    assert call("calibrate", tmp_path / "model", "--auto").code == 0
    assert ContinualLearner.load(tmp_path / "model").threshold != 0.123


def test_the_label_and_the_task_agree(world: World) -> None:
    learner = ContinualLearner(
        str(world.weights), "dualprompt", options={"g_layers": [1], "e_layers": [2], "train.epochs": 1}, device="cpu"
    )
    learner.learn(lesson(world, "ash", "birch"))
    learner.learn(lesson(world, "cedar", "elm"))
    teachers = {label: task.name for task in learner.tasks for label in task.classes}
    for answer in learner.predict(world.images / "test"):
        assert answer.label is not None
        assert answer.task == teachers[answer.label]


def test_evaluate_says_who_was_taken_for_whom(world: World, tmp_path: Path) -> None:
    learner = empty(world)
    learner.learn(lesson(world, *ALL))
    learner.threshold = sorted(a.trust for a in learner.predict(world.images / "test"))[3]
    found = learner.evaluate(lesson(world, *ALL, split="test"))
    answers = {label: learner.predict(images) for label, images in lesson(world, *ALL, split="test").items()}
    for label, own in answers.items():
        said = [answer.label or "" for answer in own]
        assert found.confusion[label] == {name: said.count(name) for name in set(said)}
    assert found.correct == sum(answer.label == label for label, own in answers.items() for answer in own)
    assert found.rejected == pytest.approx(100 * 3 / 27)
    assert found.best >= found.accuracy
    out = call("evaluate", learner.save(tmp_path / "model"), world.images / "test", "--json").json
    assert out["confusion"] == found.confusion
    assert out["interval"] == [pytest.approx(value) for value in wilson(found.correct, 27)]
    assert out["counts"]["ash"] == 5


class Interrupting(Progress):
    """Sends Ctrl-C when the first batch of a pass is done."""

    def receive(self, event: Event) -> None:
        if isinstance(event, Advanced) and event.work.kind == "features" and event.done < (event.work.total or 0):
            signal.raise_signal(signal.SIGINT)


def test_a_pass_can_be_interrupted(world: World) -> None:
    assert threading.current_thread() is threading.main_thread()
    learner = empty(world)
    with pytest.raises(InterruptedRunError, match="stopped by SIGINT"):
        learner.learn(lesson(world, *ALL), progress=Interrupting())
    assert learner.tasks == ()


def test_a_model_of_before_still_loads() -> None:
    saved = Path(__file__).parent / "saved" / "dualprompt"
    learner = ContinualLearner.load(saved, "cpu", backbone=str(saved.parent / "vit.safetensors"))
    for task in learner.tasks:
        assert (task.accuracy is None) == (task.held == 0)
        assert task.interval is None or task.interval[0] <= (task.accuracy or 0) <= task.interval[1]
    assert learner.info()["threshold_by"] == "user"
    assert replace(learner.tasks[0]).prompts is None


def test_backbones_are_compared_and_nothing_is_learned(world: World, tmp_path: Path) -> None:
    write_weights(tmp_path / "other.safetensors", seed=8)
    both = f"{world.weights},{tmp_path / 'other.safetensors'}"
    arguments = ("learn", tmp_path / "model", world.images / "train", "--compare-backbones", both, "--device", "cpu")
    found = call(*arguments, "--json").json["backbones"]
    assert {each["backbone"] for each in found} == set(both.split(","))
    assert found[0]["accuracy"] >= found[1]["accuracy"]
    learner = empty(world)
    task = learner.learn(world.images / "train", prompts="never")
    mine = next(each for each in found if each["backbone"] == str(world.weights))
    assert (mine["held"], mine["correct"]) == (39, task.correct)
    assert mine["parameters"] == learner.info()["backbone"]["parameters"]
    assert mine["images_per_second"] > 0
    assert not (tmp_path / "model").exists()
    assert not list(tmp_path.glob(".*"))
    assert "nothing was learned" in call(*arguments).out
    assert "is named twice" in call(*arguments[:4], f"{world.weights},{world.weights}").error


def test_layers_are_read_on_the_way(world: World) -> None:
    """The means of patches that left a quarter, a half and three quarters of the layers, by a pass that keeps all."""
    assert [sampled_layers(depth) for depth in (1, 2, 3, 4, 12, 24)] == [(), (), (1,), (1, 2), (3, 6, 9), (6, 12, 18)]
    vit = as_vit(ContinualLearner(str(world.weights), device="cpu")._model.method.backbone)
    images = torch.randn(3, 3, vit.input_size, vit.input_size, generator=torch.Generator().manual_seed(1))
    tokens, kept = vit.embed(images), []
    for block in vit.blocks:
        tokens = block(tokens)
        kept.append(vit.norm(tokens))
    patches = [layer[:, -(vit.config.grid**2) :].mean(dim=1) for layer in kept]
    expected = torch.cat([kept[-1][:, 0], patches[-2], patches[0]], dim=1)  # of three layers
    torch.testing.assert_close(vit.rest(vit.stem(images, 1), 1, None, "class+layers"), expected)
    torch.testing.assert_close(vit.rest(vit.stem(images), 0, None, "class+layers"), expected)
    with pytest.raises(AssertionError, match="passed already"):
        vit.rest(vit.stem(images, 2), 2, None, "class+layers")


def test_a_learner_reads_layers_unless_that_is_too_wide(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def made(**options: Any) -> DualPromptLDA:
        return cast(DualPromptLDA, ContinualLearner(str(world.weights), options=options, device="cpu")._model.method)

    dim = made().backbone.dim
    assert (made().width, made().near, made().shared_layers) == (3 * dim, 2 * dim, 1)
    assert (made(reads="class").width, made(reads="class+patches").width) == (dim, 2 * dim)
    monkeypatch.setattr(dualprompt_lda, "WIDEST", 3 * dim - 1)
    assert (made().width, made().outputs) == (2 * dim, "class+patches")


def test_a_model_of_a_release_with_other_choices_is_taken_over(world: World, tmp_path: Path) -> None:
    learner = ContinualLearner(str(world.weights), device="cpu")
    learner.learn(lesson(world, "ash", "birch"), prompts="never")
    asked = lesson(world, "ash", "cedar", split="test")["ash"]
    told = learner.predict(asked)
    path = learner.save(tmp_path / "model")
    tensors, facts = next(path.glob("weights-*")), json.loads((path / "model.json").read_text())
    state = load_file(tensors)
    state |= {"evidence.losses": state["evidence.losses"][:4].clone(), "evidence.duels": torch.ones(4, 2)}
    save_file(state, tensors, {"dualprompt": "{}"})
    facts["tensors"]["sha256"] = hashlib.sha256(tensors.read_bytes()).hexdigest()
    (path / "model.json").write_text(json.dumps(facts))
    again = ContinualLearner.load(path, "cpu")
    assert again.predict(asked) == told
    assert not cast(DualPromptLDA, again._model.method).evidence.losses.any()
    again.learn(lesson(world, "cedar"), prompts="never")
    assert again.tasks[-1].accuracy is not None


def test_evidence_about_other_choices_is_forgotten() -> None:
    evidence = loo.Evidence()
    evidence.restore({"losses": torch.ones(4, 12)})
    assert not evidence.losses.any()
    evidence.restore({"losses": torch.ones(len(loo.CHOICES), len(loo.SHARPNESSES))})
    assert evidence.losses.all()
