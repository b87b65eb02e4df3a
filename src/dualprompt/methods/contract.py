"""What passes between a method and the loop: the task it is shown, the batches, and what it asks for and answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from dualprompt.errors import DualPromptError
from dualprompt.recipe import Augment

Policy = Literal["reservoir", "balanced", "herding"]


@dataclass(frozen=True)
class TaskView:
    """What a method may know of the task that it is learning: an experience of the stream.

    Labels are the numbers of classes, in the order in which the stream first brings them.
    """

    index: int
    name: str
    labels: tuple[int, ...]  # of its classes, ascending
    new_labels: tuple[int, ...]  # those that no earlier task had
    seen: tuple[int, ...]  # all labels so far, its own among them
    generator: torch.Generator  # for everything random that the method does at this task's beginning
    queries: Callable[[], Tensor]  # frozen features of all training images in the test view, (images, dim)
    targets: Tensor  # (images,) the label of each training image, in the order of `queries`
    batches: Callable[[], Iterator[Batch]]  # all training images in the test view, in the same order
    # Images of this task and of old ones, in the test view, that no phase has ever trained on: see BufferPlan.reserve.
    reserved: Callable[[], Iterator[Batch]] = lambda: iter(())
    # Images of this task, in the test view, that no phase of it trains on: see Method.hold_out.
    held_out: Callable[[], Iterator[Batch]] = lambda: iter(())
    apart: Tensor | None = None  # (images,) bool, which training images those are; None: none
    alike: Tensor | None = None  # (images,) numbers that training images share with their copies; None: none are known
    # The images that it is judged on, of all tasks so far: for nobody but who says that it peeks.
    judged: Callable[[], Iterator[Batch]] = lambda: iter(())

    @property
    def places(self) -> Tensor:
        """Where the label of each training image stands among `labels`, (images,)."""
        return places(self.labels, len(self.seen)).to(self.targets.device)[self.targets]


def places(labels: Sequence[int], count: int) -> Tensor:
    """Return where each of `count` labels stands among `labels`, (count,); −1 for those that are not among them."""
    found = torch.full((count,), -1)
    found[list(labels)] = torch.arange(len(labels))
    return found


@dataclass(frozen=True)
class StreamKind:
    """What a method is told of a stream before it begins."""

    returns: bool = False  # whether labels come back
    bordered: bool = True  # whether it is told where a task begins and ends; else images just go on coming
    online: bool = False  # whether each image comes once, and a task is whatever portion has just come


@dataclass(frozen=True)
class Phase:
    """A stretch of training inside a task, with an optimiser of its own. Most methods have one."""

    name: str = "learn"
    data: Literal["task", "task+buffer", "buffer", "everything"] = "task"  # everything: for the upper bound only
    balanced: bool = False  # draw every class equally often
    cut: bool = False  # leave every class as many images, drawn once for the phase, as the rarest has
    epochs: int | None = None  # None: as many as the recipe says
    epochs_factor: int = 1  # so many times as many
    # The stretch of the recipe's epochs that it takes, where several phases share them: (0.0, 0.6), then (0.6, 1.0).
    part: tuple[float, float] = (0.0, 1.0)
    cycles: int = 1  # cosines of the schedule, each twice as long as the one before (SGDR)
    lr: float | None = None  # learning rate; None: the recipe's
    replay: int = 0  # batches from the buffer that come with every step, as large as the step's
    more_replay: tuple[int, ...] = ()  # further ones, of these sizes
    views: int = 1  # 2: each image comes in two independently augmented views
    # Values of optimiser and schedule that are the phase's own, as under `train`: {"milestones": (15,)}.
    recipe: Mapping[str, Any] = field(default_factory=dict)
    augment: Augment | None = None  # None: as the recipe says
    noise: int = 0  # uniform random numbers that come with each image, replayed ones too

    def epochs_of(self, recipe: int) -> int:
        """Return how many epochs it has where the recipe has so many; a part's edges are rounded down."""
        first, last = (int(edge * recipe + 1e-9) for edge in self.part)
        return self.epochs_factor * (self.epochs or last - first)


@dataclass(frozen=True)
class Step:
    """One optimiser step of a batch: what is lowered, by moving which parameters, and how. Most methods have one."""

    loss: Callable[[Batch], Tensor]
    # What moves, of all that trains: names of parameters or of modules, or a question about a name. None: all of it.
    parameters: tuple[str, ...] | Callable[[str], bool] | None = None
    name: str = ""  # steps of one name share an optimiser, and so its momentum
    optimiser: Literal["adam", "sgd"] | None = None  # None, here and below: as the recipe says
    lr: float | None = None  # or as the phase says
    betas: tuple[float, float] | None = None
    weight_decay: float | None = None
    clip: float | None = None
    after: Callable[[], None] | None = None  # called after the optimiser, as for a moving average

    def __post_init__(self) -> None:
        if "/" in self.name:
            raise ValueError(f"the name of a step has no slash, as '{self.name}' has: checkpoints name tensors by it")

    def moves(self, name: str) -> bool:
        """Return whether a parameter is moved, if it trains at all."""
        if self.parameters is None:
            return True
        if callable(self.parameters):
            return self.parameters(name)
        return any(name == each or name.startswith(f"{each}.") for each in self.parameters)

    @property
    def own(self) -> dict[str, Any]:
        """What it has of its own of the recipe's values."""
        values = {key: getattr(self, key) for key in ("optimiser", "lr", "betas", "weight_decay", "clip")}
        return {key: value for key, value in values.items() if value is not None}


