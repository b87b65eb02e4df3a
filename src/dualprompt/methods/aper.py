"""APER, first called ADAM (Zhou et al., 2024): class means of frozen and first-session features side by side."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import Field, field_validator
from torch import Tensor

from dualprompt.methods.adaptation import Kind
from dualprompt.methods.base import METHODS, Batch, Grid
from dualprompt.methods.simple_cil import SimpleCIL, SimpleCILConfig


class APERConfig(SimpleCILConfig):
    """Options of `aper`."""

    name: str = "aper"
    first_session: Literal["none", Kind] = Field(
        default="adapter", description="what the first task trains and all tasks then share"
    )

    @field_validator("first_session")
    @classmethod
    def _adapted(cls, value: Literal["none", Kind]) -> Literal["none", Kind]:
        if value == "none":
            raise ValueError("without a first session APER is simple-cil: choose that")
        return value


@METHODS.register("aper")
class APER(SimpleCIL[APERConfig]):
    """SimpleCIL on [frozen ; adapted] features: what pre-training knew stays beside what the first task taught."""

    Config = APERConfig
    summary = "class means of frozen and first-session features, compared by cosine"
    grid: ClassVar[Grid] = {"method.session_lr": (0.01, 0.03), "method.first_session": ("adapter", "lora")}

    @property
    def width(self) -> int:
        """Return the numbers in a feature."""
        return 2 * self.backbone.dim

    @property
    def uses_frozen(self) -> bool:
        """Yes: known frozen features spare one of the two passes."""
        return True

    def read(self, batch: Batch) -> Tensor:
        """Return the frozen feature and the adapted one, (batch, 2 dim)."""
        tokens = self.tokens(batch)
        return torch.cat([self.query(batch, tokens), self.adapted(tokens).float()], dim=1)
