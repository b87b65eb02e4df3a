"""Pre-T, Pro-T and the prompt bank against slow twins written with explicit attention, image by image."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dualprompt.backbones.vit import Attention, Block, LayerPrompt, VisionTransformer, ViTConfig
from dualprompt.errors import DualPromptError
from dualprompt.prompts.attach import attach, join, pre_t, pro_t, prompt_shape
from dualprompt.prompts.bank import (
    PromptBank,
    check_layers,
    cosine,
    match_loss,
    mean_key,
    paper_count,
    rows_at,
    vote,
)
from helpers import random_images, seeded, tiny_vit

DIM, HEADS = 32, 4


def close(one: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=seeded(seed))


def softmax_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """(queries, dim), (keys, dim), (keys, dim): each head by itself, the softmax written out."""
    size, parts = q.shape[1] // HEADS, []
    for head in range(HEADS):
        own = slice(head * size, (head + 1) * size)
        weights = torch.exp(q[:, own] @ k[:, own].T / math.sqrt(size))
        parts.append(weights / weights.sum(dim=1, keepdim=True) @ v[:, own])
    return torch.cat(parts, dim=1)


def slow_attention(layer: Attention, h: Tensor, h_k: Tensor, h_v: Tensor, p_k: Tensor, p_v: Tensor) -> Tensor:
    """One image: W_K and W_V see `h_k` and `h_v`; `p_k` and `p_v` join after them."""
    w_q, w_k, w_v = layer.qkv.weight.split(DIM)
    b_q, b_k, b_v = (0, 0, 0) if layer.qkv.bias is None else layer.qkv.bias.split(DIM)
    k, v = torch.cat([p_k, h_k @ w_k.T + b_k]), torch.cat([p_v, h_v @ w_v.T + b_v])
    return layer.proj(softmax_attention(h @ w_q.T + b_q, k, v))


NOTHING = torch.zeros(0, DIM)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shared", [True, False])
def test_pre_t_is_attention_with_longer_keys_and_values(shared: bool, bias: bool) -> None:
    layer: Any = tiny_vit(qkv_bias=bias).blocks[0].attn
    h, prompt = draw(3, 7, DIM), draw(1 if shared else 3, 2, 4, DIM, seed=1)
    projected, at_input = layer(h, pre_t(prompt)), layer(h, pre_t(prompt, "input"))
    assert projected.shape == at_input.shape == h.shape, "the sequence keeps its length"
    for image in range(3):
        p_k, p_v = prompt[0 if shared else image]
        x = h[image]
        close(projected[image], slow_attention(layer, x, x, x, p_k, p_v))
        close(at_input[image], slow_attention(layer, x, torch.cat([p_k, x]), torch.cat([p_v, x]), NOTHING, NOTHING))
    assert (projected - at_input).abs().max() > 1e-3
    assert (projected - layer(h)).abs().max() > 1e-3
    assert (projected - layer(h, pre_t(prompt.flip(1)))).abs().max() > 1e-3, "K and V are told apart"


def slow_pro_t(vit: VisionTransformer, image: Tensor, prompts: dict[int, Tensor]) -> Tensor:
    """One image: prompts are prepended at their layers and stay; the class token is looked up by its position."""
    sequence = list(vit.embed(image[None])[0])
    position = 0
    for number, block in enumerate(vit.blocks, start=1):
        for row in reversed(prompts.get(number, NOTHING)):
            sequence.insert(0, row)
            position += 1
        x = torch.stack(sequence)
        assert isinstance(block, Block)
        h = block.norm1(x)
        x = x + block.ls1(slow_attention(block.attn, h, h, h, NOTHING, NOTHING))
        sequence = list(x + block.ls2(block.mlp(block.norm2(x))))
    assert len(sequence) == vit.embed(image[None]).shape[1] + sum(map(len, prompts.values()))
    return vit.norm(sequence[position])


@pytest.mark.parametrize("options", [{}, {"registers": 2, "distilled": True, "layer_scale": True}])
@pytest.mark.parametrize("layers", [(1,), (4,), (2, 3), (1, 2, 3, 4)])
def test_pro_t_lets_the_sequence_grow(layers: tuple[int, ...], options: dict[str, Any]) -> None:
    vit, images = tiny_vit(**options), random_images(3)
    prompts = {layer: draw(3, 1, layer, DIM, seed=layer) for layer in layers}
    features = vit(images, attach({}, prompts, "pro-t"))
    for i, image in enumerate(images):
        close(features[i], slow_pro_t(vit, image, {layer: prompt[i, 0] for layer, prompt in prompts.items()}))
    assert (features - vit(images)).abs().max() > 1e-3


def test_g_and_e_on_one_layer_are_g_then_e_then_the_tokens() -> None:
    g, e = draw(1, 2, 2, DIM), draw(5, 2, 3, DIM, seed=1)
    joined = attach({1: g}, {1: e, 2: e})[1].prefix
    assert joined is not None
    assert joined.shape == (5, 2, 5, DIM)
    for image in range(5):
        assert torch.equal(joined[image, :, :2], g[0])
        assert torch.equal(joined[image, :, 2:], e[image])
    tokens = attach({3: g[:, :1]}, {3: e[:, :1]}, "pro-t")[3].tokens
    assert tokens is not None
    assert torch.equal(tokens, joined[:, 0])
    assert join(g, e[:1]).shape == (1, 2, 5, DIM), "what serves every image is not copied for each"
    # In the sequence itself: the layer sees [G; E; tokens].
    vit, image = tiny_vit(), random_images(1)
    features = vit(image, attach({2: g[:, :1]}, {2: e[:1, :1]}, "pro-t"))
    close(features[0], slow_pro_t(vit, image[0], {2: torch.cat([g[0, 0], e[0, 0]])}))


@pytest.mark.parametrize("prompting", ["pre-t", "pro-t"])
def test_no_prompt_is_the_plain_vit_exactly(prompting: Any) -> None:
    vit, images = tiny_vit(), random_images(4)
    plain = vit(images)
    parts = 2 if prompting == "pre-t" else 1
    empty = {1: draw(1, parts, 0, DIM), 4: draw(4, parts, 0, DIM)}
    for at in ("projected", "input"):
        assert torch.equal(vit(images, attach(empty, empty, prompting, at)), plain)  # type: ignore[arg-type]
        assert torch.equal(vit(images, attach({}, {}, prompting, at)), plain)  # type: ignore[arg-type]
    assert torch.equal(vit(images, {2: LayerPrompt()}), plain)
    direct = pre_t(draw(1, 2, 0, DIM)) if prompting == "pre-t" else pro_t(draw(1, 1, 0, DIM))
    close(vit(images, {2: direct, 4: direct}), plain)


@pytest.mark.parametrize("options", [{}, {"registers": 3, "distilled": True}, {"positions_cover_prefix": False}])
def test_the_last_layer_computes_the_class_token_as_if_it_computed_all(options: dict[str, Any]) -> None:
    vit, images = tiny_vit(**options), random_images(3)
    for prompts in (
        {},
        attach({1: draw(1, 2, 2, DIM)}, {4: draw(3, 2, 3, DIM, seed=1)}),
        attach({4: draw(1, 2, 2, DIM)}, {}, "pre-t", "input"),
        attach({1: draw(1, 1, 2, DIM)}, {4: draw(3, 1, 3, DIM, seed=1)}, "pro-t"),
    ):
        x, class_at = vit.embed(images), 0
        for number, block in enumerate(vit.blocks, start=1):
            prompt = prompts.get(number)
            if prompt is not None and prompt.tokens is not None:
                x = torch.cat([prompt.tokens.expand(3, -1, -1), x], dim=1)
                class_at += prompt.tokens.shape[1]
            x = block(x, prompt)
        close(vit(images, prompts), vit.norm(x)[:, class_at])


@pytest.mark.parametrize("first", [1, 2, 3, 4, 5])
def test_a_pass_may_be_split_anywhere_before_the_first_prompted_layer(first: int) -> None:
    vit, images = tiny_vit(), random_images(2)
    prompts = attach({}, {layer: draw(2, 2, 2, DIM, seed=layer) for layer in range(first, 5)})
    for layers in range(first):
        close(vit.rest(vit.stem(images, layers), layers, prompts), vit(images, prompts))


def test_prompt_shapes() -> None:
    assert prompt_shape(3, 20, 768, "pre-t", "each") == (3, 2, 20, 768)
    assert prompt_shape(3, 20, 768, "pre-t", "split") == (3, 2, 10, 768)
    assert prompt_shape(3, 5, 768, "pro-t", "each") == prompt_shape(3, 5, 768, "pro-t", "split") == (3, 1, 5, 768)
    assert prompt_shape(0, 4, 8, "pre-t", "each") == (0, 2, 4, 8)
    with pytest.raises(DualPromptError, match=r"prompt length 5 is odd .* use an even length or method.length_counts"):
        prompt_shape(2, 5, 768, "pre-t", "split")


def test_the_paper_counts() -> None:
    """L_g = 5 in 2 layers, L_e = 20 in 3 layers, 10 tasks: 1.90 MB, 0.55 % of ViT-B/16."""
    count = paper_count(2, 3, 5, 20, 768, 10)
    assert count == 476_160
    assert round(count * 4 / 1e6, 2) == 1.90
    with torch.device("meta"):
        vit = VisionTransformer(ViTConfig(image_size=224, patch_size=16, dim=768, depth=12, heads=12, mlp_dim=3072))
    backbone = sum(parameter.numel() for parameter in vit.parameters())
    assert backbone == 85_798_656
    assert 100 * count / 86e6 == pytest.approx(0.55, abs=0.005)
    assert 100 * count / backbone == pytest.approx(0.555, abs=0.001)


def bank_of(tasks: int, **options: Any) -> PromptBank:
    values: dict[str, Any] = {"dim": DIM, "g_layers": (1,), "e_layers": (2, 3), "g_length": 2, "e_length": 3}
    bank = PromptBank(**(values | options))
    bank.begin(seeded(0), "wide")
    for task in range(tasks):
        bank.grow(seeded(task + 1), "wide", from_previous=False)
    return bank


def test_the_bank_grows_without_bound_and_matches_by_cosine() -> None:
    bank, queries = bank_of(50), draw(200, DIM, seed=9) * 7
    assert bank.tasks == 50
    similarities = bank.similarities(queries)
    assert similarities.shape == (200, 50)
    keys = np.stack([key.detach().numpy() for key in bank.task_key]).astype(np.float64)
    np.testing.assert_array_equal(bank.keys().numpy().astype(np.float64), keys)
    selected = []
    for i, query in enumerate(queries.numpy().astype(np.float64)):
        by_hand = [query @ key / (np.linalg.norm(query) * np.linalg.norm(key)) for key in keys]
        np.testing.assert_allclose(similarities[i].numpy(), by_hand, atol=1e-6)
        selected.append(int(np.argmax(by_hand)))
    assert similarities.argmax(dim=1).tolist() == selected
    assert len(set(selected)) > 25
    prompts = bank.prompts_for(torch.tensor(selected))
    prefix = prompts[3].prefix
    assert prefix is not None
    assert torch.equal(prefix, torch.stack([bank.e_prompt[task][1] for task in selected]))


def test_growing_stops_the_older_from_training() -> None:
    bank = bank_of(4)
    assert [p.requires_grad for p in bank.e_prompt] == [False, False, False, True]
    assert [k.requires_grad for k in bank.task_key] == [False, False, False, True]
    assert bank.g_prompt.requires_grad


def test_a_grown_or_restored_bank_forgets_what_it_had_stacked() -> None:
    bank = bank_of(2)
    assert bank.keys().shape == (2, DIM)
    bank.grow(seeded(7), "uniform", from_previous=True)
    assert bank.keys().shape == (3, DIM)
    assert torch.equal(bank.e_prompt[2], bank.e_prompt[1])
    bank.set_key(torch.ones(DIM))
    assert torch.equal(bank.keys()[2], torch.ones(DIM))
    other = bank_of(4)
    bank.restore([p.detach() for p in other.e_prompt], [k.detach() for k in other.task_key])
    assert torch.equal(bank.keys(), other.keys())
    with torch.no_grad():
        other.task_key[0].add_(1)
    assert not torch.equal(bank.task_key[0], other.task_key[0]), "restored values are copies"


def test_training_prompts_carry_gradients_to_g_and_the_newest_e_only() -> None:
    bank = bank_of(3)
    prompts = bank.training_prompts()
    assert sorted(prompts) == [1, 2, 3]
    total = torch.zeros(())
    for prompt in prompts.values():
        assert prompt.prefix is not None
        assert len(prompt.prefix) == 1, "one prompt serves the whole batch"
        total = total + (prompt.prefix**2).sum()
    total.backward()
    close(bank.g_prompt.grad, 2 * bank.g_prompt.detach())  # type: ignore[arg-type]
    close(bank.e_prompt[2].grad, 2 * bank.e_prompt[2].detach())  # type: ignore[arg-type]
    assert bank.e_prompt[0].grad is None
    assert bank.e_prompt[1].grad is None


@given(st.lists(st.integers(0, 6), min_size=1, max_size=40))
def test_vote_is_the_majority_and_the_first_of_equals(selected: list[int]) -> None:
    winner = max(range(7), key=selected.count)
    assert vote(torch.tensor(selected)).tolist() == [winner] * len(selected)


@settings(deadline=None)
@given(st.integers(1, 20), st.integers(0, 1000))
def test_match_loss_is_one_minus_the_mean_cosine_whatever_the_lengths(count: int, seed: int) -> None:
    queries, key = draw(count, DIM, seed=seed), draw(DIM, seed=seed + 1)
    loss = match_loss(queries, key)
    by_hand = [1 - float(q @ key) / float(q.norm() * key.norm()) for q in queries]
    assert float(loss) == pytest.approx(np.mean(by_hand), abs=1e-5)
    assert -1e-6 <= float(loss) <= 2 + 1e-6
    scales = torch.rand(count, 1, generator=seeded(seed)) * 9 + 0.1
    close(match_loss(queries * scales, key * 5), loss)
    close(match_loss(queries[:1], queries[0]), torch.zeros(()))
    nudged = mean_key(queries) + 0.01 * draw(DIM, seed=seed + 2)
    assert match_loss(queries, mean_key(queries)) <= match_loss(queries, nudged) + 1e-6


def test_cosine_of_a_zero_vector_is_zero() -> None:
    assert torch.equal(cosine(torch.zeros(2, DIM), draw(3, DIM)), torch.zeros(2, 3))


def test_rows_that_are_picked_twice_have_one_gradient_however_many_threads_there_are() -> None:
    pool, weights = draw(30, 20, 192), draw(64, 5, 20, 192, seed=1)
    picked = torch.randint(30, (64, 5), generator=seeded(2))
    threads, found = torch.get_num_threads(), set[bytes]()
    torch.set_num_threads(4)
    try:
        for _ in range(50):
            leaf = pool.clone().requires_grad_()
            rows = rows_at(leaf, picked)
            assert torch.equal(rows, pool[picked])
            rows.backward(weights)
            assert leaf.grad is not None
            found.add(leaf.grad.numpy().tobytes())
    finally:
        torch.set_num_threads(threads)
    assert len(found) == 1
    expected = torch.zeros_like(pool).index_put_((picked,), weights, accumulate=True)
    close(torch.frombuffer(bytearray(*found), dtype=torch.float32).view_as(pool), expected)


def test_layers_are_checked() -> None:
    check_layers("method.g_layers", (), 12)
    check_layers("method.g_layers", (12, 1), 12)
    for wrong in (0, -1, 13):
        with pytest.raises(DualPromptError, match=f"method.g_layers has layer {wrong}; .* 1 to 12"):
            check_layers("method.g_layers", (1, wrong), 12)
    with pytest.raises(DualPromptError, match=r"method.e_layers names a layer twice: \[3, 3\]"):
        check_layers("method.e_layers", (3, 3), 12)
