"""LAE (Gao et al., 2023): a module that learns, a slow average of it that remembers, and the surer of both answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn

from dualprompt.backbones.base import BackboneSource, Prompts
from dualprompt.methods.adaptation import Adaptation, AdaptationConfig, AttentionLinear, Kind, make_adaptation
from dualprompt.methods.adapted import Adapted
from dualprompt.methods.base import (
    METHODS,
    Batch,
    Defaults,
    Grid,
    Phase,
    Prediction,
    Selection,
    Step,
    TaskView,
    numbered,
)
from dualprompt.methods.statistics import TensorList

HEAD_ALONE = "the head alone"


class LAEConfig(AdaptationConfig):
    """Options of `lae`; the defaults are the paper's for LoRA."""

    name: str = "lae"
    adaptation: Kind = Field(default="lora", description="what is trained and averaged")
    layers: tuple[int, ...] = Field(default=(1, 2, 3, 4, 5), description="layers that are adapted, counted from 1")
    rank: int = Field(default=5, ge=1, le=1024, description="r, rank of a low-rank change")
    linears: tuple[AttentionLinear, ...] = Field(
        default=("k", "v"), min_length=1, description="the attention's linear maps that LoRA changes: q, k, v, proj"
    )
    decay: float = Field(default=0.9999, ge=0, le=1, description="what a step leaves of the average")
    frozen_share: float = Field(
        default=0.6, ge=0, lt=1, description="share of a later task's epochs in which the head trains alone"
    )


@METHODS.register("lae")
class LAE(Adapted[LAEConfig]):
    """Learning, accumulation, ensemble: two passes an image, one head. From the second task on there is an average."""

    summary = "a module that learns, a moving average of it that remembers, and the surer answer of both"
    grid: ClassVar[Grid] = {"train.lr": (0.003, 0.001), "method.decay": (0.9999, 0.999)}
    defaults: ClassVar[Defaults] = {"train": {"lr": 0.003, "lr_scale": "none"}}

    def __init__(self, config: LAEConfig, backbone: BackboneSource) -> None:
        super().__init__(config, backbone)
        self.average = nn.ModuleDict({part: TensorList() for part in self.adaptation.parts})

    def new_adaptation(self) -> Adaptation:
        """Return what the config names."""
        return make_adaptation(self.config.adaptation, self.backbone, self.config)

    def begin_task(self, task: TaskView) -> None:
        """Draw the module (first task); let its average begin (second), and the head grow."""
        if task.index == 0:
            self.adaptation.restore({})
            self.adaptation.grow(task.generator)
            self._restore_average({})
        elif not self.averages:
            self._restore_average({f"{part}.0": value for part, value in self.adaptation.values().items()})
        self.adaptation.let_train()
        super().begin_task(task)

    @property
    def averages(self) -> bool:
        """Whether there is an average yet."""
        return bool(self._of_average())

    def _of_average(self) -> dict[str, Tensor]:
        return {part: kept[0] for part, kept in self.average.items() if isinstance(kept, TensorList) and len(kept)}

    def _restore_average(self, state: dict[str, Tensor]) -> None:
        for part, kept in self.average.items():
            assert isinstance(kept, TensorList)
            kept.restore(numbered(state, part))

    def phases(self, task: TaskView) -> Sequence[Phase]:
        """Return one; after the first task the head trains alone before it, for a share of the epochs."""
        share = self.config.frozen_share
        if task.index == 0 or not share:
            return super().phases(task)
        return (Phase(HEAD_ALONE, part=(0.0, share)), Phase(part=(share, 1.0)))

    def begin_phase(self, phase: Phase, task: TaskView) -> None:
        """Let the module train, or not yet."""
        self.adaptation.let_train(phase.name != HEAD_ALONE)

    def steps(self, phase: Phase) -> Sequence[Step]:
        """Return one, after which the average follows."""
        return (Step(self.loss, after=self._follow if self.averages else None),)

    @torch.no_grad()
    def _follow(self) -> None:
        newest = self.adaptation.values()
        for part, kept in self._of_average().items():
            kept.lerp_(newest[part], 1 - self.config.decay)

    @torch.no_grad()
    def predict(self, batch: Batch, selection: Selection | None = None) -> Prediction:
        """Classify with the module and with its average; each class is as probable as the surer of both says."""
        self.check_selection(selection)
        tokens = self.tokens(batch)
        both: list[Prompts] = [self.changes()]
        if self.averages:
            both.append(self.adaptation.attach(self._of_average()))
        probabilities = [
            self.head.predict(self.backbone.rest(tokens, self.shared_layers, each)).softmax(dim=1) for each in both
        ]
        surer = torch.stack(probabilities).amax(dim=0)
        return Prediction(surer.clamp_min(torch.finfo(surer.dtype).tiny).log())

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Take over the module, its average and the head."""
        super().load_state(state)
        self._restore_average({name.removeprefix("average."): value for name, value in state.items()})
