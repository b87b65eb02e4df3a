"""How steps are carried out changes nothing: compiled passes, batches that are not of the usual size."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dualprompt.backbones import vit
from dualprompt.training.steps import Inputs, Steps, on_device, ready_to_compile
from helpers import batch_of, random_dualprompt, random_images


class OneProcess:
    """What `Steps` asks of a Fabric."""

    device = torch.device("cpu")
    world_size = 1


def fabric() -> Any:
    return OneProcess()


def test_a_step_gets_its_inputs_and_works_by_side_effects() -> None:
    seen: list[Inputs] = []
    steps = Steps(seen.append, fabric(), full=3)
    for size in (3, 3, 3, 2):
        steps({"rows": torch.arange(size), "weight": torch.tensor(1.0)})
    assert [len(inputs["rows"]) for inputs in seen] == [3, 3, 3, 2]
    assert all(torch.equal(inputs["rows"], torch.arange(len(inputs["rows"]))) for inputs in seen)


def test_only_the_usual_batch_is_compiled() -> None:
    compiled: list[int] = []

    def backend(graph: torch.fx.GraphModule, example: list[Tensor]) -> Any:
        compiled.append(len(example[0]))
        return graph.forward

    double = torch.compile(lambda x: x * 2, backend=backend, dynamic=False)
    results: list[Tensor] = []
    steps = Steps(lambda inputs: results.append(double(inputs["x"])), fabric(), full=4)
    for size in (4, 4, 3, 1, 4):
        steps({"x": torch.ones(size)})
    assert compiled == [4]
    assert [result.tolist() for result in results] == [[2.0] * size for size in (4, 4, 3, 1, 4)]


def test_inputs_that_are_in_place_are_not_copied() -> None:
    there = torch.zeros(3)
    assert on_device({"x": there}, torch.device("cpu"))["x"] is there


def test_compiled_code_is_kept_in_our_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DUALPROMPT_CACHE", str(tmp_path))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    assert ready_to_compile() == str(tmp_path / "compiled")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/somewhere/else")
    assert ready_to_compile() == "/somewhere/else"


def test_more_shapes_than_pytorch_allows_are_compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    ready_to_compile()
    compiled = []

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., object]:
        compiled.append(graph)
        return graph.forward

    double = torch.compile(lambda x: x * 2, backend=backend, dynamic=False)
    for size in range(2, 14):
        assert double(torch.ones(size)).sum() == 2 * size
    assert len(compiled) == 12


def outcome(compiled: bool) -> dict[str, Tensor]:
    """Predictions, loss and gradients of a method, with images whose picks differ."""
    method = random_dualprompt(tasks=3, g_layers=(1, 2), e_layers=(2, 3))
    method.backbone.compiled = compiled
    images = random_images(6)
    prediction = method.predict(batch_of(images), "query")
    assert prediction.selected is not None
    method.loss(batch_of(images, method.head.first_newest + torch.arange(6) % 3)).backward()
    gradients = {name: p.grad for name, p in method.named_parameters() if p.grad is not None}
    return {"logits": prediction.logits, "selected": prediction.selected.float(), **gradients}


def test_compiled_passes_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the tracer but not the code generator, which would take half a minute; the slow test has both."""
    monkeypatch.setattr(vit, "compiled", lambda function: torch.compile(function, dynamic=False, backend="aot_eager"))
    plain, traced = outcome(False), outcome(True)
    assert plain.keys() == traced.keys()
    for name, value in plain.items():
        torch.testing.assert_close(traced[name], value, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.slow
def test_generated_code_agrees() -> None:
    plain, compiled = outcome(False), outcome(True)
    for name, value in plain.items():
        torch.testing.assert_close(compiled[name], value, rtol=1e-4, atol=1e-5, msg=name)
