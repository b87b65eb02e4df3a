"""Backbones with a short name. No torch here, so that listing them is quick."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Known:
    """One backbone that a short name stands for."""

    name: str
    title: str
    source: str  # hub id, or where the embedded file comes from
    licence: str = "Apache-2.0"
    needs_network: bool = True  # for the first use; the hub's cache serves the later ones
    notes: str = ""  # what one must know to trust it


EMBEDDED = Known(
    "embedded",
    "ViT-Ti/16 at 224 px, AugReg, ImageNet-21k then ImageNet-1k; comes with the package",
    "vit_tiny_patch16_224.augreg_in21k_ft_in1k (Google AugReg, timm)",
    needs_network=False,
    notes="rounded to fp16, head removed. It came from a public repository that republishes the tensors without naming "
    "them. What it is, was checked: 73.6 % top-1 and 93.2 % top-5 on 500 ImageNet validation images with mean = std = "
    "0.5 (42.2 % with ImageNet's mean and std); timm states 75.5 % on all 50,000. The licence is timm's for it.",
)
EMBEDDED_FILE = "vit_tiny_patch16_224.augreg_in21k_ft_in1k.safetensors"
EMBEDDED_SHA256 = "3edb492ad370f74869a7813fc591b9380244721500386ad66d0ca6432477f222"
# By the SHA-256 of their file: backbones that `embedded` once stood for. What was learned with one needs that one.
REPLACED = {
    "fa884803bf5bbd11d03d6c258bb977d5d511c7e787fe22401541d61a751714c1": "a distilled ViT-Ti/16 at 128 px",
}

RANDOM = Known(
    "vit-b16-random",
    "ViT-B/16 at 224 px with random weights: for measuring speed, it classifies nothing",
    "drawn",
    needs_network=False,
)

_DRAWN = re.compile(r"(resnet18-cifar-pool|resnet18-cifar|resnet18|resnet152)(?:-nf([1-9]\d{0,3}))?")

KNOWN: dict[str, Known] = {
    entry.name: entry
    for entry in (
        EMBEDDED,
        RANDOM,
        Known("vit-b16-in21k", "ViT-B/16, ImageNet-21k: the paper's", "timm/vit_base_patch16_224.orig_in21k"),
        Known("vit-l16-in21k", "ViT-L/16, ImageNet-21k", "timm/vit_large_patch16_224.orig_in21k"),
        Known(
            "vit-ti16-augreg-in21k",
            "ViT-Ti/16, AugReg, ImageNet-21k",
            "timm/vit_tiny_patch16_224.augreg_in21k",
        ),
        Known(
            "vit-s16-augreg-in21k",
            "ViT-S/16, AugReg, ImageNet-21k",
            "timm/vit_small_patch16_224.augreg_in21k",
        ),
        Known("vit-b16-augreg-in21k", "ViT-B/16, AugReg, ImageNet-21k", "timm/vit_base_patch16_224.augreg_in21k"),
        Known("deit-s16", "DeiT-S/16, ImageNet-1k", "timm/deit_small_patch16_224.fb_in1k"),
        Known("deit-b16", "DeiT-B/16, ImageNet-1k", "timm/deit_base_patch16_224.fb_in1k"),
        Known("dino-b16", "DINO ViT-B/16, self-supervised", "timm/vit_base_patch16_224.dino"),
        Known("dinov2-s14", "DINOv2 ViT-S/14, self-supervised", "facebook/dinov2-small"),
        Known("dinov2-b14", "DINOv2 ViT-B/14, self-supervised", "facebook/dinov2-base"),
        Known("dinov2-s14-reg", "DINOv2 ViT-S/14, 4 registers", "facebook/dinov2-with-registers-small"),
        Known("dinov2-b14-reg", "DINOv2 ViT-B/14, 4 registers", "facebook/dinov2-with-registers-base"),
        Known(
            "resnet18-cifar",
            "ResNet-18 at 32 px, drawn by the run's seed, to train from scratch",
            "drawn",
            needs_network=False,
            notes="64 channels in its first stage; 20 with -nf20 at the end of its name. So for the other drawn ones.",
        ),
        Known(
            "resnet18-cifar-pool",
            "ResNet-18 at 32 px with a pool after its stem, drawn by the run's seed: DualNet's slow learner",
            "drawn",
            needs_network=False,
        ),
        Known(
            "resnet18",
            "ResNet-18 at 224 px, drawn by the run's seed, to train from scratch",
            "drawn",
            needs_network=False,
        ),
        Known(
            "resnet152",
            "ResNet-152 at 224 px, drawn by the run's seed, to train from scratch",
            "drawn",
            needs_network=False,
        ),
        Known("resnet18-in1k", "ResNet-18, ImageNet-1k", "timm/resnet18.tv_in1k", licence="BSD-3-Clause"),
        Known("resnet152-in1k", "ResNet-152, ImageNet-1k", "timm/resnet152.tv_in1k", licence="BSD-3-Clause"),
    )
}


def known() -> list[dict[str, Any]]:
    """Return every short name with its title, source, licence, whether its first use needs a network, and notes."""
    return [asdict(entry) for entry in KNOWN.values()]


def drawn_by_seed(name: str) -> tuple[str, int] | None:
    """Return architecture and width of a backbone whose weights a run's seed draws; None for any other name."""
    found = _DRAWN.fullmatch(name)
    return found and (found[1], int(found[2] or 64))
