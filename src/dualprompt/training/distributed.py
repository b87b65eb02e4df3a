"""Devices, precision and processes, through Lightning Fabric."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dualprompt.config import RunConfig
from dualprompt.errors import DualPromptError

if TYPE_CHECKING:
    from lightning_fabric import Fabric

    from dualprompt.methods.base import Batch, Method


def launch(config: RunConfig) -> Fabric:
    """Return a Fabric on the configured devices; with several, start the other processes first."""
    from lightning_fabric import Fabric

    if config.device == "cuda" and not torch.cuda.is_available():
        raise DualPromptError("device: cuda was asked for, but PyTorch sees no GPU; use --device cpu or auto")
    processes = config.devices * config.nodes
    fabric = Fabric(
        accelerator=config.device,
        devices=config.devices,
        num_nodes=config.nodes,
        strategy="ddp" if processes > 1 else "auto",
    )
    fabric.launch()
    return fabric


def compute_dtype(config: RunConfig, device: torch.device) -> torch.dtype:
    """Return the precision in which the frozen backbone is stored and run."""
    if config.precision == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return torch.bfloat16 if config.precision == "bf16" else torch.float32


def total(fabric: Fabric, value: Tensor) -> Tensor:
    """Return the sum of a tensor over all processes."""
    if fabric.world_size == 1:
        return value
    summed = fabric.all_reduce(value, reduce_op="sum")
    assert isinstance(summed, Tensor)
    return summed


def share(count: int, rank: int, processes: int) -> slice:
    """Return which of `count` things belong to a process: contiguous parts whose sizes differ by at most one."""
    return slice(count * rank // processes, count * (rank + 1) // processes)


class LossModule(nn.Module):
    """A method seen as a module whose forward is its loss, which is what DDP knows how to wrap."""

    def __init__(self, method: Method) -> None:
        super().__init__()
        self.method = method

    def forward(self, batch: Batch) -> Tensor:
        """Return the method's loss."""
        return self.method.loss(batch)


def distribute(fabric: Fabric, method: Method) -> Any:
    """Return a callable from batch to loss whose gradients are averaged over all processes."""
    if fabric.world_size == 1:
        return method.loss
    return fabric.setup_module(LossModule(method), move_to_device=False)
