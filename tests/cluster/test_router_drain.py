"""What `twostroke serve --grace` waits for, cuts, and says."""

import asyncio

from tests.simulation.virtual_loop import run_virtually
from twostroke.cluster.deployments.router_drain import drain_routers


def drained(counts: list[int], *, grace_s: float = 10.0, notice_s: float = 0.0) -> tuple[list[str], list[str], float]:
    """(what the routers were asked, what people were told, seconds) where `counts` are under way from look to look."""
    asked: list[str] = []
    told: list[str] = []

    async def ask(method: str) -> int:
        asked.append(method)
        return counts.pop(0) if len(counts) > 1 else counts[0]

    async def script() -> float:
        loop = asyncio.get_running_loop()
        began = loop.time()
        await drain_routers(ask, grace_s, notice_s, told.append, loop.time)
        return loop.time() - began

    took_s = run_virtually(script())
    return asked, told, took_s


def test_idle_routers_end_at_once_and_nothing_is_said() -> None:
    asked, told, took_s = drained([0])
    assert ("cut" in asked, told, took_s) == (False, [], 0.0)


def test_load_balancers_get_their_time_to_notice() -> None:
    assert 3.0 <= drained([0], notice_s=3.0)[2] < 3.5


def test_answers_that_end_in_time_are_waited_for_and_not_cut() -> None:
    asked, told, took_s = drained([2, 2, 1, 0])
    assert told == ["Waiting up to 10 s for 2 answers under way ..."]
    assert "cut" not in asked
    assert took_s < 1.0


def test_answers_that_do_not_end_are_cut_shortly_before_the_end_and_counted() -> None:
    asked, told, took_s = drained([3, 1])
    assert told == [
        "Waiting up to 10 s for 3 answers under way ...",
        "Cut 1 answer that had not ended in time.",
    ]
    assert asked.count("cut") == 1
    assert 9.5 <= took_s <= 10.5


def test_a_server_whose_answers_are_cut_ends_when_their_clients_have_been_told() -> None:
    assert 9.4 <= drained([1] * 51 + [0])[2] <= 9.9
