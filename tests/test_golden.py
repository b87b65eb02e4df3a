"""The authors' own model on small random weights: features, logits, selections, losses and gradients must agree."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dualprompt.backbones import weights
from dualprompt.methods.base import Batch
from dualprompt.methods.dualprompt import DualPrompt, DualPromptConfig
from helpers import vit_config

GOLDEN = Path(__file__).parent / "golden"


class Golden:
    """One file of vectors and our model with its weights."""

    def __init__(self, name, folder):
        with np.load(GOLDEN / f"{name}.npz") as file:
            self.file = {key: torch.from_numpy(np.asarray(file[key])) for key in file.files}
        path = folder / "backbone.npz"
        arrays: Any = {
            k.removeprefix("backbone/"): v.numpy() for k, v in self.file.items() if k.startswith("backbone/")
        }
        np.savez(path, **arrays)
        checkpoint = weights.read(str(path))
        assert vit_config(checkpoint).heads == int(self["heads"])
        backbone = weights.build(checkpoint, gelu="tanh")
        config = DualPromptConfig(
            g_layers=tuple(self["g_layers"].tolist()),
            e_layers=tuple(self["e_layers"].tolist()),
            g_length=self["g_prompt"].shape[2] if "g_prompt" in self.file else 0,
            e_length=self["e_prompt"].shape[3],
        )
        self.method = DualPrompt(config, backbone)
        self.per_task, self.task = int(self["classes_per_task"]), int(self["task"])
        self.images = self["images"].permute(0, 3, 1, 2)
        self.labels = self["labels"].long()

    def __getitem__(self, key):
        return self.file[key]

    @property
    def tasks(self):
        return self["task_key"].shape[0]

    def load(self, tasks):
        """Give the method the first `tasks` tasks, so that the last of them is the one in training."""
        e_prompts = self["e_prompt"].flatten(-2)  # (layers, 2, tasks, length, dim)
        kernel, bias = self["backbone/head/kernel"], self["backbone/head/bias"]
        state: Any = {
            "bank.g_prompt": self["g_prompt"].flatten(-2) if "g_prompt" in self.file else self.method.bank.g_prompt
        }
        for task in range(tasks):
            rows = slice(task * self.per_task, (task + 1) * self.per_task)
            state |= {
                f"bank.e_prompt.{task}": e_prompts[:, :, task],
                f"bank.task_key.{task}": self["task_key"][task],
                f"head.weight.{task}": kernel[:, rows].T,
                f"head.bias.{task}": bias[rows],
            }
        self.method.load_state(state)
        return self.method

    def batch(self):
        return Batch(lambda: self.images, self.labels)


@pytest.fixture(params=["paper_layers", "overlapping_layers", "e_only"])
def golden(request, tmp_path):
    return Golden(request.param, tmp_path)


def close(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_query_is_the_frozen_class_token(golden):
    with torch.no_grad():
        close(golden.method.backbone(golden.images), golden["query"])


def test_each_image_selects_the_same_task_and_gets_the_same_logits(golden):
    method = golden.load(golden.tasks)
    prediction = method.predict(golden.batch(), "query")
    assert prediction.selected is not None
    assert prediction.selected.tolist() == golden["test_selected"].tolist()
    assert len(set(prediction.selected.tolist())) > 1, "the vectors should mix tasks in one batch"
    close(prediction.logits, golden["test_logits"])
    features = method.backbone(golden.images, method.bank.prompts_for(prediction.selected))
    close(features.detach(), golden["test_feature"])


def test_training_features_loss_and_gradients(golden):
    method = golden.load(golden.task + 1)
    features = method.backbone(golden.images, method.bank.training_prompts())
    close(features.detach(), golden["train_feature"])
    own = slice(golden.task * golden.per_task, (golden.task + 1) * golden.per_task)
    close(method.head.current(features).detach(), golden["train_logits"][:, own])

    loss = method.loss(golden.batch())
    loss.backward()
    # Ours adds λ(1 − cos) where theirs subtracts the cosine.
    close(loss.detach() - 1, golden["loss"])
    bank, head, grad = method.bank, method.head, golden.file
    if "grad_g_prompt" in grad:
        close(bank.g_prompt.grad, grad["grad_g_prompt"].flatten(-2))
    close(bank.e_prompt[-1].grad, grad["grad_e_prompt"][:, :, golden.task].flatten(-2))
    close(bank.task_key[-1].grad, grad["grad_task_key"][golden.task])
    close(head.weight[-1].grad, grad["grad_head_kernel"][:, own].T)
    close(head.bias[-1].grad, grad["grad_head_bias"][own])
    untouched = [task for task in range(golden.tasks) if task != golden.task]
    assert not grad["grad_task_key"][untouched].any(), "their gradient, too, reaches the current key only"
    assert all(old.grad is None for old in (*bank.e_prompt[:-1], *bank.task_key[:-1]))
