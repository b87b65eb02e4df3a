"""The paper's metrics against matrices worked out by hand, and what must hold for every matrix."""

from __future__ import annotations

import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualprompt import metrics

# Task 1 is best after task 2 (85, not its diagonal 80); task 2 is best on its diagonal.
THREE = [
    [80.0],
    [85.0, 70.0],
    [60.0, 50.0, 90.0],
]
# Task 1: 90, 40, 95, 70 (best after task 3); task 2: 60, 80, 50 (best after task 3); task 3: 30, 75 (improves).
FOUR = [
    [90.0],
    [40.0, 60.0],
    [95.0, 80.0, 30.0],
    [70.0, 50.0, 75.0, 20.0],
]


def test_three_tasks_by_hand() -> None:
    assert metrics.average_accuracy(THREE) == pytest.approx((60 + 50 + 90) / 3)
    assert metrics.forgetting(THREE) == pytest.approx(((85 - 60) + (70 - 50)) / 2)
    assert metrics.backward_transfer(THREE) == pytest.approx(((60 - 80) + (50 - 70)) / 2)
    assert metrics.mean_over_steps(THREE) == pytest.approx((80 + 77.5 + 200 / 3) / 3)
    assert metrics.learning_accuracy(THREE) == pytest.approx((80 + 70 + 90) / 3)
    assert metrics.over_tasks(THREE) == {
        "average_accuracy": pytest.approx([80, 77.5, 200 / 3]),
        "forgetting": pytest.approx([0, 80 - 85, 22.5]),
    }


def test_four_tasks_by_hand() -> None:
    assert metrics.average_accuracy(FOUR) == pytest.approx(215 / 4)
    assert metrics.forgetting(FOUR) == pytest.approx(((95 - 70) + (80 - 50) + (30 - 75)) / 3)
    assert metrics.backward_transfer(FOUR) == pytest.approx(((70 - 90) + (50 - 60) + (75 - 30)) / 3)
    assert metrics.mean_over_steps(FOUR) == pytest.approx((90 + 50 + 205 / 3 + 215 / 4) / 4)
    assert metrics.learning_accuracy(FOUR) == pytest.approx((90 + 60 + 30 + 20) / 4)
    assert metrics.over_tasks(FOUR)["forgetting"] == pytest.approx([0, 50, ((90 - 95) + (60 - 80)) / 2, 10 / 3])


def test_one_task() -> None:
    assert metrics.average_accuracy([[42.0]]) == 42
    assert metrics.forgetting([[42.0]]) == 0
    assert metrics.backward_transfer([[42.0]]) == 0
    assert metrics.coda_forgetting([[42.0]]) == 0
    assert metrics.mean_over_steps([[42.0]]) == 42
    assert metrics.learning_accuracy([[42.0]]) == 42


def test_summary_and_the_rest() -> None:
    assert metrics.summarise(THREE, [100.0, 50.0, 30.0], [10, 30, 40]) == {
        "average_accuracy": pytest.approx(200 / 3),
        "forgetting": pytest.approx(22.5),
        "matching_accuracy": pytest.approx(60),
        "image_weighted_accuracy": pytest.approx((60 * 10 + 50 * 30 + 90 * 40) / 80),
        "mean_over_steps": pytest.approx(224.1666667 / 3),
        "backward_transfer": pytest.approx(-20),
        "coda_forgetting": pytest.approx(((80 - 85) + ((85 - 60) + (70 - 50)) / 2) / 2),
        "learning_accuracy": pytest.approx(80),
    }
    unknown = metrics.summarise(THREE, None)
    assert (unknown["matching_accuracy"], unknown["image_weighted_accuracy"]) == (None, None)
    assert metrics.mean_and_deviation([2.0, 4.0, 9.0]) == (pytest.approx(5), pytest.approx(13**0.5))
    assert metrics.mean_and_deviation([7.0]) == (7, 0)


