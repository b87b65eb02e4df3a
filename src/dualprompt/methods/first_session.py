"""First-session adaptation: what the first task trains adapts the features of all tasks, and then never changes.

RanPAC and APER (ADAM) adapt a backbone so. Features that stay as they are let means and sums over them stay exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor
from typing_extensions import TypeVar

from dualprompt.backbones.base import BackboneSource
from dualprompt.methods.adaptation import Adaptation, AdaptationConfig, Kind, make_adaptation
from dualprompt.methods.base import Batch, Phase, StreamKind, TaskView, below
from dualprompt.methods.heads import SIGMA_LR, TrainingHead
from dualprompt.methods.prompted import Prompted


class FirstSessionConfig(AdaptationConfig):
    """Options of methods whose first task may adapt the features of all."""

    first_session: Literal["none", Kind] = Field(
        default="none", description="what the first task trains and all tasks then share"
    )
    first_factor: int = Field(
        default=4, ge=1, le=1000, description="the first task trains so many times the recipe's epochs"
    )
    session_lr: float = Field(default=0.01, gt=0, description="learning rate of the first session")
    adapter_lr: float | None = Field(
        default=None, gt=0, description="that of lora or adapters in it (default: a tenth, for Adam)"
    )

    @property
    def session(self) -> Phase:
        """The first session: a phase with a rate of its own, for no recipe was made with one in mind."""
        return Phase(epochs_factor=self.first_factor, lr=self.session_lr, recipe={"schedule": "cosine"})

    def own_lr(self, name: str) -> float | None:
        """Return the learning rate of a parameter where it is not the session's."""
        if self.first_session not in ("lora", "adapter") or not name.startswith("adaptation."):
            return None
        return self.session_lr / 10 if self.adapter_lr is None else self.adapter_lr


S = TypeVar("S", bound=FirstSessionConfig, covariant=True, default=FirstSessionConfig)


class FirstSession(Prompted[S]):
    """Features of the frozen backbone, or of one that the first task has adapted."""

    needs_borders = "the first session ends at a border"
    adaptation: Adaptation | None
    training_head: TrainingHead

    def __init__(self, config: S, backbone: BackboneSource) -> None:
        super().__init__(config, backbone)
        self.adaptation = None
        if config.first_session != "none":
            self.adaptation = make_adaptation(config.first_session, self.backbone, config)
            self.shared_layers = min(self.adaptation.at) - 1
            self.training_head = self.new_training_head()

    def new_training_head(self) -> TrainingHead:
        """Return the classifier that the session is trained with."""
        return TrainingHead(self.backbone.dim)

    @property
    def needs_prompts(self) -> bool:
        """Where something is adapted."""
        return self.config.first_session != "none"

    @property
    def uses_frozen(self) -> bool:
        """Whether the features are the frozen ones."""
        return self.adaptation is None

    def accept(self, kind: StreamKind) -> None:
        """Without a first session borders do not matter: sums and means do not care in which portions they are made."""
        super().accept(replace(kind, bordered=True) if self.adaptation is None else kind)

    def phases(self, task: TaskView) -> Sequence[Phase]:
        """Return one for the first session, if there is one; a single class teaches nothing."""
        trains = self.adaptation is not None and task.index == 0 and len(task.labels) > 1
        return (self.config.session,) if trains else ()

    def begin_task(self, task: TaskView) -> None:
        """Add rows to the head; draw what adapts and the classifier that trains it (first task)."""
        super().begin_task(task)
        if self.adaptation is not None and task.index == 0:
            self.adaptation.restore({})
            self.adaptation.grow(task.generator)
            self.training_head.begin_task(task)

    def own_lr(self, name: str) -> float | None:
        """LoRA and adapters have a rate of their own, and so has σ of a cosine classifier."""
        return SIGMA_LR if name == "training_head.sigma" else self.config.own_lr(name)

    def adapted(self, tokens: Tensor) -> Tensor:
        """Return the features of the adapted backbone, (batch, dim)."""
        assert self.adaptation is not None
        return self.backbone.rest(tokens, self.shared_layers, self.adaptation.layers())

    def loss(self, batch: Batch) -> Tensor:
        """Return the mean cross-entropy of the classifier that only the session has."""
        return self.training_head.loss(self.adapted(self.tokens(batch)), batch.labels)

    def read(self, batch: Batch) -> Tensor:
        """Return what means and sums are made of, (batch, width); it may be known where nothing is adapted."""
        return super().features(batch) if self.adaptation is None else self.adapted(self.tokens(batch))

    def features(self, batch: Batch) -> Tensor:
        """Return what the head classifies."""
        return self.read(batch)

    @torch.no_grad()
    def read_all(self, task: TaskView) -> Tensor:
        """Return what is read of all training images of a task, in its order."""
        if self.adaptation is None:
            return task.queries()
        return torch.cat([self.read(batch) for batch in task.batches()])

    def end_session(self) -> None:
        """Stop what was adapted, for good, and drop the classifier that trained it."""
        if self.adaptation is not None:
            self.adaptation.requires_grad_(False)
            self.training_head.end_task()

    def additional(self) -> int:
        """Return the number of parameters that adapt."""
        return 0 if self.adaptation is None else self.adaptation.count

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Take over the head, and what adapts."""
        super().load_state(state)
        if self.adaptation is not None:
            self.adaptation.restore(below("adaptation.", state))
            self.training_head.restore_below("training_head", state)
