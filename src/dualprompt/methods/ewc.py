"""EWC (Kirkpatrick et al., 2017): weights that mattered for old tasks are tied to where those tasks left them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.compiler import set_stance
from torch.func import functional_call, grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from dualprompt.backbones.base import BackboneSource
from dualprompt.backbones.products import plain_products
from dualprompt.methods.base import METHODS, Batch, Grid, TaskView
from dualprompt.methods.finetune import FineTune, FineTuneConfig

# How many numbers the gradients of a chunk's images may hold together: as little as a CPU likes, 1 GiB elsewhere.
_ON_CPU, _ELSEWHERE = 2**26, 2**28


class EWCConfig(FineTuneConfig):
    """Options of `ewc`."""

    name: str = "ewc"
    training_logits: Literal["masked", "unmasked"] = "masked"
    ewc_lambda: float = Field(default=1000.0, ge=0, description="weight of the penalty, λ/2 · Σ F (θ − θ*)²")
    online: bool = Field(default=False, description="one penalty at the newest weights instead of one a task")
    gamma: float = Field(default=1.0, ge=0, le=1, description="online only: what old importance keeps a task")
    # The model's own distribution is Kirkpatrick's definition. With true labels, an image that is learned counts
    # with (1 − p)² instead of p (1 − p): what was learned best would be protected least.
    fisher_labels: Literal["model", "true"] = Field(
        default="model", description="labels of the Fisher: the model's own distribution, or the images' labels"
    )
    fisher_images: int = Field(
        default=1000, ge=1, le=10**9, description="images a task that the Fisher is taken on, at most"
    )

    @model_validator(mode="after")
    def _gamma_is_used(self) -> EWCConfig:
        if self.gamma != 1 and not self.online:
            raise ValueError(f"gamma {self.gamma:g} has no effect without online: true; set it, or leave gamma at 1")
        return self


@METHODS.register("ewc")
class EWC(FineTune[EWCConfig]):
    """Fine-tuning with a quadratic penalty by the diagonal of the Fisher information."""

    summary = "fine-tuning with a Fisher-weighted penalty on changes"
    grid: ClassVar[Grid] = {"method.ewc_lambda": (1e3, 1e5, 10.0, 1e7)}
    importance: Tensor
    anchor: Tensor

    def __init__(self, config: EWCConfig, backbone: BackboneSource) -> None:
        super().__init__(config, backbone)
        # One number for each weight of `_protected`, which new tasks only extend at its end.
        self.register_buffer("importance", torch.empty(0))
        self.register_buffer("anchor", torch.empty(0))

    def _protected(self) -> list[nn.Parameter]:
        """Return what a penalty after this task covers: the backbone if trained, and the head, block by block."""
        backbone = list(self.backbone.parameters()) if self.trains_backbone else []
        blocks = zip(self.head.weight, self.head.bias, strict=True)
        return backbone + [parameter for block in blocks for parameter in block]

    def _covered(self) -> list[nn.Parameter]:
        """Return what the penalty covers so far: as much of the same list as has an importance."""
        ends = itertools.accumulate(parameter.numel() for parameter in self._protected())
        return [p for p, end in zip(self._protected(), ends, strict=True) if end <= len(self.importance)]

    def loss(self, batch: Batch) -> Tensor:
        """Return the mean cross-entropy plus the penalty."""
        return super().loss(batch) + self.penalty()

    def penalty(self) -> Tensor:
        """Return λ/2 · Σ F (θ − θ*)², up to a constant the sum over the old tasks."""
        if not len(self.importance):
            return self.importance.sum()
        weights = torch.cat([parameter.flatten() for parameter in self._covered()])
        return self.config.ewc_lambda / 2 * (self.importance * (weights - self.anchor) ** 2).sum()

    @torch.no_grad()
    def end_task(self, task: TaskView) -> None:
        """Add the task's Fisher to the importance, and move the anchor."""
        fisher = self.fisher(task)
        weights = torch.cat([parameter.flatten() for parameter in self._protected()])
        new = len(fisher) - len(self.importance)
        old, anchor = F.pad(self.importance, (0, new)), F.pad(self.anchor, (0, new))
        if self.config.online:
            self.importance, self.anchor = self.config.gamma * old + fisher, weights
        else:
            # Σ_t F_t (θ − θ_t)² = ΣF_t (θ − θ*)² + constant, where θ* is the F-weighted mean of the θ_t:
            # two numbers a weight stand for any number of tasks.
            self.importance = old + fisher
            share = fisher / self.importance.clamp_min(torch.finfo(fisher.dtype).tiny)
            self.anchor = anchor + share * (weights - anchor)

    @torch.no_grad()
    def fisher(self, task: TaskView) -> Tensor:
        """Return the diagonal of the Fisher information at the current weights, in the order of what is protected.

        It is the mean of squared gradients of single images. (The square of a batch's mean gradient is far smaller.)
        """
        protected = [parameter.detach() for parameter in self._protected()]
        names = [name for name, _ in self.backbone.named_parameters()] if self.trains_backbone else []
        from_model = self.config.fisher_labels == "model"

        def score(values: list[Tensor], image: Tensor, choice: Tensor) -> Tensor:
            rows = values[len(names) :]
            features = image[None]
            if names:
                features = functional_call(self.backbone, dict(zip(names, values, strict=False)), (features,))
            weights, biases = rows[0::2], rows[1::2]
            if self.masked:
                weight, bias = self.head.current_rows(weights, biases)
            else:
                weight, bias = torch.cat(weights), torch.cat(biases)
            log_p = F.log_softmax(F.linear(features.float(), weight, bias), dim=1)[0]
            # Random signs ε make one backward pass do for all classes c, without bias:
            # E (Σ_c ε_c √p_c ∇log p_c)² = Σ_c p_c (∇log p_c)².
            return (choice * (log_p.detach() / 2).exp() * log_p if from_model else choice * log_p).sum()

        per_image = vmap(grad(score), in_dims=(None, 0, 0))
        total = [torch.zeros_like(parameter) for parameter in protected]
        device = total[0].device.type
        room = _ON_CPU if device == "cpu" else _ELSEWHERE
        chunk = max(1, min(64, room // sum(parameter.numel() for parameter in protected)))
        # vmap knows attention and products only in their plain form, and is not meant to have compiled passes inside.
        with sdpa_kernel(SDPBackend.MATH), plain_products(), set_stance("force_eager"):
            for inputs, labels in self._fisher_images(task):
                choices = self._choices(labels, task.generator)
                for part, choice in zip(inputs.split(chunk), choices.split(chunk), strict=True):
                    for summed, gradients in zip(total, per_image(protected, part, choice), strict=True):
                        summed += gradients.square().sum(dim=0)
        return torch.cat([summed.flatten() for summed in total]) / min(self.config.fisher_images, len(task.targets))

    def _choices(self, labels: Tensor, generator: torch.Generator) -> Tensor:
        """Return (images, classes) factors of the log-likelihoods: random signs, or 1 at the true label."""
        classes = len(self.head.labels) if self.masked else self.head.classes
        if self.config.fisher_labels == "true":
            return F.one_hot(self.head.current_places(labels) if self.masked else labels, classes).float()
        signs = torch.randint(0, 2, (len(labels), classes), generator=generator) * 2 - 1
        return signs.float().to(labels.device)

    def _fisher_images(self, task: TaskView) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield evenly spaced images, or their frozen features, with their labels."""
        images = len(task.targets)
        wanted = min(self.config.fisher_images, images)
        chosen = torch.arange(wanted) * images // wanted
        start = 0
        for batch in task.batches():
            end = start + len(batch.labels)
            here = (chosen[(chosen >= start) & (chosen < end)] - start).to(batch.labels.device)
            if len(here):
                inputs = batch.images if self.trains_backbone else self.features(batch)
                yield inputs[here].float(), batch.labels[here]
            start = end

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Take over importance and anchor too."""
        super().load_state(state)
        self.importance = state["importance"].to(self.importance.device, copy=True)
        self.anchor = state["anchor"].to(self.anchor.device, copy=True)
