"""Who waits for whom."""

import asyncio
import time

import pytest

from twostroke.protocol.requests import Peer
from twostroke.protocol.verdicts import Verdict
from twostroke.router.health.suspect_turns import OtherRouters, SuspectTurns
from twostroke.router.health.suspects import PoisonRequest, Stay, Suspects, SuspectsConfig

P, D0, D1, D2 = (Peer(name, 1) for name in ("p", "d0", "d1", "d2"))


async def at_once(worker):
    """There is no other router."""


def turns_of(suspects, take_turn=at_once, end_turn=lambda worker: None, tell=lambda verdicts: None):
    others = OtherRouters(take_turn, end_turn, tell)
    return SuspectTurns(suspects, clock=time.monotonic, verdict_s=0.0, fate=lambda worker: True, others=others)


async def test_choices_whose_prefill_worker_died_before_their_kv_was_sent_go_on_one_after_the_other(a_request):
    suspects = Suspects(SuspectsConfig(pause_s=0.0), time.monotonic)
    turns = turns_of(suspects)
    read, also_read, reading = (suspects.open(a_request()) for _ in range(3))
    for case, decode in ((read, D0), (also_read, D1)):
        suspects.stay(case, decode, Stay.FRESH)  # their KV is on its way
    suspects.stay(reading, P, Stay.FRESH)
    suspects.stay(reading, D2, Stay.AWAITS)
    suspects.died(P)

    tried: list[Peer] = []

    async def compute(case, decode):
        await turns.take(case, [decode])
        suspects.stay(case, decode, Stay.FRESH)
        tried.append(decode)
        assert [other for other in (read, also_read, reading) if other is not case and suspects.is_suspect(other)]
        await asyncio.sleep(0)
        assert tried[-1] == decode, "no other suspect of its fingerprint is tried meanwhile"
        suspects.leave(case, decode)
        turns.changed()

    async with asyncio.timeout(5):
        await asyncio.gather(compute(read, D0), compute(also_read, D1), compute(reading, D2))
    assert set(tried) == {D0, D1, D2}


async def test_a_suspect_that_waits_for_its_turn_is_refused_when_another_router_has_found_it_guilty(a_request):
    suspects = Suspects(SuspectsConfig(pause_s=0.0), time.monotonic)
    turns = turns_of(suspects)
    tried, waiting = suspects.open(a_request()), suspects.open(a_request())
    for case in (tried, waiting):
        suspects.stay(case, D0, Stay.FRESH)
    suspects.died(D0)
    await turns.take(tried, [D1])
    taking = asyncio.create_task(turns.take(waiting, [D2]))
    await asyncio.sleep(0)
    assert not taking.done()
    suspects.hear([Verdict(waiting.fingerprint, 600.0)])
    turns.changed()
    async with asyncio.timeout(5):
        with pytest.raises(PoisonRequest):
            await taking


async def test_whoever_finds_a_request_guilty_has_the_others_told(a_request):
    told: list[tuple[Verdict, ...]] = []
    suspects = Suspects(SuspectsConfig(pause_s=0.0), time.monotonic)
    turns = turns_of(suspects, tell=told.append)
    case = suspects.open(a_request())
    for worker in (D0, D1):
        assert told == []
        suspects.stay(case, worker, Stay.FRESH)
        suspects.died(worker)
    with pytest.raises(PoisonRequest):
        await turns.judge(case)
    assert told == [(Verdict(case.fingerprint, 600.0),)]


class Workers:
    """What they are asked by this router, and when they give it its turn."""

    def __init__(self):
        self.asked: list[Peer] = []
        self.ended: list[Peer] = []
        self.given = {worker: asyncio.Event() for worker in (P, D0, D1, D2)}

    async def take_turn(self, worker):
        self.asked.append(worker)
        await self.given[worker].wait()


@pytest.fixture
def workers():
    return Workers()


def suspect_of(suspects, request):
    case = suspects.open(request)
    suspects.stay(case, D0, Stay.FRESH)
    suspects.died(D0)
    return case


