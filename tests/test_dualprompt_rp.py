"""DualPrompt with projected heads, and RanPAC with a first session: by hand, image by image."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dualprompt.backbones.vit import VisionTransformer
from dualprompt.methods.base import TaskView
from dualprompt.methods.dualprompt_rp import DualPromptRP, DualPromptRPConfig
from dualprompt.methods.experts import SHARPNESS, Experts
from dualprompt.methods.ranpac import RanPAC, RanPACConfig
from helpers import batch_of, of_labels, random_images, task_view, tiny_vit

CLASSES, IMAGES, M = 3, 24, 30
SMALL: dict[str, Any] = {"g_layers": (1,), "e_layers": (2, 3), "g_length": 2, "e_length": 3, "projection": M}


def view_of(index: int) -> TaskView:
    labels = torch.arange(IMAGES) % CLASSES + CLASSES * index
    return task_view(index, CLASSES, images=images_of(index), labels=labels, batch_size=7)


def images_of(index: int) -> Tensor:
    pull = torch.arange(IMAGES) % CLASSES + CLASSES * index
    return random_images(IMAGES, seed=20 + index) + pull[:, None, None, None] / 2


def step(method: Experts, view: TaskView, rate: float = 0.5) -> None:
    """A few steps of plain gradient descent on what trains."""
    for _ in range(3):
        for batch in view.batches():
            trained = list(method.trainable().values())
            gradients = torch.autograd.grad(method.loss(batch), trained)
            with torch.no_grad():
                for parameter, gradient in zip(trained, gradients, strict=True):
                    parameter -= rate * gradient


def taught(tasks: int = 3, vit: VisionTransformer | None = None, **options: Any) -> DualPromptRP:
    method = DualPromptRP(DualPromptRPConfig(**{**SMALL, **options}), vit or tiny_vit())
    for index in range(tasks):
        method.begin_task(view_of(index))
        step(method, view_of(index))
        method.end_task(view_of(index))
    return method


def feature(vit: VisionTransformer, method: Experts, images: Tensor, e_prompt: Tensor, patches: bool) -> np.ndarray:
    """What the projection reads, in one straight pass: every token in every layer."""
    prompts = method.bank.shared_prompts(e_prompt)
    x = vit.embed(images)
    middle = x
    for number, block in enumerate(vit.blocks, start=1):
        middle = x
        x = block(x, prompts.get(number))
    found = vit.norm(x)[:, 0]
    if patches:
        found = torch.cat([found, vit.norm(middle)[:, 1:].mean(dim=1)], dim=1)
    return found.detach().double().numpy()


def ridge(inputs: np.ndarray, labels: np.ndarray, classes: int, share: float) -> np.ndarray:
    gram = inputs.T @ inputs
    strength = share * np.diag(gram).mean()
    return np.linalg.solve(gram + strength * np.eye(len(gram)), inputs.T @ np.eye(classes)[labels])


@pytest.mark.parametrize("reads", ["class", "class+patches"])
def test_the_shared_prompts_find_the_task_and_its_own_name_the_class(reads: str) -> None:
    vit = tiny_vit()
    method = taught(vit=vit, reads=reads, own_share=0.6, strength_share=0.003)
    tests = torch.cat([random_images(5, seed=90 + t) + (t + 1) for t in range(3)])
    found = method.predict(batch_of(tests))

    shared, own, labels = [], [], []
    first = method.bank.e_prompt[0]
    for task in range(3):
        shared.append(feature(vit, method, images_of(task), first, reads != "class"))
        own.append(feature(vit, method, images_of(task), method.bank.e_prompt[task], reads != "class"))
        labels.append((torch.arange(IMAGES) % CLASSES + CLASSES * task).numpy())

    def scores(head: Any, training: list[np.ndarray], tested: np.ndarray) -> np.ndarray:
        drawn = head.projection.double().numpy()
        hidden = np.maximum(np.concatenate(training) @ drawn, 0)
        return np.maximum(tested @ drawn, 0) @ ridge(hidden, np.concatenate(labels), 9, 0.003)

    by_shared = scores(method.by_shared, shared, feature(vit, method, tests, first, reads != "class"))
    selected = by_shared.argmax(axis=1) // CLASSES
    assert len(set(selected)) > 1
    assert found.selected is not None
    assert found.selected.tolist() == selected.tolist()
    of_own = np.concatenate(
        [
            feature(vit, method, image[None], method.bank.e_prompt[int(task)], reads != "class")
            for image, task in zip(tests, selected, strict=True)
        ]
    )
    by_own = scores(method.by_own, own, of_own)
    np.testing.assert_allclose(found.logits.numpy() / SHARPNESS, 0.4 * by_shared + 0.6 * by_own, atol=5e-3)


def test_what_the_sums_were_taken_of_never_changes() -> None:
    method = taught(tasks=1)
    g_prompt, first = method.bank.g_prompt.clone(), method.bank.e_prompt[0].clone()
    assert torch.equal(method.shared_prompt, first)
    second = view_of(1)
    method.begin_task(second)
    assert torch.equal(method.bank.e_prompt[1], first)  # it starts from the one before
    step(method, second)
    method.end_task(second)
    assert torch.equal(method.bank.g_prompt, g_prompt)
    assert torch.equal(method.bank.e_prompt[0], first)
    assert torch.equal(method.shared_prompt, first)
    assert not torch.equal(method.bank.e_prompt[1], first)


def test_only_the_first_task_trains_the_g_prompt_and_longer() -> None:
    method = DualPromptRP(DualPromptRPConfig(**SMALL, first_factor=3), tiny_vit())
    for index in range(2):
        method.begin_task(view_of(index))
        assert ("bank.g_prompt" in method.trainable()) == (index == 0)
        [phase] = method.phases(view_of(index))
        assert phase.epochs_factor == (3 if index == 0 else 1)
        method.end_task(view_of(index))


def test_a_single_class_has_nothing_to_train_and_is_still_known() -> None:
    method = taught(tasks=1)
    labels = torch.full((IMAGES,), CLASSES)
    single = of_labels(task_view(1, 1, images=images_of(5), labels=labels), CLASSES, 1)
    method.begin_task(single)
    assert not method.phases(single)
    method.end_task(single)
    assert method.predict(batch_of(images_of(5))).logits.shape == (IMAGES, CLASSES + 1)
    assert (method.predict(batch_of(images_of(5))).logits.argmax(dim=1) == CLASSES).float().mean() > 0.8


def test_each_image_is_judged_alone() -> None:
    method = taught()
    images = torch.cat([images_of(task)[:4] for task in range(3)])
    together = method.predict(batch_of(images)).logits
    alone = torch.cat([method.predict(batch_of(image[None])).logits for image in images])
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-5)


def test_the_oracle_gets_the_true_tasks_and_nobody_else() -> None:
    method = taught()
    images = images_of(2)[:5]
    batch = batch_of(images)
    batch.task = torch.tensor([2, 1, 0, 1, 2])
    assert method.predict(batch, "oracle").selected.tolist() == [2, 1, 0, 1, 2]  # pyright: ignore[reportOptionalMemberAccess]
    without = method.predict(batch_of(images)).logits
    assert torch.equal(method.predict(batch).logits, without)


def test_ranpac_after_a_first_session_reads_the_first_tasks_prompts_for_ever() -> None:
    vit = tiny_vit()
    method = RanPAC(RanPACConfig(**SMALL, first_session="prompts", strength=2.0), vit)
    for index in range(2):
        view = view_of(index)
        method.begin_task(view)
        assert bool(method.phases(view)) == (index == 0)
        if index == 0:
            step(method, view)
        method.end_task(view)
    assert method.bank.tasks == 1
    tests = images_of(0)[:6]
    prompt = method.bank.e_prompt[0]
    drawn = method.projected.projection.double().numpy()
    hidden = np.concatenate([feature(vit, method, images_of(t), prompt, False) for t in range(2)])
    hidden = np.maximum(hidden @ drawn, 0)
    labels = np.concatenate([np.arange(IMAGES) % CLASSES + CLASSES * t for t in range(2)])
    gram = hidden.T @ hidden + 2.0 * np.eye(M)
    weight = np.linalg.solve(gram, hidden.T @ np.eye(6)[labels])
    expected = np.maximum(feature(vit, method, tests, prompt, False) @ drawn, 0) @ weight
    np.testing.assert_allclose(method.predict(batch_of(tests)).logits.numpy() / SHARPNESS, expected, atol=5e-3)
    frozen = vit(tests)
    assert not torch.allclose(torch.from_numpy(feature(vit, method, tests, prompt, False)).float(), frozen, atol=1e-2)


def test_prompts_of_both_kinds_are_patches_of_neither() -> None:
    """Pro-T puts prompts into the sequence; the mean is of the patches alone."""
    vit = tiny_vit()
    method = DualPromptRP(DualPromptRPConfig(**SMALL, prompting="pro-t"), vit)
    method.begin_task(view_of(0))
    images = random_images(2, seed=3)
    prompts = method.bank.training_prompts()
    x = vit.embed(images)
    for number, block in enumerate(vit.blocks[:-1], start=1):
        if number in prompts:
            tokens = prompts[number].tokens
            assert tokens is not None
            x = torch.cat([tokens.expand(2, -1, -1), x], dim=1)
        x = block(x)
    expected = vit.norm(x)[:, -(vit.config.grid**2) :].mean(dim=1)
    found = method.read(vit.stem(images), prompts)
    assert found.shape == (2, 2 * vit.config.dim)
    torch.testing.assert_close(found[:, vit.config.dim :], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("share", [0.003, None])
def test_what_is_plain_is_said_with_confidence(share: float | None) -> None:
    """Whatever λ, which draws all scores towards 0: a pattern a class, and little else."""
    method = DualPromptRP(DualPromptRPConfig(**{**SMALL, "projection": 200, "strength_share": share}), tiny_vit())
    patterns = random_images(9, seed=1)
    for index in range(3):
        labels = torch.arange(IMAGES) % CLASSES + CLASSES * index
        images = patterns[labels] + random_images(IMAGES, seed=2 + index) / 10
        view = task_view(index, CLASSES, images=images, labels=labels, batch_size=7)
        method.begin_task(view)
        method.end_task(view)
    sure = method.predict(batch_of(patterns)).logits.softmax(dim=1)
    assert sure.argmax(dim=1).tolist() == list(range(9))
    assert float(sure.amax(dim=1).median()) > 0.6
