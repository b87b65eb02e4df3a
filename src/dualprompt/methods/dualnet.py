"""DualNet (Pham et al., 2021): a slow learner sees without labels, a fast one reads its maps to tell classes apart."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from dualprompt.backbones.base import BackboneSource, ConvolutionalBackbone, laid_out
from dualprompt.data.distort import SSL_DRAWS, ssl_view
from dualprompt.methods.base import (
    METHODS,
    OLD_CLASSES,
    Batch,
    BufferPlan,
    Defaults,
    Grid,
    MethodConfig,
    Phase,
    Step,
    TaskView,
    below,
    logits_always,
)
from dualprompt.methods.frozen_head import FrozenHead
from dualprompt.methods.rehearsal import join
from dualprompt.methods.slow_fast import barlow_twins, draw, fast_block, noted_divergence, refuse_unfit

SLOW = ("backbone", "projector")  # what the slow learner consists of
BLUR = (1.0, 0.1)  # how often each of the two views is blurred


class DualNetConfig(MethodConfig):
    """Options of `dualnet`."""

    name: str = "dualnet"
    training_logits: Literal["masked", "unmasked"] = "unmasked"
    buffer_size: int = Field(default=1000, ge=1, le=10**8, description="images of the stream that are kept")
    offered: Literal["step", "task"] = Field(
        default="step", description="when the buffer may take an image: after its first step, or when its task ends"
    )
    outer: int = Field(default=2, ge=0, le=100, description="look-aheads of the slow learner for each batch")
    slow_steps: int = Field(default=2, ge=1, le=100, description="steps of the slow learner for each look-ahead")
    slow_batch: int = Field(default=32, ge=2, le=10_000, description="images of the buffer for each of these steps")
    slow_lr: float = Field(default=3e-4, gt=0, description="learning rate of the slow learner's own steps")
    look_ahead: float = Field(default=0.05, ge=0, le=1, description="β: share of the way that is gone in the end")
    redundancy: float = Field(default=2e-3, ge=0, description="weight of what two features say alike")
    fast_steps: int = Field(default=2, ge=1, le=100, description="steps of both learners for each batch")
    distillation_weight: float = Field(default=10.0, ge=0, description="weight of the divergence to stored logits")
    temperature: float = Field(default=2.0, gt=0, description="temperature of that divergence")

    _all_classes = logits_always("unmasked", OLD_CLASSES)


@METHODS.register("dualnet")
class DualNet(FrozenHead[DualNetConfig]):
    """For each batch, Barlow Twins and look-ahead for the slow learner on images of the buffer; then both by labels.

    The fast learner's maps are gated by the slow one's, m_i = F_i(m_{i−1}) ⊙ h_i. In the first task nothing is replayed
    and the slow learner sees the batch. An image's stored logits are those of its test view when its task ended; one of
    the running task has none yet, and is replayed for its label alone.
    """

    summary = "self-supervised slow learner that gates a fast one; reservoir buffer with logits"
    grid: ClassVar[Grid] = {"train.lr": (0.03, 0.1), "method.look_ahead": (0.05, 0.1)}
    defaults: ClassVar[Defaults] = {"train": {"lr": 0.03, "lr_scale": "none", "optimiser": "sgd", "momentum": 0.0}}
    needs_borders = "it notes the logits of images when their task ends"
    backbone: ConvolutionalBackbone

    def __init__(self, config: DualNetConfig, backbone: BackboneSource) -> None:
        super().__init__(config, backbone)
        refuse_unfit(self.backbones.outline())
        widths, dim = self.backbone.widths, self.backbone.dim
        self.fast = nn.ModuleList(map(fast_block, (3, *widths[:-1]), widths))
        self.projector = nn.Sequential(
            nn.Linear(dim, dim // 2, bias=False),
            nn.BatchNorm1d(dim // 2),
            nn.ReLU(),
            nn.Linear(dim // 2, dim, bias=False),
        )
        self.pixels = nn.Buffer(torch.tensor((self.backbone.mean, self.backbone.std)), persistent=False)
        self._before: list[Tensor] = []  # the slow learner before its steps

    @property
    def trains_backbone(self) -> bool:
        """It is the slow learner."""
        return True

    @property
    def buffer(self) -> BufferPlan:
        """A reservoir that keeps logits too."""
        fill = "step" if self.config.offered == "step" else "after"
        return BufferPlan(self.config.buffer_size, "reservoir", fill, notes=True)

    def note(self, batch: Batch) -> Tensor:
        """Return the logits of all classes seen so far."""
        return self.predict(batch).logits

    def begin_task(self, task: TaskView) -> None:
        """Add the task's rows to the head; the first task draws what is no backbone."""
        if task.index == 0:
            draw([*self.fast.modules(), *self.projector.modules()], task.generator)
        super().begin_task(task)

    def phases(self, task: TaskView) -> Sequence[Phase]:
        """Return one phase, with noise and, from the second task on, images of the buffer for every step of a batch."""
        slow = self.config.outer * self.config.slow_steps
        noise = 2 * SSL_DRAWS * slow
        if task.index == 0:
            return (Phase(noise=noise),)
        return (Phase(replay=self.config.fast_steps, more_replay=(self.config.slow_batch,) * slow, noise=noise),)

    def steps(self, phase: Phase) -> Sequence[Step]:
        """Return the slow learner's steps, each round of which ends in a look-ahead, and then those of both."""
        c, found = self.config, list[Step]()
        for number in range(c.outer * c.slow_steps):
            last = (number + 1) % c.slow_steps == 0
            after = self._look_ahead if last else None
            found.append(Step(partial(self._slow_loss, number), SLOW, "slow", "sgd", c.slow_lr, after=after))
        return [*found, *(Step(partial(self._fast_loss, number), name="fast") for number in range(c.fast_steps))]

    def _slow(self) -> list[nn.Parameter]:
        return [parameter for module in SLOW for parameter in self.get_submodule(module).parameters()]

    @torch.no_grad()
    def _look_ahead(self) -> None:
        """Go back to where the round began, but for a share β of the way."""
        for before, parameter in zip(self._before, self._slow(), strict=True):
            parameter.copy_(before.lerp(parameter, self.config.look_ahead))

    def _slow_loss(self, number: int, batch: Batch) -> Tensor:
        """Return Barlow Twins' loss of two views of the buffer's images, or of the batch's where none are replayed."""
        if number % self.config.slow_steps == 0:
            self._before = [parameter.detach().clone() for parameter in self._slow()]
        seen = batch.replay[self.config.fast_steps + number] if batch.replay else batch
        if len(seen.labels) < 2:  # features of a single image do not vary
            return 0 * self._slow()[0].sum()
        assert seen.noise is not None
        draws = seen.noise.split(SSL_DRAWS, dim=1)[2 * number : 2 * number + 2]
        mean, std = self.pixels[:, :, None, None]
        pixels = seen.images.float() * std + mean
        views = ((ssl_view(pixels, each, blur) - mean) / std for each, blur in zip(draws, BLUR, strict=True))
        one, two = (
            self.projector(self._maps(view.to(seen.images.dtype))[-1].mean(dim=(2, 3)).float()) for view in views
        )
        return barlow_twins(one, two, self.config.redundancy)

    def _fast_loss(self, number: int, batch: Batch) -> Tensor:
        """Return CE(batch) + CE(replayed) + weight · divergence of the replayed images' logits from those stored."""
        if not batch.replay:
            return self.classification_loss(self.features(batch), batch.labels)
        old = batch.replay[number]
        assert old.noted is not None
        logits, replayed = self.head.all(self.features(join(batch, old))).split([len(batch.labels), len(old.labels)])
        kept = noted_divergence(replayed, old.noted, self.config.temperature)
        known = F.cross_entropy(logits, batch.labels) + F.cross_entropy(replayed, old.labels)
        return known + self.config.distillation_weight * kept

    def loss(self, batch: Batch) -> Tensor:
        """Return what the first step of both learners lowers."""
        return self._fast_loss(0, batch)

    def _maps(self, images: Tensor) -> list[Tensor]:
        """Return what leaves each stage of the slow learner, computed in the run's precision."""
        lower = self.compute_dtype != torch.float32
        with torch.autocast(images.device.type, self.compute_dtype, enabled=lower, cache_enabled=False):
            return self.backbone.maps(images)

    def features(self, batch: Batch) -> Tensor:
        """Return the mean over pixels of the fast learner's last map, (batch, dim)."""
        found, lower = laid_out(batch.images), self.compute_dtype != torch.float32
        gates = self._maps(found)
        with torch.autocast(found.device.type, self.compute_dtype, enabled=lower, cache_enabled=False):
            for block, gate in zip(self.fast, gates, strict=True):
                found = block(found) * gate
        return found.mean(dim=(2, 3)).float()

    def additional(self) -> int:
        """Return the size of the fast learner and of the projector."""
        return sum(parameter.numel() for part in (self.fast, self.projector) for parameter in part.parameters())

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Take over both learners, projector and head."""
        super().load_state(state)
        for name in ("backbone", "fast", "projector"):
            self.get_submodule(name).load_state_dict(below(f"{name}.", state))
