"""What every method owes its callers, whichever it is."""

from __future__ import annotations

import re
from typing import get_args

import pytest
import torch

from dualprompt.errors import DualPromptError
from dualprompt.methods.base import METHODS, Method, Selection, method_config
from helpers import batch_of, random_images, seeded, task_view, tiny_vit

SOLVED = {"dualprompt-rp", "klda", "lda", "ranpac", "ridge", "simple-cil"}  # answer from what a task's end solved for


def make(name: str) -> Method:
    return METHODS[name](method_config({"name": name}), tiny_vit(depth=12))


@pytest.mark.parametrize("name", METHODS.names())
def test_a_selection_that_it_does_not_have_is_refused(name: str) -> None:
    method = make(name)
    method.begin_task(task_view(0, queries=torch.randn(6, 32, generator=seeded(0))))
    for selection in get_args(Selection):
        if selection in method.selections:
            method.check_selection(selection)
            continue
        with pytest.raises(DualPromptError, match=re.escape(f"method '{name}' has no selection '{selection}'")):
            method.predict(batch_of(random_images(1)), selection)
    method.check_selection(None)


@pytest.mark.parametrize("name", METHODS.names())
def test_answers_follow_weights_that_steps_changed_unseen(name: str) -> None:
    """A step that is replayed as a CUDA graph changes weights in place, and no line of `loss` is run."""
    images, labels = random_images(6), torch.arange(6) % 3
    method = make(name)
    queries = method.backbone(images)
    for index in range(2):
        view = task_view(index, queries=queries, images=images, labels=labels + 3 * index)
        method.begin_task(view)
        for phase in method.phases(view):
            method.begin_phase(phase, view)
        if index == 0:
            method.end_task(view)
    method.eval()
    before = method.predict(batch_of(images)).logits
    for seed in (1, 2):
        method.train()
        with torch.no_grad():
            for parameter in method.trainable().values():
                parameter.add_(torch.randn(parameter.shape, generator=seeded(seed)))
        method.eval()
        now = method.predict(batch_of(images)).logits
        copy = make(name)
        copy.load_state({key: value.clone() for key, value in method.state().items()})
        torch.testing.assert_close(now, copy.eval().predict(batch_of(images)).logits)
        assert name in SOLVED or not torch.equal(now, before)
        before = now
