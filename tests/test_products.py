"""Products of frozen layers by oneDNN are those of PyTorch, and so are the gradients that go through them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dualprompt.backbones import products
from dualprompt.backbones.vit import VisionTransformer, ViTConfig


@pytest.fixture
def onednn(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """oneDNN, whoever built the processor."""
    monkeypatch.setenv(products.SWITCH, "1")
    products.by_onednn.cache_clear()
    if not products.by_onednn():
        pytest.skip("this PyTorch has no oneDNN, or has it elsewhere")
    yield
    products.by_onednn.cache_clear()


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def counted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes that oneDNN is given from now on."""
    given, real = [], products._multiplied

    def noted(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        given.append(tuple(x.shape))
        return real(x, weight, bias)

    monkeypatch.setattr(products, "_multiplied", noted)
    return given


@pytest.mark.usefixtures("onednn")
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(4, 24), (2, 7, 24), (1, 1, 24), (0, 24)])
def test_a_product_and_its_gradient(shape: tuple[int, ...], bias: bool) -> None:
    weight, added = drawn(10, 24, seed=1), drawn(10, seed=2) if bias else None
    towards = drawn(*shape[:-1], 10, seed=3)
    found = []
    for multiply in (products.linear, F.linear):
        x = drawn(*shape).requires_grad_()
        out = multiply(x, weight, added)
        out.backward(towards)
        assert x.grad is not None
        found.append((out.detach(), x.grad))
    torch.testing.assert_close(found[0], found[1])


@pytest.mark.usefixtures("onednn")
def test_what_is_not_contiguous_and_rows_of_weights() -> None:
    x, weight = drawn(24, 6, 3).permute(2, 1, 0), drawn(30, 24, seed=1)
    for rows in (slice(0, 10), slice(10, 30)):
        torch.testing.assert_close(products.linear(x, weight[rows], None), F.linear(x, weight[rows]))


@pytest.mark.usefixtures("onednn")
def test_weights_that_are_trained_get_their_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    given = counted(monkeypatch)
    weight = drawn(10, 24, seed=1).requires_grad_()
    products.linear(drawn(4, 24), weight, None).sum().backward()
    assert weight.grad is not None
    for x in (drawn(4, 24).double(), drawn(4, 24).bfloat16()):
        assert products.linear(x, weight.detach().to(x.dtype), None).dtype == x.dtype
    assert not given
    products.linear(drawn(4, 24), weight.detach(), None)
    assert given == [(4, 24)]


def small_vit() -> VisionTransformer:
    torch.manual_seed(0)
    vit = VisionTransformer(ViTConfig(image_size=32, patch_size=8, dim=24, depth=3, heads=3, mlp_dim=48))
    for parameter in vit.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return vit.freeze()


@pytest.mark.usefixtures("onednn")
def test_a_backbone_says_the_same_by_either(monkeypatch: pytest.MonkeyPatch) -> None:
    given, vit = counted(monkeypatch), small_vit()
    images = drawn(5, 3, 32, 32)
    with torch.no_grad():
        found = vit(images)
        assert len(given) == 1 + 4 * 3 + 1  # patches, four maps a layer, and q apart from k and v in the last
        with products.plain_products():
            torch.testing.assert_close(found, vit(images))
    assert len(given) == 14


def test_it_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(products.SWITCH, "0")
    products.by_onednn.cache_clear()
    assert not products.by_onednn()
    products.by_onednn.cache_clear()


def test_another_pytorch_without_it_multiplies_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(*_: object) -> Tensor:
        raise AttributeError("'_OpNamespace' 'mkldnn' object has no attribute '_linear_pointwise'")

    monkeypatch.setenv(products.SWITCH, "1")
    monkeypatch.setattr(products, "_multiplied", gone)
    products.by_onednn.cache_clear()
    try:
        x, weight = drawn(4, 24), drawn(10, 24, seed=1)
        assert torch.equal(products.linear(x, weight, None), F.linear(x, weight))
    finally:
        products.by_onednn.cache_clear()
