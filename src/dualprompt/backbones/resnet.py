"""ResNets (He et al., 2016) with torchvision's parameter names, of any width, for small images and for large ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dualprompt.backbones.base import ConvolutionalBackbone, compiled, laid_out
from dualprompt.backbones.passes import passed


@dataclass(frozen=True)
class ResNetConfig:
    """The architecture: by name, or as read from a checkpoint."""

    image_size: int
    blocks: tuple[int, int, int, int] = (2, 2, 2, 2)  # of each stage; this is ResNet-18
    width: int = 64  # nf, channels of the first stage; each later stage has twice as many
    bottleneck: bool = False  # blocks of 1×1, 3×3 and 1×1 convolutions, whose outputs are four times as wide
    stem: Literal["cifar", "imagenet"] = "imagenet"  # one 3×3 convolution, or 7×7 with stride 2
    pool: bool = True  # a 3×3 maximum with stride 2 after the stem

    @property
    def dim(self) -> int:
        """Channels that leave the last stage."""
        return 8 * self.width * (4 if self.bottleneck else 1)

    @property
    def stride(self) -> int:
        """Pixels of the image, along a side, for each pixel of the last stage."""
        return 8 * (2 if self.stem == "imagenet" else 1) * (2 if self.pool else 1)


class BatchNorm(nn.Module):
    """BatchNorm without PyTorch's count of batches, which decides nothing: all it holds is what it computes with."""

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(channels)), nn.Parameter(torch.zeros(channels))
        self.register_buffer("running_mean", torch.zeros(channels))
        self.register_buffer("running_var", torch.ones(channels))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise each channel by the batch, which moves the statistics, or in evaluation by these."""
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, training=self.training)


def _convolution(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False)


class BasicBlock(nn.Module):
    """Two 3×3 convolutions around a residual."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = _convolution(inputs, width, 3, stride), BatchNorm(width)
        self.conv2, self.bn2 = _convolution(width, width, 3), BatchNorm(width)
        self.downsample = _shortcut(inputs, width, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output, after its last ReLU."""
        out = self.bn1(self.conv1(x)).relu()
        return (self.bn2(self.conv2(out)) + self.downsample(x)).relu()


class Bottleneck(nn.Module):
    """A 3×3 convolution between two of 1×1 around a residual; the 3×3 has the stride."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = _convolution(inputs, width, 1), BatchNorm(width)
        self.conv2, self.bn2 = _convolution(width, width, 3, stride), BatchNorm(width)
        self.conv3, self.bn3 = _convolution(width, 4 * width, 1), BatchNorm(4 * width)
        self.downsample = _shortcut(inputs, 4 * width, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output, after its last ReLU."""
        out = self.bn1(self.conv1(x)).relu()
        out = self.bn2(self.conv2(out)).relu()
        return (self.bn3(self.conv3(out)) + self.downsample(x)).relu()


def _shortcut(inputs: int, outputs: int, stride: int) -> nn.Module:
    if inputs == outputs and stride == 1:
        return nn.Identity()
    return nn.Sequential(_convolution(inputs, outputs, 1, stride), BatchNorm(outputs))


class ResNet(ConvolutionalBackbone):
    """Images to the mean over pixels of what leaves the last stage."""

    notes_passes = True

    def __init__(self, config: ResNetConfig) -> None:
        super().__init__()
        self.config = config
        large = config.stem == "imagenet"
        self.conv1 = _convolution(3, config.width, 7 if large else 3, 2 if large else 1)
        self.bn1 = BatchNorm(config.width)
        inputs = config.width
        for number, blocks in enumerate(config.blocks):
            width = config.width * 2**number
            stage = nn.Sequential()
            for block in range(blocks):
                stride = 2 if number and not block else 1
                stage.append((Bottleneck if config.bottleneck else BasicBlock)(inputs, width, stride))
                inputs = width * (4 if config.bottleneck else 1)
            self.add_module(f"layer{number + 1}", stage)
        # Of each stage. Counted now: a method may put others in the place of its convolutions, which take as much.
        self._weights = [sum(parameter.numel() for parameter in stage.parameters()) for stage in self.stages]

    @property
    def dim(self) -> int:
        """Channels that leave the last stage."""
        return self.config.dim

    @property
    def input_size(self) -> int:
        """Pixels a side of the images it was made for; any size above the stride can be computed."""
        return self.config.image_size

    @property
    def widths(self) -> tuple[int, ...]:
        """Channels that leave each stage; each later one has twice as many."""
        return tuple(self.config.dim // 2**number for number in (3, 2, 1, 0))

    @property
    def stages(self) -> tuple[nn.Module, ...]:
        """The four stages, first to last."""
        return tuple(self.get_submodule(f"layer{number}") for number in (1, 2, 3, 4))

    @property
    def operations(self) -> float:
        """Two for each weight of a stage and pixel that leaves it."""
        side, total = 8 * self.config.image_size / self.config.stride, 0.0
        for number, weights in enumerate(self._weights):
            total += 2 * (side / 2**number) ** 2 * weights
        return total

    def maps(self, images: Tensor) -> list[Tensor]:
        """Return what leaves each of the four stages, (batch, channels, height, width)."""
        found = self._maps(images)
        passed(self, found[-1])
        return found

    def _maps(self, images: Tensor) -> list[Tensor]:
        x = self.bn1(self.conv1(laid_out(images))).relu()
        if self.config.pool:
            x = F.max_pool2d(x, 3, stride=2, padding=1)
        found = []
        for stage in self.stages:
            x = stage(x)
            found.append(x)
        return found

    def features(self, images: Tensor) -> Tensor:
        """Return the mean over pixels of what leaves the last stage, (batch, dim)."""
        run = compiled(ResNet._features) if self.compiled else ResNet._features
        return passed(self, run(self, images))

    def _features(self, images: Tensor) -> Tensor:
        return self._maps(images)[-1].mean(dim=(2, 3))

    @torch.no_grad()
    def zero_residuals(self) -> None:
        """Set the weight of each block's last BatchNorm to 0 (Goyal et al., 2017)."""
        for module in self.modules():
            if isinstance(module, BasicBlock):
                module.bn2.weight.zero_()
            elif isinstance(module, Bottleneck):
                module.bn3.weight.zero_()

    def rounded(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the convolutions' weights: BatchNorms stay in fp32, for their statistics are sums of small steps."""
        return ((name, weight) for name, weight in self.named_parameters() if weight.ndim == 4)


@torch.no_grad()
def draw(network: ResNet, generator: torch.Generator) -> ResNet:
    """Give a network the weights with which training from scratch begins (He et al., 2015), and return it."""
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            fan_out = module.out_channels * module.kernel_size[0] * module.kernel_size[1]
            drawn = torch.randn(module.weight.shape, generator=generator) * (2 / fan_out) ** 0.5
            module.weight.copy_(drawn)
        elif isinstance(module, BatchNorm):
            module.weight.fill_(1)
            module.bias.zero_()
            module.running_mean.zero_()
            module.running_var.fill_(1)
    return network
