"""Low-rank changes and adapters go in where prompts do; they are the giver's, and the backbone stays as it is."""

from __future__ import annotations

import copy
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from dualprompt.backbones import vit
from dualprompt.backbones.base import Adapter, LayerPrompt, Linear, LowRank, Prompts
from dualprompt.backbones.vit import VisionTransformer
from helpers import random_images, seeded, tiny_vit

LINEARS: tuple[Linear, ...] = get_args(Linear)
RANK, WIDTH = 2, 5


def precise_vit(**options: Any) -> VisionTransformer:
    return tiny_vit(**options).double()


def sizes(network: VisionTransformer, linear: Linear) -> tuple[int, int]:
    """(outputs, inputs) of a linear map."""
    dim, hidden = network.config.dim, network.config.mlp_dim
    first = 2 * hidden if network.config.mlp == "swiglu" else hidden
    return {"fc1": (first, dim), "fc2": (dim, hidden)}.get(linear, (dim, dim))


def draw(network: VisionTransformer, linear: Linear, images: int = 1, seed: int = 5) -> LowRank:
    outputs, inputs = sizes(network, linear)
    generator = seeded(seed + LINEARS.index(linear))
    down = 0.3 * torch.randn(images, RANK, inputs, generator=generator, dtype=torch.float64)
    up = 0.3 * torch.randn(images, outputs, RANK, generator=generator, dtype=torch.float64)
    return LowRank(down.requires_grad_(), up.requires_grad_(), scale=0.7)


def deltas(network: VisionTransformer, linears: tuple[Linear, ...], images: int = 1) -> dict[Linear, LowRank]:
    return {linear: draw(network, linear, images) for linear in linears}


@torch.no_grad()
def merged(network: VisionTransformer, changes: dict[int, dict[Linear, LowRank]], image: int = 0) -> VisionTransformer:
    """A ViT of its own whose weights are W + scale · up · down."""
    own = copy.deepcopy(network)
    for layer, of_layer in changes.items():
        block = own.blocks[layer - 1]
        assert isinstance(block, vit.Block)
        dim = own.config.dim
        places = {"proj": block.attn.proj, "fc1": block.mlp.fc1, "fc2": block.mlp.fc2}
        for linear, delta in of_layer.items():
            change = delta.scale * delta.up[image] @ delta.down[image]
            if linear in places:
                places[linear].weight += change
            else:
                start = "qkv".index(linear) * dim
                block.attn.qkv.weight[start : start + dim] += change
    return own


@pytest.mark.parametrize("linears", [("q", "v"), LINEARS, *((linear,) for linear in LINEARS)], ids="-".join)
@pytest.mark.parametrize("options", [{}, {"mlp": "swiglu", "qkv_bias": False, "layer_scale": True}], ids=["", "swiglu"])
def test_low_rank_changes_are_those_of_the_weights(linears: tuple[Linear, ...], options: dict[str, Any]) -> None:
    network, images = precise_vit(**options), random_images(3).double()
    changes = {layer: deltas(network, linears) for layer in (1, 3, 4)}  # the last computes one token only
    prompts = {layer: LayerPrompt(deltas=own) for layer, own in changes.items()}
    expected = merged(network, changes)
    for outputs in ("class", "class+patches"):
        found = network.rest(network.stem(images), 0, prompts, outputs)
        torch.testing.assert_close(
            found, expected.rest(expected.stem(images), 0, None, outputs), rtol=1e-10, atol=1e-10
        )
    assert (found - network.rest(network.stem(images), 0, None, "class+patches")).abs().max() > 1e-3


