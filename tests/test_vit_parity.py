"""Our ViT, fed by `weights.read`, against transformers' models and a plain NumPy pass over an .npz."""

from __future__ import annotations

import copy
import importlib
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from dualprompt.backbones import weights
from helpers import as_vit, vit_config

SIDE = 32
SMALL = {
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "image_size": SIDE,
    "patch_size": 8,
}
MODELS = {
    "ViT": ("ViTConfig", "ViTModel", {"intermediate_size": 80}),
    "ViT without QKV bias": ("ViTConfig", "ViTModel", {"intermediate_size": 80, "qkv_bias": False}),
    "ViT with a classifier": ("ViTConfig", "ViTForImageClassification", {"intermediate_size": 80}),
    "DeiT": ("DeiTConfig", "DeiTModel", {"intermediate_size": 80}),
    "DINOv2": ("Dinov2Config", "Dinov2Model", {}),
    "DINOv2 with SwiGLU": ("Dinov2Config", "Dinov2Model", {"use_swiglu_ffn": True}),
    "DINOv2 with registers": (
        "Dinov2WithRegistersConfig",
        "Dinov2WithRegistersModel",
        {"num_register_tokens": 5},
    ),
}


@pytest.fixture(scope="module")
def transformers() -> Any:
    return importlib.import_module("transformers")  # takes seconds: only for the tests that need it


def random_model(transformers: Any, kind: str) -> torch.nn.Module:
    config, model, options = MODELS[kind]
    network = getattr(transformers, model)(getattr(transformers, config)(**SMALL, **options)).eval()
    generator = torch.Generator().manual_seed(len(kind))
    with torch.no_grad():
        # Zero biases, zero tokens and unit scales would hide a tensor that is lost or swapped.
        for name, parameter in network.named_parameters():
            middle = 1.0 if "norm" in name and name.endswith("weight") else 0.0
            parameter.copy_(middle + 0.3 * torch.randn(parameter.shape, generator=generator))
    return network


def class_feature(network: Any, images: torch.Tensor) -> torch.Tensor:
    inner = getattr(network, "vit", network)
    with torch.no_grad():
        return inner(images).last_hidden_state[:, 0]


