"""How a request gives way: by setting, by room, by cost."""

import pytest

from twostroke.decode_worker.preemption import PreemptionPolicy, Rate


@pytest.mark.parametrize(
    ("mode", "num_tokens", "free", "expected"),
    [
        ("recompute", 100, 50, False),
        ("swap", 100, 50, True),
        ("swap", 100, 10, True),
        ("swap", 100, 9, False),
        ("swap", 0, 50, False),
        ("auto", 100, 9, False),
    ],
)
def test_a_request_is_swapped_where_that_is_wanted_and_host_memory_has_room(
    mode: str, num_tokens: int, free: int, expected: bool
):
    policy = PreemptionPolicy(mode, block_bytes=1000)  # type: ignore[arg-type]
    assert policy.should_swap(num_tokens, 10, free) is expected


@pytest.mark.parametrize(
    ("computing", "copying", "expected"),
    [
        (Rate(), Rate(), False),  # nothing is known: computing it makes that known
        (Rate(), Rate(1e6, 1.0), False),
        (Rate(1000, 1.0), Rate(), True),  # and so does copying
        (Rate(1000, 1.0), Rate(3e5, 1.0), True),  # 0.1 s against 2 x 10 blocks x 1000 bytes / 3e5 = 0.067 s
        (Rate(1000, 1.0), Rate(1e5, 1.0), False),  # 0.2 s
        (Rate(2000, 1.0), Rate(3e5, 1.0), False),  # 0.05 s
    ],
)
def test_auto_takes_what_costs_less(computing: Rate, copying: Rate, expected: bool):
    policy = PreemptionPolicy("auto", block_bytes=1000)
    policy.computing, policy.copying = computing, copying
    assert policy.should_swap(100, 10, 50) is expected


def test_a_rate_is_that_of_all_that_was_counted():
    rate = Rate()
    assert rate.time_for(5) is None
    rate.count(10, 1.0)
    rate.count(30, 1.0)
    assert rate.time_for(5) == 0.25
