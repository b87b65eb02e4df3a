"""RanPAC (McDonnell et al., 2023): a random projection of features, and class prototypes by ridge regression.

The original adapts the backbone in the first task before all else. With `first_session` so does this one: by a G-Prompt
and an E-Prompt, by LoRA or by adapters. Without, the frozen features are those of every other method.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from dualprompt.backbones.base import BackboneSource, Prompts
from dualprompt.methods.adaptation import Adaptation, make_adaptation
from dualprompt.methods.base import METHODS, Batch, Grid, Phase, Prediction, Selection, StreamKind, TaskView, below
from dualprompt.methods.experts import SHARPNESS, Experts, ExpertsConfig, Projected, settle
from dualprompt.methods.first_session import FirstSessionConfig
from dualprompt.methods.ownership import OfTask
from dualprompt.methods.statistics import generator_for


class RanPACConfig(ExpertsConfig, FirstSessionConfig):
    """Options of `ranpac`. No logits of its head are trained, so a task may have one class.

    Its prompts are of `g_layers` and `e_layers`; `layers` are those of LoRA or adapters.
    """

    name: str = "ranpac"
    training_logits: Literal["masked", "unmasked"] = "unmasked"
    strength: float | None = Field(default=None, gt=0, description="λ (default: chosen by `strength_by`)")
    strength_by: Literal["fifth", "sums"] = Field(
        default="fifth",
        description="how λ is chosen: on a fifth of each task, as in the original, or by generalised cross-validation "
        "from the sums over all tasks, as in dualprompt-rp",
    )

    @model_validator(mode="after")
    def _one_rule(self) -> Self:
        if self.strength is not None and self.strength_by == "sums":
            raise ValueError("strength is given, so strength_by: sums has nothing to choose; leave one of them out")
        return self


@METHODS.register("ranpac")
class RanPAC(Experts[RanPACConfig]):
    """Ridge regression on randomly projected features: the order of tasks does not matter to its sums."""

    summary = "random projection of frozen or first-session features, and ridge regression"
    grid: ClassVar[Grid] = {"method.projection": (2000, 1000, 500, 4000)}
    of_task: ClassVar[OfTask] = {**Experts.of_task, "projected.ridge.sums": 1, "projected.ridge.counts": 0}

    def __init__(self, config: RanPACConfig, backbone: BackboneSource) -> None:
        super().__init__(config, backbone, prompted=config.first_session == "prompts")
        counted = config.strength is None and config.strength_by == "sums"
        self.projected = Projected(self.width, config.projection, counted)
        self.adaptation: Adaptation | None = None
        if config.first_session in ("lora", "adapter"):
            self.adaptation = make_adaptation(config.first_session, self.backbone, config)
            self.shared_layers = min(self.adaptation.at) - 1

    def accept(self, kind: StreamKind) -> None:
        """Without a first session, sums do not care in which portions they are made."""
        super().accept(kind if self.adapts else replace(kind, bordered=True))

    @property
    def adapts(self) -> bool:
        """Whether there is a first session."""
        return self.config.first_session != "none"

    @property
    def uses_frozen(self) -> bool:
        """Whether the features are the frozen ones."""
        return not self.adapts and self.config.reads == "class"

    @property
    def needs_prompts(self) -> bool:
        """Where the features are not the frozen ones."""
        return not self.uses_frozen

    def phases(self, task: TaskView) -> Sequence[Phase]:
        """Return one for the first session, if there is one; its prompts have the recipe's rate."""
        found = super().phases(task) if self.adapts and task.index == 0 else ()
        return found if self.adaptation is None or not found else (self.config.session,)

    def begin_task(self, task: TaskView) -> None:
        """Draw the projection and what adapts (first task)."""
        if task.index:
            self.bank.requires_grad_(False)
            return
        self.projected.draw(task.generator)
        self.add_expert(task)
        if self.adaptation is not None:
            self.adaptation.restore({})
            self.adaptation.grow(task.generator)
        if self.adapts:
            self.training_head.begin_task(task)

    def own_lr(self, name: str) -> float | None:
        """LoRA and adapters have a rate of their own."""
        return self.config.own_lr(name)

    def features(self, batch: Batch) -> Tensor:
        """Return what the projection reads, (batch, width)."""
        if self.uses_frozen:
            return super().features(batch)
        return self.read(self.tokens(batch), self.training_prompts())

    def training_prompts(self) -> Prompts | None:
        """Return what the layers receive, in the first session and ever after."""
        if self.adaptation is not None:
            return self.adaptation.layers()
        return super().training_prompts() if self.adapts else None

    @torch.no_grad()
    def end_task(self, task: TaskView) -> None:
        """Add the task to the sums and solve for the head of all classes."""
        self._include(task, self.config.strength)
        self.training_head.end_task()
        if self.adaptation is not None:
            self.adaptation.requires_grad_(False)

    @property
    def takes_more(self) -> bool:
        """Yes: sums do not care in which portions they are made."""
        return True

    @torch.no_grad()
    def more(self, task: TaskView) -> None:
        """Add the images to the sums, and solve again: with the λ of before, unless the sums choose it."""
        ridge, strength = self.projected.ridge, self.config.strength
        if strength is None and not ridge.counted:
            strength = ridge.strength_of([rows / SHARPNESS for rows in self.head.weight])
        self._include(task, strength)

    def _include(self, task: TaskView, strength: float | None) -> None:
        if self.uses_frozen:
            features = task.queries().float()
        else:
            [features] = self.read_all(task, self.training_prompts())
        solved = self.projected.ridge.add(features, task, strength, generator_for(task, "ridge"))
        settle(self.head, [SHARPNESS * rows for rows in solved])

    @torch.no_grad()
    def predict(self, batch: Batch, selection: Selection | None = None) -> Prediction:
        """Classify from the projected feature."""
        self.check_selection(selection)
        return Prediction(self.head.predict(self.projected.expand(self.features(batch))))

    def additional(self) -> int:
        """Return the number of parameters that adapt."""
        return super().additional() + (0 if self.adaptation is None else self.adaptation.count)

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Take over what adapts, projection, sums and head."""
        super().load_state(state)
        if self.adaptation is not None:
            self.adaptation.restore(below("adaptation.", state))
        self.projected.restore(below("projected.", state))
