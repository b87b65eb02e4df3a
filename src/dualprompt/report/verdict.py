"""Whether a difference is more than noise: the one rule by which studies and tables pass a verdict.

Over several seeds, a difference counts if the two-sided 95 % t-interval of its paired values excludes 0. On one seed it
counts if it is beyond two standard errors of the two accuracies, which are binomial shares of the images; these
errors are added as if the images were others, which is on the safe side. Seeds that all show the same difference are
one observation, as one seed is. Else it cannot be told.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from dualprompt.metrics import mean_and_deviation, variance

Word = Literal["holds", "does not hold", "cannot be told"]
RULE = (
    "a verdict needs a 95 % t-interval of the paired differences over seeds that excludes 0; on one seed, a difference "
    "beyond two standard errors of the accuracies"
)
ROUNDING = 1e-9  # sums in another order differ by less


@dataclass(frozen=True)
class Difference:
    """How much higher one number is than another, seed by seed, and how much of that may be noise."""

    mean: float
    deviation: float | None  # over seeds; None for one
    seeds: int
    margin: float | None  # a difference up to this may be noise; None: nobody knows

    @property
    def clear(self) -> bool:
        """Whether it is more than noise."""
        return self.margin is not None and abs(self.mean) > max(self.margin, ROUNDING)

    def beyond(self, level: float) -> Difference:
        """Return how far it is above a level that has no noise."""
        return replace(self, mean=self.mean - level)

    def in_words(self, unit: str = " points") -> str:
        """Return it in words, with its noise."""
        if self.seeds == 1:
            noise = "noise unknown" if self.margin is None else f"two standard errors: {self.margin:.2f}"
            return f"{self.mean:+.2f}{unit} on one seed ({noise})"
        interval = "the same on each, so its noise is unknown"
        if self.margin is not None:
            interval = f"95 % interval {self.mean - self.margin:+.2f} to {self.mean + self.margin:+.2f}"
        return f"{self.mean:+.2f} ± {self.deviation:.2f}{unit} over {self.seeds} seeds ({interval})"


def over_seeds(gaps: Sequence[float], one: float | None = None) -> Difference | None:
    """Return the difference that paired values over seeds show; `one` is the margin where there is a single seed."""
    if not gaps:
        return None
    mean, deviation = mean_and_deviation(gaps)
    if len(gaps) == 1:
        return Difference(mean, None, 1, one)
    from scipy.stats import t  # which takes a while to import

    margin = float(t.ppf(0.975, len(gaps) - 1)) * deviation / len(gaps) ** 0.5
    if deviation < ROUNDING:  # seeds that change nothing are one observation
        return Difference(mean, deviation, len(gaps), one)
    return Difference(mean, deviation, len(gaps), margin)


Results = Iterable[Mapping[str, Any]]


def paired(results: Results, others: Results, key: str = "average_accuracy") -> Difference | None:
    """Compare two lists of results over the seeds that both have; None if there is none.

    On one seed the noise of A is known, from the images evaluated; that of other metrics is not.
    """
    mine, theirs = ({result["seed"]: result for result in each} for each in (results, others))
    common = [seed for seed in mine if seed in theirs]
    gaps = [mine[seed][key] - theirs[seed][key] for seed in common]
    binomial = bool(common) and key == "average_accuracy"
    return over_seeds(gaps, _two_errors(mine[common[0]], theirs[common[0]]) if binomial else None)


def _two_errors(*results: Mapping[str, Any]) -> float | None:
    """Return two standard errors of the sum or difference of the A of results, from their numbers of images."""
    if not all(each["judged_images"] for each in results):
        return None
    return 2 * sum(variance(each["accuracy_matrix"], each["judged_images"]) for each in results) ** 0.5


def two_errors(result: Mapping[str, Any], tasks: int | None = None) -> float | None:
    """Return two standard errors of A after the first `tasks` tasks, or all; None where the images were not counted."""
    matrix, images = result["accuracy_matrix"], result["judged_images"]
    count = len(matrix) if tasks is None else tasks
    return _two_errors({"accuracy_matrix": matrix[:count], "judged_images": images and images[:count]})


def decide(difference: Difference | None, expected: float = 1.0) -> Word:
    """Say whether a difference has the expected sign, beyond noise."""
    if difference is None or not difference.clear:
        return "cannot be told"
    return "holds" if difference.mean * expected > 0 else "does not hold"


@dataclass(frozen=True)
class Verdict:
    """What was claimed, what was found, and whether the claim holds."""

    claim: str  # as "Pre-T beats Pro-T"
    word: Word
    difference: Difference | None
    found: str  # the difference in words
    paper: str = ""  # what the paper found, in numbers

    @property
    def sentence(self) -> str:
        """What study, report and docs say."""
        theirs = f"; the paper: {self.paper}" if self.paper else ""
        return f"That {self.claim} {self.word} here: {self.found}{theirs}."

    def plain(self) -> dict[str, Any]:
        """Return it as JSON keeps it."""
        return asdict(self) | {"sentence": self.sentence}


def verdict_on(
    claim: str,
    difference: Difference | None,
    expected: float = 1.0,
    *,
    paper: str = "",
    unit: str = " points",
    of: str = "",
) -> Verdict:
    """Pass a verdict on a claim that a difference has a sign; `of` says what the difference is of."""
    found = "there are no runs to compare" if difference is None else difference.in_words(unit) + (of and f" {of}")
    return Verdict(claim, decide(difference, expected), difference, found, paper)


def tally(verdicts: Sequence[Verdict]) -> str:
    """Return how many claims hold, do not hold and cannot be told."""
    count = {word: sum(each.word == word for each in verdicts) for word in ("holds", "does not hold", "cannot be told")}
    return f"{count['holds']} hold here, {count['does not hold']} do not, {count['cannot be told']} cannot be told"
