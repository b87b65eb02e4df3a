"""Prompts that a lesson keeps because they win: on images held out, on fresh ones, and for nobody else's classes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from dualprompt.learner import ContinualLearner
from learning import trees
from sandbox import World, call

OPTIONS = {"train.lr": 0.05, "train.batch_size": 16}
EVEN_ODD = ("even", "odd")
EACH = 100  # images of a class


def quarters(number: int, seed: int, meant: bool = True) -> dict[str, list[np.ndarray]]:
    """Noisy images whose four quarters are bright or dark, by whether an even or an odd number of them is bright.

    No quarter says anything of the class, nor do two or three of them; unless it is `meant` nor do all four.
    """
    rng = np.random.default_rng(seed)
    found: dict[str, list[np.ndarray]] = {name: [] for name in EVEN_ODD}
    for odd, images in enumerate(found.values()):
        for _ in range(number):
            bright = rng.integers(2, size=4)
            if meant and bright.sum() % 2 != odd:
                bright[rng.integers(4)] ^= 1
            light = np.kron(120 * bright.reshape(2, 2) - 60, np.ones((8, 8)))
            pixels = 128 + light[:, :, None] + rng.normal(0, 20, (16, 16, 3))
            images.append(np.clip(pixels, 0, 255).astype(np.uint8))
    return found


def written(folder: Path, images: dict[str, list[np.ndarray]]) -> Path:
    for name, own in images.items():
        (folder / name).mkdir(parents=True)
        for number, pixels in enumerate(own):
            Image.fromarray(pixels).save(folder / name / f"{number}.png")
    return folder


def right(learner: ContinualLearner, images: dict[str, list[np.ndarray]]) -> float:
    """Percent of images whose best class is theirs."""
    found = [answer.top[0].label == name for name, own in images.items() for answer in learner.predict(own)]
    return 100 * sum(found) / len(found)


def logits(learner: ContinualLearner, pixels: list[np.ndarray]) -> torch.Tensor:
    with torch.inference_mode():
        return learner.network()(torch.from_numpy(np.stack(pixels)))[0].double()


def knows_trees(world: World, path: Path) -> Path:
    """A model that has learned two classes of the world."""
    learner = ContinualLearner(str(world.weights), "dualprompt-lda", options=OPTIONS, device="cpu")
    learner.learn({name: trees(world, name, split="train") for name in ("ash", "birch")}, name="trees")
    return learner.save(path)


def test_prompts_that_win_are_kept_and_said(world: World, tmp_path: Path) -> None:
    folder, fresh = written(tmp_path / "quarters", quarters(EACH, 0)), quarters(150, 1)
    paths = {kind: knows_trees(world, tmp_path / kind) for kind in ("auto", "never")}
    before = ContinualLearner.load(paths["auto"], "cpu")
    said = {kind: call("learn", path, folder, "--prompts", kind, "--epochs", 30) for kind, path in paths.items()}
    assert [outcome.code for outcome in said.values()] == [0, 0], said
    auto, never = (ContinualLearner.load(path, "cpu") for path in paths.values())  # as they were saved

    task = auto.tasks[-1]
    choice = task.prompts
    assert choice is not None
    assert choice.used
    assert choice.held == task.held == 2 * EACH // 5
    assert choice.with_prompts == task.correct
    gain = 100 * (choice.with_prompts - choice.without) / choice.held
    assert gain > 5
    assert f"prompts: trained (+{gain:.1f} points on {choice.held} held-out images)" in said["auto"].out
    assert "prompts: not trained (none were asked for)" in said["never"].out
    with_prompts, without = right(auto, fresh), right(never, fresh)
    assert without > 60, "frozen features know something of it; chance is 50 %"
    assert with_prompts > without + 8, "the win is no accident of the images held out"

    # Other classes have the logits that they have without prompts, whatever is shown; its own share the rest anew.
    own = [auto.classes.index(name) for name in EVEN_ODD]
    others = [auto.classes.index(name) for name in ("ash", "birch")]
    shown = [auto.pixels(path) for path in trees(world, "ash", "birch")]
    everything = shown + [auto.pixels(pixels) for images in fresh.values() for pixels in images[:30]]
    changed, plain = (logits(learner, everything) for learner in (auto, never))
    torch.testing.assert_close(changed[:, others], plain[:, others], rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(changed[:, own].logsumexp(dim=1), plain[:, own].logsumexp(dim=1), rtol=1e-4, atol=1e-3)
    assert (changed[:, own].softmax(dim=1) - plain[:, own].softmax(dim=1)).abs().max() > 0.2
    assert torch.equal(changed[: len(shown)].argmax(dim=1), plain[: len(shown)].argmax(dim=1))
    assert auto.tasks[0] == before.tasks[0]

    auto.forget(task.id)
    assert torch.equal(logits(auto, shown).argmax(dim=1), logits(before, shown).argmax(dim=1))
    assert not any(prompt.numel() for name, prompt in auto._model.state.items() if name.startswith("prompts."))


@pytest.mark.parametrize("seed", [0, 1])
def test_prompts_that_learn_nothing_are_left_out(seed: int, world: World) -> None:
    """Classes that are alike: whatever was trained says nothing of images held out, and the model is as without."""
    images = quarters(EACH, seed, meant=False)
    auto, never = (
        ContinualLearner(str(world.weights), "dualprompt-lda", options=OPTIONS, device="cpu") for _ in range(2)
    )
    choice = auto.learn(images, epochs=10).prompts
    never.learn(images, prompts="never")
    assert choice is not None
    assert choice.held == 2 * EACH // 5, "they were tried"
    assert not choice.used
    assert auto._model.state["prompts.0"].numel() == 0
    shown = [pixels for own in images.values() for pixels in own[:10]]
    assert torch.equal(logits(auto, shown), logits(never, shown))
