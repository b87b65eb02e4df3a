"""SD-LoRA (Wu et al., 2025): low-rank changes of old tasks keep their directions; how far they go is learned on."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from dualprompt.backbones.base import BackboneSource, Prompts
from dualprompt.methods.adaptation import LinearsConfig, LowRanks
from dualprompt.methods.adapted import LowRankAdapted, MergingConfig
from dualprompt.methods.base import METHODS, Defaults, Grid, TaskView, numbered

FIRST = 0.8  # a magnitude, before it is trained; as in the authors' code


class SDLoRAConfig(LinearsConfig, MergingConfig):
    """Options of `sd-lora`; rank and maps are the paper's."""

    name: str = "sd-lora"
    rank: int = Field(default=10, ge=1, le=1024, description="r, rank of a task's change")
    magnitudes: Literal["shared", "each"] = Field(
        default="shared",
        description="one magnitude a task, which begins anew with every task (as released), or one for each changed "
        "map, which goes on from where it was",
    )


@METHODS.register("sd-lora")
class SDLoRA(LowRankAdapted[SDLoRAConfig]):
    """W becomes W + Σ_{s<t} α_s B_s A_s / (‖B_s‖ ‖A_s‖) + α_t B_t A_t; all α train, of B and A only the newest."""

    summary = "low-rank changes of old tasks keep their directions, and their magnitudes are learned on"
    grid: ClassVar[Grid] = {"train.lr": (0.001, 0.0005), "method.magnitudes": ("shared", "each")}
    defaults: ClassVar[Defaults] = {"train": {"lr": 0.001, "lr_scale": "none", "schedule": "cosine"}}

    def __init__(self, config: SDLoRAConfig, backbone: BackboneSource) -> None:
        super().__init__(config, backbone)
        self.magnitude = nn.ParameterList()  # of each task, (1, 1, 1, 1) or (layers, linears, 1, 1)

    def new_adaptation(self) -> LowRanks:
        """Return changes of the configured maps."""
        return LowRanks(self.backbone, self.config.layers, self.config.rank, self.config.linears)

    def lengths(self, which: int) -> Tensor:
        """Return ‖B‖ ‖A‖ of a task's changes, (layers, linears, 1, 1)."""
        norms = [torch.linalg.matrix_norm(part[which], keepdim=True) for part in (self._up, self._down)]
        return (norms[0] * norms[1]).clamp_min(1e-12)

    @property
    def _up(self) -> nn.ParameterList:
        return self.adaptation.sets_of("up")

    @property
    def _down(self) -> nn.ParameterList:
        return self.adaptation.sets_of("down")

    def changes(self) -> Prompts:
        """Return the sum of all tasks' changes."""
        newest = len(self.magnitude) - 1
        return self.adaptation.summed(
            [alpha if i == newest else alpha / self.lengths(i) for i, alpha in enumerate(self.magnitude)]
        )

    @torch.no_grad()
    def begin_task(self, task: TaskView) -> None:
        """Add a change and its magnitude; old ones have directions only from now on."""
        shared = self.config.magnitudes == "shared"
        for which, alpha in enumerate(self.magnitude):
            if shared:
                alpha.fill_(FIRST)
            elif which == len(self.magnitude) - 1:
                alpha.mul_(self.lengths(which))  # so that nothing changes by its being old
        self.adaptation.grow(task.generator)
        shape = (1, 1) if shared else (len(self.adaptation.at), len(self.adaptation.linears))
        self.magnitude.append(nn.Parameter(self._up[-1].new_full((*shape, 1, 1), FIRST)))
        self.magnitude.requires_grad_(True)
        super().begin_task(task)

    def additional(self) -> int:
        """Return the number of parameters in changes and magnitudes."""
        return super().additional() + sum(alpha.numel() for alpha in self.magnitude)

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Take over the changes, their magnitudes and the head."""
        super().load_state(state)
        device = self.backbone.device
        kept = (alpha.to(device, copy=True) for alpha in numbered(state, "magnitude"))
        self.magnitude = nn.ParameterList(nn.Parameter(alpha, requires_grad=False) for alpha in kept)
