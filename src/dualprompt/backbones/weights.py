"""One name to verified tensors to a frozen network.

A name is `embedded`; a short name of `dualprompt list backbones`, that of a file added to this room or of another
distribution among them; a hub id (`owner/name` or
`hf-hub:owner/name`, either with `@revision`); a folder that holds a downloaded hub repository; or a
`.safetensors`, `.pth`, `.pt`, `.bin` or `.npz` file. What lies on disk goes before a hub id of the same name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from dualprompt.backbones import hub
from dualprompt.backbones import tensors as files
from dualprompt.backbones.architecture import Architecture, NamedConfig, infer, network, verify
from dualprompt.backbones.base import BACKBONES, HALF, Backbone, BackboneFactory
from dualprompt.backbones.facts import Facts, Triple, from_folder, from_header
from dualprompt.backbones.known import (
    EMBEDDED,
    EMBEDDED_FILE,
    EMBEDDED_SHA256,
    KNOWN,
    RANDOM,
    Known,
    drawn_by_seed,
    known,
)
from dualprompt.backbones.layouts import SUPPORTED, convert
from dualprompt.backbones.resnet import ResNet, ResNetConfig, draw
from dualprompt.backbones.vit import ViTConfig, resize_positions
from dualprompt.errors import DualPromptError, nearest
from dualprompt.files import data_root, digest, packaged, sha256, with_home
from dualprompt.progress import SILENT, Progress
from dualprompt.seeds import derive

__all__ = ["Checkpoint", "CheckpointInfo", "absolute_name", "build", "drawn", "factory", "known", "read"]

IMAGENET: tuple[Triple, Triple] = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # mean and std of its pixels
CIFAR: tuple[Triple, Triple] = (0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761)  # CIFAR-100's

CLIP: tuple[Triple, Triple] = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)

_HUB_ID = re.compile(r"(?:hf-hub:)?([\w.-]+/[\w.-]+)(?:@([\w./-]+))?")


@dataclass(frozen=True)
class CheckpointInfo:
    """Where a backbone comes from and how its images must look; goes into a run's manifest."""

    name: str
    source: str
    licence: str
    sha256: str
    input_size: int
    mean: Triple
    std: Triple
    interpolation: Literal["bilinear", "bicubic"]
    parameters: int
    normalisation: Literal["checkpoint", "assumed"]  # assumed: the files give no mean and std; see `_assumed`
    asked_interpolation: str | None  # what the files say; anything but bilinear is replaced by bicubic


@dataclass(frozen=True)
class Checkpoint:
    """A verified backbone: every tensor of the architecture under our name, fp32, without a head."""

    config: Architecture
    tensors: dict[str, Tensor]
    info: CheckpointInfo


def read(name: str, progress: Progress = SILENT, seed: int = 0) -> Checkpoint:
    """Return the backbone called `name`; see the module's description for what a name may be.

    `seed` is the run's, and decides the weights of those that are drawn to be trained from scratch.
    Raises a DualPromptError that names the file and the tensor where something is absent, surplus, of another
    shape, not finite, or of another architecture.
    """
    if name == EMBEDDED.name:
        return _read_file(name, packaged(EMBEDDED_FILE, EMBEDDED_SHA256), Facts(licence=EMBEDDED.licence))
    if name == RANDOM.name:
        return _random()
    if (drawn := drawn_by_seed(name)) is not None:
        return _drawn(name, *drawn, seed)
    if name in BACKBONES:
        return _named(name, seed)
    path, facts = _locate(name, progress)
    checkpoint = _read_file(name, path, facts)
    if checkpoint.info.normalisation == "assumed":
        whose = {IMAGENET: "ImageNet", CIFAR: "CIFAR-100", CLIP: "CLIP"}.get(
            (checkpoint.info.mean, checkpoint.info.std)
        )
        both = f"those of {whose} are assumed" if whose else "0.5 is assumed for both"
        progress.note(f"{path.name} says nothing of mean and std: {both}")
    asked, used = checkpoint.info.asked_interpolation, checkpoint.info.interpolation
    if asked != used:
        progress.note(f"{path.name} asks for {asked or 'no'} interpolation: images are resized with {used}")
    return checkpoint


def _random() -> Checkpoint:
    """Return the paper's architecture with weights that know nothing: enough to measure speed."""
    config = ViTConfig(image_size=224, patch_size=16, dim=768, depth=12, heads=12, mlp_dim=3072)
    generator = torch.Generator().manual_seed(0)
    with torch.device("meta"):
        shapes = {name: value.shape for name, value in network(config).state_dict().items()}
    tensors = {
        name: torch.ones(shape)
        if "norm" in name and name.endswith("weight")
        else torch.randn(shape, generator=generator) * 0.02
        for name, shape in shapes.items()
    }
    parameters = sum(value.numel() for value in tensors.values())
    info = CheckpointInfo(
        RANDOM.name, "drawn", RANDOM.licence, "", 224, HALF, HALF, "bilinear", parameters, "assumed", None
    )
    return Checkpoint(config, tensors, info)


