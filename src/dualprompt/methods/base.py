"""The contract between a method and the one training loop and evaluator."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from dualprompt.backbones.vit import VisionTransformer
from dualprompt.config import Strict, parse
from dualprompt.errors import DualPromptError, nearest
from dualprompt.registry import Registry

Selection = Literal["query", "batch_vote", "oracle"]


class MethodConfig(Strict):
    """Base of every method's options."""

    name: str
    training_logits: Literal["masked", "unmasked"] = "masked"


@dataclass(frozen=True)
class TaskView:
    """What a method may know of a task: never its images."""

    index: int
    name: str
    classes: int
    first_class: int
    generator: torch.Generator  # for everything random that the method does at this task's beginning
    queries: Callable[[], Tensor]  # frozen features of all training images in the test view, (images, dim)


@dataclass
class Batch:
    """Images and what is already known of them. `images` is only made when a method asks for it."""

    make_images: Callable[[], Tensor]  # normalised, (batch, 3, side, side), in the compute precision
    labels: Tensor  # (batch,) class numbers of the stream
    frozen: Tensor | None = None  # frozen features of exactly these images
    query: Tensor | None = None  # frozen features that stand for these images when keys are trained or matched
    task: Tensor | None = None  # true task of each image: given to nobody but the oracle

    @cached_property
    def images(self) -> Tensor:
        """The images themselves."""
        return self.make_images()


@dataclass(frozen=True)
class Prediction:
    """Logits of every class seen so far, and the task whose E-Prompt each image used, if any."""

    logits: Tensor  # (batch, classes)
    selected: Tensor | None = None  # (batch,)


@dataclass(frozen=True)
class Parameters:
    """How many numbers a method trained, with and without the classifier that every method has."""

    trained: int
    additional: int
    backbone: int

    def report(self) -> dict[str, Any]:
        """Return counts, megabytes (fp32, 10^6 bytes) and shares of the backbone."""

        def row(count: int) -> dict[str, Any]:
            return {"count": count, "mb": count * 4 / 1e6, "percent_of_backbone": 100 * count / self.backbone}

        total = row(self.trained)
        return {
            "trained": total["count"],
            "mb": total["mb"],
            "percent_of_backbone": total["percent_of_backbone"],
            "backbone": self.backbone,
            "additional": row(self.additional),
        }


class Method(nn.Module, ABC):
    """Learns tasks one after another. Owns its parameters; the loop owns everything about training them."""

    Config: ClassVar[type[MethodConfig]]
    summary: ClassVar[str]
    selections: ClassVar[tuple[Selection, ...]] = ()  # ways to pick an E-Prompt; empty if there is none to pick
    uses_frozen: ClassVar[bool] = True  # whether known frozen features of an image spare it a pass

    def __init__(self, config: MethodConfig, backbone: VisionTransformer) -> None:
        super().__init__()
        self.config = config
        self.backbone = backbone

    @abstractmethod
    def begin_task(self, task: TaskView) -> None:
        """Prepare for a new task: grow what must grow. Deterministic given the state and the task's generator."""

    @abstractmethod
    def loss(self, batch: Batch) -> Tensor:
        """Return the mean loss of a training batch of the current task."""

    def end_task(self, task: TaskView) -> None:
        """Finish the task after its last step."""

    @abstractmethod
    def predict(self, batch: Batch, selection: Selection | None = None) -> Prediction:
        """Classify among all classes seen so far. Must not depend on what else is in the batch."""

    def additional(self) -> int:
        """Return the number of trained numbers besides the classifier."""
        return 0

    def parameters_report(self) -> dict[str, Any]:
        """Return the counts of what was trained so far."""
        trained = sum(value.numel() for value in self.state().values())
        backbone = sum(parameter.numel() for parameter in self.backbone.parameters())
        return Parameters(trained, self.additional(), backbone).report()

    def trainable(self) -> dict[str, nn.Parameter]:
        """Return what the optimiser of the current task updates, by name."""
        return {name: p for name, p in self.named_parameters() if p.requires_grad}

    def state(self) -> dict[str, Tensor]:
        """Return everything that was trained, by name: all parameters but the frozen backbone's."""
        return {name: p.detach() for name, p in self.named_parameters() if not name.startswith("backbone.")}

    @abstractmethod
    def load_state(self, state: dict[str, Tensor]) -> None:
        """Take over the result of `state()`, from any number of tasks."""

    def check_selection(self, selection: Selection | None) -> None:
        """Refuse a selection that this method does not have."""
        if selection is not None and selection not in self.selections:
            offers = ", ".join(self.selections) or "none, it selects no prompt"
            raise DualPromptError(f"method '{self.config.name}' has no selection '{selection}'; it offers: {offers}")


def numbered(state: dict[str, Tensor], prefix: str) -> list[Tensor]:
    """Return the tensors `prefix.0`, `prefix.1`, … of a state, in order."""
    pattern = re.compile(re.escape(prefix) + r"\.(\d+)$")
    found = {int(m.group(1)): value for name, value in state.items() if (m := pattern.match(name))}
    return [found[index] for index in sorted(found)]


METHODS: Registry[type[Method]] = Registry("method", "dualprompt.methods")


def method_config(options: dict[str, Any]) -> MethodConfig:
    """Validate a run's `method` mapping against the options of the method it names."""
    name = options.get("name")
    if not isinstance(name, str):
        raise DualPromptError(f"missing key 'method.name'; {nearest('', METHODS.names())}")
    return parse(METHODS[name].Config, options, "method")
