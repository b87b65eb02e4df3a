"""Matrix products of frozen layers in fp32 on a CPU, by the faster of the two libraries that come with PyTorch.

PyTorch multiplies with MKL, whose fastest kernels are for Intel's own processors. oneDNN makes its kernels for what the
processor can do, whoever built it: on an AMD EPYC with AVX-512 it is twice as fast. PyTorch offers it to its compiler
only, under a name with an underscore. So it is tried once, and MKL stays where it is not there, or says something else.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SWITCH = "DUALPROMPT_ONEDNN"
"""Environment variable: 0 leaves all products to PyTorch, 1 uses oneDNN on Intel's processors too."""
_plain = ContextVar("plain", default=False)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return x Wᵀ + b as `F.linear` does; frozen weights in fp32 on a CPU may be multiplied by oneDNN."""
    frozen = not weight.requires_grad and x.dtype == weight.dtype == torch.float32 and x.device.type == "cpu"
    if not frozen or _plain.get() or torch.compiler.is_compiling() or not by_onednn():
        return F.linear(x, weight, bias)
    if torch.is_grad_enabled() and x.requires_grad:
        return _Product.apply(x, weight, bias)  # pyright: ignore
    return _multiplied(x, weight, bias)


class Linear(nn.Linear):
    """A linear layer that multiplies by `linear`."""

    def forward(self, input: Tensor) -> Tensor:
        """Return x Wᵀ + b."""
        return linear(input, self.weight, self.bias)


@contextmanager
def plain_products() -> Iterator[None]:
    """Leave all products to PyTorch meanwhile, for what knows only its own operations: counters, transforms."""
    token = _plain.set(True)
    try:
        yield
    finally:
        _plain.reset(token)


@cache
def by_onednn() -> bool:
    """Return whether oneDNN is there, says what PyTorch says, and is worth it on this processor."""
    wanted = os.environ.get(SWITCH, "")
    if wanted == "0" or not torch.backends.mkldnn.is_available() or (wanted != "1" and not _built_by_amd()):
        return False
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(*shape, generator=generator) for shape in ((2, 3, 8), (5, 8), (5,)))
    try:
        return all(
            torch.allclose(_multiplied(x, weight, each), F.linear(x, weight, each), atol=1e-5) for each in (bias, None)
        )
    except (AttributeError, RuntimeError, TypeError):  # another version of PyTorch has it elsewhere, or not at all
        return False


def _built_by_amd() -> bool:
    try:
        about = Path("/proc/cpuinfo").read_text()
    except OSError:
        about = platform.processor()
    return "AuthenticAMD" in about


def _multiplied(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


class _Product(torch.autograd.Function):
    """The product with frozen weights, through which gradients go on to its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(weight)
        return _multiplied(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        [weight] = ctx.saved_tensors
        return _multiplied(gradients[0].contiguous(), weight.t().contiguous(), None), None, None
