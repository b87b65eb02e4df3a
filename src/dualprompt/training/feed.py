"""Batches for training and evaluation, and the frozen features that are computed once an image.

What a batch looks at is drawn on the CPU as a few small tensors, its `inputs`; everything else (gathering pixels,
cutting, resizing, normalising) is a function of them that only queues work on the device.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from dualprompt.backbones.base import Backbone, BackboneSource, factory_of
from dualprompt.config import RunConfig
from dualprompt.data.images import Canvas, Images
from dualprompt.data.stream import Subset
from dualprompt.data.views import View
from dualprompt.methods.base import Batch, Phase
from dualprompt.progress import SILENT, Progress
from dualprompt.seeds import derive
from dualprompt.training.distributed import share, total
from dualprompt.training.steps import Inputs, Steps, on_device

if TYPE_CHECKING:
    from lightning_fabric import Fabric

RESIDENT_SHARE = 0.4  # of the GPU memory that is free
DESCRIBE_VIEW = ("index", "pixels", "shapes", "boxes", "flips", "boxes2", "flips2")


@dataclass(frozen=True)
class Share:
    """This process's part of one global training batch."""

    inputs: Inputs
    images: int
    weight: float  # what its mean loss counts in the average over processes


class Feed:
    """Turns subsets of images into batches on the device. Each process gets its own part of every batch."""

    def __init__(
        self,
        config: RunConfig,
        view: View,
        backbone: BackboneSource,
        fabric: Fabric,
        progress: Progress = SILENT,
    ) -> None:
        self.config, self.view, self.fabric = config, view, fabric
        self.backbones = factory_of(backbone)
        self.progress = progress
        self.dtype = self.backbones.dtype  # of the images
        # Kept as long as the images are: those of a stream for the whole run, those made for a phase until its end.
        self._features: WeakKeyDictionary[Subset, Tensor] = WeakKeyDictionary()
        self._resident: WeakKeyDictionary[Images, Tensor | None] = WeakKeyDictionary()

    @property
    def backbone(self) -> Backbone:
        """The frozen backbone, which is built when its features are first asked for."""
        return self.backbones.frozen()

    def for_run(self, config: RunConfig) -> Feed:
        """Return a feed for another run on the same images; frozen features and pixels are shared."""
        other = copy.copy(self)
        other.config = config
        return other

    def resident(self, images: Images) -> Tensor | None:
        """Return all pixels on the device, (images, height, width, 3), or None where they do not fit."""
        if images not in self._resident:
            device, canvas = self.fabric.device, None
            if device.type != "cuda":
                canvas = images.uniform
            elif images.canvas_bytes <= min(2 * len(images.flat), RESIDENT_SHARE * torch.cuda.mem_get_info()[0]):
                canvas = images.gather(torch.arange(len(images))).pixels.to(device)
            self._resident[images] = canvas
        return self._resident[images]

    def course(
        self,
        subset: Subset,
        task: int,
        phase: Phase,
        number: int = 0,
        buffer: Subset | None = None,
        frozen: bool = True,
    ) -> Course:
        """Return the batches of a phase, the `number`-th of its task; with `frozen`, known features come with them."""
        return Course(self, subset, task, phase, number, buffer, frozen)

    def judging(self, subset: Subset, frozen: bool = True, shared: bool = True) -> Iterator[Inputs]:
        """Yield the inputs of an evaluation's batches, with their rows: this process's, or all of them."""
        known = self.features(subset) if frozen else None
        size = self.config.evaluate.batch_size
        starts = range(0, len(subset), size)
        for start in starts[self.fabric.global_rank :: self.fabric.world_size] if shared else starts:
            rows = torch.arange(start, min(start + size, len(subset)))
            yield self.fixed(subset, rows, None if known is None else known[start : start + size]) | {"row": rows}

    def fixed(self, subset: Subset, rows: Tensor, known: Tensor | None = None) -> Inputs:
        """Return the inputs of a batch that shows images of a subset as evaluation sees them."""
        inputs = self.look(subset, rows)
        if (boxes := self.view.fixed_boxes(inputs["shapes"])) is not None:
            inputs["boxes"] = boxes
        return self.shown(subset.images, inputs | ({} if known is None else {"frozen": known, "query": known}))

    def batch(self, images: Images, inputs: Inputs) -> Batch:
        """Return the batch of some inputs, which are on the device."""
        pixels = self.resident(images)

        def view(which: str) -> Callable[[], Tensor]:
            def make() -> Tensor:
                if f"view{which}" in inputs:
                    return inputs[f"view{which}"]
                index = inputs["index"]
                found = images.gather(index.cpu()).pixels.to(index.device) if pixels is None else pixels[index]
                return self._show(Canvas(found, inputs["shapes"]), inputs, which)

            return make

        return Batch(
            make_images=view(""),
            labels=inputs["labels"],
            frozen=inputs.get("frozen"),
            query=inputs.get("query"),
            task=inputs.get("task"),
            make_second=view("2"),
            noted=inputs.get("noted"),
            noise=inputs.get("noise"),
        )

    @torch.no_grad()
    def features(self, subset: Subset) -> Tensor:
        """Return the frozen features of the fixed view, (images, dim), computed once for each subset."""
        if subset not in self._features:
            device = self.fabric.device
            size = self.config.evaluate.batch_size
            out = torch.zeros(len(subset), self.backbone.dim, dtype=self.dtype, device=device)

            def compute(inputs: Inputs) -> None:
                out[inputs["row"]] = self.backbone(self.batch(subset.images, inputs).images)

            steps = Steps(compute, self.fabric, full=size)
            starts = range(0, len(subset), size)
            with self.progress.bar("frozen features", len(subset), "img") as bar:
                for start in starts[self.fabric.global_rank :: self.fabric.world_size]:
                    rows = torch.arange(start, min(start + size, len(subset)))
                    steps(self.fixed(subset, rows) | {"row": rows})
                    bar.advance(len(rows) * self.fabric.world_size)
            self._features[subset] = total(self.fabric, out)
        return self._features[subset]

    def look(self, subset: Subset, rows: Tensor) -> Inputs:
        """Return which images these rows of a subset are."""
        index = subset.indices[rows]
        return {"index": index, "shapes": subset.images.shapes[index], "labels": subset.labels[rows]}

    def shown(self, images: Images, inputs: Inputs) -> Inputs:
        """Replace what describes a view by the view itself, where a GPU cannot reach the pixels.

        Elsewhere a view is made when a method asks for it, which one that knows the features does not.
        """
        if self.fabric.device.type != "cuda" or self.resident(images) is not None:
            return inputs
        if "pixels" not in inputs:
            inputs["pixels"] = images.gather(inputs["index"]).pixels.pin_memory()
        described = on_device({name: inputs[name] for name in DESCRIBE_VIEW if name in inputs}, self.fabric.device)
        canvas = Canvas(described["pixels"], described["shapes"])
        kept = {name: value for name, value in inputs.items() if name not in DESCRIBE_VIEW}
        for which in ("", "2"):
            if which == "" or f"boxes{which}" in described:
                kept[f"view{which}"] = self._show(canvas, described, which)
        return kept

    def _show(self, canvas: Canvas, inputs: Inputs, which: str) -> Tensor:
        shown = self.view.show(canvas, inputs.get(f"boxes{which}"), inputs.get(f"flips{which}"))
        return shown.to(self.dtype)


