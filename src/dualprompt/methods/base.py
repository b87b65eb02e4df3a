"""The contract between a method and the one training loop and evaluator."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Generic, Literal, get_args

import torch
from pydantic import Field, ValidationError, field_validator
from torch import Tensor, nn
from typing_extensions import TypeVar

from dualprompt.backbones.base import Backbone, BackboneSource, factory_of
from dualprompt.config import METHODS as REGISTRY
from dualprompt.config import Strict, parse
from dualprompt.derived import Deriving
from dualprompt.errors import DualPromptError, nearest
from dualprompt.methods.contract import (
    Batch,
    BufferPlan,
    Phase,
    Prediction,
    Step,
    StreamKind,
    TaskView,
    Trial,
    Verdicts,
)
from dualprompt.methods.counts import Parameters
from dualprompt.registry import Registry

Selection = Literal["query", "batch_vote", "oracle"]
Grid = dict[str, tuple[Any, ...]]  # dotted option of a run → values to try
Defaults = Mapping[str, Any]  # as below `methods:` of a preset: options, and training values under `train`


class MethodConfig(Strict):
    """Base of every method's options."""

    name: str = Field(description="of the method")
    training_logits: Literal["masked", "unmasked"] = Field(
        default="masked", description="which logits the loss sees: of the task's own classes, or of all classes seen"
    )

    @property
    def learns_one_class(self) -> bool:
        """Whether a task may have one class. Among the logits of one task, a single one is always right."""
        return self.training_logits == "unmasked"

    def one_class_remedies(self, prefix: str = "") -> list[str]:
        """Return what one may set so that a task of one class is learned; some methods have no such option."""
        found = []
        for key, value in (("training_logits", "unmasked"), ("head", "gaussian")):
            try:
                changed = type(self).model_validate(self.model_dump() | {key: value})
            except ValidationError:  # it has no such option, or refuses this value
                continue
            if changed.learns_one_class:
                found.append(f"set {prefix}{key}: {value}")
        return found


OLD_CLASSES = "rehearsal trains old classes too: leave training_logits unmasked"


def logits_always(logits: str, why: str) -> Any:
    """Return a validator for options of a method that trains no other logits, which says `why`."""

    def only(value: str) -> str:
        if value != logits:
            raise ValueError(why)
        return value

    return field_validator("training_logits")(only)


# Options of a method; a method of narrower options is a method. Families have one of their own, with their own bound.
C = TypeVar("C", bound=MethodConfig, covariant=True, default=MethodConfig)


