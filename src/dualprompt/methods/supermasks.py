"""A random network that never changes, and the masks and statistics that make it another one for each task."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dualprompt.backbones.base import ConvolutionalBackbone
from dualprompt.backbones.passes import passed


class MaskedConv(nn.Module):
    """A convolution by W ⊙ M_t, or by W ⊙ Σ_t α_t M_t with an α of each image's own."""

    masks: Tensor  # (tasks, *shape), those of the pass at hand
    mix: Tensor | None = None  # (batch, tasks)

    def __init__(self, conv: nn.Conv2d) -> None:
        super().__init__()
        self.signed = nn.Buffer(signed(conv.weight.detach()), persistent=False)
        self.stride, self.padding = conv.stride, conv.padding

    def forward(self, x: Tensor) -> Tensor:
        """Convolve with every task's weights at once, and mix what comes out: a convolution is linear in them."""
        weights = (self.signed * self.masks).to(x.dtype)
        found = F.conv2d(x, weights.flatten(0, 1), None, self.stride, self.padding)
        return found if self.mix is None else mixed(found.unflatten(1, weights.shape[:2]), self.mix)


class TaskNorm(nn.Module):
    """BatchNorm without weights, whose statistics are a task's, or the image's own."""

    mean: Tensor | None  # (channels,), of the pass at hand; in training it is moved in place. None: the image's own
    variance: Tensor | None

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.channels = channels

    def forward(self, x: Tensor) -> Tensor:
        """Normalise each channel by the batch, which moves the statistics, or in evaluation by these."""
        if self.mean is None:
            return F.instance_norm(x)
        return F.batch_norm(x, self.mean, self.variance, training=self.training)


def signed(weight: Tensor) -> Tensor:
    """Return the weight's signs, times the deviation with which it would be drawn: √(2 / fan-in)."""
    return weight.sign() * math.sqrt(2 / weight[0].numel())


def mixed(found: Tensor, mix: Tensor) -> Tensor:
    """Return the sum over tasks of (batch, tasks, …), weighted by (batch, tasks)."""
    return (found * mix.to(found.dtype).view(*mix.shape, *[1] * (found.ndim - 2))).sum(dim=1)


def kept(shape: Sequence[int], sigma: float) -> int:
    """Return how many weights of a layer a mask keeps: σ times an Erdős–Rényi graph's share, but at most half."""
    outputs, inputs = shape[:2]
    count = math.prod(shape)
    density = min(0.5, sigma * (inputs + outputs) / count)
    return count - int((1 - density) * count)


def top(scores: Tensor, count: int) -> Tensor:
    """Return 1 where |score| is among the largest; the gradient passes straight through to |score|."""
    sizes = scores.abs()
    flat = torch.zeros_like(scores).flatten()
    hard = flat.scatter(0, sizes.detach().flatten().topk(count).indices, 1.0).view_as(scores)
    return hard + (sizes - sizes.detach())


def pack(masks: Sequence[Tensor]) -> Tensor:
    """Return the masks of all layers, one bit a weight."""
    flat = torch.cat([mask.detach().flatten() for mask in masks]).bool()
    bits = F.pad(flat, (0, -len(flat) % 8)).view(-1, 8)
    return (bits * (1 << torch.arange(8, device=bits.device))).sum(dim=1).to(torch.uint8)


