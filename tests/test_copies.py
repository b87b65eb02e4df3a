"""Copies of an image never answer for it: they are left out, or held out, together with it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from dualprompt.data.experience import Subset
from dualprompt.data.images import Images
from dualprompt.data.looks import Looks
from dualprompt.learner import ContinualLearner
from dualprompt.lessons.task import held_out
from dualprompt.methods import leave_one_out as loo
from dualprompt.methods.apart import hold_out
from dualprompt.methods.statistics import within_class
from dualprompt.progress import Event, Note, Progress
from sandbox import World

CLASSES, EACH, SHOTS = ("red", "blue"), 15, 4  # of every picture so many shots


class Notes(Progress):
    """Keeps what it is told in words."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def receive(self, event: Event) -> None:
        if isinstance(event, Note):
            self.texts.append(event.text)


def bursts(seed: int = 0, shots: int = SHOTS) -> dict[str, list[np.ndarray]]:
    """Noise, whose labels nobody can guess, each picture in several shots that hardly differ."""
    rng = np.random.default_rng(seed)
    found: dict[str, list[np.ndarray]] = {}
    for label in CLASSES:
        pictures = [rng.integers(0, 240, (8, 8, 3), np.uint8).repeat(8, 0).repeat(8, 1) for _ in range(EACH)]
        found[label] = [picture + np.uint8(shot) for picture in pictures for shot in range(shots)]
    return found


def pixels_of(data: dict[str, list[np.ndarray]]) -> np.ndarray:
    return np.stack([image for own in data.values() for image in own])


def learner(world: World, **options: object) -> ContinualLearner:
    return ContinualLearner(str(world.weights), device="cpu", **options)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("choice", loo.CHOICES, ids=lambda choice: choice.name)
def test_leaving_copies_out_is_making_all_without_them(choice: loo.Discriminator) -> None:
    """The twin makes means, covariance and distances anew without them; their own scatter stays in the covariance."""
    rng = torch.Generator().manual_seed(2)
    labels = torch.arange(3).repeat_interleave(8)
    features = torch.randn(24, 6, generator=rng, dtype=torch.float64) + 2 * labels[:, None]
    alike = torch.arange(24)
    alike[[1, 2, 5]] = 1
    alike[[9, 10]] = 9
    means, scatter = within_class(features, labels, 3)
    counts = torch.bincount(labels).double()
    made = loo.whiten(choice, scatter, 21, means, 2)
    found = loo.distances(features, labels, means, counts, made, alike)
    near = loo.cosines(features, labels, means, counts, alike)
    width = 6 if choice.parts is None else 2 * choice.parts
    covariance = torch.linalg.inv((made.root @ made.root.T)[:width, :width])
    for i, (x, y) in enumerate(zip(features, labels, strict=True)):
        copies, others = alike == alike[i], (labels == y) & (alike != alike[i])
        off = (features[copies].mean(dim=0) - means[y])[:width, None]
        count = int(copies.sum())
        smaller = torch.linalg.inv(covariance - made.share * count * 8 / (8 - count) * off @ off.T)
        centres = means.clone()
        centres[y] = features[others].mean(dim=0)
        away = (x - centres)[:, :width]
        torch.testing.assert_close(found[i], (away @ smaller * away).sum(dim=1))
        torch.testing.assert_close(near[i], torch.cosine_similarity(x[None], centres))


