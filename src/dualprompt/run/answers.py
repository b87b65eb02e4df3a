"""What a method answers for each image of an evaluation, taken down where it computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dualprompt.config import RunConfig
from dualprompt.data.ahead import images_ahead
from dualprompt.data.stream import Stream, Subset
from dualprompt.methods.base import Prediction
from dualprompt.run.predictions import Evaluation


class Answers:
    """Room on the device for the answers of one evaluation. Processes fill in their own, and zeros elsewhere."""

    def __init__(
        self,
        subsets: Sequence[Subset],
        labels: Sequence[Sequence[int]],
        device: torch.device,
        ahead: Tensor | None = None,
    ) -> None:
        """Make room for answers.

        Args:
            subsets: the images that each task is evaluated on, those to come among them.
            labels: the classes of each task that is learned.
            device: where the method computes.
            ahead: images of tasks to come that are shown too, as rows among all.
        """
        self.rows = torch.arange(sum(map(len, subsets))).split([len(subset) for subset in subsets])  # of each task
        self.learned = sum(map(len, subsets[: len(labels)]))  # images of the tasks that are learned
        count = 1 + max(label for each in labels for label in each)
        self.members = torch.zeros(len(labels), count, dtype=torch.bool, device=device)  # which classes a task has
        for task, each in enumerate(labels):
            self.members[task, list(each)] = True
        # Of each image one more than its class, its class where the task is known, and the task selected.
        self.whole = torch.zeros(3, sum(map(len, subsets)), dtype=torch.int64, device=device)
        self.probability = torch.zeros(self.whole.shape[1], dtype=torch.float32, device=device)
        self.ahead: list[tuple[Subset, Tensor]] = []  # images to come, and their rows
        for subset, mine in zip(subsets, self.rows, strict=True):
            rows = mine[:0] if ahead is None else mine[torch.isin(mine, ahead)]
            if len(rows):
                places = rows - mine[0]
                self.ahead.append((Subset(subset.images, subset.indices[places], subset.labels[places]), rows))

    @classmethod
    def after(cls, stream: Stream, learned: int, config: RunConfig, device: torch.device) -> Answers:
        """Make room for the evaluation after so many tasks of a stream."""
        on, tasks = config.benchmark.evaluate_on, stream.experiences
        ahead = images_ahead(tasks, learned, on, config.evaluate.ahead)
        return cls([task.judged(on) for task in tasks], [task.labels for task in tasks[:learned]], device, ahead)

    def note(self, rows: Tensor, task: Tensor, prediction: Prediction) -> None:
        """Note what was answered for the images at `rows`, of these tasks; this only queues work on the device."""
        logits = prediction.logits
        answer = logits.argmax(dim=1, keepdim=True)
        # Of an image to come nobody reads it. In the middle of a task some heads lack the columns of its classes.
        others = ~self.members[task.clamp(max=len(self.members) - 1), : logits.shape[1]]
        self.whole[0, rows] = answer[:, 0] + 1
        self.whole[1, rows] = logits.masked_fill(others, -torch.inf).argmax(dim=1) + 1
        self.probability[rows] = logits.float().softmax(dim=1).gather(1, answer)[:, 0]
        if prediction.selected is not None:
            self.whole[2, rows] = prediction.selected.long() + 1

    def gathered(self, total: Callable[[Tensor], Tensor]) -> Evaluation:
        """Return the answers of all processes, whose sum `total` returns."""
        answer, known, selected = (total(self.whole).cpu() - 1).numpy()
        known[self.learned :] = -1
        return Evaluation(answer, known, selected, total(self.probability).cpu().numpy())