class Method(Deriving, ABC, Generic[C]):
    """Learns tasks one after another. Owns its parameters; the loop owns everything about training them.

    It is generic over its options: `class Mine(Method[MineConfig])` says all that is to be said of them.

    What comes first below, every method says: `begin_task`, `loss`, `predict`, `load_state`, and mostly `end_task`. All
    else has a default.
    """

    Config: ClassVar[type[MethodConfig]]  # the type argument, unless a class says otherwise
    config: C
    summary: ClassVar[str]
    selections: ClassVar[tuple[Selection, ...]] = ()  # ways to pick an E-Prompt; empty if there is none to pick
    joint: ClassVar[bool] = False  # may train on every task's images at once: the upper bound, no continual learner
    # What `dualprompt sweep` tries when it is given no grid: dotted option → values, the most important option first.
    # Every method has four points, so that none is searched harder; the first is where the paper's benchmarks start.
    # Empty: there is nothing to choose. A method without a grid is given learning rates around the recipe's.
    grid: ClassVar[Grid]
    # Options and training values that are the method's rather than a recipe's, written as below `methods:` of a preset,
    # which may say otherwise. So that on a preset that has never heard of it, it is still trained as it must be.
    defaults: ClassVar[Defaults] = {}
    # Options that `ContinualLearner` gives it, unless its user says otherwise.
    learner_defaults: ClassVar[Mapping[str, Any]] = {}
    compute_dtype: torch.dtype = torch.float32  # set by whoever carries the method out
    # Whether `loss` and `predict` only queue work on the device: no value is read back, no shape depends on one.
    capturable: ClassVar[bool] = True
    # Whether `predict` takes gradients: on copies, for what it has learned must stay as it is. Its parameters may be
    # frozen when it is asked.
    predicts_with_gradients: ClassVar[bool] = False

    # Why it learns only tasks whose labels are all new, and only where it is told where a task begins and ends.
    # None: it takes what comes.
    needs_new_labels: ClassVar[str | None] = "nobody has said what it does with a label that comes back"
    needs_borders: ClassVar[str | None] = "it learns task by task"

    # Tensors of its state whose size is the code's, and no option's: of another size, `load_state` begins them anew.
    sized_by_code: ClassVar[tuple[str, ...]] = ()
    # Whether it judges each image of a task by all others, so that none needs to be held out.
    judges_itself: ClassVar[bool] = False
    # Of the newest images, for a method that can tell; not kept with its state.
    verdicts: Verdicts | None = None
    trial: Trial | None = None

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        arguments = [each for base in cls.__dict__.get("__orig_bases__", ()) for each in get_args(base)]
        named = [each for each in arguments if isinstance(each, type) and issubclass(each, MethodConfig)]
        if named and "Config" not in cls.__dict__:
            cls.Config = named[0]

    def __init__(self, config: C, backbone: BackboneSource) -> None:
        super().__init__()
        self.config = config
        self.backbones = factory_of(backbone)  # for a method that holds several
        if isinstance(backbone, Backbone):
            self.backbone = backbone
        else:
            self.backbone = backbone.new() if self.trains_backbone else backbone.frozen()
        self.freeze_backbone(not self.trains_backbone)

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

    @abstractmethod
    def load_state(self, state: dict[str, Tensor]) -> None:
        """Take over the result of `state()`, from any number of tasks."""

    def state(self) -> dict[str, Tensor]:
        """Return everything that learning has made, by name: all parameters and buffers but a frozen backbone's."""
        mine = self.state_dict().items()
        return {name: v.detach() for name, v in mine if self.trains_backbone or not name.startswith("backbone.")}

    def accept(self, kind: StreamKind) -> None:
        """Refuse a stream that it cannot learn, or prepare for it. Called once, before there is any state."""
        if kind.returns and self.needs_new_labels is not None:
            raise self._misfit("in which labels come back", self.needs_new_labels)
        if not kind.bordered and self.needs_borders is not None:
            raise self._misfit("without known borders between tasks", self.needs_borders)

    def _misfit(self, stream: str, reason: str) -> DualPromptError:
        return DualPromptError(
            f"method '{self.config.name}' cannot learn a stream {stream}: {reason}; choose another method or another "
            "benchmark.stream"
        )

    def phases(self, task: TaskView) -> Sequence[Phase]:
        """Return the stretches of training of a task, in order; none for a method without gradient steps."""
        return (Phase(),)

    def begin_phase(self, phase: Phase, task: TaskView) -> None:
        """Prepare for a phase: choose what trains. Called again when a run is resumed inside the phase."""

    def steps(self, phase: Phase) -> Sequence[Step]:
        """Return what is done with each batch of a phase, in order; asked once, after `begin_phase`."""
        return (Step(self.loss),)

    def end_epoch(self, task: TaskView) -> None:
        """Take note of the end of an epoch; the method is in training mode."""

    def trainable(self) -> dict[str, nn.Parameter]:
        """Return what the optimiser of the current task updates, by name."""
        return {name: p for name, p in self.named_parameters() if p.requires_grad}

    def own_lr(self, name: str) -> float | None:
        """Return the learning rate of a parameter where it is not the phase's; the schedule scales both."""
        return None

    def freeze_backbone(self, frozen: bool) -> None:
        """Freeze the backbone from here on, or let it train: a phase may train a head alone."""
        if frozen:
            self.backbone.freeze()
        else:
            self.backbone.unfreeze()

    @property
    def trains_backbone(self) -> bool:
        """Whether the backbone's weights are trained; a prompt-based method keeps them frozen."""
        return False

    @property
    def uses_frozen(self) -> bool:
        """Whether known frozen features of an image spare it a pass."""
        return not self.trains_backbone

    @property
    def hold_out(self) -> float:
        """The share of each class of a task that its phases do not train on, for a method that chooses by them."""
        return 0.0

    @property
    def peeks(self) -> bool:
        """Whether it chooses by the images that it is judged on, as some released code does; no fair result."""
        return False

    @property
    def buffer(self) -> BufferPlan | None:
        """How images of old tasks are kept; None for a rehearsal-free method, which then sees none."""
        return None

    def note(self, batch: Batch) -> Tensor:
        """Return what is kept with each image that enters the buffer, (batch, columns); asked if the plan has notes."""
        raise TypeError(f"{type(self).__name__} plans a buffer with notes, so it must say what to note")

    def represent(self, batch: Batch) -> Tensor:
        """Return the features that herding compares images by, (batch, dim); asked if the plan's policy is that."""
        raise TypeError(f"{type(self).__name__} plans a buffer that herds, so it must say by which features")

    def answer(self, batch: Batch, selection: Selection | None = None) -> Prediction:
        """Return what `predict` says, with the gradients that it needs; the answer itself has none."""
        if not self.predicts_with_gradients:
            return self.predict(batch, selection)
        with torch.enable_grad():
            return self.predict(batch, selection).detached()

    def check_selection(self, selection: Selection | None) -> None:
        """Refuse a selection that this method does not have."""
        if selection is not None and selection not in self.selections:
            offers = ", ".join(self.selections) or "none, it selects no prompt"
            raise DualPromptError(f"method '{self.config.name}' has no selection '{selection}'; it offers: {offers}")

    def additional(self) -> int:
        """Return the number of trained numbers besides the classifier."""
        return 0

    def measure(self) -> Backbone:
        """Return the backbone that what was added is given a share of."""
        return self.backbone

    def parameters_report(self) -> dict[str, Any]:
        """Return the counts of what was trained so far, and of what else is kept from task to task.

        The images of a rehearsal buffer are not the method's: the loop counts them.
        """
        state, parameters = self.state(), dict(self.named_parameters())
        trained = sum(value.numel() for name, value in state.items() if name in parameters)
        kept = [value for name, value in state.items() if name not in parameters]
        backbone = sum(parameter.numel() for parameter in self.measure().parameters())
        sizes = sum(value.numel() for value in kept), sum(value.nbytes for value in kept)
        return Parameters(trained, self.additional(), backbone, *sizes).report()

    @property
    def can_forget(self) -> bool:
        """Whether it says what it keeps for a task: this and what follows are a method's own to answer."""
        return type(self).forget is not Method.forget

    def owned_by(self, task: int) -> dict[str, Tensor]:
        """Return the tensors that are a task's alone, by their names in `state()`: the `task`-th of those known."""
        raise self._keeps_no_account()

    @property
    def shares_prompts(self) -> bool:
        """Whether it keeps nothing for a task alone but the classifier's rows."""
        raise self._keeps_no_account()

    def forget(self, task: int, classes: Sequence[int], places: Sequence[int] | None) -> None:
        """Forget some classes of a task; what others predict stays as it is, bit for bit where that can be.

        Args:
            task: which of the tasks known it is, counted from 0; those after it move up if it goes.
            classes: their columns in the logits, which stay, at zero, until `drop_classes`.
            places: theirs among the classes that the task still has; None: it has no others, and goes.
        """
        raise self._keeps_no_account()

    def drop_classes(self, classes: Sequence[int]) -> None:
        """Take the columns of forgotten classes out of the logits: before another task is learned."""
        raise self._keeps_no_account()

    def refuse_misfits(self, sizes: Sequence[int], columns: int) -> None:
        """Refuse with a ValueError to be a method of tasks with so many classes each, and of so many columns."""
        raise self._keeps_no_account()

    def _keeps_no_account(self) -> DualPromptError:
        name = self.config.name
        return DualPromptError(f"method '{name}' does not say what it keeps for a task, so it cannot forget one")

    def observe(self, batch: Batch) -> Tensor | None:
        """Return all that it learns of images where nothing is trained, (batch, width); None: it must see them itself.

        Whoever has it gives it back as `Batch.frozen`, without the images.
        """
        return None

    @property
    def can_train_prompts(self) -> bool:
        """Whether a lesson may choose to train prompts of its own; asked of methods that judge themselves."""
        return False

    def expect_more(self) -> None:
        """Prepare to be given more images of known classes. Called once, before there is any state."""

    @property
    def takes_more(self) -> bool:
        """Whether `more` adds images of known classes as if they had come with the others, up to rounding."""
        return False

    def more(self, task: TaskView) -> None:
        """Add images of known classes, none of them new, to what it keeps of these."""
        raise TypeError(f"{type(self).__name__} takes no more images of a class, and says so")


def numbered(state: dict[str, Tensor], prefix: str) -> list[Tensor]:
    """Return the tensors `prefix.0`, `prefix.1`, … of a state, in order."""
    pattern = re.compile(re.escape(prefix) + r"\.(\d+)$")
    found = {int(m.group(1)): value for name, value in state.items() if (m := pattern.match(name))}
    return [found[index] for index in sorted(found)]


def below(prefix: str, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a state whose names begin with `prefix`, without it."""
    return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}


METHODS: Registry[type[Method]] = REGISTRY


def method_config(options: dict[str, Any]) -> MethodConfig:
    """Validate a run's `method` mapping against the options of the method it names."""
    name = options.get("name")
    if not isinstance(name, str):
        raise DualPromptError(f"missing key 'method.name'; {nearest('', METHODS.names())}")
    return parse(METHODS[name].Config, options, "method")
