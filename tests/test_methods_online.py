"""SinglePrompt, S-Prompts and DualPrompt's pool against the released codes' formulas, written out image by image."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dualprompt.backbones.vit import VisionTransformer
from dualprompt.methods.alignment import nearest_centroids
from dualprompt.methods.base import Batch, StreamKind
from dualprompt.methods.dualprompt_pool import DualPromptPool, DualPromptPoolConfig
from dualprompt.methods.s_prompts import MISSING, SPrompts, SPromptsConfig
from dualprompt.methods.single_prompt import SinglePrompt, SinglePromptConfig
from helpers import as_vit, batch_of, random_images, randomise, seeded, task_view, tiny_vit


def close(one: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def feature(
    vit: VisionTransformer, image: Tensor, prefixes: dict[int, Tensor] | None = None, tokens: Tensor | None = None
) -> Tensor:
    """Return the feature of one image, by the weights alone: no batch, no seam, no kernel of attention.

    `prefixes` are (2, length, dim) by block, counted from 1, for K and V after their projections. `tokens`, (length,
    dim), stand between the class token and the patches, before the first block, as S-Prompts' released code puts them.
    """
    weights, heads = dict(vit.named_parameters()), vit.config.heads
    x = vit.embed(image[None])[0]
    if tokens is not None:
        x = torch.cat([x[:1], tokens, x[1:]])
    dim = x.shape[1]

    def norm(values: Tensor, name: str) -> Tensor:
        return F.layer_norm(values, (dim,), weights[f"{name}.weight"], weights[f"{name}.bias"], vit.config.eps)

    def linear(values: Tensor, name: str) -> Tensor:
        return values @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    for number in range(vit.depth):
        block = f"blocks.{number}"
        q, k, v = linear(norm(x, f"{block}.norm1"), f"{block}.attn.qkv").split(dim, dim=1)
        if prefixes and number + 1 in prefixes:
            k, v = torch.cat([prefixes[number + 1][0], k]), torch.cat([prefixes[number + 1][1], v])
        parts = []
        for head in range(heads):
            mine = slice(head * dim // heads, (head + 1) * dim // heads)
            scores = q[:, mine] @ k[:, mine].T * (dim // heads) ** -0.5
            parts.append(scores.softmax(dim=1) @ v[:, mine])
        x = x + linear(torch.cat(parts, dim=1), f"{block}.attn.proj")
        x = x + linear(F.gelu(linear(norm(x, f"{block}.norm2"), f"{block}.mlp.fc1")), f"{block}.mlp.fc2")
    return norm(x, "norm")[0]


def single(classes: int = 5, **options: Any) -> SinglePrompt:
    method = SinglePrompt(SinglePromptConfig(**{"length": 3, **options}), tiny_vit())
    method.begin_task(task_view(0, classes))
    randomise(method)
    return method


def by_hand(method: SinglePrompt, image: Tensor) -> Tensor:
    """Return the logits of one image, class by class."""
    vit = as_vit(method.backbone)
    x = feature(vit, image, {layer: method.prompt[i] for i, layer in enumerate(method.layers)})
    rows = torch.cat(list(method.head.weight))
    return torch.stack([(x @ row) / (x.norm() * row.norm()) / 0.1 for row in rows])


def test_single_prompt_gives_cosines_of_the_prefixed_class_token() -> None:
    method, images = single(), random_images(4)
    assert method.layers == (1, 2, 3, 4)
    assert method.prompt.shape == (4, 2, 3, 32)
    logits = method.predict(batch_of(images)).logits
    close(logits, torch.stack([by_hand(method, image) for image in images]).detach())
    some = single(layers="2-3")
    assert some.layers == (2, 3)
    assert some.shared_layers == 1
    close(some.predict(batch_of(images)).logits[0], by_hand(some, images[0]).detach())


def test_its_loss_is_over_the_classes_of_the_minibatch() -> None:
    method, images = single(), random_images(4)
    labels = torch.tensor([3, 1, 3, 4])
    loss = method.loss(batch_of(images, labels))
    present, wanted = [1, 3, 4], []
    for image, label in zip(images, labels.tolist(), strict=True):
        logits = by_hand(method, image)[present]
        wanted.append(-logits[present.index(label)] + logits.exp().sum().log())
    close(loss, torch.stack(wanted).mean())
    loss.backward()
    [rows] = method.head.weight
    assert rows.grad is not None
    moved = rows.grad.abs().sum(dim=1) > 0
    assert moved.tolist() == [False, True, False, True, True], "rows of absent classes are left alone"
    everywhere = SinglePrompt(method.config.model_copy(update={"training_logits": "unmasked"}), method.backbone)
    everywhere.load_state(method.state())
    logits = torch.stack([by_hand(method, image) for image in images])
    close(everywhere.loss(batch_of(images, labels)), F.cross_entropy(logits, labels))


def test_processes_that_share_a_minibatch_share_its_classes() -> None:
    method, images = single(), random_images(4)
    labels = torch.tensor([3, 1, 3, 4])
    whole = method.loss(batch_of(images, labels))
    parts = [
        Batch(lambda rows=rows: images[rows], labels[rows], together=labels) for rows in (slice(0, 2), slice(2, 4))
    ]
    close(whole, torch.stack([method.loss(part) for part in parts]).mean())
    alone = [batch_of(images[rows], labels[rows]) for rows in (slice(0, 2), slice(2, 4))]
    assert not torch.isclose(whole, torch.stack([method.loss(part) for part in alone]).mean())


def test_rows_come_with_their_labels_and_others_stay() -> None:
    method = SinglePrompt(SinglePromptConfig(length=2), tiny_vit())
    method.begin_task(task_view(0, 2))
    first, before = method.head.weight[0], method.head.weight[0].detach().clone()
    assert 0 < before.abs().max() <= 32**-0.5
    method.begin_task(task_view(1, 2))
    assert [rows.shape for rows in method.head.weight] == [(2, 32), (2, 32)]
    assert method.head.weight[0] is first, "the optimiser knows a parameter by what it is"
    assert torch.equal(before, first)
    prompt = method.prompt.detach().clone()
    assert prompt.min() < -0.9
    assert prompt.max() > 0.9
    assert sum(p.numel() for p in method.trainable().values()) == 4 * 32 + prompt.numel()


def pool(**options: Any) -> DualPromptPool:
    small = {"g_layers": (1,), "e_layers": (2, 3), "g_length": 2, "e_length": 3, "pool_size": 4}
    method = DualPromptPool(DualPromptPoolConfig(**{**small, **options}), tiny_vit())
    method.accept(StreamKind(returns=True, bordered=False, online=True))
    method.begin_task(task_view(0, 3))
    randomise(method)
    return method


def test_each_image_of_a_pool_takes_the_nearest_e_prompt_in_training_too() -> None:
    method, images, labels = pool(), random_images(6), torch.arange(6) % 3
    vit = as_vit(method.backbone)
    picked, losses, logits = [], [], []
    for image, label in zip(images, labels, strict=True):
        query = feature(vit, image)
        near = torch.stack([query @ key / (query.norm() * key.norm()) for key in method.key])
        choice = int(near.argmax())
        picked.append(choice)
        prefixes = {1: method.g_prompt[0], 2: method.e_prompt[choice, 0], 3: method.e_prompt[choice, 1]}
        logits.append(method.head.all(feature(vit, image, prefixes)[None])[0])
        losses.append(F.cross_entropy(logits[-1], label) + 1 - near[choice])
    assert len(set(picked)) > 1
    loss = method.loss(batch_of(images, labels))
    close(loss, torch.stack(losses).mean())
    close(method.predict(batch_of(images)).logits, torch.stack(logits).detach())
    loss.backward()
    assert method.e_prompt.grad is not None
    assert method.key.grad is not None
    used = (method.e_prompt.grad.flatten(1).abs().sum(dim=1) > 0).nonzero()[:, 0].tolist()
    assert used == sorted(set(picked)) == (method.key.grad.abs().sum(dim=1) > 0).nonzero()[:, 0].tolist()
    assert method.predict(batch_of(images)).selected is None, "a place in the pool is no task"


def s_prompts(**options: Any) -> SPrompts:
    """Two domains: the first has classes 0, 1, 2, the second 1, 2, 3."""
    method = SPrompts(SPromptsConfig(**{"length": 3, "keys": 2, **options}), tiny_vit())
    method.accept(StreamKind(returns=True))
    for index, labels, new in ((0, (0, 1, 2), (0, 1, 2)), (1, (1, 2, 3), (3,))):
        images = random_images(12, seed=30 + index) + index
        with torch.no_grad():
            queries = method.backbone(images)
        view = task_view(index, 3, queries=queries)
        seen = tuple(range(3 + index))
        method.begin_task(type(view)(**{**vars(view), "labels": labels, "new_labels": new, "seen": seen}))
        method.end_task(view)
    generator = seeded(9)
    for name, value in method.state().items():
        if name.startswith(("head", "prompts")):
            value.copy_(torch.randn(value.shape, generator=generator))
    return method


def test_an_image_finds_its_domain_by_the_nearest_key_and_answers_with_its_classifier() -> None:
    method = s_prompts()
    images = torch.cat([random_images(4, seed=1), random_images(4, seed=2) + 1])
    vit, domains, wanted = as_vit(method.backbone), [], []
    for image in images:
        query = F.normalize(feature(vit, image), dim=0)
        # As released: the sum of differences, not its square, to the nearest of each domain's centres.
        distances = [min(float((query - key).abs().sum()) for key in keys) for keys in method.keys]
        domain = distances.index(min(distances))
        domains.append(domain)
        x = feature(vit, image, tokens=method.prompts[domain])
        own = x @ method.head.weight[domain].T + method.head.bias[domain]
        row = torch.full((4,), MISSING)
        row[[(0, 1, 2), (1, 2, 3)][domain],] = own.detach()
        wanted.append(row)
    assert set(domains) == {0, 1}
    prediction = method.predict(batch_of(images))
    assert prediction.selected is not None
    assert prediction.selected.tolist() == domains
    close(prediction.logits, torch.stack(wanted))
    told = method.predict(batch_of(images, task=torch.zeros(8, dtype=torch.int64)), "oracle")
    assert told.selected is not None
    assert told.selected.tolist() == [0] * 8


def test_a_domain_trains_its_own_prompt_and_classifier_alone() -> None:
    method = s_prompts()
    images, labels = random_images(5), torch.tensor([1, 3, 2, 1, 3])
    loss = method.loss(batch_of(images, labels))
    vit, wanted = as_vit(method.backbone), []
    for image, label in zip(images, labels.tolist(), strict=True):
        x = feature(vit, image, tokens=method.prompts[1])
        logits = x @ method.head.weight[1].T + method.head.bias[1]
        wanted.append(F.cross_entropy(logits, torch.tensor(label - 1)))
    close(loss, torch.stack(wanted).mean())
    assert set(method.trainable()) == {"prompts.1", "head.weight.1", "head.bias.1"}
    assert not method.can_forget


def test_one_classifier_is_shared_by_all_domains() -> None:
    method = s_prompts(classifier="shared")
    assert [len(rows) for rows in method.head.bias] == [3, 1]
    images, labels = random_images(3), torch.tensor([1, 3, 2])
    vit, rows, biases = as_vit(method.backbone), torch.cat([*method.head.weight]), torch.cat([*method.head.bias])
    features = torch.stack([feature(vit, image, tokens=method.prompts[1]) for image in images])
    logits = features @ rows.T + biases
    close(method.loss(batch_of(images, labels)), F.cross_entropy(logits[:, 1:], labels - 1))
    told = method.predict(batch_of(images, task=torch.ones(3, dtype=torch.int64)), "oracle")
    close(told.logits, logits.detach())


def test_centres_are_a_fixed_point_of_k_means() -> None:
    groups = [
        torch.randn(20, 6, generator=seeded(n)) * 0.05 + 3 * torch.randn(6, generator=seeded(40 + n)) for n in range(4)
    ]
    points = torch.cat(groups)
    found = nearest_centroids(points, 4, seeded(0))[0]
    nearest = torch.cdist(points, found).argmin(dim=1)
    for number in range(4):
        close(found[number], points[nearest == number].mean(dim=0))
    means = torch.stack([group.mean(dim=0) for group in groups])
    close(torch.cdist(means, found).amin(dim=1), torch.zeros(4))
    assert torch.equal(nearest_centroids(points, 4, seeded(0))[0], found)
    few = nearest_centroids(points[:2], 5, seeded(1))[0]
    assert few.shape == (5, 6)
    assert bool(torch.isfinite(few).all())


@pytest.mark.parametrize("make", [single, pool, s_prompts])
def test_an_answer_depends_on_nothing_but_its_image(make: Any) -> None:
    method = make()
    method.eval()
    images = torch.cat([random_images(5, seed=1), random_images(4, seed=2) + 1])
    whole = method.predict(batch_of(images)).logits
    order = torch.randperm(9, generator=seeded(3))
    close(method.predict(batch_of(images[order])).logits, whole[order])
    for start in range(0, 9, 2):
        close(method.predict(batch_of(images[start : start + 2])).logits, whole[start : start + 2])
    close(torch.cat([method.predict(batch_of(image[None])).logits for image in images]), whole)


def test_near_is_by_the_sum_of_differences() -> None:
    method = s_prompts(keys=1)
    query, one, four = torch.zeros(3, 32)
    query[0] = one[0] = four[0] = 1
    one[1], four[1:5] = 0.6, 0.25  # a sum of 0.6 and of 1; a distance of 0.6 and of 0.5
    method.keys.restore([four[None], one[None]])
    method.eval()
    assert method.domain(query[None]).tolist() == [1]
