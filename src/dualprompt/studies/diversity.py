"""How much the images of one class differ: a gallery of the most diverse classes, by the backbone's own features."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch.nn.functional as F

from dualprompt.config import BenchmarkConfig
from dualprompt.data.gallery import gallery
from dualprompt.data.sources import GROUPS, Dataset, Split
from dualprompt.data.stream import load_dataset
from dualprompt.pictures.kinds import Line, Lines
from dualprompt.report.sheet import Column, Sheet
from dualprompt.studies.study import Context, Outcome, Study
from dualprompt.training.setup import prepare

SHOWN = 3  # classes of the gallery, as in the paper
FILE = "diversity.png"


@dataclass(frozen=True)
class Spread:
    """How alike the images of a class are: the mean cosine of two of them."""

    task: str
    name: str  # of the class
    images: int
    within: float


def within_class(features: np.ndarray) -> float:
    """Return the mean cosine of two different unit vectors, (images, dim); 1 where all are the same."""
    count = len(features)
    if count < 2:
        return 1.0
    total = features.sum(axis=0)
    return float((total @ total - count) / (count * (count - 1)))


def run(context: Context) -> Outcome:
    """Measure every class, and show the most diverse ones."""
    config = context.config({"method.name": "frozen-head"})
    setup = prepare(config, context.progress)
    spreads, means = [], []
    for task in setup.stream.experiences:
        features = F.normalize(setup.feed.features(task.train).float(), dim=-1).cpu().numpy()
        for label, name in zip(task.labels, task.classes, strict=True):
            own = features[task.train.labels.numpy() == label]
            means.append(own.mean(axis=0))
            spreads.append(Spread(task.name, name, len(own), within_class(own)))
    ranked = sorted(spreads, key=lambda spread: spread.within)
    between = _between(np.stack(means))
    mean = float(np.mean([spread.within for spread in spreads]))
    caption = _show(config.benchmark, [spread.name for spread in ranked], context.folder / FILE)
    sentence = (
        f"Two training images of one class of {config.benchmark.name} have a mean cosine of {mean:.2f} in this "
        f"backbone's features, two of different classes {between:.2f}; the most diverse class is {ranked[0].name} "
        f"({ranked[0].within:.2f}). The paper shows the diversity of Split ImageNet-R by examples only, so there is no "
        "number of its own to hold this against."
    )
    shown = [ranked[0:10], ranked[-3:]] if len(ranked) > 13 else [ranked]
    sheet = Sheet(
        f"diversity: {config.benchmark.name}, {Path(config.backbone.name).name}",
        (Column("class", right=False), Column("task", right=False), Column("images"), Column("mean cosine within")),
        tuple(tuple((s.name, s.task, str(s.images), f"{s.within:.3f}") for s in group) for group in shown),
        ("the ten most diverse classes, and the three least" if len(shown) > 1 else "the most diverse classes first",),
    )
    places = [float(place) for place in range(1, len(ranked) + 1)]
    picture = Lines(
        "how alike the images of a class are",
        "classes, the most diverse first",
        "mean cosine",
        [
            Line("same class", places, [spread.within for spread in ranked]),
            Line("different classes", [1.0], [between], level=True),
        ],
    )
    return Outcome(sentence, (sheet,), {"diversity": picture}, photos={FILE: caption})


def _between(means: np.ndarray) -> float:
    """Return the mean cosine of images of different classes, every pair of classes counting once."""
    count = len(means)
    total = means.sum(axis=0)
    return float((total @ total - (means**2).sum()) / (count * (count - 1)))


def _show(benchmark: BenchmarkConfig, ranked: list[str], path: Path) -> str:
    """Draw the gallery of the dataset that has the most diverse class; return what it shows."""
    given = benchmark.dataset
    names = given if isinstance(given, list) else GROUPS.get(given, (given,))
    root = Path(benchmark.root) if benchmark.root else None
    owners: dict[str, tuple[Dataset, int]] = {}
    for name in names:
        dataset = load_dataset(name, root, benchmark.test_share)
        for label, class_name in enumerate(dataset.classes):
            owners |= {class_name: (dataset, label), f"{name}/{class_name}": (dataset, label)}  # as streams say it
    dataset = owners[ranked[0]][0]
    labels = [owners[name][1] for name in ranked if owners[name][0] is dataset][:SHOWN]
    gallery(_only(dataset, labels), path, side=72)
    return f"training images of the most diverse classes of {dataset.name}"


def _only(dataset: Dataset, labels: list[int]) -> Dataset:
    """Return a dataset with these classes first and no others."""
    places = {label: place for place, label in enumerate(labels)}

    def split(old: Split) -> Split:
        return Split(old.source, np.array([places.get(int(label), -1) for label in old.labels]))

    return replace(
        dataset,
        classes=tuple(dataset.classes[label] for label in labels),
        train=split(dataset.train),
        test=split(dataset.test),
    )


STUDY = Study(
    "diversity",
    "How much the images of one class differ",
    "images of one class of Split ImageNet-R differ a lot, so that a small buffer cannot stand for them",
    run,
)
