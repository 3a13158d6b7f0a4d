"""A run's verdict, on a log made up for it."""

import dataclasses

import pytest

from tests.chaos.client import Answer, Choice
from tests.chaos.faults import Injected
from tests.chaos.requests import ClientRequest
from tests.chaos.verdict import judge

REQUEST = ClientRequest(0, {"n": 1})
KILL = Injected("kill decode", "kill", 100.0, 104.0, "gone", back_s=4.0)
ROUTER_KILL = Injected("kill router", "load", 100.0, 104.0, "gone")


def answer(sent_at: float, *times: float, has_end: bool = True) -> Answer:
    choice = Choice([(at, [index]) for index, at in enumerate(times)], finish_reasons=["length"] if has_end else [])
    usage = {"completion_tokens": len(times)} if has_end else None
    error = None if has_end else "closed in the middle of the answer"
    return Answer(REQUEST, sent_at, times[-1], 200, None, [choice], usage, has_end, error)


EXPECTED = {0: answer(0.0, 0.25, 0.5)}
SOUND = answer(100.0, 100.25, 100.5)


def failures(
    *answers: Answer, faults: tuple[Injected, ...] = (KILL,), leaked_blocks: int = 0, deaths: int = 0
) -> list[str]:
    return judge(answers, EXPECTED, faults, minutes=0.04, leaked_blocks=leaked_blocks, deaths=deaths).failures


def test_a_sound_run_passes_and_tells_its_figures() -> None:
    verdict = judge([SOUND], EXPECTED, [KILL], minutes=0.04, leaked_blocks=0, deaths=0)
    assert verdict.failures == []
    assert verdict.summary["passed"]
    wanted = {"faults": 1, "lost": 0, "mismatched": 0, "duplicates": 0, "stall_p99_s": 0.0}
    assert wanted.items() <= verdict.summary.items()
    (row,) = verdict.rows
    assert (row.name, row.fired, row.stalls, row.back_s) == ("kill decode", 1, 1, 4.0)


def test_each_thing_that_falls_short_fails_the_run() -> None:
    lost = answer(100.0, 100.25, has_end=False)
    assert failures(SOUND, lost) == ["1 lost"]
    assert failures(dataclasses.replace(lost, status=503)) == ["1 lost"]
    assert failures(answer(100.0, 100.25, 103.0)) == ["stall P99 of kill faults is 2.5 s, over 2"]
    assert failures(SOUND, faults=(dataclasses.replace(KILL, back_s=11.0),)) == [
        "a replica came back after 11.0 s, over 10"
    ]
    late = dataclasses.replace(KILL, back_s=11.0)
    assert judge([SOUND], EXPECTED, [late], minutes=0.04, leaked_blocks=0, deaths=0, slack=2.0).failures == []
    assert failures(SOUND, faults=()) == ["only 0 faults have fired, of 0.92 to come"]
    assert failures(SOUND, leaked_blocks=3) == ["3 blocks are owned when idle"]
    assert failures(SOUND, deaths=1) == ["1 workers have ended without being killed"]
    assert failures(dataclasses.replace(SOUND, status=429, has_end=False)) == []


@pytest.mark.parametrize(("ended_at", "is_lost"), [(100.5, False), (99.5, True), (104.5, True)])
def test_what_breaks_with_a_killed_router_is_counted_apart_and_nothing_else(ended_at: float, is_lost: bool) -> None:
    broken = answer(99.0, ended_at, has_end=False)
    verdict = judge([broken], EXPECTED, (ROUTER_KILL,), minutes=0.04, leaked_blocks=0, deaths=0)
    assert (verdict.failures == ["1 lost"]) == is_lost
    assert verdict.summary["cut_by_router"] == int(not is_lost)
