"""What a method owns of each task, and how it forgets: the same as ever, for models that were saved long ago too."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dualprompt.errors import DualPromptError
from dualprompt.learner import ContinualLearner
from dualprompt.methods.base import METHODS, Batch, Method, MethodConfig, Prediction, Selection, TaskView, method_config
from helpers import backbone_for, batch_of, random_images, task_view, tiny_vit

# Models of nine classes in three tasks, of which one class was forgotten, and what they answered then: after that,
# after a whole task was forgotten, another class, and two more classes learned. An older version made them.
SAVED = Path(__file__).parent / "saved"
ANSWERS: dict[str, list[dict[str, Any]]] = json.loads((SAVED / "answers.json").read_text())
ASKED = ((np.arange(6 * 16 * 16 * 3).reshape(6, 16, 16, 3) * 37) % 251).astype(np.uint8)


def pictures(seed: int) -> list[np.ndarray]:
    return list(np.random.default_rng(seed).integers(0, 256, (6, 16, 16, 3), dtype=np.uint8))


@pytest.mark.parametrize("name", ANSWERS)
def test_models_of_long_ago_answer_forget_and_learn_as_they_did(name: str, tmp_path: Path) -> None:
    folder = shutil.copytree(SAVED / name, tmp_path / "model")
    learner = ContinualLearner.load(folder, device="cpu", backbone=str(SAVED / "vit.safetensors"))

    def check(expected: dict[str, Any]) -> None:
        with torch.inference_mode():
            logits, task, _ = learner.network()(torch.from_numpy(ASKED))
        assert learner.classes == tuple(expected["classes"])
        torch.testing.assert_close(logits, torch.tensor(expected["logits"]), rtol=1e-4, atol=1e-4)
        assert task.tolist() == expected["task"]
        assert [task.bytes for task in learner.tasks] == expected["bytes"]
        assert learner.shares_prompts == expected["shares"]

    loaded, without_task, without_class, learned = ANSWERS[name]
    check(loaded)
    learner.forget("task 1")
    check(without_task)
    learner.forget("class 20")
    check(without_class)
    learner.learn({f"class 3{n}": pictures(90 + n) for n in range(2)}, "task 3", epochs=1)
    check(learned)


def after(name: str, tasks: int, **options: Any) -> Method:
    """A method that has been through so many tasks of three classes, without any step."""
    images, labels = random_images(6), torch.arange(6) % 3
    method = METHODS[name](method_config({"name": name, **options}), backbone_for(name))
    queries = method.backbone(images)
    for index in range(tasks):
        view = task_view(index, queries=queries, images=images, labels=labels + 3 * index)
        method.begin_task(view)
        for phase in method.phases(view):
            method.begin_phase(phase, view)
        method.eval()
        method.end_task(view)
    return method


# What a task adds that is not its own: components or changes whose sum every image gets; corrections that rehearsal
# methods, which no learner has, never forget.
GROW = ("dynaer", "rpsnet", "supsup")  # networks, not states; no learner has them
LOW_RANK = ("adaptation.down", "adaptation.up")
EVERYBODYS = {
    "coda-prompt": ("prompt", "key", "attention"),
    "bic": ("correction",),
    "inflora": LOW_RANK,
    "sd-lora": (*LOW_RANK, "magnitude"),
}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, {}) for name in METHODS.names() if name not in GROW),
        ("dualprompt", {"head": "ridge", "matching": "keys", "keys_per_task": 2}),
        ("dualprompt", {"head": "gaussian", "matching": "gaussian", "align_steps": 2}),
        ("l2p", {"pool": "by_task"}),
    ],
)
def test_what_a_task_adds_is_its_own_or_said_to_be_everybodys(name: str, options: dict[str, Any]) -> None:
    """A method with a new tensor for each task must say whose it is, or forgetting would silently leave it."""
    small = {"projection": 8} if "projection" in METHODS[name].Config.model_fields else {}
    two, three = (after(name, tasks, **small, **options) for tasks in (2, 3))
    added = three.state().keys() - two.state().keys()
    others = {key for key in added if key.rpartition(".")[0] in EVERYBODYS.get(name, ())}
    assert three.owned_by(2).keys() == added - others
    assert len(others) == len(EVERYBODYS.get(name, ()))
    assert all(value.shape == three.state()[key].shape for key, value in three.owned_by(2).items())


@pytest.mark.parametrize("name", GROW)
def test_networks_that_grow_are_for_no_learner(name: str) -> None:
    why = "does not say what it keeps for a task|trains the backbone or keeps images"
    with pytest.raises(DualPromptError, match=f"'{name}' ({why})"):
        ContinualLearner("resnet18-cifar-nf4", name, device="cpu")


class Silent(Method[MethodConfig]):
    """Says nothing of what it keeps."""

    def begin_task(self, task: TaskView) -> None: ...

    def loss(self, batch: Batch) -> Tensor:
        return torch.zeros(())

    def predict(self, batch: Batch, selection: Selection | None = None) -> Prediction:
        return Prediction(torch.zeros(len(batch.labels), 1))

    def load_state(self, state: dict[str, Tensor]) -> None: ...


def test_a_method_that_says_nothing_of_its_tasks_is_not_guessed_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(METHODS, "_things", {**METHODS._things, "silent": Silent})
    with pytest.raises(DualPromptError, match="'silent' does not say what it keeps for a task; take dualprompt"):
        ContinualLearner(str(SAVED / "vit.safetensors"), "silent", device="cpu")
    method = Silent(MethodConfig(name="silent"), tiny_vit())
    assert not method.can_forget
    assert after("lda", 1).can_forget
    for ask in (
        lambda: method.owned_by(0),
        lambda: method.forget(0, [0], None),
        lambda: method.drop_classes([0]),
        lambda: method.refuse_misfits([1], 1),
        lambda: method.shares_prompts,
    ):
        with pytest.raises(DualPromptError, match="'silent' does not say what it keeps for a task"):
            ask()


def test_other_classes_stay_as_they_are_when_one_goes() -> None:
    method = after("lda", 2)
    batch = batch_of(random_images(4, seed=5))
    before = method.predict(batch).logits
    method.forget(1, [4], [1])
    now = method.predict(batch).logits
    assert torch.equal(now[:, [0, 1, 2, 3, 5]], before[:, [0, 1, 2, 3, 5]])
    assert not now[:, 4].any()
    method.refuse_misfits([3, 2], 6)
    with pytest.raises(ValueError, match="other classes"):
        method.refuse_misfits([3, 3], 6)
    method.drop_classes([4])
    torch.testing.assert_close(method.predict(batch).logits, before[:, [0, 1, 2, 3, 5]])
    assert method.owned_by(1)["discriminant.means.1"].shape[0] == method.owned_by(1)["head.bias.1"].shape[0] == 2
