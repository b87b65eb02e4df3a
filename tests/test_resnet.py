"""ResNets: parity with transformers and with numbers on record, files and their faults, freezing, drawing."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from dualprompt.backbones import weights
from dualprompt.backbones.architecture import network
from dualprompt.backbones.resnet import ResNet, ResNetConfig, draw
from dualprompt.errors import DualPromptError

BASIC = ResNetConfig(image_size=64, width=8)
BOTTLENECK = ResNetConfig(image_size=64, width=4, blocks=(1, 2, 3, 1), bottleneck=True)
CIFAR = ResNetConfig(image_size=32, width=8, stem="cifar", pool=False)
SMALL = {"basic": BASIC, "bottleneck": BOTTLENECK, "cifar": CIFAR}


def filled(config: ResNetConfig) -> ResNet:
    """A network whose numbers are functions of their places: no draw, no file, the same everywhere."""
    made = ResNet(config)
    for number, (name, value) in enumerate(made.state_dict().items()):
        sines = torch.sin(12.9898 * torch.arange(value.numel(), dtype=torch.float64) + number)
        wave = (2 * (43758.5453 * sines).remainder(1) - 1).view(value.shape).float()  # spread over −1 to 1
        if value.ndim == 4:
            value.copy_(wave * (3 / value[0].numel()) ** 0.5)
        elif name.endswith("running_var"):
            value.copy_(0.5 + wave.square())
        elif name.endswith("weight"):
            value.copy_(1 + 0.3 * wave)
        else:
            value.copy_(0.2 * wave)
    return made.eval()


def waves(side: int, count: int = 2) -> Tensor:
    return (
        torch.sin(0.3 * torch.arange(count * 3 * side * side, dtype=torch.float64)).view(count, 3, side, side).float()
    )


# First four numbers and norm of each of two features, by transformers 5.22 (`basic`, `bottleneck`) and by the
# straight-line twin below (`cifar`), with the weights of `filled`.
GOLDEN: dict[str, list[list[float]]] = {
    "basic": [[3.29604, 4.8573, 1.59949, 0.33074, 17.97025], [2.96536, 4.73311, 1.71782, 0.27789, 17.23634]],
    "bottleneck": [[0.22071, 0.0, 0.84463, 0.04033, 9.49535], [0.50412, 0.0, 0.70502, 0.0, 9.91876]],
    "cifar": [[3.26347, 3.21243, 1.92344, 0.67154, 17.89131], [3.17338, 3.40649, 1.9752, 0.66842, 17.73669]],
}


@pytest.mark.parametrize("name", SMALL)
def test_numbers_on_record(name: str) -> None:
    with torch.no_grad():
        found = filled(SMALL[name])(waves(SMALL[name].image_size))
    rows = torch.cat([found[:, :4], found.norm(dim=1, keepdim=True)], dim=1)
    torch.testing.assert_close(rows, torch.tensor(GOLDEN[name]), rtol=1e-4, atol=1e-4)


def theirs(config: ResNetConfig, state: dict[str, Tensor]) -> Any:
    """The model of transformers with our weights."""
    transformers = pytest.importorskip("transformers")
    wide = 4 if config.bottleneck else 1
    model = transformers.ResNetModel(
        transformers.ResNetConfig(
            embedding_size=config.width,
            hidden_sizes=[wide * config.width * 2**stage for stage in range(4)],
            depths=list(config.blocks),
            layer_type="bottleneck" if config.bottleneck else "basic",
        )
    )
    renamed = {hugging_face(name): value for name, value in state.items()}
    missing, surplus = model.load_state_dict(renamed, strict=False)
    assert not surplus
    assert all(name.endswith("num_batches_tracked") for name in missing)
    return model


def hugging_face(name: str) -> str:
    def inside(part: str) -> str:
        if part.startswith("downsample"):
            return part.replace("downsample.0", "shortcut.convolution").replace(
                "downsample.1", "shortcut.normalization"
            )
        kind, number, leaf = re.fullmatch(r"(conv|bn)(\d)\.(\w+)", part).groups()  # type: ignore[union-attr]
        return f"layer.{int(number) - 1}.{'convolution' if kind == 'conv' else 'normalization'}.{leaf}"

    if (found := re.fullmatch(r"layer(\d)\.(\d+)\.(.*)", name)) is not None:
        return f"encoder.stages.{int(found[1]) - 1}.layers.{found[2]}.{inside(found[3])}"
    return "embedder.embedder." + inside(name).removeprefix("layer.0.")


@pytest.mark.parametrize("config", [BASIC, BOTTLENECK], ids=["basic", "bottleneck"])
def test_equals_transformers(config: ResNetConfig) -> None:
    """In evaluation, and in training, where the statistics move as well."""
    mine = filled(config)
    other = theirs(config, mine.state_dict())
    for training in (False, True, False):
        mine.train(training)
        other.train(training)
        with torch.no_grad():
            expected = other(waves(64, 4), output_hidden_states=True)
            torch.testing.assert_close(mine(waves(64, 4)), expected.pooler_output.flatten(1), rtol=1e-4, atol=1e-5)
            if not training:
                for found, their in zip(mine.maps(waves(64, 4)), expected.hidden_states[1:], strict=True):
                    torch.testing.assert_close(found, their, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(mine.bn1.running_var, other.state_dict()[hugging_face("bn1.running_var")])


def twin(state: dict[str, Tensor], images: Tensor) -> list[Tensor]:
    """The four maps of a ResNet-18 for small images, in evaluation, written out."""

    def norm(x: Tensor, name: str) -> Tensor:
        mean, var, weight, bias = (
            state[f"{name}.{leaf}"][:, None, None] for leaf in ("running_mean", "running_var", "weight", "bias")
        )
        return (x - mean) / (var + 1e-5).sqrt() * weight + bias

    x, maps = F.relu(norm(F.conv2d(images, state["conv1.weight"], padding=1), "bn1")), []
    for stage in (1, 2, 3, 4):
        for block in (0, 1):
            at, stride = f"layer{stage}.{block}", 2 if stage > 1 and block == 0 else 1
            out = F.relu(norm(F.conv2d(x, state[f"{at}.conv1.weight"], stride=stride, padding=1), f"{at}.bn1"))
            out = norm(F.conv2d(out, state[f"{at}.conv2.weight"], padding=1), f"{at}.bn2")
            if stride == 2:
                x = norm(F.conv2d(x, state[f"{at}.downsample.0.weight"], stride=2), f"{at}.downsample.1")
            x = F.relu(out + x)
        maps.append(x)
    return maps


def test_small_images_go_through_a_small_stem() -> None:
    mine = filled(CIFAR)
    with torch.no_grad():
        maps = mine.maps(waves(32))
        for found, expected in zip(maps, twin(mine.state_dict(), waves(32)), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        assert mine.widths == tuple(each.shape[1] for each in maps)
        assert [tuple(each.shape[1:]) for each in maps] == [(8, 32, 32), (16, 16, 16), (32, 8, 8), (64, 4, 4)]
        assert torch.equal(mine(waves(32)), maps[-1].mean(dim=(2, 3)))
        pooled = ResNet(replace(CIFAR, pool=True)).maps(waves(32))
    assert [each.shape[-1] for each in pooled] == [16, 8, 4, 2]


@pytest.mark.parametrize(
    ("name", "convolutions", "parameters", "dim"),
    [
        ("resnet18-cifar", 11_159_232, 11_168_832, 512),
        ("resnet18-cifar-nf20", 1_090_140, 1_093_140, 160),
        ("resnet18-cifar-pool", 11_159_232, 11_168_832, 512),
        ("resnet18", 11_166_912, 11_176_512, 512),  # torchvision's 11,689,512 without its classifier
        ("resnet152", 57_992_384, 58_143_808, 2048),  # torchvision's 60,192,808 without its classifier
    ],
)
def test_sizes(name: str, convolutions: int, parameters: int, dim: int) -> None:
    config = weights._RESNETS[re.sub(r"-nf\d+", "", name)]
    with torch.device("meta"):
        made = network(replace(config, width=20 if name.endswith("nf20") else 64))
    assert sum(weight.numel() for weight in made.parameters() if weight.ndim == 4) == convolutions
    assert sum(weight.numel() for weight in made.parameters()) == parameters
    assert made.dim == dim


def test_a_frozen_backbone_does_not_move_in_training_mode() -> None:
    made = filled(CIFAR).freeze()
    before = {name: value.clone() for name, value in made.state_dict().items()}
    made.train()
    assert not any(module.training for module in made.modules())
    made(waves(32))
    assert all(torch.equal(value, before[name]) for name, value in made.state_dict().items())
    assert not any(weight.requires_grad for weight in made.parameters())
    made.unfreeze().train()
    made(waves(32)).sum().backward()
    changed = {name for name, value in made.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == {name for name in before if ".running_" in name}
    assert all(weight.grad is not None for weight in made.parameters())


def test_a_lower_precision_is_the_convolutions_alone() -> None:
    made = filled(CIFAR).unfreeze()
    features = made.computed_in(torch.bfloat16, waves(32))
    assert features.dtype == torch.bfloat16
    features.sum().backward()
    assert all(weight.grad is not None and weight.grad.dtype == torch.float32 for weight in made.parameters())
    made.freeze().round_to(torch.bfloat16)
    assert made.dtype == torch.bfloat16
    assert {value.dtype for name, value in made.state_dict().items() if value.ndim == 1} == {torch.float32}
    assert torch.equal(made(waves(32).bfloat16()), features)


def test_names_of_the_known_are_drawn_by_the_seed() -> None:
    one, again, other = (weights.read("resnet18-cifar-nf4", seed=seed) for seed in (5, 5, 6))
    assert one.info == again.info
    assert one.info.sha256 != other.info.sha256
    assert all(torch.equal(value, again.tensors[name]) for name, value in one.tensors.items())
    assert not torch.equal(one.tensors["conv1.weight"], other.tensors["conv1.weight"])
    assert one.info.input_size == 32
    assert one.config == ResNetConfig(32, width=4, stem="cifar", pool=False)
    wide = draw(ResNet(ResNetConfig(32, width=32)), torch.Generator().manual_seed(0)).get_submodule("layer3.1.conv2")
    assert isinstance(wide, torch.nn.Conv2d)
    assert abs(float(wide.weight.detach().std()) - (2 / (9 * 128)) ** 0.5) < 1e-4
    assert all(
        torch.equal(value, torch.full_like(value, float(name.endswith(("weight", "running_var")))))
        for name, value in one.tensors.items()
        if value.ndim == 1
    )


def test_building_leaves_the_drawn_weights_alone() -> None:
    checkpoint = weights.read("resnet18-cifar-nf4")
    built = weights.build(checkpoint, input_size=16).unfreeze().train()
    built(waves(16))
    assert built.input_size == 16
    assert built.mean == checkpoint.info.mean
    assert bool((checkpoint.tensors["bn1.running_mean"] == 0).all())


def as_published(config: ResNetConfig = CIFAR, prefix: str = "") -> dict[str, Tensor]:
    """Tensors as torchvision and timm write them, with the classifier and the counts of batches."""
    state = {prefix + name: value.clone() for name, value in filled(config).state_dict().items()}
    counts = {
        name.replace("running_mean", "num_batches_tracked"): torch.tensor(7) for name in state if "running_mean" in name
    }
    return state | counts | {f"{prefix}fc.weight": torch.ones(10, config.dim), f"{prefix}fc.bias": torch.ones(10)}


@pytest.mark.parametrize("prefix", ["", "module."])
@pytest.mark.parametrize("kind", SMALL)
def test_published_names_are_read(kind: str, prefix: str, tmp_path: Path) -> None:
    config = SMALL[kind]
    save_file(as_published(config, prefix), tmp_path / "w.safetensors", {"input_size": str(config.image_size)})
    checkpoint = weights.read(str(tmp_path / "w.safetensors"))
    built = weights.build(checkpoint)
    assert checkpoint.config == replace(config, image_size=32 if kind == "cifar" else 224)
    assert built.input_size == config.image_size
    with torch.no_grad():
        assert torch.equal(built(waves(config.image_size)), filled(config)(waves(config.image_size)))
    assert checkpoint.info.parameters == sum(weight.numel() for weight in ResNet(config).parameters())
    usual = (0.5071, 0.4867, 0.4408) if kind == "cifar" else (0.485, 0.456, 0.406)
    assert (checkpoint.info.mean, checkpoint.info.normalisation) == (usual, "assumed")


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("layer2.0.conv2.weight", None, "missing tensor 'layer2.0.conv2.weight'"),
        ("conv1.weight", None, "missing tensor 'conv1.weight'"),
        ("bn1.running_var", None, "missing tensor 'bn1.running_var'"),
        ("layer3.0.downsample.0.weight", torch.ones(32, 16, 3, 3), "has shape [32, 16, 3, 3], expected [32, 16, 1, 1]"),
        ("conv1.weight", torch.ones(8, 3, 5, 5), "expected a convolution of 3×3 (small images) or 7×7"),
        ("conv1.weight", torch.ones(8), "expected 4 dimensions"),
        ("layer4.1.bn2.bias", torch.full((64,), torch.nan), "holds NaN"),
        ("layer1.0.se.fc1.weight", torch.ones(4), "surplus tensor 'layer1.0.se.fc1.weight'"),
        ("layer1.3.conv1.weight", torch.ones(8, 8, 3, 3), "missing tensor 'layer1.2.conv1.weight'"),
        ("patch_embed.proj.weight", torch.ones(8, 3, 8, 8), "a ViT on top of one"),
    ],
)
def test_faults_are_refused_by_name(name: str, value: Tensor | None, said: str, tmp_path: Path) -> None:
    tensors = {key: kept for key, kept in as_published().items() if key != name}
    save_file(tensors if value is None else tensors | {name: value}, tmp_path / "w.safetensors")
    with pytest.raises(DualPromptError) as caught:
        weights.read(str(tmp_path / "w.safetensors"))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_image_too_small_for_the_stages_is_refused() -> None:
    with pytest.raises(DualPromptError, match=r"input size 32 leaves one pixel .* use more than 32"):
        weights.build(weights.read("resnet18-nf4"), input_size=32)
    assert weights.build(weights.read("resnet18-nf4"), input_size=33).input_size == 33