_RESNETS = {
    "resnet18-cifar": ResNetConfig(32, stem="cifar", pool=False),
    "resnet18-cifar-pool": ResNetConfig(32, stem="cifar"),
    "resnet18": ResNetConfig(224),
    "resnet152": ResNetConfig(224, (3, 8, 36, 3), bottleneck=True),
}


def _drawn(name: str, architecture: str, width: int, seed: int) -> Checkpoint:
    """Return a ResNet with the weights that training from scratch begins with under a run's seed."""
    config = replace(_RESNETS[architecture], width=width)
    with torch.device("meta"):
        empty = ResNet(config)
    made = draw(empty.to_empty(device="cpu"), torch.Generator().manual_seed(derive(seed, "backbone")))
    mean, std = _assumed(config)
    info = CheckpointInfo(
        name=name,
        source="drawn",
        licence=KNOWN[architecture].licence,
        sha256=digest(["drawn", architecture, width, seed]),
        input_size=config.image_size,
        mean=mean,
        std=std,
        interpolation="bilinear",
        parameters=_count(made.state_dict()),
        normalisation="assumed",
        asked_interpolation="bilinear",
    )
    return Checkpoint(config, made.state_dict(), info)


def _named(name: str, seed: int) -> Checkpoint:
    """Return a backbone that another file has added, as it is at the beginning of a run with this seed."""
    kind = BACKBONES[name]
    made = kind(kind.usual_size)
    made.draw(torch.Generator().manual_seed(derive(seed, "backbone")))
    tensors = {key: value.detach() for key, value in made.state_dict().items()}
    info = CheckpointInfo(
        name=name,
        source="drawn",
        licence=kind.licence,
        sha256=digest(["drawn", name, seed]),  # its code is in a run's identity, as the method's is
        input_size=kind.usual_size,
        mean=kind.mean,
        std=kind.std,
        interpolation="bilinear",
        parameters=_count(tensors),
        normalisation="checkpoint",
        asked_interpolation="bilinear",
    )
    return Checkpoint(NamedConfig(kind, kind.usual_size), tensors, info)


def drawn(name: str) -> bool:
    """Return whether a run's seed draws the weights of a backbone."""
    return drawn_by_seed(name) is not None or name in BACKBONES


def _count(tensors: Mapping[str, Tensor]) -> int:
    """Return how many numbers can be trained: all but the statistics of BatchNorms."""
    return sum(value.numel() for name, value in tensors.items() if ".running_" not in f".{name}")


def _assumed(config: ViTConfig | ResNetConfig) -> tuple[Triple, Triple]:
    """Return the mean and std of a network whose files say nothing of them: those usual for its kind."""
    if isinstance(config, ViTConfig):
        return CLIP if config.pre_norm else (HALF, HALF)
    return CIFAR if config.stem == "cifar" else IMAGENET


def absolute_name(name: str) -> str:
    """Return a name that means the same from every directory: the absolute path of a file or folder, else itself."""
    path = with_home(name)
    try:
        return str(path.absolute()) if name not in {*KNOWN, *BACKBONES.names()} and path.exists() else name
    except OSError as error:  # too long a name, say
        raise DualPromptError(f"backbone '{name[:80]}' cannot be looked for ({error.strerror}); check it") from None


def build(
    checkpoint: Checkpoint, *, input_size: int | None = None, gelu: Literal["exact", "tanh"] = "exact"
) -> Backbone:
    """Return the frozen fp32 network, for images of `input_size` pixels a side (default: the checkpoint's).

    Position embeddings are interpolated where that is not the size they were trained at.
    """
    model = _outline(checkpoint, input_size, gelu)
    changed: dict[str, Tensor] = {}
    if isinstance(config := checkpoint.config, ViTConfig):
        special = (2 if config.distilled else 1) if config.positions_cover_prefix else 0
        grid = model.input_size // config.patch_size
        changed["pos_embed"] = resize_positions(checkpoint.tensors["pos_embed"], special, grid)
    # Copies: one who trains this network must not change the checkpoint.
    tensors = {name: value.clone() for name, value in (checkpoint.tensors | changed).items()}
    model.load_state_dict(tensors, assign=True)
    return model.freeze()


def factory(
    checkpoint: Checkpoint, *, input_size: int | None = None, gelu: Literal["exact", "tanh"] = "exact"
) -> BackboneFactory:
    """Return where the methods of a run get backbones of this checkpoint, as `build` makes them."""
    return BackboneFactory(
        lambda: build(checkpoint, input_size=input_size, gelu=gelu), lambda: _outline(checkpoint, input_size, gelu)
    )


