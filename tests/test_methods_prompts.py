"""L2P and CODA-Prompt against loops over images, and the life of every method that keeps the backbone frozen."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dualprompt.config import compose
from dualprompt.errors import DualPromptError
from dualprompt.methods.base import METHODS, Batch, Method, TaskView, method_config
from dualprompt.methods.coda_prompt import CodaPrompt, CodaPromptConfig, component_weights, orthogonal
from dualprompt.methods.l2p import L2P, L2PConfig
from helpers import as_vit, batch_of, random_images, randomise, seeded, task_view, tiny_vit

CLASSES = 3
SMALL_DUALPROMPT: dict[str, Any] = {
    "name": "dualprompt",
    "g_layers": 1,
    "e_layers": (2, 3),
    "g_length": 2,
    "e_length": 3,
    "align_steps": 30,
    "keys_per_task": 2,
}
SMALL_EXPERTS: dict[str, Any] = {"g_layers": 1, "e_layers": (2, 3), "g_length": 2, "e_length": 3}
LIVES: dict[str, dict[str, Any]] = {
    "l2p": {"name": "l2p", "pool_size": 6, "length": 2, "top_n": 2, "init": "wide"},
    "l2p class token": {"name": "l2p", "pool_size": 6, "length": 2, "top_n": 2, "init": "wide", "feature": "class"},
    "l2p by task": {"name": "l2p", "pool": "by_task", "length": 2, "top_n": 2, "init": "wide"},
    "coda-prompt": {"name": "coda-prompt", "layers": (2, 3), "components": 3, "length": 4},
    "simple-cil": {"name": "simple-cil"},
    "lda": {"name": "lda"},
    "klda": {"name": "klda", "projection": 40},
    "ridge": {"name": "ridge"},
    "fecam": {"name": "fecam"},
    "anacp": {"name": "anacp", "projection": 40},
    "ranpac": {"name": "ranpac", "projection": 40},
    "ranpac, first session": {"name": "ranpac", "projection": 40, "first_session": "prompts", **SMALL_EXPERTS},
    "dualprompt-rp": {"name": "dualprompt-rp", "projection": 40, **SMALL_EXPERTS},
    "dualprompt": SMALL_DUALPROMPT,
    "dualprompt, ridge and keys": {**SMALL_DUALPROMPT, "head": "ridge", "matching": "keys"},
    "dualprompt, gaussian both": {**SMALL_DUALPROMPT, "head": "gaussian", "matching": "gaussian"},
}


def close(one: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def task_images(index: int, count: int = 24) -> tuple[Tensor, Tensor]:
    """Images of a task of three classes: noise around a picture a class, so that there is something to learn."""
    labels = torch.arange(count) % CLASSES + CLASSES * index
    pictures = random_images(CLASSES, seed=50 + index)
    return pictures[labels - CLASSES * index] + 0.5 * random_images(count, seed=70 + index), labels


def view_of(method: Method, index: int) -> TaskView:
    images, labels = task_images(index)
    with torch.no_grad():
        return task_view(index, CLASSES, method.backbone(images), images, labels)


def steps(method: Method, view: TaskView, count: int, lr: float) -> None:
    for phase in method.phases(view):
        method.begin_phase(phase, view)
        optimiser = torch.optim.Adam(method.trainable().values(), lr=lr)
        for _ in range(count):
            for batch in view.batches():
                optimiser.zero_grad()
                method.loss(batch).backward()
                optimiser.step()


def learn(method: Method, index: int, count: int = 4, lr: float = 0.05) -> None:
    """Train one task as the loop does."""
    view = view_of(method, index)
    method.begin_task(view)
    steps(method, view, count, lr)
    method.end_task(view)


def make(options: dict[str, Any]) -> Method:
    config = method_config(options)
    return METHODS[config.name](config, tiny_vit())


def snapshot(method: Method) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in method.state().items()}


def random_l2p(tasks: int = 2, **options: Any) -> L2P:
    small = {"pool_size": 7, "length": 3, "top_n": 3}
    method = L2P(L2PConfig(**{**small, **options}), tiny_vit())
    for index in range(tasks):
        method.begin_task(task_view(index, CLASSES))
    randomise(method)
    with torch.no_grad():  # keys in the directions in which queries differ, so that images pick different ones
        queries = method.backbone(random_images(method.config.pool_size))
        mean = F.normalize(queries.mean(dim=0), dim=0)
        method.key.copy_(queries - queries.mean(dim=0))
        method.key.sub_((method.key @ mean)[:, None] * mean)
    return method


def random_coda(tasks: int = 2, **options: Any) -> CodaPrompt:
    method = CodaPrompt(CodaPromptConfig(**{"layers": (2, 3), "components": 3, "length": 4, **options}), tiny_vit())
    for index in range(tasks):
        method.begin_task(task_view(index, CLASSES))
    randomise(method)
    return method


@pytest.mark.parametrize("life", LIVES)
def test_state_survives_and_an_image_is_classified_alike_alone_and_in_company(life: str) -> None:
    method = make(LIVES[life])
    learn(method, 0)
    learn(method, 1)
    images = torch.cat([task_images(0)[0][:4], task_images(1)[0][:5]])
    prediction = method.predict(batch_of(images))
    assert prediction.logits.shape == (9, 2 * CLASSES)
    assert prediction.logits.std() > 1e-3, "all-zero logits would prove nothing"

    other = make(LIVES[life])
    other.load_state(snapshot(method))
    assert other.state().keys() == method.state().keys()
    assert all(torch.equal(value, method.state()[name]) for name, value in other.state().items())
    again = other.predict(batch_of(images))
    assert torch.equal(again.logits, prediction.logits)
    if prediction.selected is not None:
        assert again.selected is not None
        assert torch.equal(again.selected, prediction.selected)
    for row in range(9):
        alone = other.predict(batch_of(images[row : row + 1])).logits[0]
        close(alone, prediction.logits[row])

    learn(method, 2)
    learn(other, 2)
    for name, value in method.state().items():
        assert torch.equal(value, other.state()[name]), f"{name} should go on from a checkpoint as without it"


@pytest.mark.parametrize("life", LIVES)
def test_a_run_resumed_inside_a_task_ends_the_same(life: str) -> None:
    """As the loop does it: the state before the task, its beginning, then the work in progress on top."""
    whole, resumed = make(LIVES[life]), make(LIVES[life])
    learn(whole, 0)
    before = snapshot(whole)
    whole.begin_task(view := view_of(whole, 1))
    steps(whole, view, count=2, lr=0.05)
    work = {n: v for n, v in snapshot(whole).items() if n not in before or not torch.equal(v, before[n])}

    resumed.load_state(before)
    resumed.begin_task(again := view_of(resumed, 1))
    resumed.load_state(before | work)
    assert resumed.trainable().keys() == whole.trainable().keys()
    whole.end_task(view)
    resumed.end_task(again)
    assert all(torch.equal(value, resumed.state()[name]) for name, value in whole.state().items())


@pytest.mark.parametrize("life", LIVES)
def test_learns_two_tasks(life: str) -> None:
    method = make(LIVES[life])
    for index in range(2):
        learn(method, index, count=40, lr=0.02)
    right = torch.cat([method.predict(batch_of(x)).logits.argmax(dim=1) == y for x, y in map(task_images, range(2))])
    assert right.float().mean() > 0.5, "chance is one in six"


def test_l2p_picks_the_nearest_keys_and_pulls_them() -> None:
    method = random_l2p(match_weight=0.7)
    images, labels = random_images(6), torch.tensor([3, 4, 5, 5, 4, 3])
    cross_entropy, pulled = 0.0, []
    for image, label in zip(images, labels.tolist(), strict=True):
        query = method.backbone(image[None])[0]
        similarities = [float(query @ key / (query.norm() * key.norm())) for key in method.key.detach()]
        nearest = sorted(range(7), key=lambda m: -similarities[m])[:3]
        pulled += [1 - similarities[m] for m in nearest]
        # the N·L_p chosen tokens, put before the image's own by hand
        x = torch.cat([*(method.prompt[m] for m in nearest), as_vit(method.backbone).embed(image[None])[0]])[None]
        for block in as_vit(method.backbone).blocks:
            x = block(x)
        feature = as_vit(method.backbone).norm(x)[0, :9].mean(dim=0)
        logits = feature @ torch.cat(list(method.head.weight)).T + torch.cat(list(method.head.bias))
        own = logits[3:].log_softmax(dim=0)
        cross_entropy -= own[label - 3].item() / 6
        close(method.predict(batch_of(image[None])).logits[0], logits.detach())
    loss = method.loss(batch_of(images, labels))
    assert loss.item() == pytest.approx(cross_entropy + 0.7 * sum(pulled) / 6, rel=1e-4), "a sum over an image's keys"


def test_l2p_selections_differ_between_images_and_matter() -> None:
    method = random_l2p()
    images = random_images(9)
    _, picked = method.pick(method.backbone(images).float())
    assert len({tuple(sorted(row.tolist())) for row in picked}) > 3, "the batch should mix selections"
    tokens = method.backbone.stem(images)
    right, wrong = (method.prompted(tokens, method.prompt[each]) for each in (picked, picked.roll(1, dims=0)))
    changed = (picked.sort(dim=1).values != picked.roll(1, dims=0).sort(dim=1).values).any(dim=1)
    assert ((right - wrong).abs().amax(dim=1) > 1e-3).equal(changed)


@pytest.mark.parametrize("weight", [0.0, 0.5])
def test_l2p_trains_the_whole_pool_in_every_task(weight: float) -> None:
    method = random_l2p(tasks=3, match_weight=weight)
    names = {"prompt", "head.weight.2", "head.bias.2"} | ({"key"} if weight else set())
    assert method.trainable().keys() == names
    images = random_images(4)
    method.loss(batch_of(images, torch.tensor([6, 7, 8, 8]))).backward()
    _, picked = method.pick(method.backbone(images).float())
    used = torch.zeros(7, dtype=torch.bool).index_fill_(0, picked.flatten(), True)
    assert method.prompt.grad is not None
    assert method.prompt.grad.flatten(1).any(dim=1).equal(used), "prompts that no image picked have no gradient"
    assert method.additional() == 7 * 3 * 32 + 7 * 32


def test_l2p_known_query_stands_for_the_image() -> None:
    method = random_l2p()
    images = random_images(4)
    query = method.backbone(images.roll(1, dims=0))
    known = method.predict(Batch(lambda: images, torch.zeros(4, dtype=torch.int64), query=query)).logits
    assert (known - method.predict(batch_of(images)).logits).abs().max() > 1e-3
    own = Batch(lambda: images, torch.zeros(4, dtype=torch.int64), query=method.backbone(images))
    close(method.predict(own).logits, method.predict(batch_of(images)).logits)


def grown_l2p(tasks: int, **options: Any) -> L2P:
    """L2P whose tasks each trained three prompts of their own."""
    config = L2PConfig(**{"pool": "by_task", "length": 2, "top_n": 3, "init": "wide", **options})
    method = L2P(config, tiny_vit())
    for index in range(tasks):
        learn(method, index)
    return method


@pytest.mark.parametrize("weight", [0.0, 0.5])
def test_l2p_by_task_trains_its_own_prompts_from_its_predecessors_and_leaves_the_others(weight: float) -> None:
    method = grown_l2p(2, match_weight=weight)
    before = snapshot(method)
    assert not torch.equal(before["prompts.0"], before["prompts.1"]), "the second task should have moved"
    view = view_of(method, 2)
    method.begin_task(view)
    started = snapshot(method)
    assert torch.equal(started["prompts.2"], before["prompts.1"])
    assert not torch.equal(started["keys.2"], before["keys.1"]), "keys are drawn, as in the official config"
    own = {"prompts.2", "head.weight.2", "head.bias.2"} | ({"keys.2"} if weight else set())
    assert method.trainable().keys() == own
    steps(method, view, count=3, lr=0.05)
    method.zero_grad()
    (batch,) = view.batches()
    method.loss(batch).backward()
    touched = {name for name, p in method.named_parameters() if p.grad is not None and p.grad.any()}
    assert touched == own, "an image takes all prompts of its task, so each has a gradient"
    assert method.prompts[2].grad is not None
    assert method.prompts[2].grad.flatten(1).any(dim=1).all()
    method.end_task(view)
    after = snapshot(method)
    changed = {name for name, value in after.items() if not torch.equal(value, started[name])}
    assert changed == own
    assert method.additional() == 3 * (3 * 2 * 32 + 3 * 32)


def test_l2p_by_task_lets_the_prompts_of_all_tasks_compete_for_each_image() -> None:
    method = grown_l2p(3)
    with torch.no_grad():  # keys in the directions in which queries differ, so that images pick different ones
        queries = method.backbone(random_images(9))
        for index, key in enumerate(method.keys):
            key.copy_((queries - queries.mean(dim=0))[index::3])
    images = random_images(9)
    prediction = method.predict(batch_of(images)).logits
    prompts, keys = (torch.cat([*values]) for values in (method.prompts, method.keys))
    tasks = set()
    for row, image in enumerate(images):
        query = method.backbone(image[None])[0]
        nearest = F.cosine_similarity(query[None], keys).argsort(descending=True)[:3]
        tasks |= {tuple(sorted((nearest // 3).tolist()))}
        x = torch.cat([prompts[nearest].flatten(0, 1), as_vit(method.backbone).embed(image[None])[0]])[None]
        for block in as_vit(method.backbone).blocks:
            x = block(x)
        feature = as_vit(method.backbone).norm(x)[0, :6].mean(dim=0)
        close(prediction[row], feature @ torch.cat([*method.head.weight]).T + torch.cat([*method.head.bias]))
        close(method.predict(batch_of(image[None])).logits[0], prediction[row])
    assert len(tasks) > 3, "images should pick from different tasks"
    order = torch.randperm(9, generator=seeded(3))
    close(method.predict(batch_of(images[order])).logits, prediction[order])


def test_l2p_by_task_loss_is_over_its_own_prompts_and_keys() -> None:
    method = grown_l2p(2, match_weight=0.7, feature="class")
    images, labels = random_images(4), torch.tensor([3, 4, 5, 5])
    queries = method.backbone(images)
    expected = 0.0
    for image, query, label in zip(images, queries, labels.tolist(), strict=True):
        x = torch.cat([method.prompts[1].flatten(0, 1), as_vit(method.backbone).embed(image[None])[0]])[None]
        for block in as_vit(method.backbone).blocks:
            x = block(x)
        logits = as_vit(method.backbone).norm(x)[0, 6] @ method.head.weight[1].T + method.head.bias[1]
        pulled = (1 - F.cosine_similarity(query[None], method.keys[1])).sum()
        expected += (0.7 * pulled - logits.log_softmax(dim=0)[label - 3]).item() / 4
    assert method.loss(batch_of(images, labels)).item() == pytest.approx(expected, rel=1e-4)


def test_5_datasets_has_the_pool_of_the_official_config() -> None:
    options = compose("5-datasets", None, {"method.name": "l2p"}).method
    assert {key: options[key] for key in ("pool", "length", "top_n")} == {"pool": "by_task", "length": 10, "top_n": 4}
    assert compose("split-cifar100", None, {"method.name": "l2p"}).method.get("pool", "shared") == "shared"


def test_l2p_refuses_to_pick_more_than_it_has() -> None:
    with pytest.raises(DualPromptError, match="top_n is 8, but pool_size only 7"):
        method_config({"name": "l2p", "pool_size": 7, "top_n": 8})
    method_config({"name": "l2p", "pool": "by_task", "pool_size": 7, "top_n": 8})
    with pytest.raises(DualPromptError, match="no selection 'oracle'"):
        random_l2p().predict(batch_of(random_images(1)), "oracle")


def test_coda_mixes_components_of_all_tasks() -> None:
    method = random_coda(tasks=2)
    images = random_images(5)
    queries = method.backbone(images)
    prompts = method._prompts(queries, *method._components())
    assert set(prompts) == {2, 3}
    for number, layer in enumerate((2, 3)):
        prefix = prompts[layer].prefix
        assert prefix is not None
        for row, query in enumerate(queries):
            mixed = torch.zeros(2, 2, 32)
            for task in range(2):
                for m in range(3):
                    attended = query * method.attention[task][number, m]
                    weight = F.cosine_similarity(attended, method.key[task][number, m], dim=0)
                    mixed = mixed + weight * method.prompt[task][number, m]
            close(prefix[row], mixed)


def test_coda_weights_are_finite_where_attention_is_zero() -> None:
    attention = torch.zeros(1, 2, 32, requires_grad=True)
    weights = component_weights(torch.randn(3, 32), torch.randn(1, 2, 32), attention)
    weights.sum().backward()
    assert attention.grad is not None
    assert weights.eq(0).all()
    assert attention.grad.isfinite().all()


def test_coda_loss_adds_the_distance_from_orthonormal() -> None:
    images, labels = random_images(4), torch.tensor([3, 4, 5, 5])
    method, plain = random_coda(ortho_weight=0.3), random_coda(ortho_weight=0.0)
    plain.load_state(snapshot(method))
    expected = 0.0
    for part in (method.prompt, method.key, method.attention):
        for layer in range(2):
            rows = [part[task][layer, m].flatten() for task in range(2) for m in range(3)]
            for i, one in enumerate(rows):
                for j, other in enumerate(rows):
                    expected += ((one @ other).item() - (i == j)) ** 2 / 36
    difference = method.loss(batch_of(images, labels)) - plain.loss(batch_of(images, labels))
    assert difference.item() == pytest.approx(0.3 * expected, rel=1e-4)


def test_coda_components_start_orthonormal_and_old_ones_stay() -> None:
    method = make(LIVES["coda-prompt"])
    assert isinstance(method, CodaPrompt)
    learn(method, 0)
    first = snapshot(method)
    method.begin_task(task_view(1, CLASSES))
    for part in (method.prompt, method.key, method.attention):
        for layer in range(2):
            old, new = (rows[layer].flatten(1).detach() for rows in part)
            close(new @ new.T, torch.eye(3))
            close(new @ old.T, torch.zeros(3, 3))
            assert (old @ old.T - torch.eye(3)).abs().max() > 1e-3, "the old ones have been trained"
    assert method.trainable().keys() == {
        f"{part}.1" for part in ("prompt", "key", "attention", "head.weight", "head.bias")
    }
    learn(again := make(LIVES["coda-prompt"]), 0)
    learn(again, 1)
    assert all(torch.equal(value, again.state()[name]) for name, value in first.items())
    assert method.additional() == 2 * (2 * 3 * (4 * 32 + 32 + 32))


@pytest.mark.parametrize(("old", "count"), [(0, 5), (3, 5), (6, 4), (9, 2), (12, 3)])
def test_gram_schmidt_in_a_space_of_eight(old: int, count: int) -> None:
    """Orthogonal as long as there is room; then unit vectors all the same."""
    before = torch.randn(old, 8, generator=seeded(3)) if old else None
    new = orthogonal(before, count, 8, seeded(4))
    close(new.norm(dim=1), torch.ones(count))
    room = min(count, max(0, 8 - old))
    close(new[:room] @ new[:room].T, torch.eye(room))
    if before is not None:
        close(new[:room] @ before.T, torch.zeros(room, old))


def test_coda_options_are_checked() -> None:
    with pytest.raises(DualPromptError, match="odd"):
        random_coda(length=5)
    with pytest.raises(DualPromptError, match="layer 5"):
        random_coda(layers=(5,))
    assert method_config({"name": "coda-prompt", "layers": 2}).model_dump()["layers"] == (2,)