def test_images_without_copies_are_judged_as_ever() -> None:
    features = torch.randn(12, 5, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    labels = torch.arange(3).repeat_interleave(4)
    means, scatter = within_class(features, labels, 3)
    given = features, labels, means, torch.bincount(labels).double()
    made = loo.whiten(loo.CHOICES[0], scatter, 9, means, 2)
    assert torch.equal(loo.distances(*given, made, torch.arange(12)), loo.distances(*given, made))
    assert torch.equal(loo.cosines(*given, torch.arange(12)), loo.cosines(*given))


def test_what_nobody_can_guess_is_not_claimed_to_be_right(world: World) -> None:
    single = learner(world).learn(bursts(shots=1), "single", prompts="never")
    burst = learner(world).learn(bursts(), "burst", prompts="never")
    assert burst.held == SHOTS * single.held == SHOTS * EACH * len(CLASSES)
    assert single.accuracy is not None
    assert burst.accuracy is not None
    assert abs(burst.accuracy - single.accuracy) < 15
    assert burst.accuracy < 75


def test_further_bursts_are_judged_without_their_copies(world: World) -> None:
    taught = learner(world)
    first = taught.learn({label: own[:1] for label, own in bursts(seed=1).items()}, "first", prompts="never")
    (task,) = taught.more(bursts())
    assert (first.held, task.held) == (0, SHOTS * EACH * len(CLASSES))
    assert task.correct < 0.75 * task.held


def test_shots_of_one_picture_alone_say_nothing_of_how_right_a_class_is(world: World) -> None:
    data = bursts()
    data["red"] = data["red"][:SHOTS]
    task = learner(world).learn(data, "one picture", prompts="never")
    assert task.held == SHOTS * EACH  # those of the other class


def test_what_trains_throughout_holds_copies_out_together(world: World) -> None:
    data = bursts()
    labels = np.repeat([0, 1], SHOTS * EACH)
    alike = Looks.at(pixels_of(data)).alike(labels)
    assert alike is not None
    held = held_out(labels, CLASSES, 0, alike)
    assert 0 < held.sum() < len(held) / 2
    assert set(alike[held]).isdisjoint(alike[~held])
    taught = learner(world, method="simple-cil")
    task = taught.learn(data, "burst")
    assert task.held == held.sum()


def test_prompts_are_tried_on_images_whose_copies_they_have_not_seen() -> None:
    data = bursts()
    labels = np.repeat([0, 1], SHOTS * EACH)
    alike = Looks.at(pixels_of(data)).alike(labels)
    assert alike is not None
    images = Images.from_array(pixels_of(data))
    whole = Subset(images, torch.arange(len(labels)), torch.from_numpy(labels), alike=torch.from_numpy(alike))
    trained, apart = hold_out(whole, 0.2, 0, 0)
    assert apart is not None
    assert apart.alike is not None
    assert trained.alike is not None
    assert set(apart.alike.tolist()).isdisjoint(trained.alike.tolist())
    assert apart.labels.bincount().tolist() == [SHOTS * EACH // 5] * 2
    every = torch.zeros_like(whole.labels)  # one picture each: nothing can be held out
    assert not len(hold_out(Subset(images, whole.indices, whole.labels, alike=every), 0.2, 0, 0)[1] or ())


def test_prompts_are_weighed_where_a_class_cannot_be_judged(world: World) -> None:
    data = bursts()
    data["red"] = data["red"][:SHOTS]
    options = {"e_layers": [2, 3], "e_length": 3, "train.batch_size": 16, "train.epochs": 1}
    task = learner(world, options=options).learn(data, "one picture", prompts="always")
    assert task.prompts is not None
    assert task.prompts.held == task.held == SHOTS * EACH // 5


def test_a_copy_under_another_label_stays_to_speak_against_it() -> None:
    picture = next(iter(bursts()["red"]))
    looks = Looks.at(np.stack([picture, picture, picture]))
    shared = looks.alike(np.array([0, 0, 1]))
    assert shared is not None
    assert shared[0] == shared[1] != shared[2]
    assert looks.alike(np.array([0, 1, 2])) is None


def test_more_tells_of_copies_and_of_files_that_are_left_out(world: World, tmp_path: Path) -> None:
    from PIL import Image

    taught = learner(world)
    taught.learn(bursts(shots=1), "first", prompts="never")
    for label, own in bursts(seed=1, shots=2).items():
        (tmp_path / label).mkdir()
        for number, image in enumerate(own[:4]):
            Image.fromarray(image).save(tmp_path / label / f"{number}.png")
    (tmp_path / "red" / "notes.txt").write_text("no image")
    notes = Notes()
    taught.more(tmp_path, progress=notes)
    told = "\n".join(notes.texts)
    assert str(tmp_path / "red" / "notes.txt") in told
    assert str(tmp_path / "red" / "1.png") in told
    assert "fewer than" not in told  # of a lesson: the class has more by now
