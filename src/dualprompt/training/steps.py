"""How a step is carried out: as it is written, or on a GPU recorded once and replayed as one CUDA graph."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.compiler import config as compiler_config
from torch.nn.attention import SDPBackend, sdpa_kernel

from dualprompt.files import cache_root

if TYPE_CHECKING:
    from lightning_fabric import Fabric

Inputs = dict[str, Tensor]
RECOMPILE_LIMIT = 64  # compiled forms of one function
WARM_UP = 2  # calls with the same shapes before one is recorded: lazily made workspaces must exist by then
# cuDNN's attention is a quarter faster than the others for sequences as short as these.
ATTENTION = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


def on_device(inputs: Inputs, device: torch.device) -> Inputs:
    """Return tensors on the device; what comes from the CPU travels while the GPU works on."""
    if device.type != "cuda":
        return {name: value.to(device) for name, value in inputs.items()}
    return {
        name: value if value.device == device else value.pin_memory().to(device, non_blocking=True)
        for name, value in inputs.items()
    }


def ready_to_compile() -> str:
    """Make room for every method of a table, and return where compiled code is kept: it is compiled once a machine.

    A user's own choice of the place stands.
    """
    # Each pass of each method has shapes of its own. PyTorch's default of 8 is used up after a few methods in one
    # process, and what comes then runs uncompiled.
    compiler_config.recompile_limit = max(compiler_config.recompile_limit, RECOMPILE_LIMIT)
    name = "TORCHINDUCTOR_CACHE_DIR"
    chosen = os.environ.get(name, "")
    if not chosen or Path(chosen).parent == Path(tempfile.gettempdir()):  # PyTorch's own default may not outlive a boot
        os.environ[name] = str(cache_root() / "compiled")
    return os.environ[name]


class Steps:
    """Calls a function of device tensors that works by side effects and only queues work.

    On one CUDA device, calls with shapes that came before are replayed as CUDA graphs: a small model spends most of
    its time on launching kernels one by one. `full` is the usual batch; only calls of that size are compiled.
    """

    def __init__(self, function: Callable[[Inputs], None], fabric: Fabric, full: int, capturable: bool = True) -> None:
        self.function, self.device, self.full = function, fabric.device, full
        captures = capturable and self.device.type == "cuda" and fabric.world_size == 1
        self.stream = torch.cuda.Stream() if captures else None
        self._calls: dict[tuple[object, ...], int] = {}
        self._recorded: dict[tuple[object, ...], tuple[torch.cuda.CUDAGraph, Inputs]] = {}

    def __call__(self, inputs: Inputs) -> None:
        """Carry out one step."""
        placed = on_device(inputs, self.device)
        if self.stream is None:
            with self._circumstances(placed):
                self.function(placed)
            return
        key = tuple((name, value.shape, value.dtype) for name, value in placed.items())
        if key not in self._recorded:
            self._calls[key] = self._calls.get(key, 0) + 1
            if self._calls[key] <= WARM_UP:
                self._warm_up(placed)
                return
            self._recorded[key] = self._record(placed)
        graph, fixed = self._recorded[key]
        for name, value in placed.items():
            fixed[name].copy_(value, non_blocking=True)
        graph.replay()

    def _warm_up(self, placed: Inputs) -> None:
        assert self.stream is not None
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream), self._circumstances(placed):
            self.function(placed)
        torch.cuda.current_stream().wait_stream(self.stream)
        for value in placed.values():  # the allocator must not reuse them while the other stream reads
            value.record_stream(self.stream)

    def _record(self, placed: Inputs) -> tuple[torch.cuda.CUDAGraph, Inputs]:
        fixed = {name: value.clone() for name, value in placed.items()}
        graph = torch.cuda.CUDAGraph()
        # Thread-local: another thread may pin memory meanwhile, for the batches to come.
        recording = torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local")
        with self._circumstances(fixed), recording:
            self.function(fixed)
        return graph, fixed

    @contextmanager
    def _circumstances(self, inputs: Inputs) -> Iterator[None]:
        with ExitStack() as stack:
            if self.device.type == "cuda":
                stack.enter_context(sdpa_kernel(ATTENTION, set_priority=True))
            if len(next(iter(inputs.values()))) != self.full:
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            yield
