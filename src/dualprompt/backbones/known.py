"""Backbones with a short name. No torch here, so that listing them is quick."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import Any

IN21K, IN1K = "ImageNet-21k", "ImageNet-1k"
BOTH = f"{IN21K}, {IN1K}"
NONE = "none"


@dataclass(frozen=True)
class Known:
    """One backbone that a short name stands for."""

    name: str
    title: str
    source: str  # hub id, address of a file, or where the embedded file comes from
    images: str = NONE  # that it was pre-trained on
    labels: str = NONE  # of these that it saw: what a benchmark with such classes asks of it is not all new
    licence: str = "Apache-2.0"
    needs_network: bool = True  # for the first use; the hub's cache serves the later ones
    file: str = ""  # where one puts it by hand, in the folder `backbones` of the data root; "": it comes by itself
    notes: str = ""  # what one must know to trust it


EMBEDDED = Known(
    "embedded",
    "ViT-Ti/16 at 224 px, AugReg, ImageNet-21k then ImageNet-1k; comes with the package",
    "vit_tiny_patch16_224.augreg_in21k_ft_in1k (Google AugReg, timm)",
    BOTH,
    BOTH,
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

LVD = "LVD-142M"
WEB, PAIRS = "400 million of the web", "none, but texts"
IBOT = "https://lf3-nlp-opensource.bytetos.com/obj/nlp-opensource/archive/2022/ibot"
MOCO = "https://dl.fbaipublicfiles.com/moco-v3"
_DRAWN = re.compile(r"(resnet18-cifar-pool|resnet18-cifar|resnet18|resnet152)(?:-nf([1-9]\d{0,3}))?")

KNOWN: dict[str, Known] = {
    entry.name: entry
    for entry in (
        EMBEDDED,
        RANDOM,
        Known("vit-b16-in21k", "ViT-B/16: the paper's", "timm/vit_base_patch16_224.orig_in21k", IN21K, IN21K),
        Known("vit-l16-in21k", "ViT-L/16", "timm/vit_large_patch16_224.orig_in21k", IN21K, IN21K),
        Known("vit-ti16-augreg-in21k", "ViT-Ti/16, AugReg", "timm/vit_tiny_patch16_224.augreg_in21k", IN21K, IN21K),
        Known("vit-s16-augreg-in21k", "ViT-S/16, AugReg", "timm/vit_small_patch16_224.augreg_in21k", IN21K, IN21K),
        Known(
            "vit-b16-augreg-in21k",
            "ViT-B/16, AugReg: what PILOT calls IN21K; SLCA's, EASE's, and RanPAC's on three sets",
            "timm/vit_base_patch16_224.augreg_in21k",
            IN21K,
            IN21K,
        ),
        Known(
            "vit-b16-augreg-in1k",
            "ViT-B/16, AugReg, then tuned on ImageNet-1k: PILOT's IN1K; CODA-Prompt's, and RanPAC's on six sets",
            "timm/vit_base_patch16_224.augreg_in21k_ft_in1k",
            BOTH,
            BOTH,
        ),
        Known("deit-s16", "DeiT-S/16", "timm/deit_small_patch16_224.fb_in1k", IN1K, IN1K),
        Known("deit-b16", "DeiT-B/16", "timm/deit_base_patch16_224.fb_in1k", IN1K, IN1K),
        Known("dino-s16", "DINO ViT-S/16, self-supervised", "timm/vit_small_patch16_224.dino", IN1K),
        Known("dino-b16", "DINO ViT-B/16, self-supervised", "timm/vit_base_patch16_224.dino", IN1K),
        Known("dinov2-s14", "DINOv2 ViT-S/14, self-supervised", "facebook/dinov2-small", LVD),
        Known("dinov2-b14", "DINOv2 ViT-B/14, self-supervised", "facebook/dinov2-base", LVD),
        Known("dinov2-s14-reg", "DINOv2 ViT-S/14, 4 registers", "facebook/dinov2-with-registers-small", LVD),
        Known("dinov2-b14-reg", "DINOv2 ViT-B/14, 4 registers", "facebook/dinov2-with-registers-base", LVD),
        Known(
            "ibot-b16",
            "iBOT ViT-B/16, self-supervised",
            f"{IBOT}/vitb_16/checkpoint_teacher.pth",
            IN1K,
            file="ibot-b16.pth",
        ),
        Known(
            "ibot-b16-in21k",
            "iBOT ViT-B/16, self-supervised",
            f"{IBOT}/vitb_16_pt22k/checkpoint_student.pth",
            IN21K,
            file="ibot-b16-in21k.pth",
        ),
        Known(
            "mocov3-s16",
            "MoCo v3 ViT-S/16, self-supervised",
            f"{MOCO}/vit-s-300ep/vit-s-300ep.pth.tar",
            IN1K,
            licence="CC BY-NC 4.0",
            file="vit-s-300ep.pth.tar",
        ),
        Known(
            "mocov3-b16",
            "MoCo v3 ViT-B/16, self-supervised",
            f"{MOCO}/vit-b-300ep/vit-b-300ep.pth.tar",
            IN1K,
            licence="CC BY-NC 4.0",
            file="vit-b-300ep.pth.tar",
        ),
        Known("clip-b16", "CLIP ViT-B/16, image tower", "openai/clip-vit-base-patch16", WEB, PAIRS, "MIT"),
        Known("clip-b32", "CLIP ViT-B/32, image tower", "openai/clip-vit-base-patch32", WEB, PAIRS, "MIT"),
        Known("clip-l14", "CLIP ViT-L/14, image tower", "openai/clip-vit-large-patch14", WEB, PAIRS, "MIT"),
        Known(
            "clip-b32-laion2b",
            "OpenCLIP ViT-B/32, image tower: RanPAC's CLIP",
            "laion/CLIP-ViT-B-32-laion2B-s34B-b79K",
            "LAION-2B",
            PAIRS,
            "MIT",
        ),
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
        Known("resnet18-in1k", "ResNet-18", "timm/resnet18.tv_in1k", IN1K, IN1K, "BSD-3-Clause"),
        Known("resnet152-in1k", "ResNet-152", "timm/resnet152.tv_in1k", IN1K, IN1K, "BSD-3-Clause"),
    )
}


def known() -> list[dict[str, Any]]:
    """Return every short name with what is said of it: title, source, images and labels it saw, licence and notes."""
    return [asdict(entry) for entry in KNOWN.values()]


def known_as(name: str) -> Known | None:
    """Return what is known of a backbone that a short name or the hub id behind it stands for."""
    bare = name.removeprefix("hf-hub:").partition("@")[0]
    return KNOWN.get(name) or next((entry for entry in KNOWN.values() if entry.source == bare), None)


def drawn_by_seed(name: str) -> tuple[str, int] | None:
    """Return architecture and width of a backbone whose weights a run's seed draws; None for any other name."""
    found = _DRAWN.fullmatch(name)
    return found and (found[1], int(found[2] or 64))
