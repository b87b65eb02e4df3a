"""RanPAC (McDonnell et al., 2023): a random projection of features, and class prototypes by ridge regression.

The original adapts the backbone in the first task before all else. With `first_session: prompts` so does this one, by
prompts; without, the frozen features are those of every other method.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from dualprompt.backbones.base import BackboneSource, Prompts
from dualprompt.methods.base import METHODS, Batch, Grid, Phase, Prediction, Selection, StreamKind, TaskView, below
from dualprompt.methods.experts import SHARPNESS, Experts, ExpertsConfig, Projected, settle
from dualprompt.methods.ownership import OfTask
from dualprompt.methods.statistics import generator_for


class RanPACConfig(ExpertsConfig):
    """Options of `ranpac`. Without a first session no logits are trained, so a task may have one class."""

    name: str = "ranpac"
    training_logits: Literal["masked", "unmasked"] = "unmasked"
    first_session: Literal["none", "prompts"] = Field(
        default="none", description="whether the first task trains prompts, which all tasks then share"
    )
    strength: float | None = Field(default=None, gt=0, description="λ (default: chosen on a fifth of each task)")


@METHODS.register("ranpac")
class RanPAC(Experts[RanPACConfig]):
    """Ridge regression on randomly projected features: the order of tasks does not matter to its sums."""

    summary = "random projection of frozen features and ridge regression; prompts from the first task as an option"
    grid: ClassVar[Grid] = {"method.projection": (2000, 1000, 500, 4000)}
    of_task: ClassVar[OfTask] = {**Experts.of_task, "projected.ridge.sums": 1}

    def __init__(self, config: RanPACConfig, backbone: BackboneSource) -> None:
        super().__init__(config, backbone, prompted=config.first_session == "prompts")
        self.projected = Projected(self.width, config.projection)

    def accept(self, kind: StreamKind) -> None:
        """Without a first session, sums do not care in which portions they are made."""
        super().accept(kind if self.adapts else replace(kind, bordered=True))

    @property
    def adapts(self) -> bool:
        """Whether the first task trains prompts."""
        return self.config.first_session == "prompts"

    @property
    def uses_frozen(self) -> bool:
        """Whether the features are the frozen ones."""
        return not self.adapts and self.config.reads == "class"

    @property
    def needs_prompts(self) -> bool:
        """Where the features are not the frozen ones."""
        return not self.uses_frozen

    def phases(self, task: TaskView) -> Sequence[Phase]:
        """Return one for the first session, if there is one; else there are no gradient steps."""
        return super().phases(task) if self.adapts and task.index == 0 else ()

    def begin_task(self, task: TaskView) -> None:
        """Draw prompts and projection (first task)."""
        if task.index:
            self.bank.requires_grad_(False)
            return
        self.projected.draw(task.generator)
        self.add_expert(task)
        if self.adapts:
            self.begin_training_head(task)

    def features(self, batch: Batch) -> Tensor:
        """Return what the projection reads, (batch, width)."""
        if self.uses_frozen:
            return super().features(batch)
        return self.read(self.tokens(batch), self._prompts())

    def _prompts(self) -> Prompts | None:
        return self.bank.training_prompts() if self.adapts else None

    @torch.no_grad()
    def end_task(self, task: TaskView) -> None:
        """Add the task to the sums and solve for the head of all classes."""
        self._include(task, self.config.strength)
        self.end_training()

    @property
    def takes_more(self) -> bool:
        """Yes: sums do not care in which portions they are made."""
        return True

    @torch.no_grad()
    def more(self, task: TaskView) -> None:
        """Add the images to the sums, and solve again with the λ of before."""
        rows = [rows / SHARPNESS for rows in self.head.weight]
        self._include(task, self.config.strength or self.projected.ridge.strength_of(rows))

    def _include(self, task: TaskView, strength: float | None) -> None:
        if self.uses_frozen:
            features = task.queries().float()
        else:
            [features] = self.read_all(task, self._prompts())
        solved = self.projected.ridge.add(features, task, strength, generator_for(task, "ridge"))
        settle(self.head, [SHARPNESS * rows for rows in solved])

    @torch.no_grad()
    def predict(self, batch: Batch, selection: Selection | None = None) -> Prediction:
        """Classify from the projected feature."""
        self.check_selection(selection)
        return Prediction(self.head.predict(self.projected.expand(self.features(batch))))

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Take over prompts, projection, sums and head."""
        super().load_state(state)
        self.projected.restore(below("projected.", state))