def test_the_variance_of_an_accuracy_is_that_of_coin_tosses() -> None:
    # 50 of 100 right: p (1 − p) / n = 0.0025, a standard error of 5 points; where all are right, one more of each.
    assert metrics.variance([[50.0]], [100]) == pytest.approx(25)
    assert metrics.variance([[1.0], [50.0, 100.0]], [100, 7]) == pytest.approx((25 + 1e4 * 8 / 81 / 7) / 4)
    assert metrics.variance(THREE, [10, 30, 40]) == pytest.approx((60 * 40 / 10 + 50 * 50 / 30 + 90 * 10 / 40) / 9)
    tosses = [100 * sum(map(int, f"{draw:04b}")) / 4 for draw in range(16)]  # every outcome of four tosses
    assert metrics.variance([[50.0]], [4]) == pytest.approx(statistics.pvariance(tosses))


@pytest.mark.parametrize("wrong", [[], [[1.0, 2.0]], [[1.0], [2.0]], [[1.0], [2.0, 3.0], [4.0, 5.0, 6.0, 7.0]]])
def test_a_matrix_that_is_not_lower_triangular_is_refused(wrong: list[list[float]]) -> None:
    alone = (metrics.average_accuracy, metrics.forgetting, metrics.backward_transfer, metrics.learning_accuracy)
    for metric in (*alone, metrics.mean_over_steps, metrics.coda_forgetting):
        with pytest.raises(ValueError, match="accuracy matrix"):
            metric(wrong)
    for metric in (metrics.image_weighted_accuracy, metrics.variance):
        with pytest.raises(ValueError, match="accuracy matrix"):
            metric(wrong, [1] * (len(wrong[-1]) if wrong else 0))


@pytest.mark.parametrize("images", [[10, 30], [10, 30, 40, 50]])
def test_numbers_of_images_that_do_not_fit_the_tasks_are_refused(images: list[int]) -> None:
    for metric in (metrics.image_weighted_accuracy, metrics.variance):
        with pytest.raises((ValueError, TypeError)):
            metric(THREE, images)


@st.composite
def matrices(draw: st.DrawFn) -> list[list[float]]:
    tasks = draw(st.integers(1, 7))
    return [draw(st.lists(st.floats(0, 100), min_size=t, max_size=t)) for t in range(1, tasks + 1)]


@given(matrices())
def test_bounds(S: list[list[float]]) -> None:
    low, high = min(map(min, S)), max(map(max, S))
    for metric in (metrics.average_accuracy, metrics.mean_over_steps, metrics.learning_accuracy):
        assert low - 1e-9 <= metric(S) <= high + 1e-9
    assert abs(metrics.forgetting(S)) <= high - low + 1e-9
    assert abs(metrics.backward_transfer(S)) <= high - low + 1e-9
    assert metrics.forgetting(S) >= -metrics.backward_transfer(S) - 1e-9, (
        "the best earlier row is at least the diagonal"
    )


@given(matrices(), st.integers(1, 50))
def test_tasks_of_one_size_weigh_the_same(S: list[list[float]], size: int) -> None:
    same = metrics.image_weighted_accuracy(S, [size] * len(S))
    assert same == pytest.approx(metrics.average_accuracy(S), abs=1e-9)


@given(matrices())
def test_nothing_is_forgotten_when_nothing_drops(S: list[list[float]]) -> None:
    for t, row in enumerate(S[1:], start=1):
        row[:t] = S[t - 1]
    assert metrics.forgetting(S) == 0
    assert metrics.backward_transfer(S) == 0
    assert metrics.average_accuracy(S) == pytest.approx(metrics.learning_accuracy(S))


@given(matrices())
def test_forgetting_is_negative_backward_transfer_when_the_diagonal_is_best(S: list[list[float]]) -> None:
    for task in range(len(S)):
        S[task][task] = max(row[task] for row in S[task:])
    assert metrics.forgetting(S) == pytest.approx(-metrics.backward_transfer(S), abs=1e-9)


@given(matrices())
def test_curves_end_in_the_final_metrics(S: list[list[float]]) -> None:
    curves = metrics.over_tasks(S)
    assert curves["average_accuracy"][-1] == metrics.average_accuracy(S)
    assert curves["forgetting"][-1] == metrics.forgetting(S)
    assert statistics.fmean(curves["average_accuracy"]) == pytest.approx(metrics.mean_over_steps(S))


