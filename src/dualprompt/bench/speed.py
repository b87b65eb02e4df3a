"""How fast the method is: against its straight-line twin, against the machine's arithmetic, and as tasks add up.

Every ratio is measured in one process, the two sides taking turns, on the same random images.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from dualprompt.backbones import weights
from dualprompt.backbones.products import linear, plain_products
from dualprompt.backbones.vit import VisionTransformer
from dualprompt.bench import reference
from dualprompt.bench.machine import Meter, processor
from dualprompt.config import RunConfig, TrainConfig, compose
from dualprompt.data.specs import ImageSpec
from dualprompt.errors import DualPromptError
from dualprompt.methods.base import Batch, TaskView
from dualprompt.methods.dualprompt import DualPrompt, DualPromptConfig
from dualprompt.progress import SILENT, Progress
from dualprompt.training import group
from dualprompt.training.distributed import compute_dtype, launch
from dualprompt.training.optimise import make_optimiser
from dualprompt.training.steps import carried_out, ready_to_compile

CLASSES = 10  # a task
Step = Callable[[], Any]
# Where a kernel's time belongs, by what its name holds; the first that fits counts.
KINDS = {
    "attention": ("sdpa", "flash", "fmha", "dot_do_o", "convert_dq", "attention"),
    "matrix products": ("nvjet", "gemm", "cutlass", "cublas", "sm90_xmma", "splitk"),
    "normalisation and residuals": ("layer_norm", "LayerNorm"),
    "GELU": ("gelu", "Gelu"),
    "optimiser": ("multi_tensor_apply", "Optimizer"),
    "copies and the rest": ("",),
}


@dataclass(frozen=True)
class Effort:
    """How long to measure: rounds of at least so many seconds for each side; steps before both sides are compared."""

    rounds: int
    seconds: float
    steps: int


QUICK, FULL = Effort(5, 0.3, 5), Effort(7, 0.7, 20)


@dataclass(frozen=True)
class Rate:
    """Images a second, and what they are compared with."""

    what: str
    batch: int
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
        self.config, self.effort, self.progress = config, effort, progress
        self.fabric = launch(config)
        self.device = self.fabric.device
        self.dtype = compute_dtype(config, self.device)
        checkpoint = weights.read(config.backbone.name, progress)
        self.info = checkpoint.info

        def build() -> VisionTransformer:
            built = weights.build(checkpoint, input_size=config.backbone.input_size, gelu=config.backbone.gelu)
            if not isinstance(built, VisionTransformer):
                raise DualPromptError(f"bench measures DualPrompt, which needs a ViT; '{built.name}' is none")
            return built

        self.backbone = build().to(self.device, self.dtype)
        self.plain = self.backbone if self.dtype == torch.float32 else build()  # goes to the device when it is needed
        self.compiles = config.compile == "on" or (config.compile == "auto" and self.device.type == "cuda")
        self.backbone.compiled = self.compiles

    def method(self, tasks: int, backbone: VisionTransformer | None = None) -> DualPrompt:
        """Return a method that has begun `tasks` tasks."""
        method = DualPrompt(DualPromptConfig(), backbone or self.backbone).to(self.device)
        empty = torch.empty(0)
        for task in range(tasks):
            generator, seen = torch.Generator().manual_seed(task), tuple(range((task + 1) * CLASSES))
            labels = seen[-CLASSES:]
            view = TaskView(task, str(task), labels, labels, seen, generator, lambda: empty, empty, lambda: iter(()))
            method.begin_task(view)
        return method

    def run(self, batches: Sequence[int], end_to_end: str | None = None) -> dict[str, Any]:
        """Measure everything, training and evaluation at each of the batch sizes; return plain values."""
        whole = self.end_to_end(end_to_end) if end_to_end else None
        if self.compiles:
            self.progress.note(f"the first passes compile the backbone; the result is kept in {ready_to_compile()}")
        began = time.perf_counter()
        sides = [_Sides(self, batch) for batch in batches]
        memory = {side.batch: side.peak_memory() for side in sides} if self.device.type == "cuda" else None
        compiling = time.perf_counter() - began
        self.plain.to(self.device)
        meter = Meter(os.getpid())
        flops = self._matmul_rate()
        rates = [rate for side in sides for rate in side.rates(flops)]
        others, first = meter.usage().others_share, sides[0]
        profile, kernels = first.profile() if self.device.type == "cuda" else (None, None)
        return {
            "backbone": self.info.name,
            "input_size": self.plain.config.image_size,
            "device": torch.cuda.get_device_name() if self.device.type == "cuda" else f"{self.device.type}",
            "processor": processor(),
            "threads": torch.get_num_threads(),
            "others_percent": None if others is None else 100 * others,  # of all cores, while rates were measured
            "precision": str(self.dtype).removeprefix("torch."),
            "compiled": self.compiles,
            "first_steps_seconds": compiling,
            "batch": first.batch,
            "torch": torch.__version__,
            "train_ratio": rates[0].ratio,
            "eval_ratio": next(rate.ratio for rate in rates if rate.what == "evaluate, query known"),
            "rates": [asdict(rate) | {"ratio": rate.ratio, "of_roofline": rate.ours / rate.roofline} for rate in rates],
            "agreement": first.agreement(self.effort.steps),
            "growth": first.growth(),
            "matmul_tflops": flops / 1e12,
            "peak_memory_gib": memory,
            "profile": profile,
            "attention_kernels": kernels,
            "end_to_end": whole,
        }

    def end_to_end(self, preset: str) -> dict[str, Any]:
        """Run a whole benchmark; return its seconds, and those of a second time if the first had to compile."""
        seconds: list[float] = []
        compile_run = "off" if self.config.compile == "auto" else self.config.compile
        options = {"backbone.name": self.config.backbone.name, "device": self.config.device, "compile": compile_run}
        for _ in range(2 if compile_run == "on" else 1):
            with tempfile.TemporaryDirectory() as folder:
                config = compose(preset, None, options)
                began = time.perf_counter()
                group.start(group.plan([config], baseline=False), Path(folder) / "run", self.progress)
                seconds.append(time.perf_counter() - began)
                self.progress.note(f"{preset} took {seconds[-1]:.1f} s")
        return {"preset": preset, "compile": compile_run, "seconds": seconds}

    def turns(self, *steps: Step) -> list[float]:
        """Return the seconds a call of each, the sides taking turns; the median over rounds."""
        for step in steps:
            for _ in range(1 if self.device.type == "cpu" else 4):  # enough for whatever is compiled or recorded
                step()
        taken: list[list[float]] = [[] for _ in steps]
        for _ in range(self.effort.rounds):
            for times, step in zip(taken, steps, strict=True):
                times.append(self.seconds(step))
        return [statistics.median(times) for times in taken]

    def seconds(self, step: Step) -> float:
        """Return the seconds of one call, from as many as the effort asks for."""
        self.wait()
        start, calls = time.perf_counter(), 0
        while calls == 0 or time.perf_counter() - start < self.effort.seconds:
            for _ in range(1 if self.device.type == "cpu" else 5):
                step()
                calls += 1
            self.wait()
        return (time.perf_counter() - start) / calls

    def wait(self) -> None:
        """Let a GPU finish what is queued."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def _matmul_rate(self) -> float:
        """Return the floating-point operations a second of a large matrix product in the compute precision, at best."""
        size = 8192 if self.device.type == "cuda" else 1536
        one, two = (torch.randn(size, size, device=self.device).to(self.dtype) for _ in range(2))
        rounds = self.effort.rounds + 1  # the first warms up
        times = [self.seconds(lambda: linear(one, two, None)) for _ in range(rounds)]
        return 2 * size**3 / min(times)


