"""Published set-ups, as `protocols.yaml` has them: a paper's benchmarks, orders, backbones, recipes and numbers."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from importlib import resources
from typing import Any, Literal

from pydantic import Field

from dualprompt.config import parse
from dualprompt.recipe import Strict
from dualprompt.values import read_yaml

FILE = "protocols.yaml"
Metric = Literal["average_accuracy", "image_weighted_accuracy"]


class Reported(Strict):
    """What a paper reports, in percent: accuracy after the last task, and what else it gives."""

    accuracy: float
    accuracy_std: float | None = None
    mean: float | None = Field(default=None, description="mean over steps")
    mean_std: float | None = None
    forgetting: float | None = None
    forgetting_std: float | None = None


class ProtocolLine(Strict):
    """A method of a set-up, its options where they are not our defaults, and its reported numbers."""

    method: str
    title: str | None = None  # what the paper calls it, where a method has several lines
    options: dict[str, Any] = Field(default_factory=dict)
    train: dict[str, Any] = Field(default_factory=dict)
    reported: Reported

    @property
    def label(self) -> str:
        """What the table calls it."""
        return self.method if self.title is None else f"{self.method} ({self.title})"


class Setup(Strict):
    """A benchmark as a paper has it; what is not said is the paper's."""

    preset: str
    benchmark: dict[str, Any] = Field(default_factory=dict)
    backbone: str | None = None
    train: dict[str, Any] = Field(default_factory=dict)
    evaluate: dict[str, Any] = Field(default_factory=dict)
    not_comparable: str | None = None  # why our split or order cannot be the paper's
    lines: list[ProtocolLine]


class Protocol(Strict):
    """A paper, and its set-ups by name."""

    title: str
    source: str  # where the numbers were seen
    backbone: str
    seeds: list[int]
    metric: Metric = "average_accuracy"
    recipe: str | None = None
    train: dict[str, Any] = Field(default_factory=dict)
    evaluate: dict[str, Any] = Field(default_factory=dict)
    departures: list[str] = Field(default_factory=list)  # of ours from the paper's, in every set-up
    setups: dict[str, Setup]


@functools.cache
def protocols() -> Mapping[str, Protocol]:
    """Return every protocol by its name."""
    text = (resources.files("dualprompt.sweeps") / FILE).read_text(encoding="utf-8")
    return {name: parse(Protocol, values, name) for name, values in read_yaml(text).items()}


def listed() -> list[dict[str, Any]]:
    """Return what `dualprompt list protocols` shows."""
    return [
        {
            "name": name,
            "title": each.title,
            "set-ups": list(each.setups),
            "methods": list(dict.fromkeys(line.method for setup in each.setups.values() for line in setup.lines)),
            "backbones": list(dict.fromkeys(setup.backbone or each.backbone for setup in each.setups.values())),
            "seeds": len(each.seeds),
        }
        for name, each in protocols().items()
    ]
