"""Who waits for whom."""

import asyncio
import time

import pytest

from protocol.tickets import Peer
from protocol.verdicts import Verdict
from router.suspect_turns import SuspectTurns
from router.suspects import PoisonRequest, Stay, Suspects, SuspectsConfig

P, D0, D1, D2 = (Peer(name, 1) for name in ("p", "d0", "d1", "d2"))


async def test_choices_whose_prefill_worker_died_before_their_kv_was_sent_go_on_one_after_the_other(a_request):
    suspects = Suspects(SuspectsConfig(pause_s=0.0), time.monotonic)
    turns = SuspectTurns(
        suspects, clock=time.monotonic, verdict_s=0.0, fate=lambda worker: True, tell=lambda verdicts: None
    )
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
    turns = SuspectTurns(
        suspects, clock=time.monotonic, verdict_s=0.0, fate=lambda worker: True, tell=lambda verdicts: None
    )
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
    turns = SuspectTurns(suspects, clock=time.monotonic, verdict_s=0.0, fate=lambda worker: True, tell=told.append)
    case = suspects.open(a_request())
    for worker in (D0, D1):
        assert told == []
        suspects.stay(case, worker, Stay.FRESH)
        suspects.died(worker)
    with pytest.raises(PoisonRequest):
        await turns.judge(case)
    assert told == [(Verdict(case.fingerprint, 600.0),)]
