"""From a config to everything the loop works with; what is wrong with the input shows before anything is written."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from dualprompt.backbones import weights
from dualprompt.backbones.base import BackboneFactory
from dualprompt.backbones.overlap import tell_overlaps
from dualprompt.backbones.weights import CheckpointInfo
from dualprompt.config import RunConfig
from dualprompt.data.stream import Stream, Subset, build_stream, drawn_by_run
from dualprompt.data.views import View
from dualprompt.errors import DualPromptError
from dualprompt.features import tables_of
from dualprompt.methods.base import METHODS, Method, MethodConfig, StreamKind, method_config
from dualprompt.progress import SILENT, Progress
from dualprompt.run.identity import Identity
from dualprompt.training.distributed import compute_dtype, launch
from dualprompt.training.feed import Feed
from dualprompt.training.steps import ready_to_compile

if TYPE_CHECKING:
    from lightning_fabric import Fabric


@dataclass(frozen=True)
class Setup:
    """Method, data and devices of a run, ready to train."""

    config: RunConfig
    fabric: Fabric
    method: Method
    stream: Stream
    feed: Feed
    weights: CheckpointInfo
    dtype: torch.dtype
    backbones: BackboneFactory

    @property
    def identity(self) -> Identity:
        """What decides the run's result."""
        return Identity.of(self.config, self.stream, self.weights)

    @property
    def precision(self) -> str:
        """The backbone's precision, in words."""
        return str(self.dtype).removeprefix("torch.")

    def evaluated(self, tasks: int) -> list[Subset]:
        """Return the images on which each of the first `tasks` tasks is evaluated."""
        return [task.judged(self.config.benchmark.evaluate_on) for task in self.stream.experiences[:tasks]]


def prepare(config: RunConfig, progress: Progress = SILENT, share: Setup | None = None) -> Setup:
    """Validate everything, read weights and data, and put them on the device.

    `share` is the setup of another run: processes, data and frozen features are taken from it where they are the same.
    """
    options = method_config(config.method)
    if share is not None and _alike(config, share.config):
        refuse_misfits(config, share.stream)
        refuse_single_classes(options, share.stream)
        method = METHODS[options.name](options, share.backbones)
        method.accept(kind_of(share.stream))
        return _ready(config, method, share)
    checkpoint = weights.read(config.backbone.name, progress, config.seed)
    backbones = weights.factory(checkpoint, input_size=config.backbone.input_size, gelu=config.backbone.gelu)
    method = METHODS[options.name](options, backbones)  # before the images are read, since it may refuse
    info = checkpoint.info
    view = view_of(config, info)
    stream = build_stream(config.benchmark, config.seed, view.store, progress)
    refuse_misfits(config, stream)
    refuse_single_classes(options, stream)
    method.accept(kind_of(stream))
    tell_overlaps(config, progress)
    fabric = share.fabric if share is not None else launch(config)
    dtype = compute_dtype(config, fabric.device)
    backbones.place(fabric.device, dtype)
    feed = Feed(config, view, backbones, fabric, progress if fabric.is_global_zero else SILENT)
    feed.tables = tables_of(config, view, stream, info, () if share is None else share.feed.tables.values())
    return _ready(config, method, Setup(config, fabric, method, stream, feed, info, dtype, backbones))


def kind_of(stream: Stream) -> StreamKind:
    """Return what a method is told of a stream before it begins."""
    return StreamKind(stream.returns or stream.online, stream.bordered, stream.online)


def view_of(config: RunConfig, info: CheckpointInfo) -> View:
    """Return how a run looks at images through a backbone of these weights."""
    return View(
        side=config.backbone.input_size or info.input_size,
        mean=info.mean,
        std=info.std,
        interpolation=info.interpolation,
        test=config.evaluate.view,
        augment=config.train.augment,
        rotation=config.train.rotation,
        jitter=config.train.jitter,
    )


def _ready(config: RunConfig, method: Method, common: Setup) -> Setup:
    """Return a setup with a method of its own; the data, and a backbone that is frozen, are common to several."""
    device = common.fabric.device
    method.compute_dtype = common.dtype
    method.to(device)
    compiled = device.type == "cuda" and _worth_compiling(config, method, common)
    if compiled:
        common.feed.progress.note(f"the first passes compile the backbone; the result is kept in {ready_to_compile()}")
    method.backbone.compiled = compiled
    feed = common.feed.for_run(config)
    return replace(common, config=config, method=method, feed=feed)


def _worth_compiling(config: RunConfig, method: Method, common: Setup) -> bool:
    """Return whether compiling, half a minute when it is done the first time, will be won back.

    It makes a step 3 to 10 % faster than recording alone does (docs/performance.md).
    """
    if config.compile != "auto":
        return config.compile == "on"
    images = config.train.epochs * sum(len(task.train) for task in common.stream.experiences)
    return 2 * images * method.backbone.operations / 400e12 > 600  # seconds at what an H200 reaches


def refuse_misfits(config: RunConfig, stream: Stream) -> None:
    """Refuse values that an online stream cannot have, or only one can have."""
    kind, every = config.benchmark.stream, config.benchmark.evaluate_every
    if not stream.online:
        given = {"benchmark.evaluate_every": every is not None, "train.updates": config.train.updates > 1}
        for key in (key for key, value in given.items() if value):
            raise DualPromptError(f"{key} is for online streams, and '{kind}' is none; leave it out")
        return
    if config.train.epochs != 1:
        raise DualPromptError(
            f"train.epochs is {config.train.epochs}, but stream '{kind}' brings each image once; set train.epochs: 1 "
            "(train.updates: N trains on each batch N times when it comes)"
        )
    images = sum(len(each.train) for each in stream.experiences)
    if every is not None and every > images:
        raise DualPromptError(f"benchmark.evaluate_every is {every}, but the stream has {images} images; set it lower")


def refuse_single_classes(options: MethodConfig, stream: Stream) -> None:
    """Refuse tasks that teach nothing: among the classes of one task, a single one is always right."""
    for task in stream.experiences:
        if len(task.labels) == 1 and not options.learns_one_class:
            raise DualPromptError(
                f"task {task.index + 1} ('{task.name}') has one class, from which '{options.name}' cannot learn with "
                f"masked logits; {' or '.join(['give it more classes', *options.one_class_remedies('method.')])}"
            )


def _alike(one: RunConfig, other: RunConfig) -> bool:
    """Return whether two runs see the same images through the same backbone."""
    seed_matters = drawn_by_run(one.benchmark) or weights.drawn(one.backbone.name)
    same_order = not seed_matters or one.seed == other.seed
    same_view = one.evaluate == other.evaluate and all(
        getattr(one.train, each) == getattr(other.train, each) for each in ("augment", "rotation", "jitter")
    )
    same_device = (one.device, one.devices, one.nodes, one.precision) == (
        other.device,
        other.devices,
        other.nodes,
        other.precision,
    )
    return (
        same_order and same_view and same_device and (one.benchmark, one.backbone) == (other.benchmark, other.backbone)
    )
