"""The one rule of verdicts: against intervals by hand, and never more than the numbers allow."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualprompt.report.verdict import Difference, decide, over_seeds, paired, tally, verdict_on


def result(seed: int, accuracy: float, images: list[int] | None = None, forgetting: float = 0.0) -> dict[str, Any]:
    return {
        "seed": seed,
        "average_accuracy": accuracy,
        "forgetting": forgetting,
        "accuracy_matrix": [[accuracy]],
        "judged_images": images,
    }


def several(*accuracies: float) -> list[dict[str, Any]]:
    return [result(seed, accuracy, [100]) for seed, accuracy in enumerate(accuracies)]


def test_over_seeds_the_t_interval_of_the_paired_differences_decides() -> None:
    # Differences 1, 2, 3: mean 2, deviation 1; t of two degrees of freedom is 4.303, so ± 4.303 / √3 = 2.484.
    gap = paired(several(51, 62, 43), several(50, 60, 40))
    assert gap is not None
    assert (gap.mean, gap.deviation, gap.seeds) == (pytest.approx(2), pytest.approx(1), 3)
    assert gap.margin == pytest.approx(2.484, abs=1e-3)
    assert decide(gap) == "cannot be told"
    assert gap.in_words() == "+2.00 ± 1.00 points over 3 seeds (95 % interval -0.48 to +4.48)"
    # Differences 2, 3, 4, 3: mean 3, deviation 0.816; t of three degrees is 3.182, so ± 1.299.
    assert decide(paired(several(52, 63, 44, 13), several(50, 60, 40, 10))) == "holds"
    assert decide(paired(several(50, 60, 40, 10), several(52, 63, 44, 13))) == "does not hold"
    assert decide(paired(several(50, 60, 40, 10), several(52, 63, 44, 13)), expected=-1) == "holds"


def test_on_one_seed_two_binomial_errors_decide() -> None:
    # 50 of 100 right twice: standard errors of 5 points each, 7.07 together; two of them are 14.14.
    one, other = result(0, 50, [100]), result(0, 50, [100])
    assert decide(paired([one], [other])) == "cannot be told"
    near, far = (paired([result(0, a, [400])], [result(0, 50, [400])]) for a in (56.9, 57.5))
    assert near is not None
    assert near.margin == pytest.approx(2 * ((56.9 * 43.1 + 2500) / 400) ** 0.5)
    assert (decide(near), decide(far)) == ("cannot be told", "holds")
    assert near.in_words() == "+6.90 points on one seed (two standard errors: 7.04)"
    assert decide(paired([result(0, 90)], [result(0, 10)])) == "cannot be told"  # nobody knows of how many images
    forgotten = paired([result(0, 50, [400], 1.0)], [result(0, 50, [400], 60.0)], "forgetting")
    assert decide(forgotten) == "cannot be told"


def test_all_right_or_all_wrong_of_one_image_is_no_proof() -> None:
    def of(right: int) -> dict[str, Any]:
        rows = [[100.0 if task < right else 0.0 for task in range(step + 1)] for step in range(10)]
        return result(0, 10.0 * right) | {"accuracy_matrix": rows, "judged_images": [1] * 10}

    found = paired([of(6)], [of(5)])
    assert found is not None
    assert found.mean == 10
    assert found.margin is not None
    assert found.margin > 20
    assert not found.clear
    many = paired([of(6) | {"judged_images": [1000] * 10}], [of(5) | {"judged_images": [1000] * 10}])
    assert many is not None
    assert many.clear


def test_only_seeds_that_both_have_are_compared() -> None:
    gap = paired(several(51, 62, 43), several(50, 60))
    assert gap is not None
    assert (gap.mean, gap.seeds) == (1.5, 2)
    assert paired(several(51), []) is None
    assert paired([result(1, 50, [9])], [result(2, 50, [9])]) is None
    assert decide(None) == "cannot be told"


def test_equal_results_are_no_difference() -> None:
    same = several(52.7, 52.7, 52.7)
    assert decide(paired(same, same)) == "cannot be told"
    rounded = several(*(52.7 + 1e-13,) * 3)
    assert decide(paired(rounded, same)) == "cannot be told"
    # Seeds that change nothing are one observation, with the noise of the images judged.
    assert decide(paired(several(53.7, 53.7, 53.7), same)) == "cannot be told"
    assert decide(paired(several(97.0, 97.0, 97.0), same)) == "holds"
    # Of other metrics nobody knows that noise.
    forgetting = [[result(seed, 50, [400], f) for seed in range(3)] for f in (1.0, 60.0)]
    gap = paired(forgetting[0], forgetting[1], "forgetting")
    assert gap is not None
    assert (gap.mean, gap.deviation, gap.margin) == (-59, 0, None)
    assert decide(gap) == "cannot be told"
    assert "interval" not in gap.in_words()


def test_a_sentence_says_claim_verdict_and_numbers() -> None:
    clear, none = Difference(3, 0.1, 5, 0.2), Difference(0.1, 0.3, 5, 0.4)
    verdict = verdict_on("A beats B", clear, paper="+1.00")
    assert verdict.sentence == (
        "That A beats B holds here: +3.00 ± 0.10 points over 5 seeds (95 % interval +2.80 to +3.20); the paper: +1.00."
    )
    assert verdict_on("A beats B", none, of="on test images").sentence.endswith(
        "(95 % interval -0.30 to +0.50) on test images."
    )
    assert verdict_on("A beats B", None).sentence == "That A beats B cannot be told here: there are no runs to compare."
    assert verdict.plain()["sentence"] == verdict.sentence
    every = [verdict_on("", clear), verdict_on("", clear, -1), verdict_on("", none), verdict_on("", None)]
    assert tally(every) == "1 hold here, 1 do not, 2 cannot be told"


def test_a_level_moves_the_difference_and_not_its_noise() -> None:
    gap = Difference(0.75, 0.11, 3, 0.27)
    moved = gap.beyond(3.84)
    assert (moved.mean, moved.margin) == (pytest.approx(-3.09), 0.27)
    assert (decide(gap), decide(moved, -1)) == ("holds", "holds")


@given(st.lists(st.floats(-50, 50), min_size=2, max_size=6), st.floats(-10, 10))
def test_turning_a_claim_round_turns_the_verdict(gaps: list[float], shift: float) -> None:
    opposite = {"holds": "does not hold", "does not hold": "holds", "cannot be told": "cannot be told"}
    assert decide(over_seeds([-gap for gap in gaps])) == opposite[decide(over_seeds(gaps))]
    gap = over_seeds(gaps)
    assert gap is not None
    assert gap.beyond(shift).margin == gap.margin
    inside = gap.margin is not None and gap.mean - gap.margin <= 0 <= gap.mean + gap.margin
    assert not (inside and gap.clear)
