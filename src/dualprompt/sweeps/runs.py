"""The runs of one setting, one for each seed, and their numbers."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from dualprompt.config import BUFFER_SIZE
from dualprompt.methods.base import METHODS
from dualprompt.metrics import mean_and_deviation
from dualprompt.report.columns import MEASURES, Measure
from dualprompt.sweeps.obtained import Obtained


class OverSeeds:
    """What rows of tables have in common: runs that differ in their seed alone."""

    obtained: tuple[Obtained, ...]

    @property
    def finished(self) -> list[Obtained]:
        """The runs that have a result."""
        return [each for each in self.obtained if not each.error]

    @cached_property
    def results(self) -> list[dict[str, Any]]:
        """The numbers of the runs that have not failed."""
        return [each.run.result() for each in self.finished]

    @property
    def joint(self) -> bool:
        """Whether all tasks are learned at once."""
        return bool(self.obtained) and METHODS[self.obtained[0].config.method["name"]].joint

    def numbers(self, key: str) -> list[float]:
        """Return a metric of every finished run that has it; forgetting says nothing of joint training."""
        if key == "forgetting" and self.joint:
            return []
        return [result[key] for result in self.results if result.get(key) is not None]

    def measured(self, measure: Measure) -> list[float]:
        """Return a number of every finished run that has it; what old tasks have says nothing of joint training."""
        if measure.of_old_tasks and self.joint:
            return []
        return [value for result in self.results if (value := measure.of(result)) is not None]

    def metrics(self) -> dict[str, float | None]:
        """Return the mean of every number and its deviation as `…_std`, None for one seed, in full precision."""
        found: dict[str, float | None] = {}
        for each in MEASURES:
            numbers = self.measured(each)
            mean, deviation = mean_and_deviation(numbers) if numbers else (None, None)
            found |= {each.key: mean, f"{each.key}_std": deviation if len(numbers) > 1 else None}
        return found


def rehearses(method: str) -> bool:
    """Return whether a method keeps images."""
    return BUFFER_SIZE.removeprefix("method.") in METHODS[method].Config.model_fields
