"""The README.md of a saved model."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def text(info: dict[str, Any]) -> str:
    """Return the model card of what `ContinualLearner.info` says."""
    tasks, backbone = info["tasks"], info["backbone"]
    lines = [
        "---",
        "library_name: dualprompt",
        "pipeline_tag: image-classification",
        "tags: [continual-learning, prompt-tuning]",
        "---",
        "# What this model was taught",
        "",
        f"{len(info['classes'])} classes in {len(tasks)} tasks, by {info['method']['name']} of dualprompt "
        f"{info['dualprompt']}.",
        "",
        "| id | task | learned | classes | images | accuracy | kept |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for task in tasks:
        accuracy = "not measured" if task["accuracy"] is None else f"{task['accuracy']:.1f} %"
        names = ", ".join(map(_cell, task["classes"]))
        lines.append(
            f"| {task['id']} | {_cell(task['name'])} | {task['learned']} | {names} | {task['images']} | {accuracy} "
            f"| {task['bytes']:,} bytes |"
        )
    threshold = info["threshold"]
    lines += [
        "",
        "Accuracy is that of images held out when the task was learned, among all classes known then.",
        "",
        f"“None of these” is answered below a trust of {threshold:.3f}."
        if threshold is not None
        else "“None of these” is never answered: no threshold is set.",
        "",
        "# What it is made of",
        "",
        f"The frozen backbone `{_called(backbone['name'])}` ({backbone['parameters']:,} parameters, SHA-256 "
        f"`{backbone['sha256']}`, licence: {backbone['licence']}). It is not in this folder.",
        "",
        f"This folder holds {info['bytes']:,} bytes: the prompts and keys, the mean of each class's features and their "
        "covariance within each task, the classifier's rows, and how sure the model was of each held-out image. "
        "No image is kept. Class means and prompts are made from the images, so treat this folder as you treat "
        "statistics of them.",
        "",
        "```python",
        "from dualprompt import ContinualLearner",
        "",
        'learner = ContinualLearner.load("this folder")',
        'print(learner.predict("image.jpg").label)',
        "```",
        "",
    ]
    return "\n".join(lines)


def _called(backbone: str) -> str:
    """A file stands for itself without its folders, which are nobody's business elsewhere."""
    return Path(backbone).name if Path(backbone).is_absolute() else backbone


def _cell(name: str) -> str:
    return name.replace("|", "\\|").replace("\n", " ")
