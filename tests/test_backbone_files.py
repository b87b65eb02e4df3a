"""Checkpoints of CLIP, MoCo v3 and iBOT: read as they are published, against transformers and against plain files."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from dualprompt.backbones import weights
from dualprompt.backbones.known import KNOWN, known_as
from dualprompt.backbones.overlap import overlaps
from dualprompt.config import RunConfig, parse
from dualprompt.errors import DualPromptError
from helpers import as_vit, random_images, tiny_vit, vit_config
from sandbox import World, call

SIDE = 32
SMALL = {
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "image_size": SIDE,
    "patch_size": 8,
    "intermediate_size": 80,
    "projection_dim": 20,
}
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


@pytest.fixture(scope="module")
def transformers() -> Any:
    return importlib.import_module("transformers")  # takes seconds: only for the tests that need it


def clip(transformers: Any, kind: str, **options: Any) -> Any:
    """A random CLIP: its tower alone, with its projection, or with the text's beside it."""
    vision = transformers.CLIPVisionConfig(**{**SMALL, **options})
    if kind == "CLIPModel":
        text = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 40}
        small = {"vocab_size": 50, "bos_token_id": 1, "eos_token_id": 2}
        config = transformers.CLIPConfig(
            vision_config=vision.to_dict(), text_config=text | small, projection_dim=SMALL["projection_dim"]
        )
    else:
        config = vision
    network = getattr(transformers, kind)(config).eval()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            middle = 1.0 if "norm" in name and name.endswith("weight") else 0.0
            parameter.copy_(middle + 0.3 * torch.randn(parameter.shape, generator=generator))
    return network


def images() -> Tensor:
    return torch.randn(4, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(0))


def pooled(network: Any) -> Tensor:
    with torch.no_grad():
        return getattr(network, "vision_model", network)(images()).pooler_output


@pytest.mark.parametrize("kind", ["CLIPVisionModel", "CLIPVisionModelWithProjection", "CLIPModel"])
@pytest.mark.parametrize("activation", ["quick_gelu", "gelu"])
def test_clip_equals_transformers(transformers: Any, kind: str, activation: str, tmp_path: Path) -> None:
    network = clip(transformers, kind, hidden_act=activation)
    network.save_pretrained(tmp_path)
    expected = pooled(network)
    for name in (tmp_path, tmp_path / "model.safetensors"):
        checkpoint = weights.read(str(name))
        torch.testing.assert_close(weights.build(checkpoint)(images()), expected, atol=1e-5, rtol=1e-5)
    config = vit_config(checkpoint)
    assert (config.pre_norm, config.patch_bias, config.eps, config.heads) == (True, False, 1e-5, 3)
    assert config.gelu == ("quick" if activation == "quick_gelu" else "exact")
    assert checkpoint.info.mean == (0.48145466, 0.4578275, 0.40821073)
    assert expected.std() > 0.1


def test_the_projection_of_a_clip_is_a_head_on_top(transformers: Any, tmp_path: Path) -> None:
    network = clip(transformers, "CLIPVisionModelWithProjection")
    network.save_pretrained(tmp_path)
    features = weights.build(weights.read(str(tmp_path)))(images())
    with torch.no_grad():
        expected = network(images()).image_embeds
    torch.testing.assert_close(features @ network.visual_projection.weight.T, expected, atol=1e-5, rtol=1e-5)


def test_a_clip_of_timm_is_the_same_network(transformers: Any, tmp_path: Path) -> None:
    network = clip(transformers, "CLIPVisionModel")
    network.save_pretrained(tmp_path / "theirs")
    tensors = weights.read(str(tmp_path / "theirs")).tensors
    (tmp_path / "ours").mkdir()
    save_file(tensors | {"head.weight": torch.ones(20, 48)}, tmp_path / "ours" / "model.safetensors")
    said = {"architecture": "vit_base_patch16_clip_quickgelu_224", "model_args": {"num_heads": 3}}
    (tmp_path / "ours" / "config.json").write_text(json.dumps(said))
    checkpoint = weights.read(str(tmp_path / "ours"))
    torch.testing.assert_close(weights.build(checkpoint)(images()), pooled(network), atol=1e-5, rtol=1e-5)
    (tmp_path / "ours" / "config.json").write_text(json.dumps(said | {"architecture": "vit_base_patch16_clip_224"}))
    assert vit_config(weights.read(str(tmp_path / "ours"))).gelu == "exact"


def test_a_clip_takes_another_input_size_but_no_other_activation(transformers: Any, tmp_path: Path) -> None:
    clip(transformers, "CLIPVisionModel").save_pretrained(tmp_path)
    checkpoint = weights.read(str(tmp_path))
    assert weights.build(checkpoint, input_size=24)(torch.zeros(1, 3, 24, 24)).shape == (1, 48)
    with pytest.raises(DualPromptError, match="has CLIP's quick GELU, not tanh"):
        weights.build(checkpoint, gelu="tanh")


def test_dualprompt_learns_on_a_clip(transformers: Any, world: World, tmp_path: Path) -> None:
    clip(transformers, "CLIPModel", image_size=16).save_pretrained(tmp_path / "clip")
    options = ("--backbone", tmp_path / "clip", "--train.epochs", 1, "--no-baseline", "--json")
    done = call("run", world.preset, "--out", tmp_path / "run", *options)
    assert done.code == 0, done.err
    assert done.json["parameters"]["backbone"] < 200_000, "the tower of the images alone"


def state(prefix: str, seed: int, **options: Any) -> dict[str, Tensor]:
    return {prefix + name: value for name, value in tiny_vit(seed, **options).state_dict().items()}


