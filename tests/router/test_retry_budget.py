"""How many retries the router may add."""

from twostroke.router.generate.retries import RetryBudget


def test_retries_are_a_share_of_the_traffic_beyond_the_floor():
    budget = RetryBudget(share=0.25, floor=2, clock=lambda: 0.0)
    assert [budget.take() for _ in range(3)] == [True, True, False]
    for _ in range(8):
        budget.count_first_attempt()
    assert [budget.take() for _ in range(3)] == [True, True, False]


def test_the_floor_comes_back_with_time_and_no_more():
    now = 0.0
    budget = RetryBudget(share=0.2, floor=2, clock=lambda: now)
    assert budget.take()
    assert budget.take()
    now = 5.0
    assert [budget.take() for _ in range(2)] == [True, False]
    now = 1000.0
    assert [budget.take() for _ in range(3)] == [True, True, False]


def test_what_is_saved_up_is_bounded():
    budget = RetryBudget(share=1.0, floor=2, clock=lambda: 0.0)
    for _ in range(1000):
        budget.count_first_attempt()
    assert sum(budget.take() for _ in range(1000)) == 20
