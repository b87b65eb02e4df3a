"""A benchmark as typed data: which images come in which order."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import Field, model_validator

from dualprompt.recipe import Strict

CLASS_ORDER = re.compile(r"fixed|shuffled|(pilot|coda)(?:-(\d{1,9}))?")


class BenchmarkConfig(Strict):
    """Which images come in which order."""

    name: str = Field(default="custom", description="what tables call the benchmark")
    dataset: str | list[str] = Field(description="dataset name or image folder; a list is one task for each")
    stream: str = Field(
        default="class",
        description="class: every task has new classes; domain: the same classes in every dataset; each image once, "
        "without borders: online, i-blurry, si-blurry",
    )
    root: str | None = Field(default=None, description="folder that holds the datasets (default: $DUALPROMPT_DATA)")
    tasks: int | list[int] | list[list[str]] | None = Field(
        default=None,
        description="number of equal tasks, or class counts, or class names a task; None for a list",
    )
    first: int | None = Field(
        default=None, ge=1, description="classes of a task that comes before the equal ones: 50 for a B50 start"
    )
    class_order: str | list[int] | list[str] = Field(
        default="fixed",
        description="fixed, shuffled, pilot-SEED or coda-SEED (as those codes draw it), or all classes by their "
        "numbers from 0 or their names",
    )
    class_order_seed: int | None = Field(default=None, ge=0, description="seed of the order (default: the run's)")
    validation: float = Field(default=0.0, ge=0, lt=1, description="share of each class's training images held out")
    evaluate_on: Literal["test", "validation"] = Field(default="test", description="split that evaluation reads")
    train_per_class: int | None = Field(default=None, ge=1, description="use only the first N training images a class")
    test_per_class: int | None = Field(default=None, ge=1, description="use only the first N test images a class")
    test_share: float = Field(default=0.2, gt=0, lt=1, description="test share of a folder without train/ and test/")
    skip_bad: bool = Field(default=False, description="leave out unreadable images (counted) instead of refusing")
    shots: int | None = Field(default=None, ge=1, description="few-shot: training images a class, drawn by the seed")
    shots_from: int = Field(default=1, ge=1, description="first task that has so few (2: the first keeps all)")
    imbalance: float | None = Field(
        default=None, ge=1, le=10**6, description="long-tailed: largest class / smallest, falling exponentially"
    )
    disjoint: float | None = Field(
        default=None, ge=0, le=1, description="N of blurry streams: share of classes of a single task (default: 0.5)"
    )
    blur: float | None = Field(
        default=None, ge=0, le=1, description="M of blurry streams: share of other classes' images that stray (0.1)"
    )
    evaluate_every: int | None = Field(
        default=None, ge=1, description="of an online stream: images between two evaluations on all classes so far"
    )

    @model_validator(mode="after")
    def _consistent(self) -> BenchmarkConfig:
        if isinstance(self.dataset, list) and self.tasks is not None and self.stream in ("class", "domain"):
            raise ValueError("a list of datasets is one task for each: leave benchmark.tasks empty")
        if (self.disjoint, self.blur) != (None, None) and self.stream in ("class", "domain", "online"):
            raise ValueError("disjoint and blur are for blurry streams: set benchmark.stream: si-blurry or i-blurry")
        if self.shots is None and self.shots_from != 1:
            raise ValueError("shots_from says where benchmark.shots begins: set that too")
        if self.evaluate_on == "validation" and self.validation == 0:
            raise ValueError("evaluate_on: validation needs benchmark.validation > 0")
        if self.first is not None and not isinstance(self.tasks, int):
            raise ValueError("benchmark.first goes with a number of equal tasks that follow: set benchmark.tasks too")
        if self.first is not None and self.stream in ("online", "i-blurry", "si-blurry"):
            raise ValueError(f"benchmark.first is for stream: class, and stream '{self.stream}' has no such task")
        known = isinstance(self.class_order, list) or CLASS_ORDER.fullmatch(self.class_order)
        if not known:
            raise ValueError(
                f"class_order is fixed, shuffled, pilot-SEED, coda-SEED or a list, not '{self.class_order}'"
            )
        if self.class_order_seed is not None and (known is True or known[2]):
            raise ValueError("class_order says which order it is by itself: leave benchmark.class_order_seed empty")
        drawn = self.class_order != "fixed" or (self.shots, self.imbalance) != (None, None)
        if self.class_order_seed is not None and not drawn and self.stream in ("class", "domain"):
            raise ValueError("class_order is fixed, so class_order_seed would draw nothing: set class_order: shuffled")
        return self

    @property
    def order_follows_run(self) -> bool:
        """Whether the run's seed decides the order of the classes."""
        return self.class_order in ("shuffled", "pilot", "coda") and self.class_order_seed is None
