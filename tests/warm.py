"""What the server of forks does before its first fork: it imports and carries out what most commands need, once.

A fork then has in a moment what a fresh process takes seconds for. One thread computes, so there is none to lose.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

from sandbox import call, make_world

torch.set_num_threads(1)
with tempfile.TemporaryDirectory(prefix="warm-") as folder:
    world = make_world(Path(folder))
    run, model, lesson = Path(folder) / "run", Path(folder) / "model", world.images / "train"
    for words in (
        ("run", world.preset, "--out", run, "--train.epochs", 1),
        ("learn", model, lesson, "--backbone", world.weights, "--device", "cpu"),
        ("predict", model, lesson / "ash", "--device", "cpu"),
    ):
        done = call(*words)
        assert done.code == 0, done.err
