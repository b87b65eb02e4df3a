"""What a study is: settings that are run, tables and pictures of them, and one sentence on the paper's finding."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from dualprompt.backbones import weights
from dualprompt.backbones.base import PromptableBackbone
from dualprompt.config import RunConfig, changes_recipe, compose
from dualprompt.errors import DualPromptError, nearest
from dualprompt.methods.base import METHODS, method_config
from dualprompt.metrics import mean_and_deviation
from dualprompt.pictures.kinds import Picture
from dualprompt.progress import SILENT, Progress
from dualprompt.report.sheet import Sheet
from dualprompt.report.verdict import Verdict
from dualprompt.studies import STUDIES
from dualprompt.sweeps.obtained import Obtained, complain
from dualprompt.sweeps.runs import OverSeeds
from dualprompt.sweeps.sweep import VALIDATION

# On the benchmark that comes with the package a study is made for two cores: fewer images. Not fewer pixels, for the
# embedded backbone needs its 224. How methods are trained stays as it is, so that they can be compared.
REDUCED: dict[str, dict[str, Any]] = {"mini": {"benchmark.train_per_class": 10}}
HELD_OUT = {"benchmark.validation": VALIDATION, "benchmark.evaluate_on": "validation"}


@dataclass(frozen=True)
class Setting:
    """One point of a study: what tables call it, and the options that make it."""

    label: str
    options: dict[str, Any]


@dataclass(frozen=True)
class Row(OverSeeds):
    """A setting and its runs, one for each seed."""

    part: str  # of the study, as "E-Prompt alone"
    setting: Setting
    obtained: tuple[Obtained, ...]

    def mean(self, key: str = "average_accuracy") -> float | None:
        """Return the mean of a metric over seeds."""
        return mean_and_deviation(numbers)[0] if (numbers := self.numbers(key)) else None

    def plain(self) -> dict[str, Any]:
        """Return what JSON and CSV say of the row, in full precision."""
        return {
            "part": self.part,
            "setting": self.setting.label,
            "options": self.setting.options,
            "judged_on": self.obtained[0].config.benchmark.evaluate_on,
            "seeds": len(self.results),
            **self.metrics(),
            "runs": [str(each.run.folder) for each in self.finished],
            "errors": [f"{each.name}: {each.error}" for each in self.obtained if each.error],
        }


def best(rows: Sequence[Row]) -> Row:
    """Return the row of the highest mean accuracy, the one that forgets less of equals, the first of equals."""
    finished = [row for row in rows if row.results]
    if not finished:
        complain([each for row in rows for each in row.obtained])
    return min(finished, key=lambda row: (-(row.mean() or 0), row.mean("forgetting") or 0))


def at_top(rows: Sequence[Row]) -> list[Row]:
    """Return the best row and those that tables show with the same accuracy, in their order."""
    highest = f"{best(rows).mean():.2f}"
    return [row for row in rows if row.results and f"{row.mean():.2f}" == highest]


@dataclass(frozen=True)
class Outcome:
    """What a study found."""

    finding: str  # what was found, and the sentence of every verdict
    sheets: tuple[Sheet, ...]
    pictures: dict[str, Picture] = field(default_factory=dict)  # by the names of their files
    rows: tuple[Row, ...] = ()
    chosen: dict[str, Any] | None = None  # the options that a search chose
    photos: dict[str, str] = field(default_factory=dict)  # pictures of pixels in the study's folder → captions
    verdicts: tuple[Verdict, ...] = ()  # on what the paper found


@dataclass(frozen=True)
class Context:
    """Where a study's runs come from: a preset's recipe with overrides, seeds, a budget, and a store of runs."""

    preset: str
    recipe: str | None
    overrides: dict[str, Any]
    seeds: int
    budget: int | None  # settings that a search may try at a time; None: all
    folder: Path  # where the study keeps what it makes besides runs
    obtain: Callable[[Sequence[RunConfig]], list[Obtained]]
    progress: Progress = SILENT
    buffers: tuple[int, ...] = ()  # buffer sizes and methods that the user asked for
    methods: tuple[str, ...] = ()
    jobs: int = 1
    fresh: bool = False  # whether what earlier calls left is run anew

    @cached_property
    def depth(self) -> int:
        """The number of the backbone's layers."""
        name = self.config({}).backbone.name
        backbone = weights.factory(weights.read(name, self.progress)).outline()
        if not isinstance(backbone, PromptableBackbone):
            raise DualPromptError(f"this study places prompts in layers, which needs a ViT; '{name}' is none")
        return backbone.depth

    def config(self, options: dict[str, Any]) -> RunConfig:
        """Return the run of a setting, with the first seed; whatever is wrong with it shows here."""
        given = REDUCED.get(self.preset, {}) | self._general(options)
        config = compose(self.preset, self.recipe, given | options)
        # A setting that only repeats what the recipe says is the recipe: its runs are those of other commands.
        same = {key: value for key, value in options.items() if not changes_recipe(key)}
        plain = compose(self.preset, self.recipe, given | same)
        return plain if _resolved(plain) == _resolved(config) else config

    def _method(self, options: dict[str, Any]) -> str:
        return options.get("method.name", "dualprompt")

    def _general(self, options: dict[str, Any]) -> dict[str, Any]:
        """Return the user's overrides that fit the method of a setting."""
        known = METHODS[self._method(options)].Config.model_fields
        return {
            key: value
            for key, value in self.overrides.items()
            if not key.startswith("method.") or self._method(options) == "dualprompt" or key[7:] in known
        }

    def search(self, part: str, settings: Sequence[Setting]) -> list[Row]:
        """Run settings on images held out of the training images; the test images play no part."""
        if self.overrides.get("benchmark.evaluate_on", "validation") != "validation":
            raise DualPromptError("a study searches on validation images only; leave benchmark.evaluate_on out")
        asked = {key: value for key, value in HELD_OUT.items() if key not in self.overrides}
        return self._rows(part, settings, asked)

    def test(self, settings: Sequence[Setting]) -> list[Row]:
        """Run settings on the test images, trained on all training images."""
        all_images = {"benchmark.validation": 0.0, "benchmark.evaluate_on": "test"}
        return self._rows("test", settings, all_images)

    def _rows(self, part: str, settings: Sequence[Setting], split: dict[str, Any]) -> list[Row]:
        if self.seeds < 1:
            raise DualPromptError(f"--seeds must be at least 1, found {self.seeds}")
        configs = [self.config(setting.options | split) for setting in settings]
        # Seed after seed, so that settings share the images of one class order.
        every = [c.model_copy(update={"seed": c.seed + n}) for n in range(self.seeds) for c in configs]
        found = self.obtain(every)
        return [Row(part, setting, tuple(found[i :: len(settings)])) for i, setting in enumerate(settings)]