def _outline(checkpoint: Checkpoint, input_size: int | None, gelu: Literal["exact", "tanh"]) -> Backbone:
    """Return the network without its weights."""
    size, info, config = input_size or checkpoint.info.input_size, checkpoint.info, checkpoint.config
    if isinstance(config, ViTConfig):
        _refuse_part_patches(size, config.patch_size, info.name)
        if config.gelu == "quick" and gelu != "exact":
            raise DualPromptError(f"backbone '{info.name}' has CLIP's quick GELU, not {gelu}; leave backbone.gelu out")
        config = replace(config, image_size=size, gelu="quick" if config.gelu == "quick" else gelu)
    else:
        # A BatchNorm has nothing to compare one pixel of one image with.
        if isinstance(config, ResNetConfig) and size <= config.stride:
            raise DualPromptError(
                f"input size {size} leaves one pixel to the last stage of backbone '{info.name}'; "
                f"use more than {config.stride}"
            )
        config = replace(config, image_size=size)
    with torch.device("meta"):
        model = network(config)
    model.name, model.mean, model.std = info.name, info.mean, info.std
    return model


def _refuse_part_patches(size: int, patch: int, name: str) -> None:
    if size % patch:
        below = size // patch * patch
        options = f"{below} or {below + patch}" if below else f"{patch}"
        raise DualPromptError(
            f"input size {size} is not a multiple of the patch size {patch} of backbone '{name}'; nearest: {options}"
        )


def _locate(name: str, progress: Progress) -> tuple[Path, Facts]:
    """Return the weights file that `name` stands for, and what is known beside it."""
    if name in KNOWN:
        return _locate_known(KNOWN[name], progress)
    path = with_home(name)
    if path.is_dir():
        return _in_folder(path)
    if path.is_file():
        return path, from_folder(path.parent) if path.name in hub.FILES else Facts()
    if path.suffix in files.LOADERS or name.startswith((".", "/", "~")):
        raise DualPromptError(f"weights file {name} does not exist; check the path")
    hub_id = _HUB_ID.fullmatch(name)
    if hub_id is None:
        raise DualPromptError(
            f"unknown backbone '{name}'; {nearest(name, [*KNOWN, *BACKBONES.names()])}; or a hub id owner/name, or the "
            f"path of a {', '.join(files.LOADERS)} file"
        )
    repository, revision = hub_id.groups()
    folder = hub.download(repository, revision, progress)
    path, facts = _in_folder(folder)
    licence = facts.licence or f"see the model card of {repository}"
    return path, replace(facts, source=f"{repository}@{folder.name}", licence=licence)


def _locate_known(known: Known, progress: Progress) -> tuple[Path, Facts]:
    if not known.file:
        path, facts = _locate(f"hf-hub:{known.source}", progress)
        return path, replace(facts, licence=known.licence)
    path = _own_file(known)
    if not path.is_file():
        raise DualPromptError(
            f"backbone '{known.name}' is not fetched by its name, for no checksum of it is published: download "
            f"{known.source} yourself to {path}"
        )
    mean, std = IMAGENET
    return path, Facts(mean=mean, std=std, interpolation="bicubic", source=known.source, licence=known.licence)


def _own_file(known: Known) -> Path:
    return data_root() / "backbones" / known.file


def is_here(name: str) -> bool:
    """Return whether a backbone can be read without any network."""
    known = KNOWN.get(name)
    if known is None:
        found = _HUB_ID.fullmatch(name)
        return drawn(name) or with_home(name).exists() or (found is not None and hub.is_cached(found[1]))
    return _own_file(known).is_file() if known.file else not known.needs_network or hub.is_cached(known.source)


def _in_folder(folder: Path) -> tuple[Path, Facts]:
    for file in hub.FILES:
        if (folder / file).is_file():
            return folder / file, from_folder(folder)
    raise DualPromptError(f"{folder} holds no {' or '.join(hub.FILES)}; give the path of a weights file")


def _read_file(name: str, path: Path, facts: Facts) -> Checkpoint:
    raw, header = files.load(path)
    said = from_header(header, str(path))
    try:
        converted = convert(raw, str(path))
        heads = said.heads or facts.heads or converted.heads
        config = infer(converted, replace(facts, heads=heads), str(path))
        tensors = verify(converted, config, str(path))
    except (RuntimeError, ValueError, TypeError, LookupError, ArithmeticError) as error:  # shapes that nobody foresaw
        raise DualPromptError(f"{path} holds no known network ({files.first_line(error)}); {SUPPORTED}") from error
    mean, std = (said.mean, said.std) if said.mean and said.std else (facts.mean, facts.std)
    usual_mean, usual_std = IMAGENET if converted.imagenet else _assumed(config)
    size = said.input_size or facts.input_size or config.image_size
    patch = config.patch_size if isinstance(config, ViTConfig) else 1
    interpolation = said.interpolation or facts.interpolation
    info = CheckpointInfo(
        name=name,
        source=facts.source or said.source or str(path),
        licence=facts.licence or said.licence or "unknown",
        sha256=sha256(path),
        # A size that its own patches do not tile was never the network's input.
        input_size=config.image_size if size % patch else size,
        mean=mean or usual_mean,
        std=std or usual_std,
        interpolation="bilinear" if interpolation == "bilinear" else "bicubic",
        parameters=_count(tensors),
        normalisation="checkpoint" if mean and std else "assumed",
        asked_interpolation=interpolation,
    )
    return Checkpoint(config, tensors, info)
