"""The README.md of a saved model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dualprompt.texts import in_markdown


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
        "| id | task | learned | classes | images | accuracy | prompts | kept |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for task in tasks:
        accuracy = "not measured"
        if task["accuracy"] is not None and task["interval"] is not None:
            how = "left out" if task["left_one_out"] else "held out"
            low, high = task["interval"]
            accuracy = f"{task['accuracy']:.1f} % of {task['held']} {how} ({low:.0f} to {high:.0f})"
        choice = task["prompts"]
        prompts = "–" if choice is None else f"{'trained' if choice['used'] else 'none'}: {choice['why']}"
        names = ", ".join(map(_cell, task["classes"]))
        measured = f"{task['images']} | {accuracy} | {_cell(prompts)}"
        lines.append(
            f"| {task['id']} | {_cell(task['name'])} | {_cell(task['learned'])} | {names} | {measured} "
            f"| {task['bytes']:,} bytes |"
        )
    lines += [
        "",
        "Accuracy is that of images held out when the task was learned, or judged each by all others (left out), among "
        "all classes known then, with its 95 % interval. Not measured: too few images were there, or are left.",
        "",
        _threshold(info),
        "",
        "# What it is made of",
        "",
        f"The frozen backbone `{_cell(_called(backbone['name']))}` ({backbone['parameters']:,} parameters, SHA-256 "
        f"`{backbone['sha256']}`, licence: {_cell(str(backbone['licence']))}). It is not in this folder.",
        "",
        f"This folder holds {info['bytes']:,} bytes: the prompts and keys, the mean of each class's features and their "
        "covariance, the classifier's rows, and how sure the model was of each held-out image. "
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
    """Return a name, which a stranger may have chosen: it is no HTML, no link and no picture."""
    return in_markdown(name).replace("[", "\\[")


def _threshold(info: dict[str, Any]) -> str:
    """Return when "none of these" is answered, and what that was measured to do."""
    if info["threshold"] is None:
        return "“None of these” is never answered: no threshold is set."
    words = f"“None of these” is answered below a trust of {info['threshold']:.3f}"
    if (does := info["threshold_does"]) is None:
        return f"{words}."
    words += f": {does['accepted']:.1f} % of {does['known']} images of known classes get a class"
    if does["rejected"] is not None:
        words += f"; {does['rejected']:.1f} % get none where their own class is not known"
    return f"{words}."
