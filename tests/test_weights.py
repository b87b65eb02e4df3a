"""One name to verified tensors: every place a name may point to, and every way a file may be wrong."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from dualprompt.backbones import weights
from dualprompt.backbones.known import EMBEDDED_FILE, EMBEDDED_SHA256, KNOWN, known
from dualprompt.backbones.vit import VisionTransformer, ViTConfig
from dualprompt.errors import DualPromptError
from dualprompt.files import packaged
from helpers import as_vit, vit_config

SMALL = ViTConfig(image_size=24, patch_size=8, dim=64, depth=3, heads=1, mlp_dim=96)
HEADER = {
    "num_heads": "1",
    "input_size": "24",
    "mean": "0.1,0.2,0.3",
    "std": "0.4,0.5,0.6",
    "interpolation": "bilinear",
}
TIMM_CONFIG = {
    "architecture": "vit_small_patch8_24",
    "pretrained_cfg": {
        "input_size": [3, 24, 24],
        "interpolation": "bicubic",
        "mean": [0.1, 0.2, 0.3],
        "std": [0.4, 0.5, 0.6],
        "license": "mit",
    },
}


def random_tensors(config: ViTConfig = SMALL) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    state = VisionTransformer(config).state_dict()
    return {name: 0.3 * torch.randn(tensor.shape, generator=generator) for name, tensor in state.items()}


def write(path: Path, tensors: dict[str, Tensor], header: dict[str, str] | None = HEADER) -> str:
    save_file(tensors, path, header)
    return str(path)


def message_of(name: str | Path) -> str:
    with pytest.raises(DualPromptError) as caught:
        weights.read(str(name))
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_embedded() -> None:
    checkpoint = weights.read("embedded")
    info = checkpoint.info
    assert (info.input_size, info.mean, info.std, info.interpolation) == (
        224,
        (0.5,) * 3,
        (0.5,) * 3,
        "bicubic",
    )
    assert (info.licence, info.normalisation, info.parameters) == ("Apache-2.0", "checkpoint", 5_524_416)
    assert checkpoint.config == ViTConfig(image_size=224, patch_size=16, dim=192, depth=12, heads=3, mlp_dim=768)
    assert {tensor.dtype for tensor in checkpoint.tensors.values()} == {torch.float32}  # stored in fp16
    assert json.loads(json.dumps(asdict(info)))["mean"] == [0.5, 0.5, 0.5]
    model = weights.build(checkpoint)
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())
    features = model(torch.zeros(1, 3, 224, 224))
    assert features.shape == (1, 192)
    assert bool(features.isfinite().all())


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "wrong SHA-256"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1] + b"!"), "wrong SHA-256"),  # a whole file, another weight
        (lambda path: path.unlink(), "No such file"),
    ],
)
def test_damaged_embedded_weights_are_told(
    damage: Callable[[Path], None], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = packaged(EMBEDDED_FILE, EMBEDDED_SHA256)
    monkeypatch.setattr("dualprompt.files.ASSETS", tmp_path)
    path = Path(shutil.copy(whole, tmp_path))
    assert weights.read("embedded").info.sha256 == EMBEDDED_SHA256
    damage(path)
    message = message_of("embedded")
    assert message.startswith(f"{path}, which comes with dualprompt, is damaged ({reason}")
    assert message.endswith("install dualprompt again")


architectures = st.builds(
    lambda patch, grid, heads, width, **options: ViTConfig(
        image_size=patch * grid, patch_size=patch, dim=heads * width, heads=heads, **options
    ),
    patch=st.integers(4, 16),
    grid=st.integers(1, 3),
    heads=st.integers(1, 3),
    width=st.sampled_from([4, 6]),
    depth=st.integers(1, 3),
    mlp_dim=st.integers(1, 20),
    registers=st.integers(0, 4),
    distilled=st.booleans(),
    layer_scale=st.booleans(),
    qkv_bias=st.booleans(),
    positions_cover_prefix=st.booleans(),
    mlp=st.sampled_from(["gelu", "swiglu"]),
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(config=architectures)
def test_architecture_survives_the_file(config: ViTConfig, tmp_path: Path) -> None:
    tensors = random_tensors(config)
    checkpoint = weights.read(write(tmp_path / "w.safetensors", tensors, {"num_heads": str(config.heads)}))
    assert checkpoint.config == config
    built = weights.build(checkpoint).state_dict()
    assert built.keys() == tensors.keys()
    assert all(torch.equal(built[name], tensors[name]) for name in tensors)


def test_header_of_a_safetensors_file(tmp_path: Path) -> None:
    info = weights.read(write(tmp_path / "w.safetensors", random_tensors(), {**HEADER, "license": "mit"})).info
    assert (info.mean, info.std, info.interpolation) == ((0.1, 0.2, 0.3), (0.4, 0.5, 0.6), "bilinear")
    assert (info.input_size, info.licence, info.normalisation) == (24, "mit", "checkpoint")


def test_silent_file_gets_stated_assumptions(tmp_path: Path) -> None:
    info = weights.read(write(tmp_path / "w.safetensors", random_tensors(), None)).info
    assert (info.input_size, info.mean, info.std, info.normalisation) == (
        24,
        (0.5,) * 3,
        (0.5,) * 3,
        "assumed",
    )


def test_half_precision_is_read_as_fp32(tmp_path: Path) -> None:
    tensors = {name: tensor.bfloat16() for name, tensor in random_tensors().items()}
    read = weights.read(write(tmp_path / "w.safetensors", tensors)).tensors
    assert all(torch.equal(read[name], tensors[name].float()) for name in tensors)
    assert {tensor.dtype for tensor in read.values()} == {torch.float32}


@pytest.mark.parametrize("wrapper", [None, "model", "state_dict", "teacher"])
@pytest.mark.parametrize("prefix", ["", "module.backbone."])
def test_torch_file_with_wrapper_prefix_and_heads(wrapper: str | None, prefix: str, tmp_path: Path) -> None:
    tensors = random_tensors()
    state = {prefix + name: tensor for name, tensor in tensors.items()}
    state |= {
        "head.weight": torch.ones(5, 64),
        "head_dist.bias": torch.ones(5),
        "pre_logits.fc.bias": torch.ones(4),
    }
    torch.save(state if wrapper is None else {wrapper: state, "epoch": 3}, tmp_path / "w.pth")
    read = weights.read(str(tmp_path / "w.pth")).tensors
    assert read.keys() == tensors.keys()
    assert all(torch.equal(read[name], tensors[name]) for name in tensors)


def test_original_dinov2_names(tmp_path: Path) -> None:
    config = replace(SMALL, registers=4, layer_scale=True, mlp="swiglu")
    tensors = random_tensors(config)
    renamed = {"mask_token": torch.zeros(1, 64)}
    for name, tensor in tensors.items():
        name = name.replace("reg_token", "register_tokens").replace("mlp.fc1", "mlp.w12").replace("mlp.fc2", "mlp.w3")
        renamed[name.replace("blocks.", "blocks.0.")] = tensor
    checkpoint = weights.read(write(tmp_path / "w.safetensors", renamed))
    assert checkpoint.config == config
    assert all(torch.equal(checkpoint.tensors[name], tensors[name]) for name in tensors)


def test_heads_come_from_the_usual_width_where_nothing_says_so(tmp_path: Path) -> None:
    config = replace(SMALL, dim=128, heads=2)
    checkpoint = weights.read(write(tmp_path / "w.safetensors", random_tensors(config), None))
    assert vit_config(checkpoint).heads == 2
    narrow = random_tensors(replace(SMALL, dim=48))
    assert "num_heads" in message_of(write(tmp_path / "narrow.safetensors", narrow, None))
    assert "do not divide" in message_of(write(tmp_path / "w.safetensors", narrow, {"num_heads": "5"}))


def repository(folder: Path, config: dict = TIMM_CONFIG, preprocessor: dict | None = None) -> Path:
    folder.mkdir(parents=True)
    write(folder / "model.safetensors", random_tensors(), None)
    (folder / "config.json").write_text(json.dumps(config))
    if preprocessor is not None:
        (folder / "preprocessor_config.json").write_text(json.dumps(preprocessor))
    return folder


def test_folder_of_a_timm_repository(tmp_path: Path) -> None:
    info = weights.read(str(repository(tmp_path / "downloaded"))).info
    assert (info.mean, info.std, info.interpolation, info.input_size) == (
        (0.1, 0.2, 0.3),
        (0.4, 0.5, 0.6),
        "bicubic",
        24,
    )
    assert (info.licence, info.normalisation) == ("mit", "checkpoint")


@pytest.mark.parametrize(
    ("preprocessor", "side"),
    [
        ({"size": 48}, 48),
        ({"size": {"height": 16, "width": 16}}, 16),
        (
            {"size": {"shortest_edge": 32}, "crop_size": {"height": 40, "width": 40}, "do_center_crop": True},
            40,
        ),
        ({"size": {"shortest_edge": 30}}, 24),  # not a whole number of patches: the size of the positions
        ({}, 24),
    ],
)
def test_preprocessor_of_a_hugging_face_repository(preprocessor: dict, side: int, tmp_path: Path) -> None:
    preprocessor |= {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6], "resample": 2}
    config = {"model_type": "vit", "num_attention_heads": 4, "layer_norm_eps": 1e-9, "image_size": 24}
    checkpoint = weights.read(str(repository(tmp_path / "downloaded", config, preprocessor)))
    info = checkpoint.info
    assert (info.mean, info.std, info.interpolation) == ((0.1, 0.2, 0.3), (0.4, 0.5, 0.6), "bilinear")
    assert (vit_config(checkpoint).heads, vit_config(checkpoint).eps, info.input_size) == (4, 1e-9, side)
    assert weights.build(checkpoint)(torch.zeros(1, 3, side, side)).shape == (1, 64)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"architecture": "x", "pretrained_cfg": {"mean": [0.5]}}, "mean"),
        ({"architecture": "x", "pretrained_cfg": {"std": [0.0, 1, 1]}}, "std"),
        ({"num_attention_heads": -1}, "num_attention_heads"),
        ({"hidden_act": "gelu_new"}, "gelu_new"),
    ],
)
def test_bad_config_is_named(config: dict, named: str, tmp_path: Path) -> None:
    message = message_of(repository(tmp_path / "downloaded", config))
    assert "config.json" in message
    assert named in message


def test_config_that_is_no_json(tmp_path: Path) -> None:
    folder = repository(tmp_path / "downloaded")
    (folder / "config.json").write_text("{")
    assert str(folder / "config.json") in message_of(folder)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The hub client's own cache, offline, with one repository in it; its download code runs for real."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    cached = tmp_path / "hub" / "models--owner--vit.tiny"
    repository(cached / "snapshots" / ("a" * 40))
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("a" * 40)
    return tmp_path / "hub"


@pytest.mark.parametrize(
    "name", ["owner/vit.tiny", "hf-hub:owner/vit.tiny", f"owner/vit.tiny@{'a' * 40}", "owner/vit.tiny@main"]
)
def test_hub_id_from_the_cache(hub: Path, name: str) -> None:
    info = weights.read(name).info
    assert (info.name, info.source, info.mean) == (name, f"owner/vit.tiny@{'a' * 40}", (0.1, 0.2, 0.3))


def test_hub_repository_without_safetensors(hub: Path) -> None:
    snapshot = hub / "models--owner--vit.tiny" / "snapshots" / ("a" * 40)
    (snapshot / "model.safetensors").unlink()
    tensors = random_tensors()
    torch.save(tensors, snapshot / "pytorch_model.bin")
    assert torch.equal(weights.read("owner/vit.tiny").tensors["norm.bias"], tensors["norm.bias"])


def test_short_name_is_a_hub_id(hub: Path) -> None:
    alias = KNOWN["vit-b16-in21k"]
    cached = hub / f"models--{alias.source.replace('/', '--')}"
    repository(cached / "snapshots" / ("b" * 40))
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("b" * 40)
    info = weights.read("vit-b16-in21k").info
    assert (info.name, info.source, info.licence) == (
        "vit-b16-in21k",
        f"{alias.source}@{'b' * 40}",
        "Apache-2.0",
    )


@pytest.mark.parametrize("name", ["owner/absent", "vit-l16-in21k", "owner/vit.tiny@nosuchbranch", "own--er/-bad-"])
def test_hub_id_that_cannot_be_fetched(hub: Path, name: str) -> None:
    message = message_of(name)
    assert "could not be fetched" in message
    assert "give their folder's path" in message


def test_hub_repository_whose_weights_are_not_cached(hub: Path) -> None:
    (hub / "models--owner--vit.tiny" / "snapshots" / ("a" * 40) / "model.safetensors").unlink()
    assert "could not be fetched" in message_of("owner/vit.tiny")


def test_unknown_name_gets_the_nearest() -> None:
    assert "did you mean 'vit-b16-in21k'?" in message_of("vit-b16-in2k")


def test_listing_needs_no_torch() -> None:
    program = "import sys, dualprompt.backbones.known as it; sys.exit(not it.known() or 'torch' in sys.modules)"
    paths = {"PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", program], check=True, env={**os.environ, **paths})
    told = {"name", "title", "source", "images", "labels", "licence", "needs_network", "file", "notes"}
    assert told == set(known()[0])
    assert [entry["name"] for entry in known() if not entry["needs_network"]] == [
        "embedded",
        "vit-b16-random",
        "resnet18-cifar",
        "resnet18-cifar-pool",
        "resnet18",
        "resnet152",
    ]


@pytest.mark.parametrize("suffix", [".safetensors", ".pth", ".pt", ".bin", ".npz"])
@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 and then nothing", b"\x93NUMPY", bytes(range(256)) * 10])
def test_corrupt_file(suffix: str, content: bytes, tmp_path: Path) -> None:
    file = tmp_path / f"broken{suffix}"
    file.write_bytes(content)
    assert str(file) in message_of(file)


@pytest.mark.parametrize("suffix", [".safetensors", ".pth", ".npz"])
@pytest.mark.parametrize("kept", [0.1, 0.5, 0.99])
def test_truncated_file(suffix: str, kept: float, tmp_path: Path) -> None:
    file, tensors = tmp_path / f"cut{suffix}", random_tensors()
    if suffix == ".safetensors":
        save_file(tensors, file)
    elif suffix == ".pth":
        torch.save(tensors, file)
    else:
        np.savez(file, **{name: tensor.numpy() for name, tensor in tensors.items()})  # pyright: ignore[reportArgumentType]
    file.write_bytes(file.read_bytes()[: int(file.stat().st_size * kept)])
    assert str(file) in message_of(file)


@pytest.mark.parametrize("name", ["absent.safetensors", "folder/absent.pth", "./absent", "~/absent/weights"])
def test_missing_file(name: str) -> None:
    assert f"{name} does not exist" in message_of(name)


def test_files_that_are_no_weights(tmp_path: Path) -> None:
    (tmp_path / "w.ckpt").write_bytes(b"x")
    assert ".safetensors, .pth" in message_of(tmp_path / "w.ckpt")
    (tmp_path / "w.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    assert "git lfs pull" in message_of(tmp_path / "w.safetensors")
    torch.save([1, 2], tmp_path / "list.pth")
    assert "expected a state dict, found list" in message_of(tmp_path / "list.pth")
    (tmp_path / "empty").mkdir()
    assert "holds no model.safetensors" in message_of(tmp_path / "empty")


class Malicious:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.target),)


def test_malicious_pickle_is_refused_and_not_run(tmp_path: Path) -> None:
    target = tmp_path / "executed"
    torch.save({"model": random_tensors(), "args": Malicious(target)}, tmp_path / "evil.pth")
    message = message_of(tmp_path / "evil.pth")
    assert "mkdir" in message
    assert not target.exists()
    torch.load(tmp_path / "evil.pth", weights_only=False)
    assert target.exists()  # the file does carry the attack


def test_object_array_in_npz_is_refused_and_not_run(tmp_path: Path) -> None:
    target = tmp_path / "executed"
    np.savez(tmp_path / "evil.npz", cls=np.array([Malicious(target)], dtype=object))
    assert "evil.npz" in message_of(tmp_path / "evil.npz")
    assert not target.exists()


@pytest.mark.parametrize("name", sorted(random_tensors()))
def test_missing_tensor_is_refused_by_name(name: str, tmp_path: Path) -> None:
    tensors = random_tensors()
    del tensors[name]
    message = message_of(write(tmp_path / "w.safetensors", tensors))
    assert name in message or name == "patch_embed.proj.weight"  # without it the layout cannot be told


@pytest.mark.parametrize("name", sorted(random_tensors()))
def test_wrong_shape_is_refused_by_name(name: str, tmp_path: Path) -> None:
    tensors = random_tensors()
    found = [side + 1 for side in tensors[name].shape]
    tensors[name] = torch.zeros(found)
    message = message_of(write(tmp_path / "w.safetensors", tensors))
    assert f"'{name}'" in message
    if name not in ("pos_embed", "patch_embed.proj.weight"):  # these two decide what is right for them
        assert f"{found}, expected {list(random_tensors()[name].shape)}" in message


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_value_that_is_not_finite_is_refused_by_name(value: float, tmp_path: Path) -> None:
    tensors = random_tensors()
    tensors["blocks.1.mlp.fc2.weight"][3, 5] = value
    assert "'blocks.1.mlp.fc2.weight' holds NaN or infinity" in message_of(write(tmp_path / "w.safetensors", tensors))


def test_empty_tensor_is_refused_by_name(tmp_path: Path) -> None:
    tensors = {**random_tensors(), "patch_embed.proj.weight": torch.zeros(64, 3, 0, 0)}
    assert "'patch_embed.proj.weight' is empty" in message_of(write(tmp_path / "w.safetensors", tensors))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("blocks.0.attn.q_norm.weight", "surplus tensor 'blocks.0.attn.q_norm.weight'"),
        ("blocks.7.norm1.weight", "missing tensor 'blocks.3.norm1.weight'"),
        ("fc_norm.weight", "average of the patches"),
        ("norm_pre.weight", "missing tensor 'norm_pre.bias'"),
        ("visual.ln_pre.weight", "a CLIP tower under OpenAI's names"),
        ("layers.0.blocks.0.attn.relative_position_bias_table", "Swin"),
        ("layer1.0.conv1.weight", "ResNet"),
    ],
)
def test_surplus_tensor_is_refused_by_name(name: str, said: str, tmp_path: Path) -> None:
    message = message_of(write(tmp_path / "w.safetensors", {**random_tensors(), name: torch.ones(64)}))
    assert said in message


def test_other_networks_are_told_what_is_supported(tmp_path: Path) -> None:
    message = message_of(write(tmp_path / "w.safetensors", {"stem.conv.weight": torch.ones(4, 3, 3, 3)}))
    assert "'stem.conv.weight'" in message
    assert "plain Vision Transformers" in message


def test_hugging_face_file_is_refused_by_its_own_names(tmp_path: Path) -> None:
    names = {"query": (64, 64), "key": (64, 64), "value": (64, 32)}
    tensors = {"vit.embeddings.patch_embeddings.projection.weight": torch.ones(64, 3, 8, 8)}
    prefix = "vit.encoder.layer.0.attention.attention"
    tensors |= {f"{prefix}.{name}.weight": torch.ones(shape) for name, shape in names.items()}
    message = message_of(write(tmp_path / "w.safetensors", tensors))
    assert f"'{prefix}.value.weight' has shape [64, 32], expected [64, 64]" in message
    del tensors[f"{prefix}.key.weight"]
    message = message_of(write(tmp_path / "w.safetensors", tensors))
    assert "missing tensor 'blocks.0.attn.k.weight'" in message
    assert f"'{prefix}.query.weight'" in message


def test_the_same_tensor_twice(tmp_path: Path) -> None:
    tensors = random_tensors(replace(SMALL, registers=2))
    tensors["register_tokens"] = tensors["reg_token"].clone()
    assert "are the same tensor" in message_of(write(tmp_path / "w.safetensors", tensors))


def test_positions_that_are_no_square(tmp_path: Path) -> None:
    tensors = {**random_tensors(), "pos_embed": torch.ones(1, 8, 64)}
    assert "'pos_embed' holds 8 positions" in message_of(write(tmp_path / "w.safetensors", tensors))


@pytest.mark.parametrize("cover", [True, False])
@pytest.mark.parametrize("distilled", [True, False])
def test_another_input_size(cover: bool, distilled: bool, tmp_path: Path) -> None:
    config = replace(SMALL, positions_cover_prefix=cover, distilled=distilled)
    checkpoint = weights.read(write(tmp_path / "w.safetensors", random_tensors(config)))
    special = (2 if distilled else 1) * cover
    larger = weights.build(checkpoint, input_size=40)
    assert larger(torch.zeros(2, 3, 40, 40)).shape == (2, 64)
    assert as_vit(larger).pos_embed.shape[1] == special + 25
    assert torch.equal(as_vit(larger).pos_embed[:, :special], checkpoint.tensors["pos_embed"][:, :special])
    same = weights.build(checkpoint, input_size=24)
    assert torch.equal(as_vit(same).pos_embed, checkpoint.tensors["pos_embed"])
    smooth = {**checkpoint.tensors, "pos_embed": torch.ones_like(checkpoint.tensors["pos_embed"])}
    resized = as_vit(weights.build(replace(checkpoint, tensors=smooth), input_size=40)).pos_embed
    torch.testing.assert_close(resized, torch.ones_like(resized))  # a constant stays the constant


@pytest.mark.parametrize(("size", "nearest"), [(20, "nearest: 16 or 24"), (5, "nearest: 8")])
def test_input_size_must_be_whole_patches(size: int, nearest: str, tmp_path: Path) -> None:
    checkpoint = weights.read(write(tmp_path / "w.safetensors", random_tensors()))
    with pytest.raises(DualPromptError, match=f"input size {size} .* patch size 8 .*{nearest}"):
        weights.build(checkpoint, input_size=size)


def test_building_and_casting_leave_the_checkpoint_alone(tmp_path: Path) -> None:
    checkpoint = weights.read(write(tmp_path / "w.safetensors", random_tensors()))
    before = {name: tensor.clone() for name, tensor in checkpoint.tensors.items()}
    weights.build(checkpoint).to(torch.bfloat16)
    assert all(torch.equal(checkpoint.tensors[name], before[name]) for name in before)
    assert {tensor.dtype for tensor in checkpoint.tensors.values()} == {torch.float32}
