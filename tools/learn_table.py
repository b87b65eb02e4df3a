"""Write how `learn` does beside nearest mean, LDA and logistic regression on the same features of all images at once.

    python tools/learn_table.py docs/results/learn.json photos/dogs photos/shoes --lessons 2 --each 5 20 --test 20

A folder holds class folders, or `train` and `test` with class folders each; without a split, `--test` images of each
class are set aside by the seed. `learn` is given the classes lesson by lesson, the others have all of them at once.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dualprompt import ContinualLearner, __version__
from dualprompt.console import Terminal
from dualprompt.files import write_json
from dualprompt.methods.contract import Batch
from dualprompt.methods.dualprompt_lda import DualPromptLDA
from dualprompt.methods.statistics import shrunk, within_class
from dualprompt.metrics import wilson
from dualprompt.model.images import ImageLike, gather
from dualprompt.report.sheet import Column, Sheet, as_markdown

Pictures = dict[str, list[ImageLike]]


def split(folder: Path, test: int, seed: int) -> tuple[Pictures, Pictures]:
    """Return the training and test images of each class."""
    if (folder / "train").is_dir():
        return gather(folder / "train"), gather(folder / "test")
    train, apart = Pictures(), Pictures()
    for label, images in gather(folder).items():
        order = np.random.default_rng([seed, len(train)]).permutation(len(images))
        apart[label] = [images[i] for i in order[:test]]
        train[label] = [images[i] for i in order[test:]]
    return train, apart


def stacked(learner: ContinualLearner, shown: Pictures) -> tuple[np.ndarray, Tensor]:
    """Return the pixels of all images, and the number of each one's class."""
    pixels = np.stack([learner.pixels(image) for own in shown.values() for image in own])
    return pixels, torch.arange(len(shown)).repeat_interleave(torch.tensor([len(own) for own in shown.values()]))


@torch.inference_mode()
def features(learner: ContinualLearner, pixels: np.ndarray) -> Tensor:
    """Return the frozen features that `learn` sees, in float64."""
    method, network = learner._model.method, learner._model.network
    assert isinstance(method, DualPromptLDA)
    found = []
    for part in torch.from_numpy(pixels).split(16):
        shown = (part.permute(0, 3, 1, 2).float() / 255 - network.mean[:, None, None]) / network.std[:, None, None]
        batch = Batch(lambda shown=shown: shown, torch.zeros(len(part)))
        found.append(method.read(batch, method.tokens(batch)).double())
    return torch.cat(found)


def baselines(train: Tensor, labels: Tensor, test: Tensor) -> dict[str, Tensor]:
    """Return what each baseline answers to the test images."""
    means, scatter = within_class(train, labels, int(labels.max()) + 1)
    away = test[:, None] - means
    inverse = torch.linalg.inv(shrunk(scatter, len(train)))
    return {
        "nearest mean": away.square().sum(dim=2).argmin(dim=1),
        "LDA": torch.einsum("ncd,de,nce->nc", away, inverse, away).argmin(dim=1),
        "logistic regression": logistic(train, labels, test),
    }


