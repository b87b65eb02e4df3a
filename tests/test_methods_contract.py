"""What every method owes its callers, whichever it is."""

from __future__ import annotations

import re
from typing import get_args

import pytest
import torch

from dualprompt.errors import DualPromptError
from dualprompt.methods.base import METHODS, Method, Selection, method_config
from helpers import batch_of, random_images, seeded, task_view, tiny_vit


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
