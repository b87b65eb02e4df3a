"""BiC (Wu et al., 2019): distil the old classes, then correct the bias towards the new ones by two numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from dualprompt.backbones.vit import VisionTransformer
from dualprompt.methods.base import METHODS, Batch, Grid, MethodConfig, Phase, Prediction, Selection, TaskView, numbered
from dualprompt.methods.finetune import Snapshot, distillation
from dualprompt.methods.rehearsal import Rehearsal, RehearsalConfig

CORRECTION = "correct the bias"


class BiCConfig(RehearsalConfig):
    """Options of `bic`."""

    name: str = "bic"
    temperature: float = Field(default=2.0, gt=0, description="T of the distillation")
    correction_epochs: int = Field(default=60, ge=1, description="epochs of the bias correction; its images are few")
    correction_lr: float = Field(default=0.01, gt=0, description="their learning rate")


@METHODS.register("bic")
class BiC(Rehearsal):
    """The logits of task t's classes are α_t·z + β_t, where α_t and β_t are learned last, on images held out for it."""

    Config = BiCConfig
    summary = "distillation, then a bias correction of the newest logits; balanced buffer"
    policy = "balanced"
    grid: ClassVar[Grid] = {"train.lr": (5e-5, 2e-4), "method.correction_lr": (0.01, 0.001)}
    config: BiCConfig
    old: Snapshot | None = None
    old_correction: Tensor | None = None
    correcting = False

    def __init__(self, config: MethodConfig, backbone: VisionTransformer) -> None:
        super().__init__(config, backbone)
        self.correction = nn.ParameterList()  # (α, β) of each task

    def begin_task(self, task: TaskView) -> None:
        """Keep the old model with its corrections; the new classes start with α = 1, β = 0."""
        if task.index:
            self.old, self.old_correction = self.snapshot(), self._correction().detach()
        super().begin_task(task)
        self.correction.append(nn.Parameter(self.head.bias[-1].new_tensor([1.0, 0.0])))

    def phases(self, task: TaskView) -> Sequence[Phase]:
        """Return learning and, once there are old classes, the correction."""
        if not task.index:
            return (Phase(),)
        return (
            Phase(data="task+buffer", part="fit"),
            Phase(
                name=CORRECTION,
                data="task+buffer",
                part="held out",
                balanced=True,
                epochs=self.config.correction_epochs,
                lr=self.config.correction_lr,
            ),
        )

    def begin_phase(self, phase: Phase, task: TaskView) -> None:
        """Train either the network or the newest task's α and β."""
        self.correcting = phase.name == CORRECTION
        self.backbone.requires_grad_(self.trains_backbone and not self.correcting)
        self.head.requires_grad_(not self.correcting)
        self.correction.requires_grad_(False)
        self.correction[-1].requires_grad_(self.correcting)

    def _correction(self) -> Tensor:
        """Return α and β of every class, (2, classes)."""
        pairs = zip(self.correction, self.head.bias, strict=True)
        return torch.cat([pair[:, None].expand(2, len(rows)) for pair, rows in pairs], dim=1)

    def loss(self, batch: Batch) -> Tensor:
        """Return λ · distillation + (1 − λ) · CE, with λ the old classes' share of all; CE alone when correcting."""
        alpha, beta = self._correction()
        logits = self.head.all(self.features(batch)) * alpha + beta
        loss = F.cross_entropy(logits, batch.labels)
        if self.correcting or self.old is None or self.old_correction is None:
            return loss
        alpha, beta = self.old_correction
        old = self.head.first_newest
        temperature, weight = self.config.temperature, old / self.head.classes
        # λ weighs the plain divergence, without the T² that others scale it by.
        distilled = distillation(logits[:, :old], self.old.logits(batch) * alpha + beta, temperature) / temperature**2
        return weight * distilled + (1 - weight) * loss

    @torch.no_grad()
    def predict(self, batch: Batch, selection: Selection | None = None) -> Prediction:
        """Classify by the corrected logits."""
        alpha, beta = self._correction()
        return Prediction(super().predict(batch, selection).logits * alpha + beta)

    def additional(self) -> int:
        """Return the number of α and β."""
        return 2 * len(self.correction)

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Take over the network and the corrections."""
        super().load_state(state)
        device = self.backbone.cls_token.device
        self.correction = nn.ParameterList(value.clone().to(device) for value in numbered(state, "correction"))