class Course:
    """The batches of one phase of a task.

    The order derives from (seed, task, epoch) and each step's draws from (seed, task, epoch, step), for the whole
    batch, so that neither a resumed run nor the number of processes changes what is seen.
    """

    def __init__(
        self,
        feed: Feed,
        subset: Subset,
        task: int,
        phase: Phase,
        number: int,
        buffer: Subset | None,
        frozen: bool,
    ) -> None:
        self.feed, self.subset, self.phase = feed, subset, phase
        self.view = feed.view if phase.augment is None else replace(feed.view, augment=phase.augment)
        self.size = feed.config.train.batch_size
        self.buffer = buffer if phase.replay and buffer is not None and len(buffer) else None
        self._place = (task,) if number == 0 else (task, "phase", number)
        serves = self.view.training_is_fixed or feed.config.train.query_view == "fixed"
        known = frozen and serves and phase.views == 1
        for images in (subset.images, *(() if self.buffer is None else (self.buffer.images,))):
            feed.resident(images)  # now, not in the thread that draws ahead
        self._known = feed.features(subset) if known else None
        self._known_of_buffer = feed.features(self.buffer) if known and self.buffer is not None else None

    @property
    def steps(self) -> int:
        """The number of batches in an epoch, the remainder included."""
        return -(-len(self.subset) // self.size)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Share]:
        """Yield the batches of one epoch from step `start` on; on a GPU the next is drawn while one is worked on."""
        order = self._order(epoch)
        if self.feed.fabric.device.type != "cuda":
            yield from (self._finish(self._draw(order, epoch, step)) for step in range(start, self.steps))
            return
        with ThreadPoolExecutor(1) as ahead:
            waiting = [ahead.submit(self._draw, order, epoch, start)]
            for step in range(start, self.steps):
                drawn = waiting.pop().result()
                if step + 1 < self.steps:
                    waiting.append(ahead.submit(self._draw, order, epoch, step + 1))
                yield self._finish(drawn)

    def batch(self, inputs: Inputs) -> Batch:
        """Return the batch of some inputs, which are on the device, with those from the buffer."""
        batch = self.feed.batch(self.subset.images, inputs)
        if self.buffer is not None:
            looks = [_part(inputs, f"replay{i}.") for i in range(self.phase.replay)]
            batch.replay = tuple(self.feed.batch(self.buffer.images, look) for look in looks)
        return batch

    def _generator(self, purpose: str, *place: int) -> torch.Generator:
        return torch.Generator().manual_seed(derive(self.feed.config.seed, purpose, *self._place, *place))

    def _order(self, epoch: int) -> Tensor:
        generator, count = self._generator("order", epoch), len(self.subset)
        if not self.phase.balanced:
            return torch.randperm(count, generator=generator)
        classes = self.subset.labels.unique()
        each = -(-count // len(classes))
        rows = []
        for label in classes:
            mine = (self.subset.labels == label).nonzero()[:, 0]
            rounds = [mine[torch.randperm(len(mine), generator=generator)] for _ in range(-(-each // len(mine)))]
            rows.append(torch.cat(rounds)[:each])
        mixed = torch.cat(rows)
        return mixed[torch.randperm(len(mixed), generator=generator)][:count]

    def _draw(self, order: Tensor, epoch: int, step: int) -> tuple[Share, Inputs]:
        """Draw everything random of a step, for the whole batch; keep this process's part. On the CPU."""
        feed, processes = self.feed, self.feed.fabric.world_size
        rows = order[step * self.size : (step + 1) * self.size]
        part = share(len(rows), feed.fabric.global_rank, processes)
        weight = (part.stop - part.start) * processes / len(rows)
        if part.stop == part.start:  # fewer images than processes: any one image, counted as nothing
            part = slice(0, 1)
        inputs = self._views(self.subset, rows, part, self._generator("augment", epoch, step))
        if self.phase.noise:
            drawn = torch.rand(len(rows), self.phase.noise, generator=self._generator("noise", epoch, step))
            inputs["noise"] = drawn[part]
        if self.buffer is not None:
            generator = self._generator("replay", epoch, step)
            for i in range(self.phase.replay):
                chosen = torch.randint(len(self.buffer), (len(rows),), generator=generator)
                look = self._views(self.buffer, chosen, part, generator)
                inputs |= {f"replay{i}.{name}": value for name, value in look.items()}
        return Share({}, part.stop - part.start, weight), inputs

    def _views(self, subset: Subset, rows: Tensor, part: slice, generator: torch.Generator) -> Inputs:
        shapes = subset.images.shapes[subset.indices[rows]]
        draws = [self.view.draw(shapes, generator) for _ in range(self.phase.views)]
        mine = rows[part]
        inputs = self.feed.look(subset, mine) | {"rows": mine}
        if (boxes := self.view.fixed_boxes(shapes[part])) is not None and draws[0] is None:
            inputs["boxes"] = boxes
        for which, drawn in zip(("", "2"), draws, strict=False):
            if drawn is not None:
                inputs |= {f"boxes{which}": drawn[0][part], f"flips{which}": drawn[1][part]}
        if subset.notes is not None:
            inputs["noted"] = subset.notes[mine]
        if self.feed.fabric.device.type == "cuda" and self.feed.resident(subset.images) is None:
            inputs["pixels"] = subset.images.gather(inputs["index"]).pixels.pin_memory()  # costly, so it is done ahead
        return inputs

    def _finish(self, drawn: tuple[Share, Inputs]) -> Share:
        """Add what lies on the device already: known features, and views whose pixels were gathered on the CPU."""
        step, inputs = drawn
        finished = self._known_added(_part(inputs, "", without="replay"), self.subset, self._known)
        if self.buffer is not None:
            for i in range(self.phase.replay):
                look = self._known_added(_part(inputs, f"replay{i}."), self.buffer, self._known_of_buffer)
                finished |= {f"replay{i}.{name}": value for name, value in look.items()}
        return replace(step, inputs=finished)

    def _known_added(self, inputs: Inputs, subset: Subset, known: Tensor | None) -> Inputs:
        rows = inputs.pop("rows")
        if known is not None:
            features = known[rows.to(known.device, non_blocking=True)]
            inputs["query"] = features
            if self.view.training_is_fixed:
                inputs["frozen"] = features
        return self.feed.shown(subset.images, inputs)


def _part(inputs: Inputs, prefix: str, without: str = "\0") -> Inputs:
    named = inputs.items()
    return {n.removeprefix(prefix): v for n, v in named if n.startswith(prefix) and not n.startswith(without)}
