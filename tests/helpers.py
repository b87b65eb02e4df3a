"""Small models, images and tasks for tests."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dualprompt.backbones.base import Backbone
from dualprompt.backbones.resnet import ResNet, ResNetConfig, draw
from dualprompt.backbones.vit import VisionTransformer, ViTConfig
from dualprompt.backbones.weights import Checkpoint
from dualprompt.data.images import Images
from dualprompt.data.stream import Subset
from dualprompt.methods.base import Batch, Method, TaskView
from dualprompt.methods.dualprompt import DualPrompt, DualPromptConfig

SIDE = 16


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def tiny_vit(seed: int = 0, **options: Any) -> VisionTransformer:
    """A random ViT of 4 layers and 32 channels. No tensor is zero or one, which would hide that it is ignored."""
    shape = {"image_size": SIDE, "patch_size": 8, "dim": 32, "depth": 4, "heads": 4, "mlp_dim": 48}
    vit = VisionTransformer(ViTConfig(**{**shape, **options}))
    generator = seeded(seed)
    with torch.no_grad():
        for name, parameter in vit.named_parameters():
            middle = 1.0 if "norm" in name and name.endswith("weight") else 0.0
            parameter.copy_(middle + 0.2 * torch.randn(parameter.shape, generator=generator))
    return vit.freeze()


def tiny_resnet(seed: int = 0, pool: bool = False) -> ResNet:
    """A random ResNet-18 of 4 channels; with a pool its stages halve the image one by one."""
    return draw(ResNet(ResNetConfig(SIDE, width=4, stem="cifar", pool=pool)), seeded(seed)).freeze()


def backbone_for(method: str) -> Backbone:
    """A small backbone that a method takes."""
    return {"supsup": tiny_resnet, "dualnet": partial(tiny_resnet, pool=True)}.get(
        method, partial(tiny_vit, depth=12)
    )()


def as_vit(backbone: Backbone) -> VisionTransformer:
    """The same one, known to be a ViT."""
    assert isinstance(backbone, VisionTransformer)
    return backbone


def vit_config(checkpoint: Checkpoint) -> ViTConfig:
    """The architecture of a checkpoint, known to be a ViT's."""
    assert isinstance(checkpoint.config, ViTConfig)
    return checkpoint.config


def random_images(count: int, seed: int = 1) -> Tensor:
    return torch.randn(count, 3, SIDE, SIDE, generator=seeded(seed))


def task_view(
    index: int,
    classes: int = 3,
    queries: Tensor | None = None,
    images: Tensor | None = None,
    labels: Tensor | None = None,
    batch_size: int | None = None,
    frozen: bool = False,
) -> TaskView:
    """The `index`-th of tasks that all have `classes` new classes; `frozen` if its images are features instead."""
    seen = tuple(range((index + 1) * classes))
    found = torch.empty(0, dtype=torch.int64) if labels is None else labels

    def batches() -> Iterator[Batch]:
        if images is not None:
            size = batch_size or len(images)
            for part, answer in zip(images.split(size), found.split(size), strict=True):
                yield Batch(lambda part=part: part, answer, frozen=part if frozen else None)

    return TaskView(
        index=index,
        name=f"task {index + 1}",
        labels=seen[index * classes :],
        new_labels=seen[index * classes :],
        seen=seen,
        generator=seeded(100 + index),
        queries=lambda: torch.empty(0) if queries is None else queries,
        targets=found,
        batches=batches,
    )


def of_labels(view: TaskView, first: int, count: int) -> TaskView:
    """The same view of a task whose `count` new labels go on from `first`."""
    seen = tuple(range(first + count))
    return replace(view, labels=seen[first:], new_labels=seen[first:], seen=seen)


def randomise(method: Method, seed: int = 2, scale: float = 1.0) -> None:
    """Give every trained tensor random values, as if it had been trained."""
    generator = seeded(seed)
    for name, value in method.state().items():
        value.copy_((0.1 if name.startswith("head") else scale) * torch.randn(value.shape, generator=generator))


def random_dualprompt(tasks: int = 3, classes: int = 3, seed: int = 0, **options: Any) -> DualPrompt:
    """A DualPrompt on a tiny ViT after `tasks` tasks, with random prompts, keys and head."""
    small = {"g_layers": (1,), "e_layers": (2, 3), "g_length": 2, "e_length": 3}
    method = DualPrompt(DualPromptConfig(**{**small, **options}), tiny_vit(seed))
    for index in range(tasks):
        method.begin_task(task_view(index, classes))
    randomise(method)
    return method


def spread_keys(method: DualPrompt, images: Tensor) -> Tensor:
    """Put the keys on the queries of the first images, so that image t selects task t; return all selections."""
    with torch.no_grad():
        queries = method.backbone(images)
        for task, key in enumerate(method.bank.task_key):
            key.copy_(queries[task])
    method.load_state({name: value.clone() for name, value in method.state().items()})
    selected = method.predict(batch_of(images), "query").selected
    assert selected is not None
    return selected


def batch_of(images: Tensor, labels: Tensor | None = None, task: Tensor | None = None) -> Batch:
    return Batch(lambda: images, torch.zeros(len(images), dtype=torch.int64) if labels is None else labels, task=task)


def subset_of(pixels: np.ndarray, labels: Any) -> Subset:
    """A subset that holds all of `pixels`, (images, height, width, 3) uint8."""
    return Subset(Images.from_array(pixels), torch.arange(len(pixels)), torch.as_tensor(labels, dtype=torch.int64))


def ragged(pictures: list[np.ndarray]) -> Images:
    """Images of different sizes."""
    flat = torch.from_numpy(np.concatenate([picture.reshape(-1) for picture in pictures]))
    return Images(flat, torch.tensor([picture.shape[:2] for picture in pictures]))


def noise_pictures(shapes: list[tuple[int, int]], seed: int = 3) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 256, (height, width, 3), dtype=np.uint8) for height, width in shapes]


def numbers(values: Tensor) -> np.ndarray:
    """Return a tensor in NumPy, for checks by hand."""
    return values.detach().double().numpy()
