"""Stalls, and what they are charged to, on answers made up for it. Times in seconds."""

from tests.chaos.client import Answer, Choice
from tests.chaos.requests import ClientRequest
from tests.chaos.stalls import Normal, Window, normal_of, stalls_by_fault

NORMAL = {1: Normal(first_s=0.5, between_s=0.1)}


def answer(sent_at: float, *times: float) -> Answer:
    pieces = [(at, [3]) for at in times]
    return Answer(ClientRequest(1, {"n": 1}), sent_at, ended_at=times[-1], status=200, choices=[Choice(pieces)])


def test_what_is_usual_is_no_stall() -> None:
    kill = Window("kill", "kill decode", 10.0, 15.0)
    assert stalls_by_fault([answer(10.0, 10.5, 10.6)], NORMAL, [kill]) == {"kill decode": [0.0]}


def test_the_longest_wait_beyond_the_usual_counts_for_a_stream() -> None:
    kill = Window("kill", "kill decode", 10.0, 15.0)
    (stall,) = stalls_by_fault([answer(9.0, 9.4, 11.4, 11.9)], NORMAL, [kill])["kill decode"]
    assert round(stall, 6) == 1.4


def test_a_wait_counts_from_when_the_fault_struck() -> None:
    kill = Window("kill", "kill decode", 20.0, 21.0)
    (stall,) = stalls_by_fault([answer(9.0, 15.0, 20.25, 20.3)], NORMAL, [kill])["kill decode"]
    assert stall == 0.25
    assert stalls_by_fault([answer(9.0, 15.0)], NORMAL, [kill]) == {}


def test_a_wait_through_a_kill_and_a_stop_is_the_stops() -> None:
    windows = [Window("kill", "kill", 10.0, 15.0), Window("stop", "stop", 12.0, 14.0)]
    found = stalls_by_fault([answer(9.9, 10.0, 14.0, 14.5)], NORMAL, windows)
    assert round(found["stop"][0], 6) == 2.0
    assert round(found["kill"][0], 6) == 0.4


def test_normal_is_the_longest_wait_of_each_sort() -> None:
    assert normal_of([answer(0.0, 1.0, 1.5, 1.75), answer(5.0, 5.5, 6.25)]) == Normal(1.0, 0.75)
