"""How steps are carried out changes nothing: compiled passes, batches that are not of the usual size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dualprompt.backbones import vit
from dualprompt.data.specs import BatchSpec, Crop, ImageSpec, Look
from dualprompt.training.steps import Eager, Recorded, carried_out, ready_to_compile
from helpers import batch_of, random_dualprompt, random_images

CPU = torch.device("cpu")


class OneProcess:
    """What `carried_out` asks of a Fabric."""

    device = CPU
    world_size = 1


def fabric() -> Any:
    return OneProcess()


def spec(size: int, value: float = 0.0, replays: int = 0) -> BatchSpec:
    """A batch in which every number tells the value."""

    def images() -> ImageSpec:
        look = Look(torch.full((size,), int(value)), torch.ones(size, 2), (Crop(torch.full((size, 4), value)),))
        return ImageSpec(torch.full((size,), int(value)), look, query=torch.full((size, 3), value))

    return BatchSpec(images(), tuple(images() for _ in range(replays)), torch.tensor(value))


def test_a_spec_names_its_tensors_and_changes_them_all() -> None:
    found = spec(2, 1.0, replays=1)
    names = [name for name, _ in found.named()]
    one = ["labels", "look.index", "look.shapes", "look.crops.0.boxes", "query"]
    assert names == [f"main.{name}" for name in one] + [f"replays.0.{name}" for name in one] + ["weight"]
    doubled = found.map(lambda value: 2 * value)
    assert [float(value.sum()) for _, value in doubled.named()] == [
        2 * float(value.sum()) for _, value in found.named()
    ]
    assert doubled.main.frozen is None
    assert len(found) == 2


def test_a_key_tells_whatever_a_record_depends_on() -> None:
    assert spec(2, 1.0).key == spec(2, 5.0).key, "values do not matter"
    known = replace(spec(2), main=replace(spec(2).main, frozen=torch.zeros(2, 3)))
    halved = replace(spec(2), weight=torch.tensor(1.0, dtype=torch.float16))
    assert len({each.key for each in (spec(2), spec(3), spec(2, replays=1), known, halved)}) == 5


def test_values_are_taken_over_in_place() -> None:
    fixed, new = spec(2, 1.0, replays=2), spec(2, 7.0, replays=2)
    places = [value.data_ptr() for _, value in fixed.named()]
    fixed.copy_(new)
    assert [value.data_ptr() for _, value in fixed.named()] == places
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(fixed.named(), new.named(), strict=True))
    assert not {value.data_ptr() for _, value in new.clone().named()} & {v.data_ptr() for _, v in new.named()}
    with pytest.raises(ValueError):
        fixed.copy_(spec(2, 7.0, replays=1))


def test_a_step_gets_its_spec_and_works_by_side_effects() -> None:
    seen: list[BatchSpec] = []
    step = carried_out(seen.append, fabric(), full=3)
    for size in (3, 3, 3, 2):
        step(spec(size))
    assert [len(each) for each in seen] == [3, 3, 3, 2]


def test_only_the_usual_batch_is_compiled() -> None:
    compiled: list[int] = []

    def backend(graph: torch.fx.GraphModule, example: list[Tensor]) -> Any:
        compiled.append(len(example[0]))
        return graph.forward

    double = torch.compile(lambda x: x * 2, backend=backend, dynamic=False)
    results: list[Tensor] = []

    def step(found: BatchSpec) -> None:
        results.append(double(found.main.labels))

    carried = carried_out(step, fabric(), full=4)
    for size in (4, 4, 3, 1, 4):
        carried(spec(size, 1.0))
    assert compiled == [4]
    assert [result.tolist() for result in results] == [[2] * size for size in (4, 4, 3, 1, 4)]


def test_specs_that_are_in_place_are_not_copied() -> None:
    found = spec(3)
    assert found.to(CPU).main.labels is found.main.labels


class Tape:
    """Stands in for CUDA graphs: what it records is not done then, but when it is replayed, on the tensors of then."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def warm_up(self, step: Callable[[Any], None], spec: Any) -> None:
        self.told.append("warm up")
        step(spec)

    def record(self, step: Callable[[], None]) -> Callable[[], None]:
        self.told.append("record")

        def replay() -> None:
            self.told.append("replay")
            step()

        return replay


def test_a_step_is_recorded_once_its_shapes_have_come_before() -> None:
    tape, seen = Tape(), list[tuple[int, float, int]]()
    eager = Eager[BatchSpec](lambda s: seen.append((len(s), float(s.weight), s.main.labels.data_ptr())), CPU, full=3)
    step = Recorded(eager, tape)
    calls = [(3, 1.0), (3, 2.0), (2, 3.0), (3, 4.0), (2, 5.0), (3, 6.0), (2, 7.0), (3, 8.0)]
    for size, value in calls:
        step(spec(size, value))
    assert [(size, value) for size, value, _ in seen] == calls, "each call is carried out once, in order, on its values"
    warm, record, replay = "warm up", "record", "replay"
    assert tape.told == [warm, warm, warm, record, replay, warm, replay, record, replay, replay]
    replayed = [place for size, value, place in seen if size == 3 and value >= 4]
    assert len(set(replayed)) == 1, "a record reads the same memory each time"


def test_recorded_and_plain_steps_train_alike() -> None:
    def trained(recorded: bool) -> Tensor:
        weight = torch.ones(3, requires_grad=True)
        optimiser = torch.optim.Adam([weight], lr=0.1)

        def step(found: BatchSpec) -> None:
            optimiser.zero_grad(set_to_none=True)
            assert found.main.query is not None
            ((found.main.query * weight).square().mean() * found.weight).backward()
            optimiser.step()

        eager = Eager(step, CPU, full=4)
        carried = Recorded(eager, Tape()) if recorded else eager
        for number in range(7):
            carried(spec(4 if number % 3 else 2, number + 1.0))
        return weight.detach()

    assert torch.equal(trained(True), trained(False))
    assert not torch.equal(trained(True), torch.ones(3))


def test_without_a_gpu_nothing_is_recorded() -> None:
    assert isinstance(carried_out(lambda _: None, fabric(), full=3), Eager)


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
    method.loss(batch_of(images, method.head.labels[0] + torch.arange(6) % 3)).backward()
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
