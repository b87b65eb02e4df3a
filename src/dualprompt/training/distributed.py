"""Devices, precision and processes, through Lightning Fabric."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor, nn

from dualprompt.config import RunConfig
from dualprompt.errors import DualPromptError

if TYPE_CHECKING:
    from lightning_fabric import Fabric

    from dualprompt.methods.base import Batch, Method

Loss: TypeAlias = "Callable[[Batch], Tensor]"


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
    """A method seen as a module whose forward is the loss of one of its steps, which is what DDP knows how to wrap."""

    def __init__(self, method: Method, losses: Sequence[Loss]) -> None:
        super().__init__()
        self.method, self.losses = method, losses

    def forward(self, batch: Batch, number: int = 0) -> Tensor:
        """Return the loss of a step."""
        return self.losses[number](batch)


def distribute(fabric: Fabric, method: Method, losses: Sequence[Loss]) -> list[Loss]:
    """Return the losses of a method's steps as functions whose gradients are averaged over all processes."""
    if fabric.world_size == 1:
        return list(losses)
    module = LossModule(method, losses)
    if len(losses) == 1:
        return [fabric.setup_module(module, move_to_device=False)]
    # No loss of several need reach every parameter.
    places = [fabric.device.index] if fabric.device.type == "cuda" else None
    together = nn.parallel.DistributedDataParallel(module, device_ids=places, find_unused_parameters=True)
    return [partial(together, number=number) for number in range(len(losses))]