@dataclass(frozen=True)
class Study:
    """A study of the paper: one command away."""

    name: str
    title: str
    summary: str  # what the paper found, which is what the study looks for
    run: Callable[[Context], Outcome]
    seeds: int = 1  # unless the user says otherwise
    searches: bool = False  # whether a budget means something to it
    mini_budget: int | None = None  # for the embedded benchmark, unless the user says otherwise
    goes_on: bool = False  # a larger budget goes on with the same search


def _resolved(config: RunConfig) -> dict[str, Any]:
    """Return all that decides a run's result, whatever its recipe is called."""
    method = method_config(config.method).model_dump()
    return config.model_dump(exclude={"train": {"recipe"}}) | {"method": method}


def load(name: str) -> Study:
    """Return a study by its name."""
    if name not in STUDIES:
        raise DualPromptError(f"unknown study '{name}'; {nearest(name, STUDIES)}")
    return importlib.import_module(f"dualprompt.studies.{name.replace('-', '_')}").STUDY


def spread_out(values: Sequence[int], count: int | None, always: Sequence[int] = ()) -> list[int]:
    """Return at most `count` of ordered values: those of `always` that are there, the ends, and others in between."""
    if count is None or count >= len(values):
        return list(values)
    if count < 1:
        raise DualPromptError(f"--budget must be at least 1, found {count}")
    wanted = [value for value in (*always, values[-1], values[0]) if value in values]
    chosen = set(list(dict.fromkeys(wanted))[:count])
    while len(chosen) < count:  # the value that is farthest from all chosen ones comes next
        rest = [value for value in values if value not in chosen]
        chosen.add(max(rest, key=lambda value: min(abs(value - other) for other in chosen)))
    return sorted(chosen)
