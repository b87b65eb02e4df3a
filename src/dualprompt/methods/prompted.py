"""What prompt-based methods share: one frozen backbone, whose pass without prompts is the query."""

from __future__ import annotations

import torch
from torch import Tensor

from dualprompt.backbones.base import BackboneSource, PromptableBackbone
from dualprompt.errors import DualPromptError
from dualprompt.methods.base import Batch, C, Selection
from dualprompt.methods.frozen_head import FrozenHead
from dualprompt.prompts.bank import vote


class Prompted(FrozenHead[C]):
    """A linear head on features that prompts have changed."""

    backbone: PromptableBackbone
    needs_borders = "a task has prompts of its own"
    # Layers before the first prompted one give the same tokens to the query and to the prompted pass.
    shared_layers: int = 0

    def __init__(self, config: C, backbone: BackboneSource) -> None:
        super().__init__(config, backbone)
        if self.needs_prompts and not isinstance(self.backbone, PromptableBackbone):
            raise DualPromptError(
                f"method '{config.name}' needs a backbone that takes prompts (a ViT); '{self.backbone.name}' is none"
            )

    @property
    def needs_prompts(self) -> bool:
        """Whether it gives prompts to the backbone, or looks at single tokens; else any backbone will do."""
        return True

    def selected_task(self, selection: Selection, batch: Batch, found: Tensor) -> Tensor:
        """Return the task whose prompts each image gets: that which was found, the one voted for, or the true one."""
        if selection == "oracle":
            return batch.told_task
        return vote(found) if selection == "batch_vote" else found

    @torch.no_grad()
    def tokens(self, batch: Batch) -> Tensor:
        """Return the tokens of the batch's images before the first prompted layer."""
        return self.backbone.stem(batch.images, self.shared_layers)

    @torch.no_grad()
    def query(self, batch: Batch, tokens: Tensor) -> Tensor:
        """Return q(x), known or computed from the tokens, in fp32, (batch, dim)."""
        query = batch.query if batch.query is not None else self.backbone.rest(tokens, self.shared_layers)
        return query.float()
