"""The one-file DualPrompt and the package learn the same from the same pictures and seeds."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from PIL import Image

from dualprompt.config import compose
from dualprompt.run.folder import Run
from dualprompt.training import group
from dualprompt.training.loop import train
from dualprompt.training.setup import prepare
from sandbox import World

FILE = Path(__file__).parent.parent / "examples" / "minimal.py"
TASKS = (("ash", "birch"), ("cedar", "elm", "fir"))
SMALL = {"g_layers": [1], "e_layers": [2, 3], "g_length": 2, "e_length": 3}


def minimal() -> ModuleType:
    spec = importlib.util.spec_from_file_location("minimal", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def draw(folder: Path, names: tuple[str, ...], count: int, seed: int) -> None:
    """Pictures as large as the network sees them, so that nobody has to resize any."""
    rng = np.random.default_rng(seed)
    for number, name in enumerate(names):
        (folder / name).mkdir(parents=True)
        for i in range(count):
            pixels = np.clip(50 * number + rng.normal(60, 50, (16, 16, 3)), 0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{i:02}.png")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number, names in enumerate(TASKS):
        draw(tmp_path / "train", names, 7, number)
        draw(tmp_path / "test", names, 4, 10 + number)
        draw(tmp_path / "tasks" / str(number + 1), names, 7, number)
        draw(tmp_path / "tests" / str(number + 1), names, 4, 10 + number)
    return tmp_path


def test_both_learn_the_same(world: World, folder: Path, tmp_path: Path) -> None:
    one = minimal()
    options = {f"method.{key}": value for key, value in SMALL.items()}
    options |= {"benchmark.dataset": str(folder), "benchmark.tasks": [list(names) for names in TASKS], "seed": 3}
    options |= {"train.lr": 0.05, "train.lr_scale": "none", "train.batch_size": 4, "train.epochs": 3}
    config = group.plan([compose(str(world.preset), None, options | {"method.name": "dualprompt"})], baseline=False)
    setup = prepare(config[0].config)
    run = Run.create(tmp_path / "run", setup.config, setup.stream, setup.weights, setup.precision)
    result = train(setup, run)
    lines = [json.loads(line) for line in run.metrics_path.read_text().splitlines()]
    losses = [line["loss"] for line in lines if line["event"] == "epoch"]

    vit, facts = one.load_vit(world.weights)
    model = one.DualPrompt(vit, seed=3, **{key: tuple(v) if isinstance(v, list) else v for key, v in SMALL.items()})
    found = []
    for number in (1, 2):
        images, labels, names = one.read_folder(folder / "tasks" / str(number), vit.size, facts)
        assert tuple(names) == TASKS[number - 1]
        found += list(one.learn(model, images, labels, epochs=3, batch=4, lr=0.05))
    assert found == pytest.approx(losses, rel=1e-4)
    assert losses[2] < losses[0]  # there was something to learn

    state = setup.method.state()
    for name, mine in (("bank.g_prompt", model.g_prompt), ("bank.e_prompt.1", model.e_prompts[1])):
        torch.testing.assert_close(state[name], mine.data, rtol=1e-3, atol=1e-4)
    right = []
    for number, subset in enumerate(setup.evaluated(2)):
        images, labels, _ = one.read_folder(folder / "tests" / str(number + 1), vit.size, facts)
        logits, task = model.predict(images)
        batches = [setup.feed.batch(subset.images, spec) for spec in setup.feed.evaluation(subset, True)]
        theirs = [setup.method.predict(batch) for batch in batches]
        torch.testing.assert_close(torch.cat([each.logits for each in theirs]), logits, rtol=1e-3, atol=1e-4)
        assert torch.cat([each.selected for each in theirs if each.selected is not None]).tolist() == task.tolist()
        first = sum(map(len, TASKS[:number]))
        right.append(100 * (logits.argmax(dim=1) == first + labels).float().mean().item())
    assert right == pytest.approx(result["accuracy_matrix"][-1])


def test_it_stands_alone_and_prints_what_it_learns(world: World, folder: Path) -> None:
    text = FILE.read_text(encoding="utf-8")
    assert "import dualprompt" not in text
    assert "from dualprompt" not in text
    assert len(text.splitlines()) <= 260
    command = [sys.executable, "-I", str(FILE), str(world.weights), *map(str, sorted((folder / "tasks").iterdir()))]
    printed = subprocess.run([*command, "--epochs", "1"], check=True, capture_output=True, text=True).stdout
    assert printed.count("epoch 1, loss") == 2
    assert printed.count("% right") == 3
