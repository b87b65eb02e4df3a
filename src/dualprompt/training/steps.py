"""How a step is carried out: as it is written, or on a GPU recorded once and replayed as one CUDA graph.

A step is a function of one spec. It works by side effects on tensors that stay where they are, and only queues work on
the device. Recording wraps it from outside, changes nothing that it computes, and can be switched off: by the caller,
or for all by `DUALPROMPT_RECORD=0` in the environment.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import torch
from torch.compiler import config as compiler_config
from torch.nn.attention import SDPBackend, sdpa_kernel

from dualprompt.data.specs import Spec
from dualprompt.files import cache_root

if TYPE_CHECKING:
    from lightning_fabric import Fabric

S = TypeVar("S", bound=Spec)
RECORD = "DUALPROMPT_RECORD"
RECOMPILE_LIMIT = 64  # compiled forms of one function
WARM_UP = 2  # calls with the same shapes before one is recorded: lazily made workspaces must exist by then
# cuDNN's attention is a quarter faster than the others for sequences as short as these.
ATTENTION = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


def carried_out(step: Callable[[S], None], fabric: Fabric, full: int, record: bool = True) -> Callable[[S], None]:
    """Return a step that takes specs from the CPU, and is recorded on one CUDA device.

    `full` is the usual number of images; only calls of that size are compiled. `record` is False for a step that reads
    a value back.
    """
    eager = Eager(step, fabric.device, full)
    records = record and fabric.device.type == "cuda" and fabric.world_size == 1 and os.environ.get(RECORD) != "0"
    return Recorded(eager, CudaGraphs()) if records else eager


class Eager(Generic[S]):
    """A step as it is written."""

    def __init__(self, step: Callable[[S], None], device: torch.device, full: int) -> None:
        self.step, self.device, self.full = step, device, full

    def __call__(self, spec: S) -> None:
        """Carry out one step."""
        placed = spec.to(self.device)
        with self.circumstances(placed):
            self.step(placed)

    @contextmanager
    def circumstances(self, spec: S) -> Iterator[None]:
        """Choose the kernels of attention, and compile nothing for a batch that is not of the usual size."""
        with ExitStack() as stack:
            if self.device.type == "cuda":
                stack.enter_context(sdpa_kernel(ATTENTION, set_priority=True))
            if len(spec) != self.full:
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            yield


class Graphs(Protocol):
    """What can record work on a device."""

    def warm_up(self, step: Callable[[S], None], spec: S) -> None:
        """Carry out a step in the surroundings in which one is recorded."""
        ...

    def record(self, step: Callable[[], None]) -> Callable[[], None]:
        """Take down the work that a step queues, without doing it; return what does it."""
        ...


class Recorded(Generic[S]):
    """A step whose calls are replayed from a record once their shapes have come before.

    A small model spends most of its time on launching kernels one by one. A record reads fixed tensors, into which each
    call's are copied.
    """

    def __init__(self, eager: Eager[S], graphs: Graphs) -> None:
        self.eager, self.graphs = eager, graphs
        self._calls: dict[tuple[object, ...], int] = {}
        self._records: dict[tuple[object, ...], tuple[S, Callable[[], None]]] = {}

    def __call__(self, spec: S) -> None:
        """Carry out one step."""
        placed = spec.to(self.eager.device)
        key = placed.key
        if key not in self._records:
            self._calls[key] = self._calls.get(key, 0) + 1
            with self.eager.circumstances(placed):
                if self._calls[key] <= WARM_UP:
                    self.graphs.warm_up(self.eager.step, placed)
                    return
                fixed = placed.clone()
                self._records[key] = fixed, self.graphs.record(partial(self.eager.step, fixed))
        fixed, replay = self._records[key]
        fixed.copy_(placed)
        replay()


class CudaGraphs:
    """CUDA graphs, recorded on a stream of their own."""

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream()

    def warm_up(self, step: Callable[[S], None], spec: S) -> None:
        """See Graphs."""
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            step(spec)
        torch.cuda.current_stream().wait_stream(self.stream)
        for _, value in spec.named():  # the allocator must not reuse them while the other stream reads
            value.record_stream(self.stream)

    def record(self, step: Callable[[], None]) -> Callable[[], None]:
        """See Graphs."""
        graph = torch.cuda.CUDAGraph()
        # Thread-local: another thread may pin memory meanwhile, for the batches to come.
        with torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local"):
            step()
        return graph.replay


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