class _Sides:
    """Ours and the twin at one batch size."""

    def __init__(self, bench: Bench, batch: int) -> None:
        self.bench, self.batch = bench, batch
        side, device = bench.backbone.config.image_size, bench.device
        generator = torch.Generator().manual_seed(0)
        self.plain_images = torch.randn(batch, 3, side, side, generator=generator).to(device)
        self.images = self.plain_images.to(bench.dtype)
        self.labels = torch.arange(batch, device=device) % CLASSES
        self._query: Tensor | None = None

    @property
    def query(self) -> Tensor:
        """The frozen features of the images."""
        if self._query is None:
            with torch.no_grad():
                found = self._query = self.bench.backbone(self.images).clone()
            return found
        return self._query

    def trainer(self, method: DualPrompt, known: bool) -> Step:
        """Return one training step of ours, with the frozen features known or not."""
        optimiser = make_optimiser(method, TrainConfig(), device=self.bench.device)
        labels = self.labels + method.head.labels[0]

        def step(spec: ImageSpec) -> None:
            optimiser.zero_grad(set_to_none=True)
            method.loss(Batch(lambda: spec.views[0], spec.labels, query=spec.query)).backward()
            optimiser.step()

        return self._stepped(step, labels, known)

    def predictor(self, method: DualPrompt, known: bool) -> Step:
        """Return one prediction of ours."""
        method.eval()

        def step(spec: ImageSpec) -> None:
            method.predict(Batch(lambda: spec.views[0], spec.labels, query=spec.query))

        return self._stepped(step, self.labels, known)

    def _stepped(self, step: Callable[[ImageSpec], None], labels: Tensor, known: bool) -> Step:
        spec = ImageSpec(labels, views=(self.images,), query=self.query if known else None)
        carried = carried_out(step, self.bench.fabric, self.batch)
        return lambda: carried(spec)

    def reference_trainer(self, method: DualPrompt) -> Step:
        """Return one training step of the straight-line twin."""
        optimiser = make_optimiser(method, TrainConfig())
        labels = self.labels + method.head.labels[0]

        def step() -> None:
            optimiser.zero_grad(set_to_none=True)
            reference.loss(method, self.bench.plain, self.plain_images, labels).backward()
            optimiser.step()

        return step

    def reference_predictor(self, method: DualPrompt) -> Step:
        """Return one prediction of the straight-line twin."""
        return lambda: reference.predict(method, self.bench.plain, self.plain_images)

    def rates(self, flops: float) -> list[Rate]:
        """Measure training and evaluation, with the query known and computed."""
        ours, twin = self.bench.method(10), self.bench.method(10, self.bench.plain)
        found = []
        for what, known, mine, other in (
            ("train, query known", True, self.trainer, self.reference_trainer),
            ("train, query computed", False, self.trainer, self.reference_trainer),
            ("evaluate, query known", True, self.predictor, self.reference_predictor),
            ("evaluate, both passes", False, self.predictor, self.reference_predictor),
        ):
            self.bench.progress.note(f"measuring: {what}, batch {self.batch}")
            fast, slow = self.bench.turns(mine(ours, known), other(twin))
            roofline = self.batch * flops / self._operations(ours, what, known)
            found.append(Rate(what, self.batch, self.batch / fast, self.batch / slow, roofline))
            self.bench.progress.note(f"  {found[-1].ours:,.0f} img/s, the twin {found[-1].reference:,.0f}")
        return found

    def _operations(self, method: DualPrompt, what: str, known: bool) -> int:
        """Return the floating-point operations of one step."""
        batch = Batch(lambda: self.images, self.labels + method.head.labels[0], query=self.query if known else None)
        compiled, self.bench.backbone.compiled = self.bench.backbone.compiled, False  # what is compiled is not counted
        with FlopCounterMode(display=False) as counter, plain_products():
            if what.startswith("train"):
                method.loss(batch).backward()
            else:
                method.predict(batch)
        self.bench.backbone.compiled = compiled
        return counter.get_total_flops()

    def agreement(self, steps: int) -> dict[str, float]:
        """Train ours and the twin from the same start on the same images; return how far apart they come to stand."""
        ours, twin = self.bench.method(2), self.bench.method(2, self.bench.plain)
        start = {name: value.clone() for name, value in ours.state().items()}
        one, other = self.trainer(ours, True), self.reference_trainer(twin)
        for _ in range(steps):
            one()
            other()
        trained = list(ours.trainable())
        moved = torch.cat([(twin.state()[name] - start[name]).flatten() for name in trained])
        apart = torch.cat([(twin.state()[name] - ours.state()[name]).flatten() for name in trained])
        with torch.no_grad():
            mine = ours.predict(Batch(lambda: self.images, self.labels)).logits.argmax(dim=1)
            theirs = reference.predict(twin, self.bench.plain, self.plain_images)[0].argmax(dim=1)
        same = float((mine == theirs).float().mean())
        return {
            "steps": steps,
            "apart_percent_of_moved": 100 * float(apart.norm() / moved.norm()),
            "same_predictions_percent": 100 * same,
        }

    def growth(self) -> dict[str, float]:
        """Return what a task costs when there are many: later steps and predictions against early ones."""
        self.bench.progress.note("measuring: many tasks")
        method = self.bench.method
        first, hundredth = self.bench.turns(self.trainer(method(1), True), self.trainer(method(100), True))
        few, many = self.bench.turns(self.predictor(method(10), True), self.predictor(method(1000), True))
        return {
            "training_task_100_v_1_percent": 100 * (hundredth / first - 1),
            "prediction_1000_v_10_tasks_percent": 100 * (many / few - 1),
            "bytes_a_task": float(_bytes(method(2)) - _bytes(method(1))),
        }

    def peak_memory(self) -> float:
        """Return the GiB that training takes at most, weights and images included, compiling excluded."""
        step = self.trainer(self.bench.method(1), known=True)
        for _ in range(2):
            step()
        self.bench.wait()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        for _ in range(2):
            step()
        self.bench.wait()
        return torch.cuda.max_memory_allocated() / 2**30

    def profile(self) -> tuple[dict[str, float], list[str]]:
        """Return where a step's milliseconds go (gaps: the GPU waits), and the names of attention's kernels."""
        from torch.profiler import ProfilerActivity, profile

        step, steps = self.trainer(self.bench.method(10), True), 10
        taken = self.bench.turns(step)[0]
        with profile(activities=[ProfilerActivity.CUDA]) as found:
            for _ in range(steps):
                step()
            self.bench.wait()
        spent, attending = dict.fromkeys(KINDS, 0.0), list[str]()
        for kernel in found.key_averages():
            kind = next(kind for kind, marks in KINDS.items() if any(mark in kernel.key for mark in marks))
            attending += [kernel.key] if kind == "attention" else []
            spent[kind] += kernel.self_device_time_total / steps / 1e3
        return {**spent, "gaps": max(0.0, 1e3 * taken - sum(spent.values())), "step": 1e3 * taken}, sorted(attending)


