"""DualPrompt with a projected head (ours): the first task's prompts find the task, its own prompts name the class.

Two prompted passes an image, as DualPrompt has a query and a prompted pass. The first has the prompts that the first
task trained, which all tasks share. Ridge regression on random features of it scores all classes; the task of the best
one is the image's. The second has that task's own E-Prompt, and a second regression scores all classes again. Both
regressions are solved from sums over all tasks; no image is kept, and each image is judged alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from dualprompt.backbones.vit import VisionTransformer
from dualprompt.methods.base import (
    METHODS,
    Batch,
    Grid,
    MethodConfig,
    Prediction,
    Selection,
    TaskView,
    below,
)
from dualprompt.methods.experts import Experts, ExpertsConfig, Projected, of_projected
from dualprompt.methods.statistics import generator_for
from dualprompt.prompts.bank import vote


class DualPromptRPConfig(ExpertsConfig):
    """Options of `dualprompt-rp`; the defaults were chosen on validation images (docs/experiments)."""

    name: str = "dualprompt-rp"
    reads: Literal["class", "class+patches"] = Field(
        default="class+patches", description="what the projections read: the class token, or the patches' mean as well"
    )
    strength_share: float = Field(default=0.003, gt=0, description="λ, as a share of the mean of HᵀH's diagonal")
    own_share: float = Field(
        default=0.7, ge=0, le=1, description="weight of the own prompts' scores in the sum of both"
    )
    selection: Selection = Field(default="query", description="how test images pick an E-Prompt")


@METHODS.register("dualprompt-rp")
class DualPromptRP(Experts):
    """A shared prompt from the first task, an E-Prompt a task, and a projected head over each."""

    Config = DualPromptRPConfig
    summary = "DualPrompt with projected heads solved in closed form (ours)"
    grid: ClassVar[Grid] = {"method.reads": ("class+patches", "class"), "train.lr": (0.01, 0.005)}
    selections = ("query", "batch_vote", "oracle")
    of_task: ClassVar[Mapping[str, int | None]] = {
        **Experts.of_task,
        **of_projected("task_head"),
        **of_projected("class_head"),
    }
    config: DualPromptRPConfig

    def __init__(self, config: MethodConfig, backbone: VisionTransformer) -> None:
        assert isinstance(config, DualPromptRPConfig)
        super().__init__(config, backbone)
        self.shared_prompt = nn.Buffer(torch.zeros(self.bank.e_shape))  # the first task's E-Prompt, which stays
        self.task_head = Projected(self.width, config.projection)
        self.class_head = Projected(self.width, config.projection)
        self.task_of = nn.Buffer(torch.empty(0, dtype=torch.int64), persistent=False)  # task of each class

    def begin_task(self, task: TaskView) -> None:
        """Add an E-Prompt; draw the projections (first task)."""
        self.add_expert(task)
        if task.index == 0:
            self.task_head.draw(generator_for(task, "task head"))
            self.class_head.draw(generator_for(task, "class head"))
        self.begin_training_head(task)

    @torch.no_grad()
    def end_task(self, task: TaskView) -> None:
        """Keep the first task's prompts for all; add the task to both sums and solve for both heads."""
        if task.index == 0:
            self.shared_prompt.copy_(self.bank.e_prompt[0])
        shared, own = self.bank.shared_prompts(self.shared_prompt), self.bank.training_prompts()
        labels, share = task.labels - task.first_class, self.config.strength_share
        by_shared, by_own = self.read_all(task, shared, own)
        self.task_head.add(by_shared, labels, task.classes, None, task.generator, share)
        self.class_head.add(by_own, labels, task.classes, None, task.generator, share)
        self._note_tasks()

    def _note_tasks(self) -> None:
        sizes = torch.tensor([len(rows) for rows in self.task_head.head.bias])
        self.task_of = torch.arange(len(sizes)).repeat_interleave(sizes).to(self.shared_prompt.device)

    @torch.no_grad()
    def predict(self, batch: Batch, selection: Selection | None = None) -> Prediction:
        """Find each image's task with the shared prompts, then classify with that task's E-Prompt."""
        self.check_selection(selection)
        tokens = self.tokens(batch)
        by_shared = self.task_head.scores(self.read(tokens, self.bank.shared_prompts(self.shared_prompt)))
        selected = self._select(selection or self.config.selection, batch, by_shared)
        by_own = self.class_head.scores(self.read(tokens, self.bank.prompts_for(selected, tokens.dtype)))
        return Prediction(torch.lerp(by_shared, by_own, self.config.own_share), selected)

    def _select(self, selection: Selection, batch: Batch, scores: Tensor) -> Tensor:
        if selection == "oracle":
            if batch.task is None:
                raise ValueError("selection 'oracle' needs the true task of each image")
            return batch.task
        selected = self.task_of[scores.argmax(dim=1)]
        return vote(selected) if selection == "batch_vote" else selected

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Take over prompts, sums and heads."""
        super().load_state(state)
        self.shared_prompt.copy_(state["shared_prompt"])
        self.task_head.restore(below("task_head.", state))
        self.class_head.restore(below("class_head.", state))
        self._note_tasks()
