"""SupSup: masks that stay, bits as counted, and a task that each image finds by itself."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call, grad, vmap

from dualprompt.backbones.passes import counted
from dualprompt.backbones.resnet import ResNet, ResNetConfig, draw
from dualprompt.errors import DualPromptError
from dualprompt.methods.base import METHODS, method_config
from dualprompt.methods.supermasks import SuperNet, entropy, find, kept, pack, signed, top, unpack
from dualprompt.methods.supsup import SupSup
from helpers import batch_of, random_images, seeded, task_view, tiny_vit

CLASSES = 3


def resnet(width: int = 4, seed: int = 4) -> ResNet:
    return draw(ResNet(ResNetConfig(16, width=width, stem="cifar", pool=False)), seeded(seed)).freeze()


TWIN = resnet()


def learned(tasks: int = 3, steps: int = 3, sizes: tuple[int, ...] = (), **options: Any) -> SupSup:
    """A method that has learned random labels of random images, task after task."""
    method = METHODS["supsup"](method_config({"name": "supsup", **options}), resnet())
    assert isinstance(method, SupSup)
    for index in range(tasks):
        learn(method, index, steps, sizes[index] if sizes else CLASSES)
    return method.eval()


def learn(method: SupSup, index: int, steps: int, classes: int = CLASSES) -> None:
    view = task_view(index, classes)
    first = sum(method.sizes)
    method.begin_task(view)
    method.train()
    optimiser = torch.optim.Adam(method.trainable().values(), lr=0.05)
    for step in range(steps):
        optimiser.zero_grad()
        images = random_images(8, seed=100 * index + step)
        method.loss(batch_of(images, first + torch.arange(8) % classes)).backward()
        optimiser.step()
    method.eval()
    method.end_task(view)


def test_masked_convolutions_are_counted_as_those_in_whose_place_they_are() -> None:
    method, images, once = learned(tasks=3), random_images(2), 2 * resnet().operations
    with counted() as passes:
        method.predict(batch_of(images), "query")
    # Once with each task's mask, then with all of them mixed; the gradient of the mixture goes back.
    assert passes.forward == 2 * (3 + 3)
    assert once > 0
    assert passes.operations > once * 6
    with counted() as told:
        method.predict(replace(batch_of(images), task=torch.tensor([0, 2])), "oracle")
    assert (told.forward, told.operations) == (6, pytest.approx(3 * once))


def test_a_mask_keeps_the_largest_scores_and_passes_gradients_straight_through() -> None:
    scores = torch.tensor([[0.3, -2.0], [1.0, -0.1]], requires_grad=True)
    mask = top(scores, 2)
    assert mask.tolist() == [[0.0, 1.0], [1.0, 0.0]]
    (mask * torch.tensor([[1.0, 2.0], [3.0, 4.0]])).sum().backward()
    assert scores.grad is not None
    assert scores.grad.tolist() == [[1.0, -2.0], [3.0, -4.0]]  # of |s|


def test_weights_are_signs_of_one_size() -> None:
    weight = torch.randn(5, 4, 3, 3, generator=seeded(0))
    found = signed(weight)
    assert torch.equal(found.sign(), weight.sign())
    torch.testing.assert_close(found.abs(), torch.full_like(weight, math.sqrt(2 / 36)))


@pytest.mark.parametrize(
    ("shape", "sigma", "expected"),
    [((160, 160, 3, 3), 1, 320), ((160, 160, 3, 3), 32, 10240), ((20, 3, 3, 3), 32, 270), ((10, 160), 1, 170)],
)
def test_layers_are_as_dense_as_asked_for(shape: tuple[int, ...], sigma: float, expected: int) -> None:
    assert abs(kept(shape, sigma) - expected) <= 1


def test_bits_come_back_and_take_an_eighth_of_a_byte() -> None:
    shapes = [(3, 5), (2, 2, 3, 3), (7,)]
    masks = [torch.rand(shape, generator=seeded(1)) < 0.4 for shape in shapes]
    packed = pack(masks)
    assert packed.dtype == torch.uint8
    assert len(packed) == math.ceil((15 + 36 + 7) / 8)
    for mask, again in zip(masks, unpack(packed, shapes), strict=True):
        assert torch.equal(mask, again)


@pytest.mark.parametrize(("width", "masks", "statistics"), [(20, 136_268, 12_000), (64, 1_394_904, 38_400)])
def test_a_task_costs_the_bytes_that_are_counted(width: int, masks: int, statistics: int) -> None:
    """One bit a weight, and two numbers a BatchNorm's channel; the classifier's bits come on top."""
    with torch.device("meta"):
        net = SuperNet(ResNet(ResNetConfig(32, width=width, stem="cifar", pool=False)))
    assert math.ceil(sum(shape.numel() for shape in net.shapes(10)[:-1]) / 8) == masks
    assert 2 * 4 * sum(net.channels) == statistics


def test_what_is_kept_is_what_is_counted() -> None:
    method = learned()
    report = method.parameters_report()
    weights = sum(shape.numel() for shape in method.net.shapes(CLASSES))
    head, sizes = 4 * method.net.head.numel(), 8 * 3
    expected = 3 * (math.ceil(weights / 8) + 2 * 4 * sum(method.net.channels)) + head + sizes
    assert report["trained"] == 0
    assert report["kept"]["mb"] == pytest.approx(expected / 1e6)
    assert {name.split(".")[0] for name in method.state()} == {"masks", "mean", "variance", "net", "classes"}


def test_old_tasks_stay_as_they_are() -> None:
    method = learned(tasks=2)
    before = {name: value.clone() for name, value in method.state().items()}
    images = random_images(6)
    logits = method.predict(batch_of(images, task=torch.zeros(6, dtype=torch.int64)), "oracle").logits
    learn(method, 2, steps=3)
    after = method.state()
    for name, value in before.items():
        if name.startswith(("masks", "mean", "variance")):
            assert torch.equal(after[name], value), name
    again = method.predict(batch_of(images, task=torch.zeros(6, dtype=torch.int64)), "oracle").logits
    assert torch.equal(again[:, : 2 * CLASSES], logits)
    assert not torch.equal(method.masks[1], method.masks[2])
    assert not torch.equal(method.mean[1], method.mean[2])


def plain(method: SupSup, masks: list[Tensor], mean: Tensor, variance: Tensor) -> dict[str, Tensor]:
    """The weights of a plain ResNet that is the method's network under some masks and statistics."""
    state, offset = dict(TWIN.state_dict()), 0
    for name, module in method.net.backbone.named_modules():
        if module in method.net.convs:
            number = method.net.convs.index(module)
            state[f"{name}.weight"] = signed(state[f"{name}.weight"]) * masks[number]
    places = {norm: name for name, norm in method.net.backbone.named_modules()}
    for norm in method.net.norms:
        name, part = places[norm], slice(offset, offset + norm.channels)
        state[f"{name}.weight"], state[f"{name}.bias"] = torch.ones(norm.channels), torch.zeros(norm.channels)
        state[f"{name}.running_mean"], state[f"{name}.running_var"] = mean[part], variance[part]
        offset += norm.channels
    return state


