"""S-Prompts (Wang et al., 2022), with images alone (S-iPrompts): a prompt, keys and a classifier for each domain."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from dualprompt.backbones.base import BackboneSource, LayerPrompt
from dualprompt.config import LONGEST
from dualprompt.methods.alignment import nearest_centroids
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
    numbered,
)
from dualprompt.methods.contract import places
from dualprompt.methods.ownership import OfTask
from dualprompt.methods.prompted import Prompted
from dualprompt.methods.statistics import TensorList, generator_for

MISSING = -1e4  # logit of a class that a domain does not have


class SPromptsConfig(MethodConfig):
    """Options of `s-prompts`."""

    name: str = "s-prompts"
    length: int = Field(default=10, ge=1, le=LONGEST, description="tokens of a domain's prompt")
    keys: int = Field(default=5, ge=1, le=1000, description="k: centres of a domain's features")
    classifier: Literal["own", "shared"] = Field(
        default="own", description="one for each domain, chosen with its prompt (official), or one that all train"
    )
    selection: Literal["query", "oracle"] = Field(
        default="query", description="test images find their domain by the nearest key, or are told it"
    )

    @property
    def learns_one_class(self) -> bool:
        """Whether a domain may have one class: with a classifier of its own, whoever finds the domain has found it."""
        return self.classifier == "own" or super().learns_one_class


@METHODS.register("s-prompts")
class SPrompts(Prompted[SPromptsConfig]):
    """Domains are learned independently of each other; an image finds its own by the nearest of all keys."""

    summary = "a prompt, k-means keys and a classifier for each domain"
    grid: ClassVar[Grid] = {"train.lr": (0.01, 0.03), "method.length": (10, 20)}
    defaults: ClassVar[Defaults] = {
        "train": {"optimiser": "sgd", "lr": 0.01, "lr_scale": "none", "weight_decay": 2e-4, "schedule": "cosine"}
    }
    selections = ("query", "oracle")
    needs_borders = "a domain has a prompt, keys and a classifier of its own"
    of_task: ClassVar[OfTask] = {**Prompted.of_task, "prompts": None, "keys": None, "labels": 0}
    forget = Method.forget  # of its domains: a class is in several, so what is one's own is not a label's
    places: Tensor
    columns: Tensor

    def __init__(self, config: SPromptsConfig, backbone: BackboneSource) -> None:
        super().__init__(config, backbone)
        self.prompts = nn.ParameterList()  # each (length, dim)
        self.keys = TensorList()  # each (keys, dim)
        self.labels = TensorList(torch.int64)  # of each domain, in the order of its rows in the classifier
        self.register_buffer("places", torch.empty(0, dtype=torch.int64), persistent=False)  # of labels in the newest
        # Which row of the classifier each label has in each domain, (domains, classes); the number of rows: none.
        self.register_buffer("columns", torch.empty(0, 0, dtype=torch.int64), persistent=False)

    @property
    def own(self) -> bool:
        """Whether each domain has a classifier of its own."""
        return self.config.classifier == "own"

    def begin_task(self, task: TaskView) -> None:
        """Add a prompt, drawn as a linear layer's weights are, and rows of the classifier."""
        dim = self.backbone.dim
        prompt = (2 * torch.rand(self.config.length, dim, generator=task.generator) - 1) / dim**0.5
        self._restore([*self.prompts, prompt])
        self.labels.append(torch.tensor(task.labels))
        if self.own:
            rows = range(self.head.classes, self.head.classes + len(task.labels))
            self.head.begin(rows, rows, train_old=False)
        else:
            super().begin_task(task)
        self._find_columns()

    def _restore(self, prompts: Sequence[Tensor]) -> None:
        """Replace all prompts; only the newest trains, so that older ones stay bit-identical."""
        copies = [prompt.detach().clone().to(self.backbone.device) for prompt in prompts]
        self.prompts = nn.ParameterList([nn.Parameter(p, i == len(copies) - 1) for i, p in enumerate(copies)])
        self.drop_derived()

    def _find_columns(self) -> None:
        """Work out where each domain's classifier has each label."""
        classes = 1 + max((int(labels.max()) for labels in self.labels), default=-1)
        found, first = list[Tensor](), 0
        for labels in self.labels:
            mine = places(labels.tolist(), classes)
            found.append(torch.where(mine < 0, self.head.classes, first + mine))
            first += len(labels)
        self.columns = torch.stack(found).to(self.backbone.device) if found else self.columns.new_empty(0, 0)
        self.places = places(self.labels[-1].tolist(), classes).to(self.columns.device) if found else self.places

    def prompted(self, tokens: Tensor, prompts: Tensor) -> Tensor:
        """Return the features of images with prompts, (batch or 1, length, dim), before the first layer."""
        return self.backbone.rest(tokens, 0, {1: LayerPrompt(tokens=prompts)})

    def loss(self, batch: Batch) -> Tensor:
        """Return the mean cross-entropy of the newest domain's prompt and classifier."""
        features = self.prompted(self.tokens(batch), self.prompts[-1][None])
        if not self.own:
            return self.classification_loss(features, batch.labels)
        return F.cross_entropy(self.head.current(features), self.places[batch.labels])

    @torch.no_grad()
    def end_task(self, task: TaskView) -> None:
        """Find the domain's keys: the centres of its frozen features, each of length one."""
        queries = F.normalize(task.queries().float(), dim=1)
        keys, _ = nearest_centroids(queries, self.config.keys, generator_for(task, "keys"), rounds=100, least=1e-12)
        self.keys.append(keys)

    @torch.no_grad()
    def predict(self, batch: Batch, selection: Selection | None = None) -> Prediction:
        """Pick a domain for each image, then classify with its prompt and classifier."""
        self.check_selection(selection)
        tokens = self.tokens(batch)
        told = (selection or self.config.selection) == "oracle"
        domain = batch.told_task if told else self.domain(self.query(batch, tokens))
        prompts = self.derived("prompts", lambda: torch.stack(list(self.prompts)))
        logits = self.head.predict(self.prompted(tokens, prompts[domain].to(tokens.dtype)))
        if self.own:
            logits = F.pad(logits, (0, 1), value=MISSING).gather(1, self.columns[domain])
        return Prediction(logits, domain)

    def domain(self, query: Tensor) -> Tensor:
        """Return the domain of the key nearest to each query of length one, by the sum of differences, (batch,)."""
        keys = self.derived("keys", lambda: torch.stack(list(self.keys)))  # (domains, k, dim)
        return torch.cdist(F.normalize(query, dim=1), keys.flatten(0, 1), p=1).argmin(dim=1) // keys.shape[1]

    def additional(self) -> int:
        """Return the number of prompt parameters."""
        return sum(prompt.numel() for prompt in self.prompts)

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Take over prompts, keys and classifiers."""
        super().load_state(state)
        self._restore(numbered(state, "prompts"))
        self.keys.restore(numbered(state, "keys"))
        self.labels.restore(numbered(state, "labels"))
        self._find_columns()
