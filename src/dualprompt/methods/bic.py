"""BiC (Wu et al., 2019): distil the old classes, then correct the bias towards the new ones by two numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from dualprompt.backbones.base import BackboneSource
from dualprompt.methods.base import (
    METHODS,
    Batch,
    BufferPlan,
    Grid,
    Phase,
    Prediction,
    Selection,
    TaskView,
    numbered,
)
from dualprompt.methods.finetune import Snapshot, distillation
from dualprompt.methods.rehearsal import Rehearsal, RehearsalConfig


class BiCConfig(RehearsalConfig):
    """Options of `bic`."""

    name: str = "bic"
    temperature: float = Field(default=2.0, gt=0, description="T of the distillation")
    # A few reserved images are often told apart without error; then α and β would grow without end.
    correction_decay: float = Field(
        default=1e-4, gt=0, description="weight of ((α − 1)² + β²)/2 beside the mean loss of the bias correction"
    )


@METHODS.register("bic")
class BiC(Rehearsal[BiCConfig]):
    """The logits of task t's classes are α_t·z + β_t.

    Stage one trains the network. Stage two, at the end of a task, solves for α_t and β_t on images that are reserved
    for it: no task trains on them. The network is fixed then, so one pass gives their logits, and two numbers are
    left to find. What was found for a task stays as it is, and stays applied to its classes.
    """

    summary = "distillation, then a bias correction of the newest logits; balanced buffer"
    grid: ClassVar[Grid] = {"train.lr": (5e-5, 2e-4), "method.head_lr": (0.005, 0.001)}
    needs_new_labels = "it corrects the logits of new classes against those of old ones"
    old: Snapshot | None = None
    old_correction: Tensor | None = None

    def __init__(self, config: BiCConfig, backbone: BackboneSource) -> None:
        super().__init__(config, backbone)
        self.correction = nn.ParameterList()  # (α, β) of each task; no gradient step moves them

    @property
    def buffer(self) -> BufferPlan:
        """Balanced, with places for reserved images."""
        return BufferPlan(self.config.buffer_size, "balanced", reserve=True)

    def begin_task(self, task: TaskView) -> None:
        """Keep the old model with its corrections; the new classes start with α = 1, β = 0."""
        if task.index:
            self.old, self.old_correction = self.snapshot(), self._correction().clone()
        super().begin_task(task)
        start = self.head.bias[-1].new_tensor([1.0, 0.0])
        self.correction.append(nn.Parameter(start, requires_grad=False))

    def phases(self, task: TaskView) -> Sequence[Phase]:
        """Return stage one, on the task and the buffer."""
        return (Phase(data="task+buffer"),)

    def _correction(self) -> Tensor:
        """Return α and β of every class, (2, classes)."""
        pairs = zip(self.correction, self.head.bias, strict=True)
        return torch.cat([pair[:, None].expand(2, len(rows)) for pair, rows in pairs], dim=1)

    def loss(self, batch: Batch) -> Tensor:
        """Return λ · distillation + (1 − λ) · CE, with λ the old classes' share of all."""
        alpha, beta = self._correction()
        logits = self.head.all(self.features(batch)) * alpha + beta
        loss = F.cross_entropy(logits, batch.labels)
        if self.old is None or self.old_correction is None:
            return loss
        alpha, beta = self.old_correction
        old = self.old.head.classes
        temperature, weight = self.config.temperature, old / self.head.classes
        # λ weighs the plain divergence, without the T² that others scale it by.
        distilled = distillation(logits[:, :old], self.old.logits(batch) * alpha + beta, temperature) / temperature**2
        return weight * distilled + (1 - weight) * loss

    @torch.no_grad()
    def end_task(self, task: TaskView) -> None:
        """Solve for α and β of the newest classes, once there are old ones to weigh them against."""
        super().end_task(task)
        found = [(self.predict(batch).logits.cpu(), batch.labels.cpu()) for batch in task.reserved()]
        if self.old is None or not found:
            return
        logits, labels = (torch.cat(parts) for parts in zip(*found, strict=True))
        old = self.old.head.classes
        new = labels >= old
        if new.any() and not new.all():
            solved = bias_correction(logits, labels, old, self.config.correction_decay)
            self.correction[-1].copy_(solved)

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
        device = self.backbone.device
        self.correction = nn.ParameterList(
            nn.Parameter(value.clone().to(device), requires_grad=False) for value in numbered(state, "correction")
        )


def correction_loss(pair: Tensor, logits: Tensor, labels: Tensor, first: int, decay: float) -> Tensor:
    """Return what α and β minimise: a cross-entropy in which every class counts alike, and the decay.

    `logits` (images, classes); those from class `first` on become α·z + β. The loss is convex in the pair, since the
    logits are linear in it, and strictly so by the decay: it has one minimum.
    """
    alpha, beta = pair
    corrected = torch.cat([logits[:, :first], alpha * logits[:, first:] + beta], dim=1)
    counts = labels.bincount(minlength=logits.shape[1])
    weights = (1 / counts.clamp_min(1)).to(logits)
    return F.cross_entropy(corrected, labels, weights) + decay / 2 * ((alpha - 1) ** 2 + beta**2)


@torch.enable_grad()
def bias_correction(logits: Tensor, labels: Tensor, first: int, decay: float) -> Tensor:
    """Return α and β at the minimum of `correction_loss`, found in double precision from α = 1, β = 0."""
    logits = logits.double()
    pair = torch.tensor([1.0, 0.0], dtype=torch.float64, requires_grad=True)
    solver = torch.optim.LBFGS(
        [pair], max_iter=500, tolerance_grad=1e-9, tolerance_change=1e-14, line_search_fn="strong_wolfe"
    )

    def evaluate() -> Tensor:
        solver.zero_grad()
        loss = correction_loss(pair, logits, labels, first, decay)
        loss.backward()
        return loss

    solver.step(evaluate)  # type: ignore[arg-type]  # torch says float, and takes a tensor
    return pair.detach()