def unpack(packed: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """Return the masks that `pack` was given, as booleans."""
    bits = (packed[:, None] >> torch.arange(8, device=packed.device, dtype=torch.uint8)) & 1
    sizes = [math.prod(shape) for shape in shapes]
    parts = bits.flatten()[: sum(sizes)].bool().split(sizes)
    return [part.view(*shape) for part, shape in zip(parts, shapes, strict=True)]


class SuperNet(nn.Module):
    """A backbone whose convolutions wear masks and whose BatchNorms wear statistics, with a classifier that does too.

    Statistics are those of all BatchNorms, one after another.
    """

    def __init__(self, backbone: ConvolutionalBackbone) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = nn.Buffer(torch.zeros(0, backbone.dim))  # signed, as all weights; a task uses its first rows
        self.convs, self.norms = list[MaskedConv](), list[TaskNorm]()
        for parent in list(backbone.modules()):
            for name, child in list(parent.named_children()):
                if isinstance(child, nn.Conv2d):
                    self.convs.append(MaskedConv(child))
                    setattr(parent, name, self.convs[-1])
                elif isinstance(statistics := getattr(child, "running_mean", None), Tensor):
                    self.norms.append(TaskNorm(len(statistics)))
                    setattr(parent, name, self.norms[-1])

    @property
    def channels(self) -> list[int]:
        """The channels of each BatchNorm."""
        return [norm.channels for norm in self.norms]

    def shapes(self, outputs: int) -> list[torch.Size]:
        """Return the shapes of all layers' weights, last those of so many outputs."""
        return [*(conv.signed.shape for conv in self.convs), torch.Size([outputs, self.backbone.dim])]

    def grow(self, outputs: int, generator: torch.Generator) -> None:
        """Draw rows of the classifier until it has so many outputs."""
        missing = outputs - len(self.head)
        if missing > 0:
            rows = torch.randn(missing, self.backbone.dim, generator=generator)
            self.head = torch.cat([self.head, signed(rows).to(self.head.device)])

    def logits(
        self,
        images: Tensor,
        masks: Sequence[Tensor],
        mean: Tensor | None,
        variance: Tensor | None,
        mix: Tensor | None = None,
    ) -> Tensor:
        """Return the outputs for images, (batch, outputs), in fp32, of a task's network or a mixture of several.

        Args:
            images: normalised, (batch, 3, side, side).
            masks: of each layer, (tasks, *shape), the classifier's last; one task unless there is a mixture.
            mean: of the BatchNorms; None: each image is normalised by its own pixels.
            variance: of the BatchNorms.
            mix: α of each image, (batch, tasks).
        """
        for conv, mask in zip(self.convs, masks[:-1], strict=True):
            conv.masks, conv.mix = mask, mix
        none = [None] * len(self.norms)
        means, variances = (none if each is None else each.split(self.channels) for each in (mean, variance))
        for norm, norm_mean, norm_variance in zip(self.norms, means, variances, strict=True):
            norm.mean, norm.variance = norm_mean, norm_variance
        features = self.backbone.features(images).float()
        if mix is not None:  # every convolution was computed with each task's weights
            passed(self.backbone, features, len(masks[0]) - 1)
        for conv in self.convs:  # no graph stays alive
            del conv.masks, conv.mix
        head = self.head[: masks[-1].shape[1]] * masks[-1]
        found = F.linear(features, head.flatten(0, 1)).unflatten(1, head.shape[:2])
        return found[:, 0] if mix is None else mixed(found, mix)


def entropy(logits: Tensor) -> Tensor:
    """Return −Σ p log p of the softmax over the last dimension; a logit of −∞ has no part in it."""
    log = logits.log_softmax(dim=-1)
    return -(log.exp() * log.masked_fill(log == -torch.inf, 0.0)).sum(dim=-1)


def find(surprise: Callable[[Tensor], Tensor], images: int, tasks: int, once: bool, device: torch.device) -> Tensor:
    """Return for each image the task whose larger share α in the mixture lowers its entropy most, (images,).

    Or, unless it is done at once, the last task left when the better half is kept again and again.

    Args:
        surprise: from α (images, tasks) to the entropy of each image's answer.
        images: how many.
        tasks: how many.
        once: whether the first gradient decides.
        device: where α lies.
    """
    left, remain = tasks, torch.ones(images, tasks, dtype=torch.bool, device=device)
    while left > 1:
        mix = (remain / left).requires_grad_()
        with torch.enable_grad():
            (gradient,) = torch.autograd.grad(surprise(mix).sum(), mix)
        order = gradient.masked_fill(~remain, torch.inf).argsort(dim=1, stable=True)
        left = 1 if once else -(-left // 2)
        remain = torch.zeros_like(remain).scatter(1, order[:, :left], value=True)
    return remain.int().argmax(dim=1)
