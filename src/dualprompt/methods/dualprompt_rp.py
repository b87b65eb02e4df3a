"""DualPrompt with a projected head (ours): the first task's prompts find the task, its own prompts name the class.

Two prompted passes an image, as DualPrompt has a query and a prompted pass. The first has the prompts that the first
task trained, which all tasks share. Ridge regression on random features of it scores all classes; the task of the best
one is the image's. The second has that task's own E-Prompt, and a second regression scores all classes again. Both
regressions are solved from sums over all tasks; no image is kept, and each image is judged alone.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from dualprompt.backbones.base import BackboneSource
from dualprompt.methods.base import (
    METHODS,
    Batch,
    Grid,
    Prediction,
    Selection,
    TaskView,
    below,
    logits_always,
    numbered,
)
from dualprompt.methods.experts import SHARPNESS, Experts, ExpertsConfig, Projected, settle
from dualprompt.methods.heads import GrowingHead
from dualprompt.methods.ownership import OfTask
from dualprompt.methods.statistics import generator_for


class DualPromptRPConfig(ExpertsConfig):
    """Options of `dualprompt-rp`. `reads` was chosen on validation images; the other defaults were set by hand."""

    name: str = "dualprompt-rp"
    reads: Literal["class", "class+patches"] = Field(
        default="class+patches", description="what the projections read: the class token, or the patches' mean as well"
    )
    strength_share: float | None = Field(
        default=None,
        gt=0,
        description="λ, as a share of the mean of HᵀH's diagonal (default: chosen from the sums)",
    )
    own_share: float = Field(
        default=0.7, ge=0, le=1, description="weight of the own prompts' scores in the sum of both"
    )
    selection: Selection = Field(default="query", description="how test images pick an E-Prompt")

    _own_classes = logits_always(
        "masked",
        "a task's prompts are trained with a classifier of its own classes that goes with the task, so there are no "
        "old rows to train: leave it masked; a task of one class is learned without training (the baseline beside it: "
        "--methods dualprompt-rp,frozen-head:training_logits=unmasked, or --no-baseline)",
    )


@METHODS.register("dualprompt-rp")
class DualPromptRP(Experts[DualPromptRPConfig]):
    """A shared prompt from the first task, an E-Prompt a task, and a projected head over each."""

    summary = "DualPrompt with projected heads solved in closed form (ours)"
    grid: ClassVar[Grid] = {"method.reads": ("class+patches", "class"), "train.lr": (0.01, 0.005)}
    needs_new_labels = "it finds an image's task by its class, which would be of several tasks"
    selections = ("query", "batch_vote", "oracle")
    of_task: ClassVar[OfTask] = {
        **Experts.of_task,
        "bank.e_prompt": None,
        "by_shared.ridge.sums": 1,
        "by_own.ridge.sums": 1,
        "by_shared.ridge.counts": 0,
        "by_own.ridge.counts": 0,
        "task_head.weight": 0,
        "task_head.bias": 0,
    }

    def __init__(self, config: DualPromptRPConfig, backbone: BackboneSource) -> None:
        super().__init__(config, backbone)
        self.shared_prompt = nn.Buffer(torch.zeros(self.bank.e_shape))  # the first task's E-Prompt, which stays
        by_sums = config.strength_share is None
        self.by_shared = Projected(self.width, config.projection, by_sums)
        self.by_own = Projected(self.width, config.projection, by_sums)
        self.task_head = GrowingHead(config.projection)  # of the shared prompts' features; finds the task
        # Task of each class of that head, and the row that the same class has in `head`, where a forgotten one is zero.
        self.task_of = nn.Buffer(torch.empty(0, dtype=torch.int64), persistent=False)
        self.row_of = nn.Buffer(torch.empty(0, dtype=torch.int64), persistent=False)

    def begin_task(self, task: TaskView) -> None:
        """Add an E-Prompt; draw the projections (first task)."""
        self.add_expert(task)
        if task.index == 0:
            self.by_shared.draw(generator_for(task, "task head"))
            self.by_own.draw(generator_for(task, "class head"))
        self.training_head.begin_task(task)

    @torch.no_grad()
    def end_task(self, task: TaskView) -> None:
        """Keep the first task's prompts for all; add the task to both sums and solve for both heads."""
        if task.index == 0:
            self.shared_prompt.copy_(self.bank.e_prompt[0])
        shared, own = self.bank.shared_prompts(self.shared_prompt), self.bank.training_prompts()
        by_shared, by_own = self.read_all(task, shared, own)
        self._include(task, by_shared, by_own)
        self.training_head.end_task()
        self._note_classes()

    @property
    def takes_more(self) -> bool:
        """Yes: sums do not care in which portions they are made."""
        return True

    @torch.no_grad()
    def more(self, task: TaskView) -> None:
        """Add the images to both sums, each seen with the prompts of the task that its class is of."""
        shared, own = self.bank.shared_prompts(self.shared_prompt), []
        for batch in task.batches():
            tokens = self.tokens(batch)
            own.append(self.read(tokens, self.bank.prompts_for(self.task_of[batch.labels], tokens.dtype)).float())
        [by_shared] = self.read_all(task, shared)
        self._include(task, by_shared, torch.cat(own))
        self._note_classes()

    def _include(self, task: TaskView, by_shared: Tensor, by_own: Tensor) -> None:
        """Add features to both sums and solve for both heads."""
        for projected, head, features in (
            (self.by_shared, self.task_head, by_shared),
            (self.by_own, self.head, by_own),
        ):
            solved = projected.ridge.add(features, task, None, task.generator, self.config.strength_share)
            fit = projected.ridge.fit
            sharpness = SHARPNESS if fit is None else fit.sharpness(SHARPNESS)
            settle(head, [sharpness * rows for rows in solved])

    def _note_classes(self) -> None:
        """Note the task of each class, and its row in `head`: all of them, unless some are of forgotten classes."""
        device = self.shared_prompt.device
        self.task_of = self.task_head.blocks()
        self.row_of = torch.arange(self.head.classes, device=device)
        if self.head.classes != self.task_head.classes:
            self.row_of = torch.cat([rows.abs().amax(dim=1) for rows in self.head.weight]).nonzero()[:, 0]

    @torch.no_grad()
    def predict(self, batch: Batch, selection: Selection | None = None) -> Prediction:
        """Find each image's task with the shared prompts, then classify with that task's E-Prompt."""
        self.check_selection(selection)
        tokens = self.tokens(batch)
        shared = self.read(tokens, self.bank.shared_prompts(self.shared_prompt))
        of_tasks = self.task_head.predict(self.by_shared.expand(shared))
        selected = self.selected_task(selection or self.config.selection, batch, self.task_of[of_tasks.argmax(dim=1)])
        own = self.read(tokens, self.bank.prompts_for(selected, tokens.dtype))
        logits = self.config.own_share * self.head.predict(self.by_own.expand(own))
        logits[:, self.row_of] += (1 - self.config.own_share) * of_tasks
        return Prediction(logits, selected)

    def additional(self) -> int:
        """Return the number of prompt parameters, and of the head that finds the task."""
        return super().additional() + sum(rows.numel() for rows in self.task_head.parameters())

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Take over prompts, sums and heads."""
        super().load_state(state)
        self.shared_prompt.copy_(state["shared_prompt"])
        self.by_shared.restore(below("by_shared.", state))
        self.by_own.restore(below("by_own.", state))
        settle(self.task_head, numbered(state, "task_head.weight"))
        self._note_classes()