def images(side: int = SIDE) -> torch.Tensor:
    return torch.randn(4, 3, side, side, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("kind", MODELS)
def test_equals_transformers(transformers: Any, kind: str, tmp_path: Path) -> None:
    network: Any = random_model(transformers, kind)
    network.save_pretrained(tmp_path)
    expected = class_feature(network, images())
    for name in (tmp_path, tmp_path / "model.safetensors"):
        checkpoint = weights.read(str(name))
        torch.testing.assert_close(weights.build(checkpoint)(images()), expected, atol=1e-5, rtol=1e-5)
    assert vit_config(checkpoint).heads == SMALL["num_attention_heads"]
    assert vit_config(checkpoint).eps == network.config.layer_norm_eps
    assert expected.std() > 0.1


@pytest.mark.parametrize("kind", MODELS)
def test_equals_transformers_from_names_in_memory(transformers: Any, kind: str, tmp_path: Path) -> None:
    """transformers 5 names modules differently in memory than in files; both are understood."""
    network: Any = random_model(transformers, kind)
    network.config.save_pretrained(tmp_path)
    state = {name: tensor.contiguous() for name, tensor in network.state_dict().items()}
    save_file(state, tmp_path / "model.safetensors")
    features = weights.build(weights.read(str(tmp_path)))(images())
    torch.testing.assert_close(features, class_feature(network, images()), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("grid", [2, 5, 9])
def test_positions_are_interpolated_as_pillow_does(grid: int, tmp_path: Path) -> None:
    arrays = random_google(grid=4)
    np.savez(tmp_path / "ViT.npz", **arrays)
    network = weights.build(weights.read(str(tmp_path / "ViT.npz")), input_size=8 * grid)
    trained = arrays["Transformer/posembed_input/pos_embedding"][0]
    planes = trained[1:].reshape(4, 4, -1)
    for channel in range(planes.shape[-1]):
        resized = Image.fromarray(planes[..., channel]).resize((grid, grid), Image.Resampling.BICUBIC)
        found = as_vit(network).pos_embed[0, 1:, channel].reshape(grid, grid)
        np.testing.assert_allclose(found.numpy(), np.asarray(resized), atol=1e-5)
    np.testing.assert_array_equal(as_vit(network).pos_embed[0, 0].numpy(), trained[0])


def random_google(dim: int = 24, heads: int = 2, depth: int = 2, mlp: int = 40, patch: int = 8, grid: int = 3) -> dict:
    """Random weights under the names and in the shapes of Google's .npz files, heads included."""
    random = np.random.default_rng(7)
    shapes: dict[str, tuple[int, ...]] = {
        "cls": (1, 1, dim),
        "embedding/kernel": (patch, patch, 3, dim),
        "embedding/bias": (dim,),
        "Transformer/posembed_input/pos_embedding": (1, grid**2 + 1, dim),
        "Transformer/encoder_norm/scale": (dim,),
        "Transformer/encoder_norm/bias": (dim,),
        "pre_logits/kernel": (dim, dim),
        "pre_logits/bias": (dim,),
        "head/kernel": (dim, 10),
        "head/bias": (10,),
    }
    for number in range(depth):
        block = f"Transformer/encoderblock_{number}"
        for norm in ("LayerNorm_0", "LayerNorm_2"):
            shapes |= {f"{block}/{norm}/scale": (dim,), f"{block}/{norm}/bias": (dim,)}
        attention = f"{block}/MultiHeadDotProductAttention_1"
        for part in ("query", "key", "value"):
            shapes |= {
                f"{attention}/{part}/kernel": (dim, heads, dim // heads),
                f"{attention}/{part}/bias": (heads, dim // heads),
            }
        shapes |= {f"{attention}/out/kernel": (heads, dim // heads, dim), f"{attention}/out/bias": (dim,)}
        shapes |= {
            f"{block}/MlpBlock_3/Dense_0/kernel": (dim, mlp),
            f"{block}/MlpBlock_3/Dense_0/bias": (mlp,),
        }
        shapes |= {
            f"{block}/MlpBlock_3/Dense_1/kernel": (mlp, dim),
            f"{block}/MlpBlock_3/Dense_1/bias": (dim,),
        }
    return {name: (0.3 * random.standard_normal(shape)).astype(np.float32) for name, shape in shapes.items()}


def google_feature(arrays: dict[str, np.ndarray], image: np.ndarray) -> np.ndarray:
    """The final class token of one (3, side, side) image, straight from Google's arrays."""

    def layer_norm(x: np.ndarray, name: str) -> np.ndarray:
        centred = x - x.mean(-1, keepdims=True)
        scaled = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-6)
        return scaled * arrays[f"{name}/scale"] + arrays[f"{name}/bias"]

    def gelu(x: np.ndarray) -> np.ndarray:
        return 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))

    kernel = arrays["embedding/kernel"].astype(np.float64)
    patch, grid = kernel.shape[0], image.shape[-1] // kernel.shape[0]
    tokens = [arrays["cls"][0, 0]]
    for row in range(grid):
        for column in range(grid):
            window = image[:, row * patch : (row + 1) * patch, column * patch : (column + 1) * patch]
            tokens.append(np.einsum("chw,hwcd->d", window, kernel) + arrays["embedding/bias"])
    x = np.stack(tokens) + arrays["Transformer/posembed_input/pos_embedding"][0]
    depth = sum(name.endswith("LayerNorm_0/scale") for name in arrays)
    for number in range(depth):
        block = f"Transformer/encoderblock_{number}"
        attention = f"{block}/MultiHeadDotProductAttention_1"
        y = layer_norm(x, f"{block}/LayerNorm_0")
        q, k, v = (
            np.einsum("td,dhc->htc", y, arrays[f"{attention}/{part}/kernel"])
            + arrays[f"{attention}/{part}/bias"][:, None]
            for part in ("query", "key", "value")
        )
        scores = np.einsum("hqc,hkc->hqk", q, k) / math.sqrt(q.shape[-1])
        likely = np.exp(scores - scores.max(-1, keepdims=True))
        likely /= likely.sum(-1, keepdims=True)
        mixed = np.einsum("hqk,hkc->qhc", likely, v)
        x = x + np.einsum("qhc,hcd->qd", mixed, arrays[f"{attention}/out/kernel"]) + arrays[f"{attention}/out/bias"]
        y = layer_norm(x, f"{block}/LayerNorm_2")
        mlp = f"{block}/MlpBlock_3"
        hidden = gelu(y @ arrays[f"{mlp}/Dense_0/kernel"] + arrays[f"{mlp}/Dense_0/bias"])
        x = x + hidden @ arrays[f"{mlp}/Dense_1/kernel"] + arrays[f"{mlp}/Dense_1/bias"]
    return layer_norm(x, "Transformer/encoder_norm")[0]


@pytest.mark.parametrize("prefix", ["", "opt/target/"])
def test_equals_a_numpy_pass_over_google_npz(prefix: str, tmp_path: Path) -> None:
    arrays = random_google()
    np.savez(tmp_path / "ViT.npz", **{prefix + name: array for name, array in arrays.items()})
    checkpoint = weights.read(str(tmp_path / "ViT.npz"))
    config = vit_config(checkpoint)
    assert (config.heads, config.image_size, config.eps) == (2, 24, 1e-6)
    assert checkpoint.info.mean == checkpoint.info.std == (0.5, 0.5, 0.5)
    batch = images(24)
    expected = np.stack([google_feature(arrays, image.numpy().astype(np.float64)) for image in batch])
    features = weights.build(checkpoint)(batch)
    np.testing.assert_allclose(features.numpy(), expected, atol=1e-5, rtol=1e-5)


def test_gelu_flavour_is_chosen_when_building(tmp_path: Path) -> None:
    np.savez(tmp_path / "ViT.npz", **random_google())
    checkpoint = weights.read(str(tmp_path / "ViT.npz"))
    exact, tanh = (weights.build(checkpoint, gelu=flavour)(images(24)) for flavour in ("exact", "tanh"))
    assert not torch.equal(exact, tanh)
    torch.testing.assert_close(exact, tanh, atol=0.05, rtol=0.05)


def test_weights_rounded_as_one_tensor_are_a_rounded_copy() -> None:
    backbone = weights.build(weights.read("embedded"), input_size=SIDE).requires_grad_(True)
    as_vit(backbone).blocks[3].requires_grad_(False)
    copied = copy.deepcopy(backbone).bfloat16()
    found, expected = backbone.computed_in(torch.bfloat16, images()), copied(images().bfloat16())
    assert torch.equal(found, expected)
    assert not torch.allclose(found.float(), backbone(images()), atol=1e-4)
    found.square().sum().backward()
    expected.square().sum().backward()
    for weight, other in zip(backbone.parameters(), copied.parameters(), strict=True):
        assert weight.dtype == torch.float32
        assert weight.grad is None or (other.grad is not None and torch.equal(weight.grad, other.grad.float()))
    assert all((weight.grad is None) == (not weight.requires_grad) for weight in backbone.parameters())
    assert torch.equal(backbone.computed_in(torch.float32, images()), backbone(images()))
