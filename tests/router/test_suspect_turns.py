"""Who waits for whom."""

import asyncio
import time

from protocol.tickets import Peer
from router.suspect_turns import SuspectTurns
from router.suspects import Stay, Suspects, SuspectsConfig

P, D0, D1, D2 = (Peer(name, 1) for name in ("p", "d0", "d1", "d2"))


async def test_choices_whose_prefill_worker_died_before_their_kv_was_sent_go_on_one_after_the_other(a_request):
    suspects = Suspects(SuspectsConfig(pause_s=0.0), time.monotonic)
    turns = SuspectTurns(suspects, clock=time.monotonic, verdict_s=0.0, fate=lambda worker: True)
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