def _bytes(method: DualPrompt) -> int:
    return sum(value.numel() * value.element_size() for value in method.state().values())


def tables(found: dict[str, Any]) -> list[Table]:
    """Return the measurements for a terminal."""
    where = f"{found['precision']} on {found['device']}"
    title = f"{found['backbone']} at {found['input_size']} px, {where}"
    speed = Table("", "batch", "img/s", "straight line", "ratio", "of the roofline", title=title, min_width=len(title))
    for rate in found["rates"]:
        speed.add_row(
            rate["what"],
            str(rate["batch"]),
            f"{rate['ours']:,.1f}",
            f"{rate['reference']:,.1f}",
            f"{rate['ratio']:.2f} ×",
            f"{100 * rate['of_roofline']:.0f} %",
        )
    if (others := found["others_percent"]) is not None:
        speed.caption = f"others had {others:.0f} % of the processor meanwhile"
    growth = Table("as tasks add up", "")
    growth.add_row("training step of task 100 v task 1", f"{found['growth']['training_task_100_v_1_percent']:+.1f} %")
    growth.add_row(
        "prediction with 1,000 v 10 tasks", f"{found['growth']['prediction_1000_v_10_tasks_percent']:+.1f} %"
    )
    growth.add_row("bytes a task adds", f"{found['growth']['bytes_a_task']:,.0f}")
    for batch, peak in (found["peak_memory_gib"] or {}).items():
        growth.add_row(f"peak memory of training, batch {batch}", f"{peak:.2f} GiB")
    close = found["agreement"]
    growth.add_row(
        f"after {close['steps']} steps, ours and the twin",
        f"{close['apart_percent_of_moved']:.2g} % of the way apart, "
        f"same prediction for {close['same_predictions_percent']:.1f} %",
    )
    if (whole := found["end_to_end"]) is not None:
        taken = ", then ".join(f"{seconds:.1f} s" for seconds in whole["seconds"])
        growth.add_row(f"all of {whole['preset']}, compile {whole['compile']}", taken)
    shown = [speed, growth]
    if found["profile"] is not None:
        profile = Table(f"a training step, batch {found['batch']}", "ms")
        for kind, spent in found["profile"].items():
            profile.add_row(kind, f"{spent:.2f}")
        shown.append(profile)
    return shown
