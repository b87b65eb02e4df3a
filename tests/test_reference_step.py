"""One training step, written a second time as a straight line from the paper's equations.

Nothing here is shared with the package but the numbers: two full passes, attention as explicit matrices, the
cross-entropy over all classes with −∞ outside the task, the cosine, the LayerNorm, the GELU and Adam by hand.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from dualprompt.config import TrainConfig
from dualprompt.methods.dualprompt import DualPrompt
from dualprompt.methods.l2p import L2P, L2PConfig
from dualprompt.training.optimise import make_optimiser
from helpers import batch_of, random_dualprompt, random_images, randomise, seeded, task_view, tiny_vit

HEADS, PATCH, CLASSES, BATCH = 4, 8, 3, 6


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    mean = x.mean(dim=-1, keepdim=True)
    variance = ((x - mean) ** 2).mean(dim=-1, keepdim=True)
    return (x - mean) / torch.sqrt(variance + 1e-6) * weight + bias


def attention(h: Tensor, h_k: Tensor, h_v: Tensor, extra_k: Tensor, extra_v: Tensor, w: dict[str, Tensor]) -> Tensor:
    """MSA(h, h_K, h_V) of one image, (tokens, dim); `extra` rows join K and V after the projections."""
    dim = h.shape[-1]
    w_q, w_k, w_v = w["attn.qkv.weight"][:dim], w["attn.qkv.weight"][dim : 2 * dim], w["attn.qkv.weight"][2 * dim :]
    b_q, b_k, b_v = w["attn.qkv.bias"][:dim], w["attn.qkv.bias"][dim : 2 * dim], w["attn.qkv.bias"][2 * dim :]
    q = h @ w_q.T + b_q
    k = torch.cat([extra_k, h_k @ w_k.T + b_k])
    v = torch.cat([extra_v, h_v @ w_v.T + b_v])
    size = dim // HEADS
    heads = []
    for i in range(HEADS):
        part = slice(i * size, (i + 1) * size)
        scores = q[:, part] @ k[:, part].T / math.sqrt(size)
        weights = torch.exp(scores - scores.max(dim=1, keepdim=True).values)
        heads.append(weights / weights.sum(dim=1, keepdim=True) @ v[:, part])
    return torch.cat(heads, dim=1) @ w["attn.proj.weight"].T + w["attn.proj.bias"]


def outputs(
    image: Tensor, w: dict[str, Tensor], g: dict[int, Tensor], e: dict[int, Tensor], how: str
) -> tuple[Tensor, int]:
    """All of f(x) of one image, and where its class token is. `g`, `e`: layer, from 1, to (parts, rows, dim)."""
    patches = []
    for top in range(0, image.shape[1], PATCH):
        for left in range(0, image.shape[2], PATCH):
            patches.append(image[:, top : top + PATCH, left : left + PATCH].reshape(-1))
    kernel = w["patch_embed.proj.weight"].reshape(len(w["patch_embed.proj.weight"]), -1)
    x = torch.cat([w["cls_token"][0], torch.stack(patches) @ kernel.T + w["patch_embed.proj.bias"]])
    x = x + w["pos_embed"][0]
    prepended, layer = 0, 1
    while f"blocks.{layer - 1}.norm1.weight" in w:
        block = {k.split(".", 2)[2]: v for k, v in w.items() if k.startswith(f"blocks.{layer - 1}.")}
        p = [prompt[layer] for prompt in (g, e) if layer in prompt]
        none = x.new_zeros(0, x.shape[1])
        p_k = torch.cat([none, *(part[0] for part in p)])
        p_v = torch.cat([none, *(part[-1] for part in p)])
        if how == "pro-t":
            x = torch.cat([p_k, x])
            prepended += len(p_k)
        h = layer_norm(x, block["norm1.weight"], block["norm1.bias"])
        if how == "projected":
            x = x + attention(h, h, h, p_k, p_v, block)
        elif how == "input":
            x = x + attention(h, torch.cat([p_k, h]), torch.cat([p_v, h]), none, none, block)
        else:
            x = x + attention(h, h, h, none, none, block)
        h = layer_norm(x, block["norm2.weight"], block["norm2.bias"])
        h = h @ block["mlp.fc1.weight"].T + block["mlp.fc1.bias"]
        h = h * 0.5 * (1 + torch.erf(h / math.sqrt(2)))
        x = x + h @ block["mlp.fc2.weight"].T + block["mlp.fc2.bias"]
        layer += 1
    return layer_norm(x, w["norm.weight"], w["norm.bias"]), prepended


def feature(image: Tensor, w: dict[str, Tensor], g: dict[int, Tensor], e: dict[int, Tensor], how: str) -> Tensor:
    """f(x)[class token] of one image."""
    rows, class_at = outputs(image, w, g, e, how)
    return rows[class_at]


class Reference:
    """The trained tensors, copied, and the loss of a batch as a function of them."""

    def __init__(self, method: DualPrompt, how: str) -> None:
        self.frozen = {name: value.detach().clone() for name, value in method.backbone.named_parameters()}
        self.trained = {name: value.clone().requires_grad_() for name, value in method.state().items()}
        self.how, self.config, self.tasks = how, method.config, method.bank.tasks

    def loss(self, images: Tensor, labels: Tensor) -> Tensor:
        now = self.tasks - 1
        p = self.trained
        g = dict(zip(self.config.g_layers, p["bank.g_prompt"], strict=True))
        e = dict(zip(self.config.e_layers, p[f"bank.e_prompt.{now}"], strict=True))
        weight = torch.cat([p[f"head.weight.{task}"] for task in range(self.tasks)])
        bias = torch.cat([p[f"head.bias.{task}"] for task in range(self.tasks)])
        allowed = range(now * CLASSES, (now + 1) * CLASSES)
        if self.config.training_logits == "unmasked":
            allowed = range(len(bias))
        total = torch.zeros(())
        for image, label in zip(images, labels.tolist(), strict=True):
            logits = weight @ feature(image, self.frozen, g, e, self.how) + bias
            mask = torch.tensor([0.0 if c in allowed else -math.inf for c in range(len(bias))])
            total = total - (logits + mask)[label] + torch.log(torch.exp(logits + mask).sum())
            query, key = feature(image, self.frozen, {}, {}, self.how), p[f"bank.task_key.{now}"]
            cosine = (query * key).sum() / (torch.sqrt((query**2).sum()) * torch.sqrt((key**2).sum()))
            total = total + self.config.match_weight * (1 - cosine)
        return total / len(images)

    def gradients(self, images: Tensor, labels: Tensor) -> tuple[Tensor, dict[str, Tensor | None]]:
        loss = self.loss(images, labels)
        values = torch.autograd.grad(loss, list(self.trained.values()), allow_unused=True)
        return loss.detach(), dict(zip(self.trained, values, strict=True))


ARRANGEMENTS: dict[str, dict[str, Any]] = {
    "one after the other": {"g_layers": (1,), "e_layers": (2, 3)},
    "both on the same layers": {"g_layers": (1, 2), "e_layers": (2, 3)},
    "last layer": {"g_layers": (2,), "e_layers": (4,)},
    "every layer": {"g_layers": (1, 2, 3, 4), "e_layers": (1, 2, 3, 4)},
    "given out of order": {"g_layers": (3, 1), "e_layers": (4, 2)},
    "no G-Prompt": {"g_layers": (), "e_layers": (3,)},
    "no E-Prompt": {"g_layers": (2,), "e_layers": ()},
    "length 0": {"g_layers": (1,), "e_layers": (2,), "g_length": 0},
    "unmasked": {"g_layers": (1,), "e_layers": (3,), "training_logits": "unmasked"},
    "weighted": {"g_layers": (1,), "e_layers": (2, 3), "match_weight": 0.3},
}
HOW: dict[str, dict[str, Any]] = {
    "projected": {"prompting": "pre-t", "prefix_at": "projected"},
    "input": {"prompting": "pre-t", "prefix_at": "input"},
    "pro-t": {"prompting": "pro-t"},
}


def data(step: int = 0) -> tuple[Tensor, Tensor]:
    labels = CLASSES + torch.randint(CLASSES, (BATCH,), generator=seeded(step))
    return random_images(BATCH, seed=50 + step), labels


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
def test_loss_and_every_gradient(arrangement: str, how: str) -> None:
    method = random_dualprompt(tasks=2, classes=CLASSES, **ARRANGEMENTS[arrangement], **HOW[how])
    images, labels = data()
    expected_loss, expected = Reference(method, how).gradients(images, labels)
    loss = method.loss(batch_of(images, labels))
    loss.backward()
    torch.testing.assert_close(loss.detach(), expected_loss, rtol=1e-5, atol=1e-5)
    parameters = {name: p for name, p in method.named_parameters() if not name.startswith("backbone.")}
    assert parameters.keys() == expected.keys()
    for name, parameter in parameters.items():
        want = expected[name]
        if parameter.grad is None:  # ours does not train it: then the equations must not move it either
            assert want is None or not want.any(), name
        else:
            assert want is not None, name
            torch.testing.assert_close(parameter.grad, want, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
            assert want.abs().max() > 1e-4, f"{name} is trained, but the data does not show it"
    assert all(parameter.grad is None for parameter in method.backbone.parameters())


@pytest.mark.parametrize("how", HOW)
def test_prompts_after_several_adam_steps(how: str) -> None:
    method = random_dualprompt(tasks=2, classes=CLASSES, g_layers=(1, 2), e_layers=(2, 3), **HOW[how])
    reference = Reference(method, how)
    before = {name: value.clone() for name, value in method.state().items()}
    trainable = method.trainable()
    optimiser = make_optimiser(method, TrainConfig(lr=0.01, betas=(0.8, 0.95)))
    first = {name: torch.zeros_like(value) for name, value in reference.trained.items()}
    second = {name: torch.zeros_like(value) for name, value in reference.trained.items()}
    for step in range(1, 6):
        images, labels = data(step)
        optimiser.zero_grad()
        method.loss(batch_of(images, labels)).backward()
        optimiser.step()
        _, gradients = reference.gradients(images, labels)
        for name, value in reference.trained.items():
            gradient = gradients[name]
            if gradient is None or name not in trainable:
                continue
            first[name] = 0.8 * first[name] + 0.2 * gradient
            second[name] = 0.95 * second[name] + 0.05 * gradient**2
            m, v = first[name] / (1 - 0.8**step), second[name] / (1 - 0.95**step)
            reference.trained[name] = (value - 0.01 * m / (torch.sqrt(v) + 1e-8)).detach().requires_grad_()
    for name, value in method.state().items():
        torch.testing.assert_close(value, reference.trained[name].detach(), rtol=1e-4, atol=1e-5)
        moved = (value - before[name]).abs().max()
        assert moved > 0.01 if name in trainable else moved == 0, name


def l2p_loss(trained: dict[str, Tensor], frozen: dict[str, Tensor], config: L2PConfig, step: int) -> Tensor:
    """L2P's equations, image by image: sort the pool by cosine, prepend the first N prompts, average their outputs."""
    total = torch.zeros(())
    for image, label in zip(*data(step), strict=True):
        query = feature(image, frozen, {}, {}, "pro-t")
        by_cosine = []
        for prompt, key in zip(trained["prompt"], trained["key"], strict=True):
            norms = torch.sqrt((query**2).sum()) * torch.sqrt((key**2).sum())
            by_cosine.append(((query * key).sum() / norms, prompt))
        chosen = sorted(by_cosine, key=lambda pair: -pair[0].item())[: config.top_n]
        tokens = torch.cat([prompt for _, prompt in chosen])
        rows, class_at = outputs(image, frozen, {}, {1: tokens[None]}, "pro-t")
        assert class_at == config.top_n * config.length
        read = rows[class_at] if config.feature == "class" else rows[:class_at].sum(dim=0) / class_at
        logits = trained["head.weight.1"] @ read + trained["head.bias.1"]
        total = total - logits[label - CLASSES] + torch.log(torch.exp(logits).sum())
        for cosine, _ in chosen:
            total = total + config.match_weight * (1 - cosine)
    return total / BATCH


@pytest.mark.parametrize("read", ["prompts", "class"])
def test_l2p_loss_and_every_gradient(read: Any) -> None:
    config = L2PConfig(pool_size=7, length=2, top_n=3, match_weight=0.3, feature=read)
    method = L2P(config, tiny_vit())
    for index in range(2):
        method.begin_task(task_view(index, CLASSES))
    randomise(method)
    frozen = {name: value.detach().clone() for name, value in method.backbone.named_parameters()}
    trained = {name: value.clone().requires_grad_() for name, value in method.state().items()}
    expected = l2p_loss(trained, frozen, config, step=0)
    gradients = torch.autograd.grad(expected, list(trained.values()), allow_unused=True)
    loss = method.loss(batch_of(*data()))
    loss.backward()
    torch.testing.assert_close(loss.detach(), expected.detach(), rtol=1e-5, atol=1e-5)
    parameters = dict(method.named_parameters())
    for name, want in zip(trained, gradients, strict=True):
        grad = parameters[name].grad
        if want is None:
            assert grad is None, f"{name} belongs to an old task"
            continue
        assert grad is not None, name
        torch.testing.assert_close(grad, want, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
        assert want.abs().max() > 1e-4, f"{name} is trained, but the data does not show it"