def answers(method: SupSup, images: Tensor, masks: list[Tensor], mean: Tensor, variance: Tensor) -> Tensor:
    features = functional_call(TWIN, plain(method, masks, mean, variance), (images,))
    return F.linear(features, method.net.head * masks[-1])


def slow_gradients(method: SupSup, images: Tensor, mix: Tensor) -> Tensor:
    """∂H/∂α of each image by itself, from the definition: one network with the weights W ⊙ Σ α M."""
    each = [unpack(bits, method.net.shapes(CLASSES)) for bits in method.masks]
    mean, variance = torch.stack(list(method.mean)).mean(dim=0), torch.stack(list(method.variance)).mean(dim=0)

    def surprise(alpha: Tensor, image: Tensor) -> Tensor:
        masks = [sum(alpha[t] * masks[layer] for t, masks in enumerate(each)) for layer in range(len(each[0]))]
        chance = answers(method, image[None], masks, mean, variance)[0].softmax(dim=0)  # type: ignore[arg-type]
        return -(chance * chance.log()).sum()

    return vmap(grad(surprise))(mix, images)


def test_the_loss_is_the_cross_entropy_of_the_masked_network_in_training() -> None:
    method = learned(tasks=1)
    method.begin_task(task_view(1))
    method.train()
    images, labels = random_images(5), torch.tensor([3, 4, 5, 3, 4])
    masks = [top(scores, kept(scores.shape, 32.0)).detach() for scores in method.scores]
    fresh = torch.zeros(sum(method.net.channels)), torch.ones(sum(method.net.channels))
    twin = resnet().unfreeze().train()
    state = plain(method, masks, *fresh)
    logits = F.linear(functional_call(twin, state, (images,)), method.net.head * masks[-1])
    torch.testing.assert_close(method.loss(batch_of(images, labels)), F.cross_entropy(logits, labels - 3))
    moved = torch.cat([value for name, value in state.items() if name == "bn1.running_mean"])
    torch.testing.assert_close(method.mean[1][: len(moved)], moved)  # the first BatchNorm comes first
    assert not torch.equal(moved, torch.zeros_like(moved))