async def turned():
    """All that can go on now has."""
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_suspect_takes_its_workers_turns_one_after_the_other_and_ends_them_as_it_gets_on(a_request, workers):
    suspects = Suspects(SuspectsConfig(pause_s=0.0), time.monotonic)
    turns = turns_of(suspects, workers.take_turn, workers.ended.append)
    case, sibling = suspect_of(suspects, a_request()), suspects.open(a_request())
    suspects.stay(sibling, P, Stay.AWAITS)
    taking = asyncio.create_task(turns.take(case, [P, D1]))
    await turned()
    assert workers.asked == [D1], "in the same order at every router, whatever a path's is"
    workers.given[D1].set()
    await turned()
    assert workers.asked == [D1, P]
    assert not taking.done()
    turns.changed()
    assert workers.ended == []
    workers.given[P].set()
    await taking
    suspects.stay(case, P, Stay.FRESH)
    suspects.leave(case, P)
    turns.changed()
    assert workers.ended == [P], "its sibling there has nothing computed"
    suspects.stay(case, D1, Stay.FRESH)
    suspects.got_on(case, D1, 0)
    turns.changed()
    assert workers.ended == [P, D1]


async def test_who_is_no_suspect_waits_for_nobody(a_request, workers):
    suspects = Suspects(SuspectsConfig(), time.monotonic)
    turns = turns_of(suspects, workers.take_turn, workers.ended.append)
    await turns.take(suspects.open(a_request()), [P, D1])
    assert workers.asked == []


async def test_a_client_that_leaves_while_its_suspect_waits_gives_up_the_turns(a_request, workers):
    suspects = Suspects(SuspectsConfig(pause_s=0.0), time.monotonic)
    turns = turns_of(suspects, workers.take_turn, workers.ended.append)
    case = suspect_of(suspects, a_request())
    taking = asyncio.create_task(turns.take(case, [D1, D2]))
    workers.given[D1].set()
    await turned()
    assert workers.asked == [D1, D2]
    taking.cancel()
    await asyncio.gather(taking, return_exceptions=True)
    for worker in (D1, D2):
        suspects.leave(case, worker)
    turns.changed()
    assert workers.ended == [D1, D2]


async def test_a_suspect_that_waits_for_others_here_holds_up_no_other_router(a_request, workers):
    suspects = Suspects(SuspectsConfig(pause_s=0.0), time.monotonic)
    turns = turns_of(suspects, workers.take_turn, workers.ended.append)
    for event in workers.given.values():
        event.set()
    case = suspect_of(suspects, a_request())
    await turns.take(case, [D1])
    sibling = suspects.open(a_request())
    suspects.stay(sibling, D2, Stay.FRESH)
    again = asyncio.create_task(turns.take(case, [D1]))
    await turned()
    assert workers.ended == [D1]
    suspects.leave(sibling, D2)
    turns.changed()
    await again
    assert workers.asked == [D1, D1]


async def test_a_verdict_that_comes_while_a_suspect_waits_for_another_router_refuses_it(a_request, workers):
    suspects = Suspects(SuspectsConfig(pause_s=0.0), time.monotonic)
    turns = turns_of(suspects, workers.take_turn, workers.ended.append)
    case = suspect_of(suspects, a_request())
    taking = asyncio.create_task(turns.take(case, [D1]))
    await turned()
    suspects.hear([Verdict(case.fingerprint, 600.0)])
    turns.changed()
    assert workers.ended == [D1]
    workers.given[D1].set()  # as a channel does whose turn is given up
    with pytest.raises(PoisonRequest):
        await taking


async def test_of_many_that_wait_for_a_worker_one_is_woken_when_its_turn_has_come(a_request, monkeypatch):
    suspects = Suspects(SuspectsConfig(pause_s=0.0), time.monotonic)
    turns = turns_of(suspects)
    cases = [suspects.open(a_request(token_ids=(number,), num_prompt_tokens=1)) for number in range(10)]
    for case in cases:
        suspects.stay(case, D0, Stay.FRESH)
    suspects.died(D0)
    looked = []
    may_try = suspects.may_try
    monkeypatch.setattr(suspects, "may_try", lambda case, workers: looked.append(case) or may_try(case, workers))
    taking = [asyncio.create_task(turns.take(case, [D1])) for case in cases]
    await turned()
    assert looked == cases
    for _ in range(5):  # others get on
        turns.changed()
        await turned()
    assert looked == cases
    for number, (case, task) in enumerate(zip(cases, taking, strict=True)):
        assert [one.done() for one in taking] == [one <= number for one in range(10)]
        await task
        suspects.leave(case, D1)
        turns.changed()
        await turned()
    assert looked == [*cases, *cases[1:]]
