"""What methods share that classify, by a head that grows, from features of a backbone to which they add something."""

from __future__ import annotations

from abc import abstractmethod

import torch
from pydantic import Field
from torch import Tensor
from typing_extensions import TypeVar

from dualprompt.backbones.base import BackboneSource, PromptableBackbone, Prompts
from dualprompt.methods.adaptation import Adaptation, LowRankConfig, LowRanks
from dualprompt.methods.base import Batch, C, below
from dualprompt.methods.prompted import Prompted


class Adapted(Prompted[C]):
    """A linear head on features of an adapted backbone; what adapts it is the method's own, and in its state."""

    needs_borders = "what adapts the backbone is trained task by task"

    def __init__(self, config: C, backbone: BackboneSource) -> None:
        super().__init__(config, backbone)
        self.adaptation = self.new_adaptation()
        self.shared_layers = min(self.adaptation.at) - 1

    @abstractmethod
    def new_adaptation(self) -> Adaptation:
        """Return what adapts the backbone, without any set yet."""

    @property
    def uses_frozen(self) -> bool:
        """No: every feature is an adapted one."""
        return False

    def changes(self) -> Prompts:
        """Return what the layers receive, in training and in prediction."""
        return self.adaptation.layers()

    def features(self, batch: Batch) -> Tensor:
        """Return the features of the adapted backbone, (batch, dim)."""
        return self.backbone.rest(self.tokens(batch), self.shared_layers, self.changes())

    def additional(self) -> int:
        """Return the number of parameters that adapt."""
        return self.adaptation.count

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Take over the head and what adapts."""
        super().load_state(state)
        self.adaptation.restore(below("adaptation.", state))
        self.drop_derived()


class MergingConfig(LowRankConfig):
    """Options of methods whose low-rank changes are the same for every image."""

    merge: bool = Field(
        default=False,
        description="predict with a copy of the backbone that has the changes in its weights: as fast as without any",
    )


M = TypeVar("M", bound=MergingConfig, covariant=True, default=MergingConfig)


class LowRankAdapted(Adapted[M]):
    """Low-rank changes that every image gets; in prediction they may be merged into the weights."""

    adaptation: LowRanks

    def features(self, batch: Batch) -> Tensor:
        """Return the features of the changed backbone; merged ones differ from the others by rounding."""
        if self.config.merge and not self.training:
            return self.derived("merged", self._merged)(batch.images)
        return super().features(batch)

    @torch.no_grad()
    def _merged(self) -> PromptableBackbone:
        return self.backbone.merged(self.changes())