@pytest.mark.parametrize("kind", ["after", "input", "tokens"])
def test_changes_and_prompts_share_a_layer(kind: str) -> None:
    """A prefix that goes through W_K and W_V goes through what they have become."""
    network, images = precise_vit(), random_images(3).double()
    changes = {2: deltas(network, LINEARS)}
    rows = torch.randn(1, 2, 3, network.dim, generator=seeded(3), dtype=torch.float64)
    own: dict[str, Any] = {"tokens": rows[:, 0]} if kind == "tokens" else {"prefix": rows}
    own["prefix_at_input"] = kind == "input"
    found = network(images, {2: LayerPrompt(**own, deltas=changes[2])})
    torch.testing.assert_close(found, merged(network, changes)(images, {2: LayerPrompt(**own)}), rtol=1e-10, atol=1e-10)


def test_every_image_may_have_changes_of_its_own() -> None:
    network, images = precise_vit(), random_images(3).double()
    own = deltas(network, LINEARS, images=3)
    found = network(images, {2: LayerPrompt(deltas=own)})
    for number in range(3):
        expected = merged(network, {2: own}, number)(images[number : number + 1])
        torch.testing.assert_close(found[number : number + 1], expected, rtol=1e-10, atol=1e-10)


def test_gradients_reach_the_givers_tensors_alone() -> None:
    network, images = precise_vit(), random_images(3).double()
    before = {name: value.clone() for name, value in network.state_dict().items()}
    own, adapter = deltas(network, ("q", "v")), draw_adapter(network)
    network(images, {2: LayerPrompt(deltas=own, adapter=adapter)}).square().sum().backward()
    for tensor in (*(part for delta in own.values() for part in (delta.down, delta.up)), adapter.down, adapter.up):
        assert tensor.grad is not None
        assert tensor.grad.abs().max() > 0
    assert all(weight.grad is None for weight in network.parameters())
    assert network.state_dict().keys() == before.keys()
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())


def draw_adapter(network: VisionTransformer, images: int = 1, beside: bool = False) -> Adapter:
    def some(*shape: int) -> Tensor:
        return (0.3 * torch.randn(images, *shape, generator=generator, dtype=torch.float64)).requires_grad_()

    generator, dim = seeded(8), network.dim
    return Adapter(some(WIDTH, dim), some(dim, WIDTH), some(WIDTH), some(dim), scale=0.4, beside=beside)


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("each", [False, True])
@torch.no_grad()
def test_an_adapter_by_hand(beside: bool, each: bool) -> None:
    network, images = precise_vit(), random_images(2).double()
    adapter = draw_adapter(network, 2 if each else 1, beside)
    assert adapter.down_bias is not None
    assert adapter.up_bias is not None
    x = network.stem(images)
    for number, block in enumerate(network.blocks, start=1):
        assert isinstance(block, vit.Block)
        x = x + block.attn(block.norm1(x))
        out = block.mlp(block.norm2(x))
        if number in (2, 4):
            reads, added = x if beside else out, []
            for image in range(2):
                which = image if each else 0
                hidden = (adapter.down[which] @ reads[image].T).T + adapter.down_bias[which]
                added.append(0.4 * ((adapter.up[which] @ hidden.clamp(min=0).T).T + adapter.up_bias[which]))
            out = out + torch.stack(added)
        x = x + out
    found = network(images, {layer: LayerPrompt(adapter=adapter) for layer in (2, 4)})
    torch.testing.assert_close(found, network.norm(x[:, 0]), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("prompt", [LayerPrompt(), LayerPrompt(deltas={})], ids=["nothing", "no changes"])
def test_what_is_absent_changes_no_bit(prompt: LayerPrompt) -> None:
    network, images = tiny_vit(), random_images(3)
    assert torch.equal(network(images, {2: prompt, 4: prompt}), network(images))


def test_compiled_passes_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vit, "compiled", lambda function: torch.compile(function, dynamic=False, backend="aot_eager"))
    network, images = precise_vit(), random_images(3).double()
    prompts: Prompts = {2: LayerPrompt(deltas=deltas(network, LINEARS), adapter=draw_adapter(network))}
    plain = network(images, prompts)
    network.compiled = True
    torch.testing.assert_close(network(images, prompts), plain, rtol=1e-10, atol=1e-10)
