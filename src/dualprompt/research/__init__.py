"""Runs in Python: fit a method to a benchmark in a line, and read what a run has left.

import dualprompt

run = dualprompt.fit("mini", method="dualprompt", train={"epochs": 2})
run.accuracy_matrix                     # NumPy, one row after each task
run.prompts().e                         # the E-Prompts of all tasks, one tensor
run.logits(pixels, task=0)              # the model's logits for images after the first task
dualprompt.load_run("runs/cifar").frame()
"""

from dualprompt.research.finished import FinishedGroup, FinishedRun, FinishedStudy, load_run
from dualprompt.research.fitting import fit

__all__ = ["FinishedGroup", "FinishedRun", "FinishedStudy", "fit", "load_run"]