def moco(**options: Any) -> dict[str, Any]:
    """What a file of MoCo v3 holds: two encoders, each with a head, a predictor, and the optimiser's state."""
    tensors = state("module.momentum_encoder.", 1, **options) | state("module.base_encoder.", 2, **options)
    heads = ("module.base_encoder.head.0.weight", "module.momentum_encoder.head.0.weight", "module.predictor.0.weight")
    tensors |= {name: torch.ones(4, 4) for name in heads}
    return {"epoch": 300, "arch": "vit_base", "state_dict": tensors, "optimizer": {"state": {0: torch.ones(2)}}}


def test_moco_v3_is_read_as_published(tmp_path: Path) -> None:
    options = {"dim": 64, "heads": 1}
    torch.save(moco(**options), tmp_path / "vit-b-300ep.pth.tar")
    checkpoint = weights.read(str(tmp_path / "vit-b-300ep.pth.tar"))
    pictures = random_images(3)
    assert torch.equal(weights.build(checkpoint)(pictures), tiny_vit(2, **options)(pictures))
    assert (checkpoint.info.mean, checkpoint.info.std) == IMAGENET


def test_the_small_vit_of_moco_v3_has_twelve_heads(tmp_path: Path) -> None:
    options = {"dim": 384, "depth": 1, "heads": 12}
    torch.save(moco(**options), tmp_path / "w.pth.tar")
    assert vit_config(weights.read(str(tmp_path / "w.pth.tar"))).heads == 12
    torch.save(state("module.", 2, **options), tmp_path / "w.pth")
    assert vit_config(weights.read(str(tmp_path / "w.pth"))).heads == 6


@pytest.mark.parametrize(
    ("wrapper", "prefix", "head"),
    [
        ("state_dict", "", "masked_embed"),
        ("teacher", "backbone.", "head.mlp.0.weight"),
        ("student", "module.backbone.", "module.head.mlp.0.weight"),
    ],
)
def test_ibot_is_read_as_published(tmp_path: Path, wrapper: str, prefix: str, head: str) -> None:
    options = {"dim": 64, "heads": 1}
    content = {wrapper: state(prefix, 4, **options) | {head: torch.ones(1, 64)}, "epoch": 9}
    torch.save(content, tmp_path / "checkpoint.pth")
    checkpoint = weights.read(str(tmp_path / "checkpoint.pth"))
    pictures = random_images(3)
    assert torch.equal(weights.build(checkpoint)(pictures), tiny_vit(4, **options)(pictures))
    assert ((checkpoint.info.mean, checkpoint.info.std) == IMAGENET) == (head == "masked_embed")


def test_a_name_finds_the_file_that_was_put_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DUALPROMPT_DATA", str(tmp_path))
    for name in ("ibot-b16", "ibot-b16-in21k", "mocov3-s16", "mocov3-b16"):
        with pytest.raises(DualPromptError) as caught:
            weights.read(name)
        place = tmp_path / "backbones" / KNOWN[name].file
        assert f"download {KNOWN[name].source} yourself to {place}" in str(caught.value)
        assert not weights.is_here(name)
    place.parent.mkdir()
    torch.save(moco(dim=64, heads=1), place)
    assert weights.is_here("mocov3-b16")
    info = weights.read("mocov3-b16").info
    assert (info.mean, info.std) == IMAGENET
    assert (info.licence, info.source, info.normalisation) == ("CC BY-NC 4.0", KNOWN["mocov3-b16"].source, "checkpoint")
    assert weights.is_here("embedded")
    assert weights.is_here("resnet18-cifar-nf20")
    assert weights.is_here(str(place))
    assert not weights.is_here("nobody/nothing")


def test_every_known_backbone_says_what_it_saw() -> None:
    for entry in KNOWN.values():
        if entry.needs_network or entry.name == "embedded":
            assert entry.images != "none"
        if entry.labels.startswith("ImageNet"):
            assert entry.labels == entry.images
    assert {KNOWN[name].labels for name in ("dino-b16", "ibot-b16", "mocov3-b16", "dinov2-b14")} == {"none"}
    assert known_as("hf-hub:timm/vit_base_patch16_224.orig_in21k@main") is KNOWN["vit-b16-in21k"]
    assert known_as("./my-vit") is None


def test_old_networks_keep_their_tensors() -> None:
    assert not any("norm_pre" in name for name in as_vit(tiny_vit()).state_dict())


@pytest.mark.parametrize(
    ("backbone", "dataset", "said"),
    [
        ("vit-b16-augreg-in1k", "imagenet-r", "imagenet-r has 200 classes of ImageNet-1k, in other pictures; backbone"),
        ("timm/vit_base_patch16_224.orig_in21k", "imagenet-a-pilot", "with the labels of ImageNet-21k"),
        ("embedded", "cifar100", "with the labels of ImageNet-21k, ImageNet-1k"),
        ("dino-b16", "tiny-imagenet", "on pictures of ImageNet-1k, without labels"),
        ("embedded", "domainnet", "domainnet/real has everyday things"),
        ("dino-b16", "imagenet-r", None),
        ("clip-b16", "tiny-imagenet", None),
        ("resnet18-cifar", "cifar100", None),
        ("embedded", "mini", None),
        ("./my-vit", "imagenet-r", None),
    ],
)
def test_what_a_backbone_has_seen_of_a_benchmark(backbone: str, dataset: str, said: str | None) -> None:
    values = {"benchmark": {"dataset": dataset}, "backbone": {"name": backbone}}
    found = overlaps(parse(RunConfig, values))
    assert len(found) == (said is not None)
    assert said is None or said in found[0]
