"""The skew of experts' choices, from made-up counts."""

import math

import numpy as np
import pytest

from twostroke.worker.experts import EXPERT_MEMORY_S, ExpertLoad


class Counts:
    """Two layers of four experts, and one without; what was chosen before is nobody's."""

    def __init__(self) -> None:
        self.now = 100.0
        self.hits = np.array([[9, 0, 0, 0], [0, 0, 0, 0], [5, 5, 5, 5]])
        self.load = ExpertLoad(lambda: self.hits.copy(), lambda: self.now)

    def pass_by(self, seconds: float, first: list[int], last: list[int]) -> None:
        self.now += seconds
        self.hits[0] += first
        self.hits[2] += last


def test_the_hottest_experts_hits_over_the_mean_are_reported_of_each_layer() -> None:
    counts = Counts()
    assert counts.load.skews() == (0.0, 0.0, 0.0)
    counts.pass_by(1.0, [0, 30, 10, 0], [7, 7, 7, 7])
    assert counts.load.skews() == pytest.approx((3.0, 0.0, 1.0))
    assert counts.load.skews() == pytest.approx((3.0, 0.0, 1.0)), "however often it is asked for"


def test_old_hits_fade_and_leave_the_skew_as_it_was_while_nothing_is_computed() -> None:
    counts = Counts()
    counts.pass_by(1.0, [100, 0, 0, 0], [0, 0, 0, 100])
    counts.load.skews()
    counts.pass_by(EXPERT_MEMORY_S, [0, 0, 0, 0], [100, 100, 100, 0])
    left = 100 / math.e
    assert counts.load.skews() == pytest.approx((4.0, 0.0, 100 / ((300 + left) / 4)))
    counts.pass_by(1000 * EXPERT_MEMORY_S, [0, 0, 0, 0], [1, 1, 1, 1])
    assert counts.load.skews() == pytest.approx((0.0, 0.0, 1.0))
