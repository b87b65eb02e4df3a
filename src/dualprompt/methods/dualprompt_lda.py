"""A discriminant on frozen features, and prompts of a task's own where they win on its held-out images (ours).

One pass over a task's images gives a mean a class and a covariance for all; the classifier is solved from these sums,
chosen and made as sharp as images left out call for. Where a task trained an E-Prompt, a second pass with it tells the
task's own classes apart; how likely the task is stays what the first pass says, so no other task is touched.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field, field_validator
from torch import Tensor, nn

from dualprompt.backbones.base import BackboneSource, Outputs, PromptableBackbone, Prompts, sampled_layers
from dualprompt.config import LONGEST
from dualprompt.methods.base import (
    METHODS,
    Batch,
    Defaults,
    Grid,
    MethodConfig,
    Phase,
    Prediction,
    Selection,
    StreamKind,
    TaskView,
    below,
    numbered,
)
from dualprompt.methods.contract import Trial, Verdicts
from dualprompt.methods.heads import GrowingHead, TrainingHead
from dualprompt.methods.leave_one_out import (
    CHOICES,
    SHARPNESSES,
    Evidence,
    Whitening,
    copies_of,
    cosines,
    distances,
    linear,
    log_losses,
    whiten,
)
from dualprompt.methods.ownership import OfTask
from dualprompt.methods.prompted import Prompted
from dualprompt.methods.statistics import Discriminant, TensorList, precise, unpacked, within_class
from dualprompt.prompts.attach import attach, prompt_shape
from dualprompt.prompts.bank import Init, check_layers, draw, layers_of

HELD_OUT = 0.2  # of each class, where prompts are tried
WIDEST = 2048  # numbers of a feature that is made of several layers: solving takes its cube


class DualPromptLDAConfig(MethodConfig):
    """Options of `dualprompt-lda`."""

    name: str = "dualprompt-lda"
    prompts: Literal["auto", "always", "never"] = Field(
        default="auto", description="train a task's prompts: where they win on its held-out images, always, or never"
    )
    reads: Literal["class", "class+patches", "class+layers"] = Field(
        default="class+patches",
        description="the features: of the class token, the patches' mean as well, or also those of three layers before",
    )
    e_layers: tuple[int, ...] = Field(default=(), description="layers with an E-Prompt, from 1 (default: all but two)")
    e_length: int = Field(default=20, ge=1, le=LONGEST, description="L_e")
    init: Init = Field(default="uniform", description="prompts from U[0, 0.01), or wide: U(−1, 1)")

    _layers_of = field_validator("e_layers", mode="before")(layers_of)

    @property
    def learns_one_class(self) -> bool:
        """Yes: the head is solved for, and prompts are not trained where there is nothing to tell apart."""
        return True


@METHODS.register("dualprompt-lda")
class DualPromptLDA(Prompted[DualPromptLDAConfig]):
    """Class means and one covariance of frozen features; an E-Prompt and a head of its own for a task that gains."""

    summary = (
        "discriminant analysis chosen on images left out, and prompts where they win (ours; the learner's default)"
    )
    grid: ClassVar[Grid] = {"train.lr": (0.01, 0.005, 0.02, 0.0025)}
    defaults: ClassVar[Defaults] = {"train": {"lr": 0.01, "lr_scale": "none", "schedule": "cosine"}}
    learner_defaults: ClassVar[Mapping[str, Any]] = {"reads": "class+layers"}
    needs_new_labels = None
    judges_itself = True
    sized_by_code = ("evidence.losses",)
    of_task: ClassVar[OfTask] = {
        **Prompted.of_task,
        "discriminant.means": 0,
        "discriminant.counts": 0,
        "prompts": None,
        "own_weight": 0,
        "own_bias": 0,
    }
    freedom: Tensor

    def __init__(self, config: DualPromptLDAConfig, backbone: BackboneSource) -> None:
        super().__init__(config, backbone)
        dim, promptable = self.backbone.dim, isinstance(self.backbone, PromptableBackbone)
        self.e_layers = self._layers() if promptable else ()
        self.outputs: Outputs = "class"
        sampled: tuple[int, ...] = ()
        if promptable and config.reads != "class":
            sampled = sampled_layers(self.backbone.depth) if config.reads == "class+layers" else ()
            sampled = sampled if (2 + len(sampled)) * dim <= WIDEST else ()
            self.outputs = "class+layers" if sampled else "class+patches"
        self.own_outputs: Outputs = "class" if self.outputs == "class" else "class+patches"
        self.near = dim if self.outputs == "class" else 2 * dim  # numbers of the class token and of the last patches
        self.width = self.near + len(sampled) * dim
        self.shared_layers = min([min(self.e_layers, default=1) - 1, *sampled])
        self.e_shape = prompt_shape(len(self.e_layers), config.e_length, dim, "pre-t", "each")
        self.head = GrowingHead(self.width)
        self.discriminant = Discriminant(self.width)
        self.discriminant.expect_returning()
        self.register_buffer("freedom", torch.zeros((), dtype=torch.int64))  # samples less classes, of all tasks
        self.evidence = Evidence()
        self.prompts = TensorList()  # a task's E-Prompt; empty: it has none
        self.own_weight, self.own_bias = TensorList(), TensorList()  # its head on prompted features
        self.training_prompt = nn.Parameter(torch.empty(0), requires_grad=False)
        self.training_head = TrainingHead(dim)

    def _layers(self) -> tuple[int, ...]:
        depth = self.backbone.depth
        check_layers("method.e_layers", self.config.e_layers, depth)
        return self.config.e_layers or tuple(range(min(3, depth), depth + 1))

    @property
    def can_train_prompts(self) -> bool:
        """Whether the backbone takes prompts."""
        return bool(self.e_layers)

    @property
    def needs_prompts(self) -> bool:
        """No: without a ViT there are only frozen features."""
        return False

    @property
    def uses_frozen(self) -> bool:
        """Whether the frozen class feature is all that is read."""
        return not self.e_layers

    @property
    def hold_out(self) -> float:
        """A share of the images, by which prompts are judged."""
        return HELD_OUT if self.e_layers and self.config.prompts != "never" else 0.0

    def accept(self, kind: StreamKind) -> None:
        """Take what comes, but for unknown borders, where prompts may be trained."""
        if self.hold_out:
            super().accept(kind)

    def phases(self, task: TaskView) -> Sequence[Phase]:
        """Return one where prompts are tried; a single class teaches nothing, nor does one that returns."""
        return (Phase(),) if self._tries(task) else ()

    def _tries(self, task: TaskView) -> bool:
        return self.hold_out > 0 and len(task.labels) > 1 and task.labels == task.new_labels

    def begin_task(self, task: TaskView) -> None:
        """Add rows for the new labels; draw an E-Prompt and a classifier to train it with."""
        self.verdicts = self.trial = None
        self.head.begin(task.labels, task.new_labels, train_old=False)
        self.head.requires_grad_(False)
        if self._tries(task):
            device = self.training_prompt.device
            drawn = draw(self.e_shape, task.generator, self.config.init)
            self.training_prompt = nn.Parameter(drawn.to(device))
            self.training_head.begin_task(task)

    def loss(self, batch: Batch) -> Tensor:
        """Return the mean cross-entropy over the task's own classes, of the prompted class token."""
        prompts = self._attached(self.training_prompt[None])
        features = self.backbone.rest(self.tokens(batch), self.shared_layers, prompts)
        return self.training_head.loss(features, batch.labels)

    def _attached(self, e_prompt: Tensor) -> Prompts:
        """`e_prompt` is (batch or 1, layers, parts, rows, dim)."""
        return attach({}, {layer: e_prompt[:, i] for i, layer in enumerate(self.e_layers)}, "pre-t", "projected")

    def read(self, batch: Batch, tokens: Tensor | None, prompts: Prompts | None = None) -> Tensor:
        """Return the features, (batch, width); under prompts, without those of other layers."""
        if tokens is None:
            return self.features(batch).float()
        outputs = self.outputs if prompts is None else self.own_outputs
        return self.backbone.rest(tokens, self.shared_layers, prompts, outputs).float()

    def _tokens(self, batch: Batch) -> Tensor | None:
        return self.tokens(batch) if self.e_layers else None

    @torch.no_grad()
    def end_task(self, task: TaskView) -> None:
        """Add the task to the sums, judge each image by the others, solve for the head, and weigh the prompts."""
        tried = self._tries(task)
        prompts = self._attached(self.training_prompt[None]) if tried else None
        frozen, own = self._read_all(task, prompts)
        self.discriminant.include_features(frozen, task)
        new = len(task.new_labels)
        self.freedom += len(frozen) - new
        judged = self._solve(precise(frozen), task)
        if new:
            trained = own is not None and self._prompts_win(precise(own), task, judged)
            self._keep_own(precise(own) if own is not None and trained else None, task)
        self.training_prompt = nn.Parameter(self.training_prompt.new_empty(0), requires_grad=False)
        self.training_head.end_task()
        self.drop_derived()

    @torch.no_grad()
    def observe(self, batch: Batch) -> Tensor | None:
        """Return the frozen features, where no prompts are tried."""
        return None if self.hold_out else self.read(batch, self._tokens(batch))

    @property
    def takes_more(self) -> bool:
        """Yes: sums do not care in which portions they are made."""
        return True

    @torch.no_grad()
    def more(self, task: TaskView) -> None:
        """Add the images to the sums and solve again; a head on prompted features stays as it is."""
        frozen, _ = self._read_all(task, None)
        self.discriminant.include_features(frozen, task)
        self.freedom += len(frozen)
        self._solve(precise(frozen), task)
        self.drop_derived()

    def _read_all(self, task: TaskView, prompts: Prompts | None) -> tuple[Tensor, Tensor | None]:
        """Return the features of all images of a task, and those under prompts."""
        frozen, own = [], []
        for batch in task.batches():
            tokens = None if batch.frozen is not None else self._tokens(batch)
            frozen.append(self.read(batch, tokens))
            if prompts is not None:
                own.append(self.read(batch, tokens, prompts))
        return torch.cat(frozen), torch.cat(own) if own else None

    def _solve(self, features: Tensor, task: TaskView) -> Tensor:
        """Leave each image out, choose by the outcome, and solve for the head of all classes.

        Return which images could be left out, (images,) bool.
        """
        statistics = self.discriminant
        assert statistics.counts is not None
        means, counts = (precise(torch.cat(list(each))) for each in (statistics.means, statistics.counts))
        scatter = unpacked(precise(statistics.scatter), statistics.dim)
        labels = task.targets.to(means.device)
        judged = counts[labels] > copies_of(features, task.alike)[1]  # else there is nothing left of its class
        shown = features[judged], labels[judged], means, counts
        alike = None if task.alike is None else task.alike[judged]
        best: tuple[Whitening, Tensor] | None = None
        for number, each in enumerate(CHOICES):  # one after another: the distances of all would be gigabytes
            made = whiten(each, scatter, int(self.freedom), means, self.backbone.dim)
            found = distances(*shown, made, alike)
            if len(means) > 1:
                self.evidence.add(number, found, labels[judged])
            if best is None or self.evidence.choice(number + 1) == number:
                best = made, found
        assert best is not None
        made, found = best
        choice = self.evidence.choice()
        sharpness = self.evidence.sharpness(choice)
        logits = -sharpness * found / 2
        near = cosines(shown[0][:, : self.near], labels[judged], means[:, : self.near], counts, alike)
        self.verdicts = Verdicts(labels[judged], logits, near, left_one_out=True)
        sizes = [len(block) for block in statistics.means]
        solved = [rows.to(statistics.scatter) for rows in linear(means, made, sharpness)]
        self.head.restore(*(rows.split(sizes) for rows in solved), train_old=False)
        self.head.requires_grad_(False)
        return judged

    def _prompts_win(self, own: Tensor, task: TaskView, judged: Tensor) -> bool:
        """Return whether to keep the prompts: whether they win on images held out by more than chance.

        `own` are the features of all images under them; `judged` says which images were left out without them.
        """
        frozen, apart = self.verdicts, task.apart
        if frozen is None or apart is None:
            return False
        labels = task.targets.to(own.device)
        held = apart.to(own.device) & judged
        scores = self._distances_to_others(own, ~apart.to(own.device), held, task)
        places = task.places.to(own.device)[held]
        sharp = SHARPNESSES[int(log_losses(scores, places).argmin())]
        among = held[judged]  # of the images that were left out
        without = frozen.logits[among]
        mine = torch.zeros_like(without, dtype=torch.bool)
        mine[:, list(task.labels)] = True
        inner = torch.zeros_like(without)
        inner[:, list(task.labels)] = -sharp * scores / 2
        refined = refine(without, inner, mine)
        before, after = (each.argmax(dim=1) == labels[held] for each in (without, refined))
        won, lost = int((after & ~before).sum()), int((before & ~after).sum())
        kept = self.config.prompts == "always" or won - lost > (won + lost) ** 0.5
        self.trial = Trial(int(held.sum()), int(before.sum()), int(after.sum()), kept)
        if kept:
            self.verdicts = Verdicts(labels[held], refined, frozen.cosines[among], left_one_out=False)
            self._own_sharpness = sharp
        return kept

    def _distances_to_others(self, own: Tensor, fitted: Tensor, held: Tensor, task: TaskView) -> Tensor:
        """Return squared distances of held-out images to the class means of the others, under prompts."""
        classes, places = len(task.labels), task.places.to(own.device)
        means, scatter = within_class(own[fitted], places[fitted], classes)
        made = whiten(CHOICES[0], scatter, int(fitted.sum()) - classes, means, self.backbone.dim)
        return torch.cdist(own[held] @ made.root, means @ made.root).square()

    def _keep_own(self, own: Tensor | None, task: TaskView) -> None:
        """Keep the newest task's E-Prompt and its head on prompted features, or that it has none."""
        classes = len(task.new_labels)
        if own is None:
            for kept, empty in ((self.prompts, (0,)), (self.own_weight, (classes, 0)), (self.own_bias, (classes,))):
                kept.append(torch.zeros(empty))
            return
        means, scatter = within_class(own, task.places, classes)
        made = whiten(CHOICES[0], scatter, len(own) - classes, means, self.backbone.dim)
        weight, bias = linear(means, made, self._own_sharpness)
        self.prompts.append(self.training_prompt.data)
        self.own_weight.append(weight)
        self.own_bias.append(bias)

    _own_sharpness: float = SHARPNESSES[-1]

    @torch.no_grad()
    def predict(self, batch: Batch, selection: Selection | None = None) -> Prediction:
        """Classify from frozen features; where the likeliest task has prompts, tell its classes apart with them."""
        self.check_selection(selection)
        tokens = self._tokens(batch)
        features = self.read(batch, tokens)
        logits = self.head.predict(features)
        directions, task_of, stack, weight, bias = self.derived("columns", self._columns)
        if stack is not None and tokens is not None:
            task = task_of[logits.argmax(dim=1)]
            own = self.read(batch, tokens, self._attached(stack[task].to(tokens.dtype)))
            mine = (task_of == task[:, None]) & (weight.abs().amax(dim=1) > 0)
            logits = refine(logits, F.linear(own, weight, bias), mine)
        similarity = (F.normalize(features[:, : self.near], dim=1) @ directions.T).gather(
            1, logits.argmax(dim=1, keepdim=True)
        )
        return Prediction(logits, None, similarity[:, 0])

    def _columns(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor]:
        """Return, for each column of the logits, its mean's direction and task; all E-Prompts; and the own heads."""
        means = list(self.discriminant.means)
        alive = torch.arange(self.head.classes)
        if sum(map(len, means)) != self.head.classes:  # the rows of forgotten classes are zero
            alive = torch.cat([rows.abs().amax(dim=1) for rows in self.head.weight]).nonzero()[:, 0]
        device = self.freedom.device
        alive = alive.to(device)
        sizes = torch.tensor([len(block) for block in means], device=device)
        directions = torch.zeros(self.head.classes, self.near, device=device)
        directions[alive] = F.normalize(torch.cat(means)[:, : self.near], dim=1)
        task_of = torch.zeros(self.head.classes, dtype=torch.int64, device=device)
        task_of[alive] = torch.arange(len(means), device=device).repeat_interleave(sizes)
        weight, bias = torch.zeros_like(directions), torch.zeros(self.head.classes, device=device)
        if not any(prompt.numel() for prompt in self.prompts):
            return directions, task_of, None, weight, bias
        padded = [F.pad(rows, (0, self.near - rows.shape[1])) for rows in self.own_weight]
        weight[alive], bias[alive] = torch.cat(padded), torch.cat(list(self.own_bias))
        blank = torch.zeros(self.e_shape, device=device)
        stack = torch.stack([prompt if prompt.numel() else blank for prompt in self.prompts])
        return directions, task_of, stack, weight, bias

    def additional(self) -> int:
        """Return the number of prompt parameters."""
        return sum(prompt.numel() for prompt in self.prompts)

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Take over sums, evidence, prompts and heads."""
        self.head.restore(numbered(state, "head.weight"), numbered(state, "head.bias"), train_old=False)
        self.head.requires_grad_(False)
        self.discriminant.restore(below("discriminant.", state))
        self.freedom.copy_(state["freedom"])
        self.evidence.restore(below("evidence.", state))
        for name in ("prompts", "own_weight", "own_bias"):
            getattr(self, name).restore(numbered(state, name))
        self.training_head.restore_below("training_head", state)
        prompt = state["training_prompt"].to(self.freedom.device)
        self.training_prompt = nn.Parameter(prompt.clone(), requires_grad=self.training_prompt.requires_grad)
        self.drop_derived()


def refine(logits: Tensor, own: Tensor, mine: Tensor) -> Tensor:
    """Return log probabilities in which the columns `mine` share what `logits` give them as `own` says.

    Args:
        logits: of all classes, (batch, classes).
        own: of classes that another head tells apart, (batch, classes).
        mine: which those are, (batch, classes) bool; where none is, nothing changes.
    """
    apart = logits.masked_fill(~mine, -torch.inf)
    total = torch.logsumexp(apart, dim=1, keepdim=True)
    inner = torch.log_softmax(own.masked_fill(~mine, -1e30), dim=1)
    return torch.where(mine, total + inner, logits)
