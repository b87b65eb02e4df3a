"""The batches of a phase of training, in an order and with draws that nothing but seed and place decide."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dualprompt.data.specs import BatchSpec, Crop, ImageSpec, Look
from dualprompt.data.stream import Subset
from dualprompt.methods.base import Batch, Phase
from dualprompt.seeds import derive
from dualprompt.training.distributed import local_part
from dualprompt.training.feed import Feed


@dataclass(frozen=True)
class LocalBatch:
    """This process's part of one global training batch."""

    spec: BatchSpec
    images: int
    rows: Tensor  # of the whole batch, in the phase's subset


class Loader:
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
        number: int = 0,
        buffer: Subset | None = None,
        frozen: bool = True,
        live: bool = False,
        in_order: bool = False,
    ) -> None:
        """Prepare the batches of a phase, the `number`-th of its task.

        Args:
            feed: what makes batches, on which device and with which seed.
            subset: the images that the phase trains on.
            task: the task's number, which decides the draws.
            phase: how the images are shown, and how often the buffer is.
            number: which phase of its task it is.
            buffer: images of old tasks that may be replayed.
            frozen: whether known frozen features come with the images.
            live: whether the buffer changes from step to step, see `replay_from`.
            in_order: whether images come in the order of the subset, as those of an online stream do.
        """
        self.feed, self.subset, self.phase, self.number = feed, subset, phase, number
        self.view = feed.view if phase.augment is None else replace(feed.view, augment=phase.augment)
        self.size = feed.config.train.batch_size
        self.buffer: Subset | None = None
        if buffer is not None:
            self.replay_from(buffer)
        self._place = (task,) if number == 0 else (task, "phase", number)
        serves = self.view.training_is_fixed or feed.config.train.query_view == "fixed"
        known = frozen and serves and phase.views == 1
        for images in (subset.images, *(() if self.buffer is None or live else (self.buffer.images,))):
            feed.resident(images)  # now, not in the thread that draws ahead
        self._known = feed.features(subset) if known else None
        self._known_of_buffer = feed.features(self.buffer) if known and self.buffer is not None and not live else None
        self.live, self._in_order = live, in_order

    @property
    def steps(self) -> int:
        """The number of batches in an epoch, the remainder included."""
        return -(-len(self.subset) // self.size)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[LocalBatch]:
        """Yield the batches of one epoch from step `start` on; on a GPU the next is drawn while one is worked on."""
        return self._drawn(self._order(epoch), [(epoch, step) for step in range(start, self.steps)])

    def arriving(self, start: int, repeats: int) -> Iterator[LocalBatch]:
        """Yield the batches of an online stream from step `start` on, each so many times, drawn anew each time."""
        return self._drawn(
            self._order(0), [(again, step) for step in range(start, self.steps) for again in range(repeats)]
        )

    def _drawn(self, order: Tensor, places: Sequence[tuple[int, int]]) -> Iterator[LocalBatch]:
        """Yield the batches at some places, each an epoch and a step."""
        if self.feed.fabric.device.type != "cuda" or self.live:  # what a live buffer holds is known after the step
            yield from (self._finish(self._draw(order, *place)) for place in places)
            return
        with ThreadPoolExecutor(1) as ahead:
            waiting = [ahead.submit(self._draw, order, *place) for place in places[:1]]
            for next_place in [*places[1:], None]:
                drawn = waiting.pop().result()
                if next_place is not None:
                    waiting.append(ahead.submit(self._draw, order, *next_place))
                yield self._finish(drawn)

    def rows(self, epoch: int, step: int) -> Tensor:
        """Return which images of the subset a step trains on, in all processes."""
        return self._order(epoch)[step * self.size : (step + 1) * self.size]

    def replay_from(self, buffer: Subset) -> None:
        """Replay images of this buffer from the next batch on."""
        replays = bool(self.phase.replay or self.phase.more_replay)
        self.buffer = buffer if replays and len(buffer) else None

    def batch(self, spec: BatchSpec) -> Batch:
        """Return the batch of a spec, which is on the device, with those from the buffer."""
        batch = self.feed.batch(self.subset.images, spec.main)
        if self.buffer is not None:  # a live one changes, but then its images came with the spec
            batch.replay = tuple(self.feed.batch(self.buffer.images, replay) for replay in spec.replays)
        return batch

    def _generator(self, purpose: str, *place: int) -> torch.Generator:
        return torch.Generator().manual_seed(derive(self.feed.config.seed, purpose, *self._place, *place))

    def _order(self, epoch: int) -> Tensor:
        if self._in_order:
            return torch.arange(len(self.subset))
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

    def _draw(self, order: Tensor, epoch: int, step: int) -> LocalBatch:
        """Draw everything random of a step, for the whole batch; keep this process's part. On the CPU."""
        fabric = self.feed.fabric
        rows = order[step * self.size : (step + 1) * self.size]
        part = local_part(len(rows), fabric.global_rank, fabric.world_size)
        weight = (part.stop - part.start) * fabric.world_size / len(rows)
        if part.stop == part.start:  # fewer images than processes: any one image, counted as nothing
            part = slice(0, 1)
        main = self._images(self.subset, rows, part, self._generator("augment", epoch, step))
        noise = self._generator("noise", epoch, step)
        main, replays = self._with_noise(main, len(rows), part, noise), list[ImageSpec]()
        if fabric.world_size > 1:
            main = replace(main, together=self.subset.labels[rows])
        if self.buffer is not None:
            generator = self._generator("replay", epoch, step)
            sizes = [len(rows)] * self.phase.replay + list(self.phase.more_replay)
            for size in sizes:
                chosen = torch.randint(len(self.buffer), (size,), generator=generator)
                own = part if size == len(rows) else local_part(size, fabric.global_rank, fabric.world_size)
                drawn = self._images(self.buffer, chosen, own, generator)
                replays.append(self._with_noise(drawn, size, own, noise))
        return LocalBatch(BatchSpec(main, tuple(replays), torch.tensor(weight)), part.stop - part.start, rows)

    def _with_noise(self, spec: ImageSpec, size: int, part: slice, generator: torch.Generator) -> ImageSpec:
        """Add this process's part of the phase's noise, drawn for the whole batch."""
        if not self.phase.noise:
            return spec
        return replace(spec, noise=torch.rand(size, self.phase.noise, generator=generator)[part])

    def _images(self, subset: Subset, rows: Tensor, part: slice, generator: torch.Generator) -> ImageSpec:
        """Draw how the images at some rows are seen; return this process's part of them."""
        shapes = subset.images.shapes[subset.indices[rows]]
        draws = [self.view.draw(shapes, generator) for _ in range(self.phase.views)]
        fixed = Crop(self.view.fixed_boxes(shapes[part])) if any(drawn is None for drawn in draws) else Crop()
        crops = tuple(fixed if drawn is None else Crop.of(drawn, part) for drawn in draws)
        mine = rows[part]
        look = Look(subset.indices[mine], shapes[part], crops)
        on_gpu, live = self.feed.fabric.device.type == "cuda", self.live and subset is self.buffer
        if live or (on_gpu and self.feed.resident(subset.images) is None):  # costly, so it is done ahead
            gathered = subset.images.gather(look.index).pixels
            look = replace(look, pixels=gathered.pin_memory() if on_gpu else gathered)
        noted = None if subset.notes is None else subset.notes[mine]
        return ImageSpec(subset.labels[mine], look, rows=mine, noted=noted)

    def _finish(self, drawn: LocalBatch) -> LocalBatch:
        """Add what lies on the device already: known features, and views whose pixels were gathered on the CPU."""
        spec = drawn.spec
        main, replays = self._with_known(spec.main, self.subset, self._known), spec.replays
        if self.buffer is not None:
            replays = tuple(self._with_known(each, self.buffer, self._known_of_buffer) for each in replays)
        return replace(drawn, spec=replace(spec, main=main, replays=replays))

    def _with_known(self, spec: ImageSpec, subset: Subset, known: Tensor | None) -> ImageSpec:
        assert spec.rows is not None
        if known is not None:
            features = known[spec.rows.to(known.device, non_blocking=True)]
            spec = replace(spec, query=features, frozen=features if self.view.training_is_fixed else None)
        return self.feed.shown(subset.images, replace(spec, rows=None))
