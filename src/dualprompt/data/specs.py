"""What a step needs, as typed tensors: drawn on the CPU, carried to the device, held in place by a recorded step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import torch
from torch import Tensor

from dualprompt.data.views import Draws


class Spec:
    """Base of frozen dataclasses whose fields are tensors, other specs, tuples of either, or None."""

    def named(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every tensor with where it stands, as `replays.0.labels`."""
        for field in fields(self):  # pyright: ignore[reportArgumentType]
            yield from _named(field.name, getattr(self, field.name))

    def map(self, change: Callable[[Tensor], Tensor]) -> Self:
        """Return the spec with every tensor changed."""
        values = ((field.name, getattr(self, field.name)) for field in fields(self))  # pyright: ignore[reportArgumentType]
        return replace(self, **{name: _mapped(value, change) for name, value in values if value is not None})  # pyright: ignore[reportArgumentType]

    def to(self, device: torch.device) -> Self:
        """Return it on the device; what comes from the CPU travels while a GPU works on."""
        if device.type != "cuda":
            return self.map(lambda value: value.to(device))
        return self.map(lambda v: v if v.device == device else v.pin_memory().to(device, non_blocking=True))

    def clone(self) -> Self:
        """Return a copy that shares no memory."""
        return self.map(torch.clone)

    def copy_(self, other: Self) -> None:
        """Take over the values of another spec of the same key, in place."""
        for (_, mine), (_, theirs) in zip(self.named(), other.named(), strict=True):
            mine.copy_(theirs, non_blocking=True)

    @property
    def key(self) -> tuple[object, ...]:
        """What a recorded step depends on: which tensors there are, their shapes and their types."""
        return tuple((name, value.shape, value.dtype) for name, value in self.named())

    def __len__(self) -> int:
        """The number of images."""
        return len(next(self.named())[1])


@dataclass(frozen=True, eq=False)
class Crop(Spec):
    """How each image is seen, as `data.views.Draws` says; None: all of it, as it is."""

    boxes: Tensor | None = None
    flips: Tensor | None = None
    shifts: Tensor | None = None
    angles: Tensor | None = None
    jitter: Tensor | None = None

    @classmethod
    def of(cls, draws: Draws, part: slice) -> Crop:
        """Return how a part of the images for which draws were made is seen."""
        return cls(*(None if each is None else each[part] for each in draws))


@dataclass(frozen=True, eq=False)
class Look(Spec):
    """Which images are seen, and how: what views are made of."""

    index: Tensor  # (batch,) rows of `Images`
    shapes: Tensor  # (batch, 2) heights and widths
    crops: tuple[Crop, ...] = (Crop(),)  # one for each view
    pixels: Tensor | None = None  # the images, where they were gathered ahead


@dataclass(frozen=True, eq=False)
class ImageSpec(Spec):
    """Images of a batch, and what is known of them."""

    labels: Tensor  # (batch,) class numbers of the stream
    look: Look | None = None  # None: the views are made
    views: tuple[Tensor, ...] = ()
    frozen: Tensor | None = None  # frozen features of exactly these views
    query: Tensor | None = None  # frozen features that stand for these images when keys are trained or matched
    task: Tensor | None = None  # (batch,) true task of each image
    rows: Tensor | None = None  # (batch,) where the images stand among all that are passed through
    noted: Tensor | None = None  # of images from the buffer: what was kept with them
    noise: Tensor | None = None  # uniform random numbers
    together: Tensor | None = None  # labels of the whole minibatch, where processes share it


@dataclass(frozen=True, eq=False)
class BatchSpec(Spec):
    """What a training step needs: the images of the phase, batches from the buffer, and how much its loss counts."""

    main: ImageSpec
    replays: tuple[ImageSpec, ...]
    weight: Tensor  # () of this process's mean loss in the average over processes


def _named(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Spec):
        yield from ((f"{name}.{inner}", tensor) for inner, tensor in value.named())
    elif isinstance(value, tuple):
        for place, each in enumerate(value):
            yield from _named(f"{name}.{place}", each)


def _mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    return value.map(change) if isinstance(value, Spec) else tuple(_mapped(each, change) for each in value)