def checked_loss(found: object) -> Tensor:
    """Return what a step gave as its loss; what cannot be lowered is refused."""
    if isinstance(found, Tensor) and not found.ndim and found.requires_grad:
        return found
    what = f"a tensor of shape {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
    less = " without a gradient" if isinstance(found, Tensor) and not found.requires_grad else ""
    raise DualPromptError(f"a loss must be one number with a gradient, found {what}{less}; mend the method's loss")


@dataclass(frozen=True)
class BufferPlan:
    """How a rehearsal method wants images of old tasks kept. A rehearsal-free method has no plan, and no buffer."""

    size: int  # images
    policy: Policy
    # When a task's images are offered: before it is learned, after, or each with the step that first trains on it,
    # which needs no border. Where borders are unknown, it is always with the step.
    fill: Literal["before", "after", "step"] = "after"
    # Whether the method's `note` of an image is kept with it. It is asked for when the image's task ends; where borders
    # are unknown, when the image is taken in. Until then all of its columns are NaN.
    notes: bool = False
    # Whether some images of every class are set aside when their class comes, and never trained on in any task. The
    # buffer keeps a tenth of its places for them, or one a class if that is more, but never more than half.
    reserve: bool = False

    def __post_init__(self) -> None:
        if self.reserve and (self.policy, self.fill) != ("balanced", "after"):
            raise ValueError("a buffer that reserves images is balanced, and filled after a task")


@dataclass
class Batch:
    """Images and what is already known of them. `images` is only made when a method asks for it."""

    make_images: Callable[[], Tensor]  # normalised, (batch, 3, side, side), in the compute precision
    labels: Tensor  # (batch,) class numbers of the stream; −1 in an evaluation, which tells nobody
    frozen: Tensor | None = None  # frozen features of exactly these images
    query: Tensor | None = None  # frozen features that stand for these images when keys are trained or matched
    task: Tensor | None = None  # true task of each image: given to nobody but the oracle
    make_second: Callable[[], Tensor] | None = None  # the other view, for phases with two
    replay: tuple[Batch, ...] = ()  # batches from the buffer
    noted: Tensor | None = None  # of images from the buffer: (batch, columns), NaN where there was no column yet
    noise: Tensor | None = None  # (batch, phase.noise) uniform in [0, 1)
    together: Tensor | None = None  # labels of the whole minibatch, where other processes have the rest of it

    @property
    def told_task(self) -> Tensor:
        """The true task of each image, for selection 'oracle'."""
        if self.task is None:
            raise ValueError("selection 'oracle' needs the true task of each image")
        return self.task

    @cached_property
    def images(self) -> Tensor:
        """The images themselves."""
        return self.make_images()

    @cached_property
    def second(self) -> Tensor:
        """The images in another view."""
        assert self.make_second is not None
        return self.make_second()


@dataclass(frozen=True)
class Prediction:
    """Logits of every class seen so far, and the task whose E-Prompt each image used, if any."""

    logits: Tensor  # (batch, classes)
    selected: Tensor | None = None  # (batch,)
    similarity: Tensor | None = (
        None  # (batch,) cosine of the query and the nearest key or class mean of the task it matched
    )

    def check(self, method: str, images: int, classes: int | None) -> None:
        """Refuse logits that would be counted all the same, but for other images or classes; None: of any classes."""
        found = tuple(self.logits.shape)
        if len(found) == 2 and found[0] == images and classes in (None, found[1]):
            return
        columns = "a column a class" if classes is None else f"{classes} columns, one for each class seen"
        raise DualPromptError(
            f"method '{method}' gives logits of shape {found} for {images} images; its predict must return a row an "
            f"image and {columns}"
        )

    def detached(self) -> Prediction:
        """Return it without the graph that made it."""
        others = (value if value is None else value.detach() for value in (self.selected, self.similarity))
        return Prediction(self.logits.detach(), *others)


@dataclass(frozen=True)
class Verdicts:
    """How a method does on images of its newest task that it was not made of, each judged by all the others."""

    labels: Tensor  # (judged,) class numbers
    logits: Tensor  # (judged, classes)
    cosines: Tensor  # (judged, classes) with each class's mean
    left_one_out: bool  # else these images were held out of learning


@dataclass(frozen=True)
class Trial:
    """What trained prompts did for the newest task, on images held out."""

    held: int  # images
    without: int  # right without the prompts
    with_prompts: int  # right with them
    kept: bool  # whether the prompts are used from now on
