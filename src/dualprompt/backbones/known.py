"""Backbones with a short name. No torch here, so that listing them is quick."""

from __future__ import annotations

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


EMBEDDED = Known(
    "embedded",
    "ViT-Ti/16 at 128 px, distilled from EfficientNet-Lite2; comes with the package",
    "distilled by this project",
    needs_network=False,
)
EMBEDDED_FILE = "vit_tiny_patch16_128.distilled.safetensors"
EMBEDDED_SHA256 = "fa884803bf5bbd11d03d6c258bb977d5d511c7e787fe22401541d61a751714c1"

RANDOM = Known(
    "vit-b16-random",
    "ViT-B/16 at 224 px with random weights: for measuring speed, it classifies nothing",
    "drawn",
    needs_network=False,
)

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
    )
}


def known() -> list[dict[str, Any]]:
    """Return every short name with its title, source, licence and whether its first use needs a network."""
    return [asdict(entry) for entry in KNOWN.values()]
