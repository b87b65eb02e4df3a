"""Devices, precision and processes, through Lightning Fabric."""

from __future__ import annotations

import logging
import os
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
    from lightning_fabric.utilities.exceptions import MisconfigurationException

    if config.device == "cuda" and not torch.cuda.is_available():
        raise DualPromptError("device: cuda was asked for, but PyTorch sees no GPU; use --device cpu or auto")
    logging.getLogger("lightning_fabric.utilities").setLevel(logging.WARNING)  # it greets from every process
    devices, nodes = _processes(config)
    try:
        fabric = Fabric(
            accelerator=config.device,
            devices=devices,
            num_nodes=nodes,
            strategy="ddp" if devices * nodes > 1 else "auto",
        )
    except (MisconfigurationException, ValueError, RuntimeError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise DualPromptError(
            f"device: {config.device}, devices: {devices}, nodes: {nodes} cannot be had here ({reason}); "
            "use --device cpu or auto, or fewer --devices"
        ) from error
    fabric.launch()
    return fabric


def _processes(config: RunConfig) -> tuple[int, int]:
    """Return the devices a machine and the machines: those of the config, or those that torchrun has decided on."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return int(os.environ["LOCAL_WORLD_SIZE"]), int(os.environ["GROUP_WORLD_SIZE"])
    return config.devices, config.nodes


def lost_process(error: RuntimeError) -> bool:
    """Return whether a collective operation failed because another process is gone."""
    return isinstance(error, torch.distributed.DistError) or "gloo" in str(error)


def compute_dtype(config: RunConfig, device: torch.device) -> torch.dtype:
    """Return the precision in which the backbone is run; a frozen one is also stored in it."""
    if config.precision == "auto":
        capable = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
        return torch.bfloat16 if capable else torch.float32
    return torch.bfloat16 if config.precision == "bf16" else torch.float32


def total(fabric: Fabric, value: Tensor) -> Tensor:
    """Return the sum of a tensor over all processes."""
    if fabric.world_size == 1:
        return value
    summed = value.clone()
    torch.distributed.all_reduce(summed)
    return summed


def local_part(count: int, rank: int, processes: int) -> slice:
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