@given(matrices(), st.floats(-50, 50))
def test_a_shift_of_all_accuracies_moves_averages_and_not_differences(S: list[list[float]], shift: float) -> None:
    moved = [[value + shift for value in row] for row in S]
    assert metrics.average_accuracy(moved) == pytest.approx(metrics.average_accuracy(S) + shift, abs=1e-9)
    assert metrics.forgetting(moved) == pytest.approx(metrics.forgetting(S), abs=1e-9)
    assert metrics.backward_transfer(moved) == pytest.approx(metrics.backward_transfer(S), abs=1e-9)
    assert metrics.coda_forgetting(moved) == pytest.approx(metrics.coda_forgetting(S), abs=1e-9)


def codas_loops(y: list[list[float]]) -> float:
    """What utils/calc_forgetting.py of CODA-Prompt computes, for one trial: every pair of a step and an older task."""
    drops = 0.0
    for t in range(1, len(y)):
        for i in range(t):
            drops += (y[t - 1][i] - y[t][i]) / t
    return drops / (len(y) - 1)


def test_codas_forgetting_by_hand() -> None:
    # Steps of FOUR: 90 → 40; 40 → 95 and 60 → 80; 95 → 70, 80 → 50 and 30 → 75.
    assert metrics.coda_forgetting(FOUR) == pytest.approx((50 + (-55 - 20) / 2 + (25 + 30 - 45) / 3) / 3)


@given(matrices())
def test_codas_forgetting_is_that_of_its_code(S: list[list[float]]) -> None:
    if len(S) > 1:
        assert metrics.coda_forgetting(S) == pytest.approx(codas_loops(S), abs=1e-9)
    if len(S) == 2:
        assert metrics.coda_forgetting(S) == pytest.approx(metrics.forgetting(S), abs=1e-9)


def test_forward_transfer_by_hand() -> None:
    # 60 % right of 4 classes and 35 % of 5, before the task is learned: 35 and 15 above guessing.
    assert metrics.forward_transfer([60.0, 35.0], [4, 5]) == pytest.approx(25)
    assert metrics.forward_transfer([60.0, None], [4, 5]) is None
    assert metrics.forward_transfer([], []) is None


def test_calibration_by_hand() -> None:
    # Four bins. Edges belong below: 0.25 to the first, 0.75 to the third. The second is empty.
    probability = np.array([0.2, 0.25, 0.75, 0.6, 0.9, 1.0])
    right = np.array([False, True, True, False, True, True])
    bins = metrics.reliability(probability, right, bins=4)
    assert bins["images"] == [2, 0, 2, 2]
    assert bins["confidence"] == pytest.approx([22.5, 0, 67.5, 95])
    assert bins["accuracy"] == pytest.approx([50, 0, 50, 100])
    assert metrics.calibration_error(bins) == pytest.approx((2 * 27.5 + 2 * 17.5 + 2 * 5) / 6)


def test_a_method_that_says_what_is_so_is_calibrated() -> None:
    """Answers of probability 0.8 of which 8 in 10 are right have no error; all of them wrong, one of 80."""
    sure = np.full(10, 0.8)
    assert metrics.calibration_error(metrics.reliability(sure, np.arange(10) < 8)) == pytest.approx(0)
    assert metrics.calibration_error(metrics.reliability(sure, np.zeros(10, bool))) == pytest.approx(80)
    assert len(metrics.reliability(sure, np.zeros(10, bool))["images"]) == 15


def test_auroc_by_hand() -> None:
    known, unknown = np.array([0.9, 0.5, 0.5]), np.array([0.5, 0.1])
    # Six pairs: 0.9 beats both, each 0.5 beats 0.1 and ties with 0.5.
    assert metrics.auroc(known, unknown) == pytest.approx(100 * (2 + 1.5 + 1.5) / 6)
    assert metrics.auroc(unknown, known) == pytest.approx(100 - 100 * 5 / 6)
    assert metrics.auroc(np.ones(3), np.zeros(2)) == 100


@given(
    st.lists(st.integers(0, 4), min_size=1, max_size=20),
    st.lists(st.integers(0, 4), min_size=1, max_size=20),
)
def test_auroc_is_the_share_of_pairs(known: list[int], unknown: list[int]) -> None:
    pairs = [(a > b) + (a == b) / 2 for a in known for b in unknown]
    assert metrics.auroc(np.array(known) / 4, np.array(unknown) / 4) == pytest.approx(100 * statistics.fmean(pairs))
