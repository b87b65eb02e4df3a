"""Domain-incremental: the same classes in every task, in pictures of another kind."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dualprompt.config import BenchmarkConfig
from dualprompt.data.sources import Dataset
from dualprompt.data.stream import STREAMS, Plan, order_of
from dualprompt.errors import DualPromptError


@STREAMS.register("domain")
def domain_incremental(config: BenchmarkConfig, seed: int, datasets: Sequence[Dataset]) -> list[Plan]:
    """Make each dataset or folder of the list a domain; all must have the same classes, by name.

    Classes are numbered as the first of the list has them. The order permutes the domains. A domain is without a class
    that it has no training images or no test images of (DomainNet's paintings are without two).
    """
    if not isinstance(config.dataset, list) or len(datasets) < 2:
        raise DualPromptError(
            "benchmark.stream: domain needs a list of at least 2 datasets or folders, one for each domain; set "
            "benchmark.dataset to [A, B, …]"
        )
    classes = datasets[0].classes
    for dataset in datasets[1:]:
        if strange := sorted(set(classes) ^ set(dataset.classes)):
            owner, other = (datasets[0], dataset) if strange[0] in classes else (dataset, datasets[0])
            raise DualPromptError(
                f"domains have the same classes, but '{strange[0]}' is in '{owner.name}' and not in '{other.name}'; "
                "add or remove it, or set benchmark.stream: class"
            )
    plans = []
    for place, dataset in enumerate(datasets):
        there = set(np.unique(dataset.train.labels)) & set(np.unique(dataset.test.labels))
        members = {name: number for name in classes if (number := dataset.classes.index(name)) in there}
        plans.append(Plan(dataset.name, place, list(members.values()), tuple(members)))
    order = order_of(config, seed, [dataset.name for dataset in datasets])
    return [plans[i] for i in order(len(plans))]
