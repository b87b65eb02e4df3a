"""The runs of one setting, one for each seed, and their numbers."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from dualprompt.config import BUFFER_SIZE
from dualprompt.methods.base import METHODS
from dualprompt.metrics import mean_and_deviation
from dualprompt.sweeps.obtained import Obtained

METRICS = (
    "average_accuracy", "forgetting", "matching_accuracy", "image_weighted_accuracy", "mean_over_steps",
    "area_under_curve", "last_accuracy",
)  # fmt: skip


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

    def numbers(self, key: str) -> list[float]:
        """Return a metric of every finished run that has it; forgetting says nothing of joint training."""
        if key == "forgetting" and self.obtained and METHODS[self.obtained[0].config.method["name"]].joint:
            return []
        return [result[key] for result in self.results if result.get(key) is not None]

    def metrics(self) -> dict[str, float | None]:
        """Return the mean of every metric, and its deviation as `…_std`, in full precision."""
        found = {key: mean_and_deviation(n) if (n := self.numbers(key)) else (None, None) for key in METRICS}
        return {name: value for key in METRICS for name, value in zip((key, f"{key}_std"), found[key], strict=True)}


def rehearses(method: str) -> bool:
    """Return whether a method keeps images."""
    return BUFFER_SIZE.removeprefix("method.") in METHODS[method].Config.model_fields
