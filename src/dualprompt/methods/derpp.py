"""DER++ (Buzzega et al., 2020): replayed images must keep their labels, and others the logits they once had."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from dualprompt.methods.base import METHODS, Batch, BufferPlan, Grid, Phase, TaskView
from dualprompt.methods.rehearsal import Rehearsal, RehearsalConfig, join


class DERPPConfig(RehearsalConfig):
    """Options of `der++`."""

    name: str = "der++"
    alpha: float = Field(default=0.3, ge=0, description="α: weight of the squared error to the stored logits")
    beta: float = Field(default=0.5, ge=0, description="β: weight of the replayed images' cross-entropy")


@METHODS.register("der++")
class DERPP(Rehearsal[DERPPConfig]):
    """Dark experience replay with labels.

    The logits kept with an image are those of its test view when its task ends; where nobody says that it does, after
    the first step on it. The original stores them along the way, from whatever the network was when the image came by;
    here an image is stored raw, and once.
    """

    summary = "replay of labels and of stored logits, from a reservoir buffer"
    grid: ClassVar[Grid] = {"train.lr": (5e-5, 2e-4), "method.alpha": (0.3, 1.0)}
    needs_borders = None

    @property
    def buffer(self) -> BufferPlan:
        """A reservoir that keeps logits too."""
        return BufferPlan(self.config.buffer_size, self.policy, notes=True)

    def note(self, batch: Batch) -> Tensor:
        """Return the logits of all classes seen so far."""
        return self.predict(batch).logits

    def phases(self, task: TaskView) -> Sequence[Phase]:
        """Return one phase, with two replay batches at every step: one for the logits, one for the labels."""
        return (Phase(replay=2),)

    def loss(self, batch: Batch) -> Tensor:
        """Return CE(batch) + α · squared error of the first replay's logits + β · CE(second replay)."""
        logits = self.head.all(self.features(join(batch, *batch.replay)))
        if not batch.replay:
            return F.cross_entropy(logits, batch.labels)
        dark, labelled = batch.replay
        assert dark.noted is not None
        now, dark_now, labelled_now = logits.split([len(part.labels) for part in (batch, dark, labelled)])
        return (
            F.cross_entropy(now, batch.labels)
            + self.config.alpha * noted_error(dark_now, dark.noted)
            + self.config.beta * F.cross_entropy(labelled_now, labelled.labels)
        )


def noted_error(logits: Tensor, noted: Tensor) -> Tensor:
    """Return the mean squared error over the classes that each image's note knows (no NaN), then over images.

    The original has a head for all N classes of the stream from the start, notes all N logits, and takes the mean
    over them. Our head grows: an image is noted when n ≤ N classes are known, and the mean is over these. So an error
    in a known logit counts N/n times as much as in the original, most for images of the first task; where n = N both
    are the same.
    """
    known = ~noted.isnan()
    # A NaN that is only masked afterwards would still be in the gradient.
    error = (logits[:, : noted.shape[1]] - noted.nan_to_num()) * known
    return (error.square().sum(dim=1) / known.sum(dim=1)).mean()
