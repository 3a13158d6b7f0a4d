"""When to try again, and when to stop."""

from twostroke.kvtransfer.retry import MAX_ATTEMPTS, LinkBudget, needs_other_link


def test_the_last_attempt_alone_needs_another_link() -> None:
    assert [needs_other_link(attempt) for attempt in range(MAX_ATTEMPTS)] == [False, False, True]


def test_a_budget_is_spent_and_comes_back_with_time() -> None:
    now = 0.0
    budget = LinkBudget(lambda: now, 2, 10.0)
    assert budget.ask()
    now = 6.0
    assert budget.ask()
    assert not budget.ask()
    now = 10.0
    assert budget.ask(), "the first one is forgotten"
    assert not budget.ask()
    now = 16.0
    assert budget.ask()
