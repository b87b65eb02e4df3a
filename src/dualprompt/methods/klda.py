"""KLDA (Momeni et al., 2025): discriminant analysis in random Fourier features of an RBF kernel."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from dualprompt.backbones.base import BackboneSource
from dualprompt.config import WIDEST
from dualprompt.methods.base import METHODS, Grid, TaskView
from dualprompt.methods.lda import LDA, LDAConfig
from dualprompt.methods.statistics import generator_for, precise

PAIRED = 1000  # images between which distances are taken


class KLDAConfig(LDAConfig):
    """Options of `klda`."""

    name: str = "klda"
    projection: int = Field(
        default=2000,
        ge=1,
        le=WIDEST,
        description="D, random Fourier features; the state holds D²/2 numbers: 8 MB for 2000",
    )
    bandwidth: float = Field(
        default=1.0, gt=0, description="σ of the kernel, in median distances between features of the first task"
    )


@METHODS.register("klda")
class KLDA(LDA[KLDAConfig]):
    """LDA after a fixed random map φ with φ(x)·φ(y) ≈ exp(−‖x − y‖² / 2σ²) (Rahimi and Recht, 2007)."""

    summary = "linear discriminant analysis of random Fourier features; no training"
    grid: ClassVar[Grid] = {"method.bandwidth": (1.0, 0.5, 2.0, 4.0)}
    frequencies: Tensor
    phase: Tensor

    def __init__(self, config: KLDAConfig, backbone: BackboneSource) -> None:
        super().__init__(config, backbone)
        self.register_buffer("frequencies", torch.zeros(self.backbone.dim, config.projection))
        self.register_buffer("phase", torch.zeros(config.projection))

    def dimensions(self) -> int:
        """Return D."""
        return self.config.projection

    def expand(self, features: Tensor) -> Tensor:
        """Return φ = √(2/D) cos(xΩ + b), (batch, D)."""
        return math.sqrt(2 / self.config.projection) * (features.float() @ self.frequencies + self.phase).cos()

    @torch.no_grad()
    def end_task(self, task: TaskView) -> None:
        """Draw the map (first task), then do as LDA does."""
        if task.index == 0:
            self.draw_map(task)
        super().end_task(task)

    def draw_map(self, task: TaskView) -> None:
        """Draw Ω from N(0, 1/σ²) and b from U[0, 2π); the task's features say how far apart features are."""
        generator = generator_for(task, "fourier")
        sigma = self.config.bandwidth * median_distance(self.read_all(task), generator)
        self.frequencies.copy_(torch.randn(self.frequencies.shape, generator=generator) / sigma)
        self.phase.copy_(2 * math.pi * torch.rand(self.phase.shape, generator=generator))

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Take over the map, the statistics and the head."""
        super().load_state(state)
        self.frequencies.copy_(state["frequencies"])
        self.phase.copy_(state["phase"])


def median_distance(features: Tensor, generator: torch.Generator) -> float:
    """Return the median distance between different features, of some where there are many; 1 where all are equal."""
    some = torch.randperm(len(features), generator=generator)[:PAIRED].to(features.device)
    distances = F.pdist(precise(features[some]))
    distances = distances[distances > 0]
    return float(distances.median()) if len(distances) else 1.0
