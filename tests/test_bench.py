"""The straight-line twin agrees with the method, and `bench` reports what it promises. Nothing here is timed."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dualprompt.bench import reference, speed
from dualprompt.config import TrainConfig
from dualprompt.methods.base import Batch
from dualprompt.training.optimise import make_optimiser
from helpers import as_vit, batch_of, random_dualprompt, random_images, spread_keys
from sandbox import VIT, World, call, write_weights

OVERLAP: dict[str, Any] = {"g_layers": (1, 2), "e_layers": (2, 3)}


def test_fast_and_straight_line_predictions_agree():
    method, images = random_dualprompt(tasks=4, **OVERLAP), random_images(24)
    assert len(set(spread_keys(method, images).tolist())) == 4
    fast = method.predict(batch_of(images), "query")
    logits, selected = reference.predict(method, as_vit(method.backbone), images)
    assert fast.selected is not None
    assert fast.selected.tolist() == selected.tolist()
    torch.testing.assert_close(fast.logits, logits, rtol=1e-4, atol=1e-5)
    assert fast.logits.argmax(dim=1).tolist() == logits.argmax(dim=1).tolist()


def test_fast_and_straight_line_prompts_agree_after_an_epoch():
    fast, slow = (random_dualprompt(tasks=2, **OVERLAP) for _ in range(2))
    images = random_images(30)
    labels = fast.head.labels[0] + torch.arange(30) % 3
    with torch.no_grad():
        known = fast.backbone(images)
    optimisers = [make_optimiser(method, TrainConfig()) for method in (fast, slow)]
    before = {name: value.clone() for name, value in fast.state().items()}
    for start in range(0, 30, 8):
        rows = slice(start, start + 8)
        losses = (
            fast.loss(Batch(lambda rows=rows: images[rows], labels[rows], query=known[rows])),
            reference.loss(slow, as_vit(slow.backbone), images[rows], labels[rows]),
        )
        for loss, optimiser in zip(losses, optimisers, strict=True):
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
        torch.testing.assert_close(losses[0], losses[1], rtol=1e-5, atol=1e-5)
    assert not torch.equal(fast.state()["bank.e_prompt.1"], before["bank.e_prompt.1"])
    for name, value in fast.state().items():
        torch.testing.assert_close(value, slow.state()[name], rtol=1e-4, atol=2e-5, msg=name)


def test_the_command_reports_rates_ratios_and_growth(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speed, "QUICK", speed.Effort(rounds=1, seconds=0, steps=3))
    write_weights(tmp_path / "deep.safetensors", replace(VIT, depth=5))
    options = ("--backbone", tmp_path / "deep.safetensors", "--batch", "4", "--device", "cpu", "--quick")
    found = call("bench", *options, "--json").json
    assert [rate["what"] for rate in found["rates"]][0::2] == ["train, query known", "evaluate, query known"]
    for rate in found["rates"]:
        assert rate["ratio"] == pytest.approx(rate["ours"] / rate["reference"])
    assert found["train_ratio"] == found["rates"][0]["ratio"]
    assert 0 <= found["others_percent"] <= 100
    assert found["eval_ratio"] == found["rates"][2]["ratio"]
    prompts, key, rows = 3 * 2 * 20 * VIT.dim, VIT.dim, 10 * (VIT.dim + 1)
    assert found["growth"]["bytes_a_task"] == 4 * (prompts + key + rows)
    table = call("bench", *options).out
    assert "evaluate, both passes" in table
    assert " % of the processor meanwhile" in table
    assert "prediction with 1,000 v 10 tasks" in table


def test_the_command_refuses_what_it_cannot_measure(world: World) -> None:
    options = ("--backbone", world.weights, "--device", "cpu", "--quick")
    assert "'precision'" in call("bench", *options, "--precision", "fp99").error
    assert "--batch takes numbers of at least 1" in call("bench", *options, "--batch", "0").error
    # The tiny backbone has 3 layers; the paper's prompts reach layer 5.
    assert "the backbone's layers are 1 to 3" in call("bench", *options).error
