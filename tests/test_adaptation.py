"""What adapts a frozen backbone: prefixes, LoRA and adapters behind one interface, merged or not; first sessions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dualprompt.backbones.base import Adapter, LayerPrompt, LowRank
from dualprompt.errors import DualPromptError
from dualprompt.methods.adaptation import Adaptation, Adapters, LowRanks, Prefixes
from dualprompt.methods.base import METHODS, Method, StreamKind, TaskView, method_config
from dualprompt.methods.contract import Phase
from dualprompt.methods.first_session import FirstSession
from dualprompt.methods.heads import CosineTrainingHead, TrainingHead
from dualprompt.methods.lora import LoRA, LoRAConfig
from dualprompt.methods.ranpac import RanPAC
from helpers import batch_of, random_images, seeded, task_view, tiny_resnet, tiny_vit

KINDS = ("prompts", "lora", "adapter")
HEADS = ("simple-cil", "lda", "klda", "ridge", "ranpac", "fecam", "anacp")
SMALL = {"rank": 2, "bottleneck": 3, "prompt_length": 2}


def make(name: str, **options: Any) -> Method:
    return METHODS[name](method_config({"name": name, **options}), tiny_vit())


def adaptations(layers: tuple[int, ...] = (2, 4)) -> list[Adaptation]:
    backbone = tiny_vit()
    return [
        Prefixes(backbone, layers, 3),
        LowRanks(backbone, layers, 2, ("k", "proj"), 0.5),
        Adapters(backbone, layers, 5, 0.3),
    ]


@torch.no_grad()
def shake(values: Any, seed: int = 9, scale: float = 0.3) -> None:
    """Move tensors as training would."""
    for value in values:
        value.add_(scale * torch.randn(value.shape, generator=seeded(seed)))


def task(index: int, images: Tensor | None = None) -> TaskView:
    """A task of three classes with its frozen features as queries."""
    shown = random_images(9, seed=30 + index) if images is None else images
    return task_view(index, queries=tiny_vit()(shown), images=shown, labels=torch.arange(9) % 3 + 3 * index)


@pytest.mark.parametrize("adaptation", adaptations(), ids=KINDS)
def test_a_new_set_trains_alone_and_the_others_stay(adaptation: Adaptation) -> None:
    backbone, images = tiny_vit(), random_images(3)
    adaptation.grow(seeded(1))
    first = adaptation.values()
    assert all(value.requires_grad for value in first.values())
    if not isinstance(adaptation, Prefixes):  # it begins as no change
        torch.testing.assert_close(backbone(images, adaptation.layers()), backbone(images))
    shake(first.values())
    kept = {name: value.detach().clone() for name, value in first.items()}
    with_first = backbone(images, adaptation.layers()).detach()
    adaptation.grow(seeded(2))
    shake(adaptation.values().values(), seed=4)
    assert len(adaptation) == 2
    assert adaptation.count == 2 * sum(value.numel() for value in first.values())
    assert not any(value.requires_grad for value in adaptation.values(0).values())
    assert all(torch.equal(value, kept[name]) for name, value in adaptation.values(0).items())
    assert torch.equal(backbone(images, adaptation.layers(0)), with_first)
    assert not torch.allclose(backbone(images, adaptation.layers()), with_first, atol=1e-3)
    copy = adaptations()[[type(each) for each in adaptations()].index(type(adaptation))]
    copy.restore({name: value.clone() for name, value in adaptation.state_dict().items()})
    assert copy.state_dict().keys() == adaptation.state_dict().keys()
    assert torch.equal(backbone(images, copy.layers()), backbone(images, adaptation.layers()))
    assert not any(value.requires_grad for value in copy.parameters())


def test_what_layers_receive_by_hand() -> None:
    prefixes, changes, adapters = adaptations()
    for each, every in zip((prefixes, changes, adapters), adaptations(()), strict=True):
        each.grow(seeded(1))
        shake(each.parameters())
        assert set(each.layers()) == {2, 4}
        assert every.at == (1, 2, 3, 4)
    second = prefixes.layers()[4]
    assert second.prefix is not None
    assert torch.equal(second.prefix[0], prefixes.values()["prefix"][1])
    deltas = changes.layers()[4].deltas
    assert deltas is not None
    down, up = changes.values()["down"][1, 1], changes.values()["up"][1, 1]
    x = torch.randn(2, 5, 32, generator=seeded(3))
    torch.testing.assert_close(deltas["proj"](x), 0.5 * x @ down.T @ up.T)
    adapter = adapters.layers()[2].adapter
    assert isinstance(adapter, Adapter)
    own = {name: value[0] for name, value in adapters.values().items()}
    hidden = (x @ own["down"].T + own["down_bias"]).clamp_min(0)
    torch.testing.assert_close(adapter(x), 0.3 * (hidden @ own["up"].T + own["up_bias"]))
    assert adapter.beside


def test_a_new_adapter_changes_nothing_and_has_no_bias() -> None:
    adapters = next(each for each in adaptations() if isinstance(each, Adapters))
    drawn = adapters.drawn(torch.Generator().manual_seed(0))
    assert {name for name, value in drawn.items() if value.any()} == {"down"}


def test_sums_of_changes_are_one_change() -> None:
    _, changes, _ = adaptations()
    assert isinstance(changes, LowRanks)
    for seed in range(3):
        changes.grow(seeded(seed))
    shake(changes.parameters())
    x, factors = torch.randn(2, 5, 32, generator=seeded(3)), [torch.tensor(value) for value in (0.5, 2.0, -1.0)]
    for given in (None, factors):
        summed = changes.summed(given)
        for layer in (2, 4):
            apart = [changes.layers(which)[layer].deltas for which in range(3)]
            scales = given or [torch.tensor(1.0)] * 3
            expected = sum(scale * deltas["k"](x) for scale, deltas in zip(scales, apart, strict=True) if deltas)
            found = summed[layer].deltas
            assert found is not None
            torch.testing.assert_close(found["k"](x), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merged_changes_are_the_same_but_for_rounding(dtype: torch.dtype) -> None:
    backbone, images = tiny_vit(mlp_dim=32).round_to(dtype), random_images(3).to(dtype)
    down, up = torch.randn(1, 2, 32, generator=seeded(1)), 0.2 * torch.randn(1, 32, 2, generator=seeded(2))
    deltas = {linear: LowRank(down, up, 0.5) for linear in ("q", "k", "v", "proj", "fc1", "fc2")}
    changes = {layer: LayerPrompt(deltas=deltas) for layer in (1, 3)}  # pyright: ignore[reportArgumentType]
    before = {name: value.clone() for name, value in backbone.state_dict().items()}
    merged = backbone.merged(changes)
    assert all(torch.equal(value, before[name]) for name, value in backbone.state_dict().items())
    assert not any(weight.requires_grad for weight in merged.parameters())
    rtol, atol = (0.1, 0.1) if dtype == torch.bfloat16 else (1e-4, 1e-5)
    torch.testing.assert_close(merged(images), backbone(images, changes), rtol=rtol, atol=atol)
    assert (merged(images) - backbone(images)).abs().max() > 0.5
    weight = merged.state_dict()["blocks.2.attn.qkv.weight"][32:64].float() - before["blocks.2.attn.qkv.weight"][32:64]
    torch.testing.assert_close(weight, 0.5 * (up @ down)[0], rtol=rtol, atol=atol)


@pytest.mark.parametrize(
    "layer",
    [
        LayerPrompt(prefix=torch.zeros(1, 2, 3, 32)),
        LayerPrompt(tokens=torch.zeros(1, 3, 32)),
        LayerPrompt(adapter=Adapter(torch.zeros(1, 2, 32), torch.zeros(1, 32, 2))),
        LayerPrompt(deltas={"q": LowRank(torch.zeros(2, 1, 32), torch.zeros(2, 32, 1))}),
    ],
    ids=["prefix", "tokens", "adapter", "of each image"],
)
def test_what_no_weight_can_hold_is_not_merged(layer: LayerPrompt) -> None:
    with pytest.raises(ValueError, match="only low-rank changes that all images share"):
        tiny_vit().merged({1: layer})


def test_a_merged_method_follows_its_weights_and_keeps_no_copy_in_its_state() -> None:
    methods = [LoRA(LoRAConfig(rank=3, merge=merge), tiny_vit()) for merge in (False, True)]
    images = random_images(4)
    for method in methods:
        method.begin_task(task(0))
    for seed in (1, 2):
        for method in methods:
            method.train()
            shake(method.adaptation.parameters(), seed)
            shake(method.head.parameters(), seed)
            method.eval()
        plain, merged = (method.predict(batch_of(images)).logits for method in methods)
        torch.testing.assert_close(merged, plain, rtol=1e-4, atol=1e-4)
    assert methods[0].state().keys() == methods[1].state().keys()
    merged = methods[1].train()
    assert merged.loss(batch_of(images, torch.arange(4) % 3)).requires_grad  # gradients reach A and B, not a copy


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"rank": 33}, "method.rank is 33; the backbone's linear maps have 32 dimensions"),
        ({"layers": [5]}, "method.layers has layer 5; the backbone's layers are 1 to 4"),
        ({"linears": ["q", "q"]}, "name each linear map once"),
        ({"linears": ["fc1"]}, "'method.linears"),
    ],
)
def test_options_that_cannot_be_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(DualPromptError) as refused:
        make("lora", **options)
    assert said in str(refused.value)


def test_a_phase_takes_its_part_of_the_recipes_epochs() -> None:
    parts = [Phase(part=(0.0, 0.6)), Phase(part=(0.6, 1.0))]
    assert [[phase.epochs_of(epochs) for phase in parts] for epochs in (1, 2, 3, 5, 10)] == [
        [0, 1],
        [1, 1],
        [1, 2],
        [3, 2],
        [6, 4],
    ]
    assert [Phase().epochs_of(7), Phase(epochs_factor=3).epochs_of(7), Phase(epochs=2).epochs_of(7)] == [7, 21, 2]


@pytest.mark.parametrize("kind", [TrainingHead, CosineTrainingHead])
def test_a_training_head_is_of_one_task_and_leaves_nothing(kind: type[TrainingHead]) -> None:
    head, features = kind(32), torch.randn(4, 32, generator=seeded(1))
    head.begin_task(task(1))
    labels = torch.tensor([3, 5, 4, 3])
    rows, places = torch.cat(list(head.weight)), torch.tensor([0, 2, 1, 0])
    if isinstance(head, CosineTrainingHead):
        head.sigma.data.fill_(7.0)
        assert rows.abs().max() <= 32**-0.5
        logits = torch.stack([7.0 * F.cosine_similarity(row[None], rows, dim=1) for row in features])
    else:
        assert not rows.any()
        logits = torch.zeros(4, 3)
    expected = -torch.stack([logits[i].log_softmax(0)[place] for i, place in enumerate(places)]).mean()
    torch.testing.assert_close(head.loss(features, labels), expected)
    state = {f"own.{name}": value.clone() for name, value in head.state_dict().items()}
    copy = kind(32)
    copy.restore_below("own", state)
    torch.testing.assert_close(copy.current(features), head.current(features))
    head.end_task()
    assert sum(value.numel() for value in head.state_dict().values()) == 0


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_first_session_adapts_every_prototype_head(name: str, kind: str) -> None:
    """What the head is solved from are the adapted features, of every task, and nothing moves after the first."""
    small = SMALL | {"g_layers": [1], "e_layers": [2, 3], "projection": 40, "strength": 3.0}
    own = {key: value for key, value in small.items() if key in METHODS[name].Config.model_fields}
    method = make(name, first_session=kind, **own)
    frozen = make(name, **{key: value for key, value in own.items() if key in ("projection", "strength")})
    views = [task(0), task(1)]
    method.begin_task(views[0])
    [phase] = method.phases(views[0])
    assert phase.epochs_factor == 4
    before = method.additional()
    assert before == sum(p.numel() for n, p in method.trainable().items() if not n.startswith("training_head."))
    loss = method.loss(batch_of(random_images(6), torch.arange(6) % 3))
    loss.backward()
    assert all(p.grad is not None for p in method.trainable().values())
    shake((p for n, p in method.trainable().items() if not n.startswith("training_head.")), scale=0.1)
    adapted = {n: p.detach().clone() for n, p in method.trainable().items() if not n.startswith("training_head.")}
    for index, view in enumerate(views):
        if index:
            method.begin_task(view)
            assert not method.phases(view)
            assert not any(n.startswith(("adaptation.", "bank.")) for n in method.trainable())
        method.end_task(view)
        read = adapted_features(method, next(iter(view.batches())).images)
        frozen.begin_task(task_view(index, queries=read, images=read, labels=view.targets, frozen=True))
        frozen.end_task(task_view(index, queries=read, images=read, labels=view.targets, frozen=True))
    for parameter, value in adapted.items():
        assert torch.equal(method.state()[parameter], value)
    asked = random_images(5, seed=8)
    expected = frozen.predict(batch_of_known(adapted_features(method, asked))).logits
    torch.testing.assert_close(method.eval().predict(batch_of(asked)).logits, expected, rtol=1e-3, atol=1e-3)
    assert method.additional() == before


@torch.no_grad()
def adapted_features(method: Method, images: Tensor) -> Tensor:
    backbone = method.backbone
    if isinstance(method, RanPAC):
        return backbone(images, method.training_prompts())
    assert isinstance(method, FirstSession)
    assert method.adaptation is not None
    return backbone(images, method.adaptation.layers())


def batch_of_known(features: Tensor) -> Any:
    batch = batch_of(features)
    batch.frozen = features
    return batch


def test_a_session_has_a_rate_of_its_own_and_adapters_a_tenth_of_it() -> None:
    for kind in KINDS:
        method = make("lda", first_session=kind, session_lr=0.02, **SMALL)
        method.begin_task(task(0))
        [phase] = method.phases(task(0))
        assert (phase.lr, phase.recipe) == (0.02, {"schedule": "cosine"})
        rates = {name: method.own_lr(name) for name in method.trainable()}
        slow = None if kind == "prompts" else 0.002
        assert rates == {name: slow if name.startswith("adaptation.") else None for name in rates}
    given = make("ranpac", first_session="adapter", adapter_lr=0.05, projection=40)
    given.begin_task(task(0))
    assert {given.own_lr(name) for name in given.trainable() if name.startswith("adaptation.")} == {0.05}


def test_a_session_needs_a_border_and_a_vit() -> None:
    method = make("ridge", first_session="adapter")
    method.accept(StreamKind(returns=True))
    with pytest.raises(DualPromptError, match="the first session ends at a border"):
        method.accept(StreamKind(bordered=False))
    options, resnet = method_config({"name": "lda", "first_session": "lora"}), tiny_resnet()
    with pytest.raises(DualPromptError, match="needs a backbone that takes prompts"):
        METHODS["lda"](options, resnet)


def test_a_strength_that_is_given_leaves_nothing_for_the_sums_to_choose() -> None:
    with pytest.raises(DualPromptError, match="strength_by: sums has nothing to choose"):
        method_config({"name": "ranpac", "strength": 5.0, "strength_by": "sums"})
