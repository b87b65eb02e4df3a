"""How fast the method is: against its straight-line twin, against the machine's arithmetic, and as tasks add up.

Every ratio is measured in one process, the two sides taking turns, on the same random images.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.table import Table
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from dualprompt.backbones import weights
from dualprompt.backbones.vit import VisionTransformer
from dualprompt.config import RunConfig, TrainConfig
from dualprompt.methods.base import Batch, TaskView
from dualprompt.methods.dualprompt import DualPrompt, DualPromptConfig
from dualprompt.progress import SILENT, Progress
from dualprompt.studies import reference
from dualprompt.training.distributed import compute_dtype, launch
from dualprompt.training.loop import make_optimiser

CLASSES = 10  # a task
Step = Callable[[], Any]


@dataclass(frozen=True)
class Effort:
    """How long to measure: rounds of at least so many seconds for each side."""

    rounds: int
    seconds: float


QUICK, FULL = Effort(3, 0.5), Effort(7, 2.0)


@dataclass(frozen=True)
class Rate:
    """Images a second, and what they are compared with."""

    what: str
    ours: float
    reference: float
    roofline: float  # what the measured matrix product rate would allow for the counted operations

    @property
    def ratio(self) -> float:
        """Ours over the reference."""
        return self.ours / self.reference


class Bench:
    """A method with some tasks, its twin in fp32, and random images, on one device."""

    def __init__(self, config: RunConfig, effort: Effort, progress: Progress = SILENT) -> None:
        batch = config.train.batch_size
        self.device = launch(config).device
        self.dtype = compute_dtype(config, self.device)
        self.batch, self.effort, self.progress = batch, effort, progress
        checkpoint = weights.read(config.backbone.name, progress)
        self.info = checkpoint.info
        plain = weights.build(checkpoint, input_size=config.backbone.input_size, gelu=config.backbone.gelu)
        self.plain = plain.to(self.device)
        self.backbone = copy.deepcopy(plain).to(self.device, self.dtype) if self.dtype != torch.float32 else plain
        generator = torch.Generator().manual_seed(0)
        side = plain.config.image_size
        self.images = torch.randn(batch, 3, side, side, generator=generator).to(self.device)
        self.labels = torch.arange(batch, device=self.device) % CLASSES
        self.flops = self._matmul_rate()

    def method(self, tasks: int, backbone: VisionTransformer | None = None) -> DualPrompt:
        """Return a method that has begun `tasks` tasks."""
        method = DualPrompt(DualPromptConfig(), backbone or self.backbone).to(self.device)
        for task in range(tasks):
            generator = torch.Generator().manual_seed(task)
            method.begin_task(
                TaskView(task, f"task {task + 1}", CLASSES, task * CLASSES, generator, lambda: self.images)
            )
        return method

    def trainer(self, method: DualPrompt, query: Tensor | None) -> Step:
        """Return one training step of ours; with `query`, the frozen features are known."""
        optimiser = make_optimiser(method.trainable(), TrainConfig())
        labels = self.labels + method.head.first_newest

        def step() -> None:
            images = self.images.to(self.dtype)
            loss = method.loss(Batch(lambda: images, labels, query=query))
            optimiser.zero_grad(set_to_none=True)
            loss.backward()
            optimiser.step()

        return step

    def reference_trainer(self, method: DualPrompt) -> Step:
        """Return one training step of the straight-line twin."""
        optimiser = make_optimiser(method.trainable(), TrainConfig())
        labels = self.labels + method.head.first_newest

        def step() -> None:
            loss = reference.loss(method, self.plain, self.images, labels)
            optimiser.zero_grad(set_to_none=True)
            loss.backward()
            optimiser.step()

        return step

    def predictor(self, method: DualPrompt, query: Tensor | None) -> Step:
        """Return one prediction of ours."""
        return lambda: method.predict(Batch(lambda: self.images.to(self.dtype), self.labels, query=query))

    def run(self) -> dict[str, Any]:
        """Measure everything; return plain values."""
        with torch.no_grad():
            query = self.backbone(self.images.to(self.dtype))
        ours, twin = self.method(10), self.method(10, self.plain)
        sides = {
            "train, query known": (self.trainer(ours, query), self.reference_trainer(twin)),
            "train, query computed": (self.trainer(ours, None), self.reference_trainer(twin)),
            "evaluate, query known": (self.predictor(ours, query), self._reference_predictor(twin)),
            "evaluate, both passes": (self.predictor(ours, None), self._reference_predictor(twin)),
        }
        rates = [self._rate(what, *pair) for what, pair in sides.items()]
        growth = self._growth(query)
        return {
            "backbone": self.info.name,
            "input_size": self.plain.config.image_size,
            "device": torch.cuda.get_device_name() if self.device.type == "cuda" else f"{self.device.type}",
            "threads": torch.get_num_threads(),
            "precision": str(self.dtype).removeprefix("torch."),
            "batch": self.batch,
            "torch": torch.__version__,
            "train_ratio": rates[0].ratio,
            "eval_ratio": rates[2].ratio,
            "rates": [asdict(rate) | {"ratio": rate.ratio, "of_roofline": rate.ours / rate.roofline} for rate in rates],
            "growth": growth,
            "matmul_tflops": self.flops / 1e12,
            "peak_memory_gib": self._peak_memory(ours, query),
        }

    def _reference_predictor(self, twin: DualPrompt) -> Step:
        return lambda: reference.predict(twin, self.plain, self.images)

    def _rate(self, what: str, ours: Step, other: Step) -> Rate:
        self.progress.note(f"measuring: {what}")
        fast, slow = self._turns(ours, other)
        with FlopCounterMode(display=False) as counter:
            ours()
        return Rate(what, self.batch / fast, self.batch / slow, self.batch * self.flops / counter.get_total_flops())

    def _turns(self, *steps: Step) -> list[float]:
        """Return the seconds a call of each, the sides taking turns; the median over rounds."""
        for step in steps:
            step()
        taken: list[list[float]] = [[] for _ in steps]
        for _ in range(self.effort.rounds):
            for times, step in zip(taken, steps, strict=True):
                times.append(self._seconds(step))
        return [statistics.median(times) for times in taken]

    def _seconds(self, step: Step) -> float:
        self._wait()
        start, calls = time.perf_counter(), 0
        while calls == 0 or time.perf_counter() - start < self.effort.seconds:
            step()
            calls += 1
            self._wait()
        return (time.perf_counter() - start) / calls

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def _growth(self, query: Tensor) -> dict[str, float]:
        """Return what a task costs when there are many: later steps and predictions against early ones."""
        self.progress.note("measuring: many tasks")
        first, hundredth = self._turns(self.trainer(self.method(1), query), self.trainer(self.method(100), query))
        few, many = self._turns(self.predictor(self.method(10), query), self.predictor(self.method(1000), query))
        return {
            "training_task_100_v_1_percent": 100 * (hundredth / first - 1),
            "prediction_1000_v_10_tasks_percent": 100 * (many / few - 1),
            "bytes_a_task": float(self._bytes(self.method(2)) - self._bytes(self.method(1))),
        }

    @staticmethod
    def _bytes(method: DualPrompt) -> int:
        return sum(value.numel() * value.element_size() for value in method.state().values())

    def _matmul_rate(self) -> float:
        """Return the floating-point operations a second of a large matrix product in the compute precision, at best."""
        size = 8192 if self.device.type == "cuda" else 1536
        one, two = (torch.randn(size, size, device=self.device).to(self.dtype) for _ in range(2))
        times = [self._seconds(lambda: one @ two) for _ in range(self.effort.rounds + 1)]  # the first warms up
        return 2 * size**3 / min(times)

    def _peak_memory(self, method: DualPrompt, query: Tensor) -> float | None:
        if self.device.type != "cuda":
            return None
        torch.cuda.reset_peak_memory_stats()
        self.trainer(method, query)()
        self._wait()
        return torch.cuda.max_memory_allocated() / 2**30


def tables(found: dict[str, Any]) -> list[Table]:
    """Return the measurements for a terminal."""
    where = f"{found['precision']} on {found['device']}"
    title = f"{found['backbone']} at {found['input_size']} px, batch {found['batch']}, {where}"
    speed = Table("", "img/s", "straight line", "ratio", "of the roofline", title=title, min_width=len(title))
    for rate in found["rates"]:
        speed.add_row(
            rate["what"],
            f"{rate['ours']:,.1f}",
            f"{rate['reference']:,.1f}",
            f"{rate['ratio']:.2f} ×",
            f"{100 * rate['of_roofline']:.0f} %",
        )
    growth = Table("as tasks add up", "")
    growth.add_row("training step of task 100 v task 1", f"{found['growth']['training_task_100_v_1_percent']:+.1f} %")
    growth.add_row(
        "prediction with 1,000 v 10 tasks", f"{found['growth']['prediction_1000_v_10_tasks_percent']:+.1f} %"
    )
    growth.add_row("bytes a task adds", f"{found['growth']['bytes_a_task']:,.0f}")
    if found["peak_memory_gib"] is not None:
        growth.add_row("peak memory of a training step", f"{found['peak_memory_gib']:.2f} GiB")
    return [speed, growth]