def test_a_known_task_is_a_plain_network_with_its_masks() -> None:
    method, images = learned(), random_images(6)
    for task in range(3):
        known = torch.full((6,), task)
        found = method.predict(batch_of(images, task=known), "oracle")
        masks = unpack(method.masks[task], method.net.shapes(CLASSES))
        own = slice(CLASSES * task, CLASSES * (task + 1))
        expected = answers(method, images, masks, method.mean[task], method.variance[task])
        torch.testing.assert_close(found.logits[:, own], expected)
        others = torch.ones(found.logits.shape[1], dtype=torch.bool)
        others[own] = False
        assert found.logits.softmax(dim=1)[:, others].eq(0).all()
        assert found.selected is not None
        assert torch.equal(found.selected, known)


def test_within_every_task_logits_are_ordered_as_if_it_were_known() -> None:
    """So accuracy with a known task is that of the task's own network, whichever task was found."""
    method, images = learned(tasks=3), random_images(9)
    found = method.predict(batch_of(images))
    assert found.selected is not None
    assert found.logits.isfinite().all()
    assert torch.equal(found.logits.argmax(dim=1) // CLASSES, found.selected)
    for task in range(3):
        own = slice(CLASSES * task, CLASSES * (task + 1))
        known = method.predict(batch_of(images, task=torch.full((9,), task)), "oracle").logits[:, own]
        torch.testing.assert_close(
            found.logits[:, own].softmax(dim=1), known.softmax(dim=1), rtol=1e-3, atol=1e-4, msg=str(task)
        )
        assert (found.selected != task).any()


def test_gradients_of_many_images_at_once_are_those_of_each_alone() -> None:
    method, images = learned(tasks=4), random_images(7)
    masks = method.derived("masks", method._learned)
    mean, variance = torch.stack(list(method.mean)).mean(dim=0), torch.stack(list(method.variance)).mean(dim=0)
    for mix in (torch.full((7, 4), 0.25), torch.rand(7, 4, generator=seeded(3)) / 4):
        mix = mix.requires_grad_()
        (found,) = torch.autograd.grad(entropy(method.net.logits(images, masks, mean, variance, mix)).sum(), mix)
        torch.testing.assert_close(found, slow_gradients(method, images, mix.detach()), rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("tasks", [1, 2, 5])
def test_each_image_finds_its_task_as_the_algorithms_say(tasks: int) -> None:
    images = random_images(7)
    found = {}
    for inference in ("oneshot", "binary", "min_entropy"):
        method = learned(tasks, inference=inference)
        selected = method.predict(batch_of(images)).selected
        assert selected is not None
        found[inference] = selected.tolist()
    once = slow_gradients(method, images, torch.full((7, tasks), 1 / tasks))
    assert found["oneshot"] == once.argmin(dim=1).tolist()
    for number, image in enumerate(images):
        remain = list(range(tasks))
        passes = 0
        while len(remain) > 1:
            mix = torch.tensor([[1 / len(remain) if t in remain else 0.0 for t in range(tasks)]])
            slopes = slow_gradients(method, image[None], mix)[0]
            middle = slopes[remain].median()  # the lower one of two
            remain = [task for task in remain if slopes[task] <= middle]
            passes += 1
        assert passes == math.ceil(math.log2(tasks))
        assert [found["binary"][number]] == remain
        sure = []
        for task in range(tasks):
            known = torch.tensor([task])
            logits = method.predict(batch_of(image[None], task=known), "oracle").logits[0]
            chance = logits[CLASSES * task : CLASSES * (task + 1)].softmax(dim=0)
            sure.append(float(-(chance * chance.log()).sum()))
        assert found["min_entropy"][number] == sure.index(min(sure))
    if tasks == 5:
        assert all(len(set(each)) > 1 for each in found.values()), "one task for all shows little"


def test_the_algorithms_by_hand() -> None:
    """Entropies that are known functions of α: −Σ c α² has the gradient −2 c α."""
    slopes = torch.tensor([[4.0, 3.0, 2.0, 1.0, 5.0], [1.0, 3.0, 2.0, 1.5, 0.5]])

    def surprise(mix: Tensor) -> Tensor:
        return -(slopes * mix**2).sum(dim=1)

    for once in (True, False):
        assert find(surprise, 2, 5, once, torch.device("cpu")).tolist() == [4, 1]
    asked = []

    def counted(mix: Tensor) -> Tensor:
        asked.append((mix > 0).sum(dim=1).tolist())
        return surprise(mix)

    find(counted, 2, 5, False, torch.device("cpu"))
    assert asked == [[5, 5], [3, 3], [2, 2]]


def test_an_image_may_be_normalised_by_its_own_pixels() -> None:
    """Which is what BatchNorm does in training with a batch of one."""
    own, images = learned(superposed="image"), random_images(6)
    masks, mix = own.derived("masks", own._learned), torch.full((6, 3), 1 / 3)
    whole = own.net.logits(images, masks, None, None, mix)
    own.net.train()
    fresh = torch.zeros(sum(own.net.channels)), torch.ones(sum(own.net.channels))
    alone = [own.net.logits(image[None], masks, *fresh, mix[:1]) for image in images]
    torch.testing.assert_close(torch.cat(alone), whole, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("inference", ["oneshot", "binary", "min_entropy"])
@pytest.mark.parametrize("superposed", ["mean", "image"])
def test_a_prediction_depends_on_its_image_alone(inference: str, superposed: str) -> None:
    method, images = learned(inference=inference, superposed=superposed), random_images(9)
    whole = method.predict(batch_of(images))
    assert whole.selected is not None
    order = torch.randperm(9, generator=seeded(5))
    for parts in (images.split(1), images.split(4)):
        pieces = [method.predict(batch_of(part)) for part in parts]
        torch.testing.assert_close(torch.cat([each.logits for each in pieces]), whole.logits)
    turned = method.predict(batch_of(images[order]))
    assert turned.selected is not None
    assert torch.equal(turned.selected, whole.selected[order])
    torch.testing.assert_close(turned.logits, whole.logits[order])


def test_the_released_codes_leak_has_to_be_asked_for() -> None:
    method, images = learned(tasks=4), random_images(12)
    state = {name: value.clone() for name, value in method.state().items()}
    chosen = [method.predict(batch_of(images[start:]), "batch_vote").selected for start in range(6)]
    assert all(each is not None and len(each.unique()) == 1 for each in chosen)
    fair = method.predict(batch_of(images)).selected
    assert fair is not None
    assert len(fair.unique()) > 1
    for name, value in method.state().items():  # unlike the released code, it moves no statistics
        assert torch.equal(value, state[name]), name


def test_tasks_may_have_different_numbers_of_classes() -> None:
    method, images = learned(sizes=(2, 4, 3)), random_images(5)
    logits = method.predict(batch_of(images)).logits
    assert logits.shape == (5, 9)
    chosen = method.predict(batch_of(images)).selected
    assert chosen is not None
    assert torch.equal((logits.softmax(dim=1) > 0).sum(dim=1), torch.tensor([2, 4, 3])[chosen])
    copy = METHODS["supsup"](method_config({"name": "supsup"}), resnet()).eval()
    copy.load_state({name: value.clone() for name, value in method.state().items()})
    assert torch.equal(copy.predict(batch_of(images)).logits, logits)


def test_a_network_without_convolutions_is_refused() -> None:
    with pytest.raises(DualPromptError, match="'supsup' needs a ResNet"):
        METHODS["supsup"](method_config({"name": "supsup"}), tiny_vit())
    with pytest.raises(DualPromptError, match="training_logits masked"):
        method_config({"name": "supsup", "training_logits": "unmasked"})
