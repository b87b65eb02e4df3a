"""What DualNet is made of: blocks of the fast learner, and the losses of both."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from dualprompt.backbones.base import Backbone, ConvolutionalBackbone
from dualprompt.errors import DualPromptError


def fast_block(inputs: int, outputs: int) -> nn.Module:
    """Return a block of the fast learner, which halves a map."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(), nn.MaxPool2d(2, ceil_mode=True)
    )


def refuse_unfit(outline: Backbone) -> None:
    """Refuse a backbone whose stages have other sizes than the fast learner's, which halve the image's."""
    if isinstance(outline, ConvolutionalBackbone):
        size = outline.input_size
        sides = [each.shape[-1] for each in outline.maps(torch.empty(2, 3, size, size, device="meta"))]
        if sides == [-(-size // 2**number) for number in range(1, len(sides) + 1)]:
            return
    raise DualPromptError(
        f"method 'dualnet' needs a ResNet whose stages halve the image (resnet18-cifar-pool); '{outline.name}' is none"
    )


@torch.no_grad()
def draw(modules: Sequence[nn.Module], generator: torch.Generator) -> None:
    """Draw every weight and bias from U(−1/√fan-in, 1/√fan-in), torch's own initialisation, but from the generator."""
    for module in modules:
        if isinstance(module, nn.Conv2d | nn.Linear):
            bound = module.weight[0].numel() ** -0.5
            for parameter in module.parameters():
                parameter.copy_(torch.empty(parameter.shape).uniform_(-bound, bound, generator=generator))


def barlow_twins(one: Tensor, two: Tensor, redundancy: float) -> Tensor:
    """Return Σ_i (C_ii − 1)² + redundancy · Σ_{i≠j} C_ij², C being the correlations of two views' features."""
    first, second = ((each - each.mean(dim=0)) / (each.var(dim=0, correction=0) + 1e-5).sqrt() for each in (one, two))
    correlations = first.T @ second / len(one)
    alike = (correlations.diagonal() - 1).square().sum()
    return alike + redundancy * (correlations.square().sum() - correlations.diagonal().square().sum())


def noted_divergence(logits: Tensor, noted: Tensor, temperature: float) -> Tensor:
    """Return Σ KL(softmax(noted/T) ‖ softmax(logits/T)) over images, by the number of classes.

    Both softmaxes are over the classes that were known when the image was noted: its others are NaN. An image without
    a note adds nothing. The released code (task-free) has all N outputs of the stream from the start, so its softmaxes
    are over N and it divides by N; our head grows, and the classes are those seen so far.
    """
    known = ~noted.isnan()
    exists = known.any(dim=1, keepdim=True)
    left_out = ~known & exists
    past = noted.nan_to_num().masked_fill(left_out, -torch.inf) / temperature
    now = logits[:, : noted.shape[1]].masked_fill(left_out, -torch.inf) / temperature
    difference = (past.log_softmax(dim=1) - now.log_softmax(dim=1)).masked_fill(~known, 0.0)
    return (past.softmax(dim=1) * difference).sum() / logits.shape[1]