def logistic(train: Tensor, labels: Tensor, test: Tensor, strength: float = 1.0) -> Tensor:
    """Return what L2-regularised logistic regression on standardised features answers (C = 1 / strength)."""
    centre, spread = train.mean(dim=0), train.std(dim=0) + 1e-6
    shown, asked = (train - centre) / spread, (test - centre) / spread
    weight = torch.zeros(int(labels.max()) + 1, train.shape[1], dtype=train.dtype, requires_grad=True)
    bias = torch.zeros(len(weight), dtype=train.dtype, requires_grad=True)
    optimiser = torch.optim.LBFGS([weight, bias], max_iter=300, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimiser.zero_grad()
        found = F.cross_entropy(F.linear(shown, weight, bias), labels, reduction="sum")
        found = found + strength * weight.square().sum() / 2
        found.backward()
        return found

    optimiser.step(loss)  # pyright: ignore
    return F.linear(asked, weight, bias).argmax(dim=1).detach()


def rows_of(folder: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return how all do on the images of a folder, a row for each number of images a class."""
    train, test = split(folder, options.test, options.seed)
    train = {label: images[: max(options.each)] for label, images in train.items()}
    reader = ContinualLearner(options.backbone, device=options.device)
    shown, asked = stacked(reader, train), stacked(reader, test)
    shown, asked = [(features(reader, pixels), labels) for pixels, labels in (shown, asked)]
    return [row(folder.name, each, train, shown, asked, options) for each in options.each]


def row(
    name: str,
    each: int,
    train: Pictures,
    shown: tuple[Tensor, Tensor],
    asked: tuple[Tensor, Tensor],
    options: argparse.Namespace,
) -> dict[str, Any]:
    """Return how all do with so many images a class.

    Args:
        name: what the images are called.
        each: images a class that are taught.
        train: the training images.
        shown: their features and labels.
        asked: those of the test images.
        options: of the command.
    """
    learner, names = ContinualLearner(options.backbone, device=options.device), list(train)
    began = time.monotonic()
    with Terminal() as terminal:
        for part in np.array_split(np.arange(len(names)), options.lessons):
            own = {names[i]: train[names[i]][:each] for i in part}
            learner.learn(own, prompts="never", progress=terminal)
    seconds, method = time.monotonic() - began, learner._model.method
    assert isinstance(method, DualPromptLDA)
    taken = torch.cat([(shown[1] == label).nonzero()[:each, 0] for label in range(len(names))])
    test, truth = asked
    found = {"learn": method.head.predict(test.float()).argmax(dim=1)}
    found |= baselines(shown[0][taken], shown[1][taken], test)
    right = {name: int((said == truth).sum()) for name, said in found.items()}
    return {
        "folder": name,
        "classes": len(names),
        "each": each,
        "lessons": options.lessons,
        "test": len(truth),
        "seconds": round(seconds, 1),
        "said": [round(task.accuracy, 1) for task in learner.tasks if task.accuracy is not None],
        "correct": right,
        "accuracy": {name: round(100 * count / len(truth), 1) for name, count in right.items()},
        "interval": {name: [round(end, 1) for end in wilson(count, len(truth))] for name, count in right.items()},
    }


def sheet(rows: list[dict[str, Any]]) -> Sheet:
    """Return the rows as a table, the best of each in bold, and their mean."""
    names = list(rows[0]["accuracy"])
    headings = ("classes", "images a class", "test images", *names)
    lines = []
    for found in rows:
        best = max(found["accuracy"].values())
        cells = [f"**{value:.1f}**" if value == best else f"{value:.1f}" for value in found["accuracy"].values()]
        lines.append((found["folder"], str(found["classes"]), str(found["each"]), str(found["test"]), *cells))
    means = [f"{np.mean([found['accuracy'][name] for found in rows]):.1f}" for name in names]
    columns = (Column("images", right=False), *map(Column, headings))
    return Sheet("Test images right (%)", columns, (tuple(lines), (("mean", "", "", "", *means),)))


def publication(rows: list[dict[str, Any]], options: argparse.Namespace) -> dict[str, Any]:
    """Return all of it as what `dualprompt publish` reads."""
    made, folders = sheet(rows), " ".join(folder.name for folder in options.folders)
    each = " ".join(map(str, options.each))
    return {
        "kind": "learn",
        "title": made.title,
        "command": f"python tools/learn_table.py {options.out.name} {folders} --each {each} --lessons {options.lessons}"
        f" --test {options.test} --backbone {options.backbone} --seed {options.seed}",
        "date": time.strftime("%Y-%m-%d"),
        "versions": {"dualprompt": __version__, "torch": torch.__version__},
        "finding": "",
        "verdicts": [],
        "sheets": [asdict(made)],
        "rows": [],
        "measured": rows,
    }


def main() -> None:
    """Make the table, print it, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="where the JSON goes")
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("--each", type=int, nargs="+", default=[5, 20], help="images a class that are taught")
    parser.add_argument("--lessons", type=int, default=2)
    parser.add_argument("--test", type=int, default=20, help="images a class set aside where there is no split")
    parser.add_argument("--backbone", default="embedded")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for folder in options.folders:
        rows += rows_of(folder, options)
        write_json(options.out, publication(rows, options))
    sys.stdout.write(as_markdown(sheet(rows)))


if __name__ == "__main__":
    main()
