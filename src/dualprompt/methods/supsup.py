"""SupSup (Wortsman et al., 2020): a mask a task over one random network; a test image finds its mask by gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from dualprompt.backbones.base import BackboneSource, ConvolutionalBackbone
from dualprompt.errors import DualPromptError
from dualprompt.methods.base import (
    METHODS,
    Batch,
    Defaults,
    Grid,
    Method,
    MethodConfig,
    Prediction,
    Selection,
    TaskView,
    logits_always,
    numbered,
)
from dualprompt.methods.statistics import TensorList
from dualprompt.methods.supermasks import SuperNet, entropy, find, kept, pack, top, unpack

OUT_OF_REACH = 200.0  # how much lower the best logit of another task is: in fp32 its chance is 0


class SupSupConfig(MethodConfig):
    """Options of `supsup`."""

    name: str = "supsup"
    sigma: float = Field(default=32.0, gt=0, description="σ: how dense masks are, times an Erdős–Rényi graph's density")
    inference: Literal["oneshot", "binary", "min_entropy"] = Field(
        default="oneshot",
        description="oneshot: steepest fall of entropy; binary: halving the tasks; min_entropy: surest task of all",
    )
    superposed: Literal["mean", "image"] = Field(
        default="mean",
        description="what BatchNorm sees while the task is sought: the mean of the learned tasks' statistics, or the "
        "image's own pixels",
    )
    selection: Selection = Field(
        default="query",
        description="batch_vote: as the released code, the first image of a batch decides for all, and BatchNorm sees "
        "the test batch",
    )

    _masked = logits_always("masked", "a task of supsup is a network of its own: leave training_logits masked")


@METHODS.register("supsup")
class SupSup(Method[SupSupConfig]):
    """Every convolution and the classifier has frozen signs; a task trains scores, and keeps the bits of the largest.

    In the superposed network, in which an image looks for its task, BatchNorm has the mean of the learned tasks'
    statistics: no task's own would be right, and those of a test batch would leak.
    """

    summary = "a mask a task over a random frozen network; entropy gradients find the task"
    selections = ("query", "batch_vote", "oracle")
    grid: ClassVar[Grid] = {"train.lr": (0.001, 0.003), "method.superposed": ("mean", "image")}
    defaults: ClassVar[Defaults] = {
        "train": {"lr": 0.001, "lr_scale": "none", "schedule": "cosine", "weight_decay": 1e-4, "decay": "l2"},
    }
    predicts_with_gradients = True
    needs_new_labels = "a mask holds the classes of one task"
    needs_borders = "a task has a mask of its own"

    def __init__(self, config: SupSupConfig, backbone: BackboneSource) -> None:
        super().__init__(config, backbone)
        network = self.backbones.new()
        if not isinstance(network, ConvolutionalBackbone):
            raise DualPromptError(f"method 'supsup' needs a ResNet; '{network.name}' is none")
        self.net = SuperNet(network)
        self.sizes: list[int] = []  # classes of each task
        self.classes = nn.Buffer(torch.zeros(0, dtype=torch.int64))  # the same, for the state
        self.scores = nn.ParameterList()  # of each layer, the classifier's last; only while a task is learned
        self.masks = TensorList(torch.uint8)  # of each learned task: bits
        self.mean, self.variance = TensorList(), TensorList()  # of each task: the BatchNorms' statistics

    @property
    def uses_frozen(self) -> bool:
        """Features without a mask say nothing."""
        return False

    def begin_task(self, task: TaskView) -> None:
        """Draw the task's scores, and rows of the classifier where it has more classes than any task before."""
        size = len(task.new_labels)
        self.net.grow(size, task.generator)
        self.sizes.append(size)
        device, channels = self.net.head.device, sum(self.net.channels)
        self.classes = torch.tensor(self.sizes, device=device)
        for shape in self.net.shapes(size):
            bound = shape[1:].numel() ** -0.5
            drawn = torch.empty(shape).uniform_(-bound, bound, generator=task.generator)
            self.scores.append(nn.Parameter(drawn.to(device)))
        self.mean.append(torch.zeros(channels))
        self.variance.append(torch.ones(channels))
        self.drop_derived()

    def end_task(self, task: TaskView) -> None:
        """Keep the bits of the task's masks; its scores have done their work."""
        self.masks.append(pack(self._newest()))
        self.scores = nn.ParameterList()
        self.drop_derived()

    def _newest(self) -> list[Tensor]:
        """Return the masks that the scores make, of each layer."""
        return [top(scores, kept(scores.shape, self.config.sigma)) for scores in self.scores]

    def _learned(self) -> list[Tensor]:
        """Return the masks of all tasks, of each layer (tasks, *shape), the one being learned among them."""
        found = [unpack(bits, self.net.shapes(size)) for bits, size in zip(self.masks, self.sizes, strict=False)]
        if len(self.scores):
            found.append([mask.detach().bool() for mask in self._newest()])
        for masks in found:
            masks[-1] = F.pad(masks[-1], (0, 0, 0, max(self.sizes) - len(masks[-1])))
        return [torch.stack(each) for each in zip(*found, strict=True)]

    def loss(self, batch: Batch) -> Tensor:
        """Return the cross-entropy among the task's own classes."""
        masks = [mask[None] for mask in self._newest()]
        logits = self.net.logits(batch.images, masks, self.mean[-1], self.variance[-1])
        return F.cross_entropy(logits, batch.labels - sum(self.sizes[:-1]))

    def predict(self, batch: Batch, selection: Selection | None = None) -> Prediction:
        """Find each image's task, and classify it there; the classes of all other tasks have no chance.

        Among themselves they keep the order that their own task's network gives them.
        """
        self.check_selection(selection)
        masks = self.derived("masks", self._learned)
        with torch.no_grad():
            each = [
                self.net.logits(batch.images, [m[task : task + 1] for m in masks], mean, variance)[:, :size]
                for task, (size, mean, variance) in enumerate(zip(self.sizes, self.mean, self.variance, strict=True))
            ]
        chosen = self._task(batch, each, masks, selection or self.config.selection)
        most = torch.stack([logits.amax(dim=1) for logits in each], dim=1)
        lower = most.gather(1, chosen[:, None]) - most - OUT_OF_REACH
        lower = lower.scatter(1, chosen[:, None], 0.0)
        found = [logits + lower[:, task : task + 1] for task, logits in enumerate(each)]
        return Prediction(torch.cat(found, dim=1), chosen)

    def _task(self, batch: Batch, logits: Sequence[Tensor], masks: Sequence[Tensor], selection: Selection) -> Tensor:
        """Return each image's task, (batch,), given its logits within every task."""
        if selection == "oracle":
            return batch.told_task
        if self.config.inference == "min_entropy":
            chosen = torch.stack([entropy(each) for each in logits], dim=1).argmin(dim=1)
        else:
            mean, variance = (self._superposed(each) for each in (self.mean, self.variance))
            images, once = batch.images, self.config.inference == "oneshot"
            self.net.train(selection == "batch_vote")
            chosen = find(
                lambda mix: entropy(self.net.logits(images, masks, mean, variance, mix)),
                len(images),
                len(self.sizes),
                once,
                images.device,
            )
            self.net.eval()
        return chosen[:1].expand(len(chosen)) if selection == "batch_vote" else chosen

    def _superposed(self, each: TensorList) -> Tensor | None:
        """Return the statistics of the superposed network; None: the image's own."""
        return torch.stack(list(each)).mean(dim=0) if self.config.superposed == "mean" else None

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Take over the tasks, and the scores of one that is being learned."""
        self.net.head, self.classes = state["net.head"].clone(), state["classes"].clone()
        self.sizes = self.classes.tolist()
        for name, values in (("masks", self.masks), ("mean", self.mean), ("variance", self.variance)):
            values.restore(numbered(state, name))
        self.scores = nn.ParameterList(nn.Parameter(value.clone()) for value in numbered(state, "scores"))
        self.drop_derived()
