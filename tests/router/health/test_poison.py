"""Who is suspected of a worker's death, who waits for whom, who is guilty, and who is let go."""

import asyncio

import pytest
from msgspec.structs import replace

from twostroke.protocol.requests import Peer, ScoringParams
from twostroke.protocol.verdicts import Verdict
from twostroke.router.health.poison import PoisonRequest, Stay, Suspects, SuspectsConfig, fingerprint_of

P, D0, D1, D2 = (Peer(name, 1) for name in ("p", "d0", "d1", "d2"))


class Scene:
    """Suspects whose clock goes on by a second with every death. `told` has what other routers are told."""

    def __init__(self, a_request, **config):
        self.now = 0.0
        self.told: list[tuple[Verdict, ...]] = []
        self.fates = dict.fromkeys((P, D0, D1, D2), True)
        self.suspects = Suspects(
            SuspectsConfig(**config), lambda: self.now, is_gone=self.fates.__getitem__, tell=self.told.append
        )
        self._a_request = a_request

    def case(self, name: int):
        return self.suspects.open(self._a_request(token_ids=(name,), num_prompt_tokens=1))

    def dies(self, worker: Peer, **stays: tuple) -> None:
        """With these cases there."""
        for case, stay in stays.values():
            self.suspects.stay(case, worker, stay)
        self.suspects.died(worker)
        self.now += 1.0

    async def convict(self, case) -> None:
        for worker in (D0, D1):
            self.dies(worker, case=(case, Stay.FRESH))
        with pytest.raises(PoisonRequest):
            await self.suspects.judge(case)

    def tries(self, case, *workers: Peer) -> asyncio.Task[None]:
        return asyncio.create_task(self.suspects.may_try(case, workers))


async def turned():
    """All that can go on now has."""
    for _ in range(5):
        await asyncio.sleep(0)


@pytest.fixture
def scene(a_request):
    return Scene(a_request)


def test_who_got_no_token_is_suspected_and_who_streams_or_waits_for_its_kv_is_not(scene):
    fresh, streaming, waiting = (scene.case(i) for i in range(3))
    scene.dies(D0, a=(fresh, Stay.FRESH), b=(streaming, Stay.STREAMS), c=(waiting, Stay.AWAITS))
    assert [scene.suspects.is_suspect(case) for case in (fresh, streaming, waiting)] == [True, False, False]


def test_one_that_is_alone_at_a_second_death_is_guilty(scene):
    case = scene.case(1)
    scene.dies(D0, a=(case, Stay.FRESH))
    assert scene.suspects.accused_of(case) == ()
    scene.dies(D1, a=(case, Stay.FRESH))
    assert scene.suspects.accused_of(case) == (D0, D1)


def test_a_newcomer_beside_a_suspect_does_not_clear_it_and_is_not_accused(scene):
    case, newcomer = scene.case(1), scene.case(2)
    scene.dies(D0, a=(case, Stay.FRESH))
    scene.dies(D1, a=(case, Stay.FRESH), b=(newcomer, Stay.FRESH))
    assert scene.suspects.accused_of(case) == (D0, D1)
    assert scene.suspects.accused_of(newcomer) == ()


def test_two_suspects_at_one_death_are_both_tried_again(scene):
    one, two = scene.case(1), scene.case(2)
    for worker in (D0, D1):
        scene.dies(worker, a=(one, Stay.FRESH), b=(two, Stay.FRESH))
    assert scene.suspects.accused_of(one) == scene.suspects.accused_of(two) == ()
    scene.dies(D2, a=(two, Stay.FRESH))
    assert scene.suspects.accused_of(two) == (D1, D2)


def test_one_that_comes_to_a_worker_which_has_just_died_is_not_accused_of_that(scene):
    case, guilty = scene.case(1), scene.case(2)
    scene.dies(D0, a=(case, Stay.FRESH), b=(guilty, Stay.FRESH))
    scene.suspects.stay(guilty, D1, Stay.FRESH)
    scene.suspects.died(D1)
    scene.dies(D1, a=(case, Stay.FRESH))
    assert scene.suspects.accused_of(guilty) == (D0, D1)
    assert scene.suspects.accused_of(case) == ()


def test_a_token_of_its_own_clears_a_suspect(scene):
    case = scene.case(1)
    scene.dies(D0, a=(case, Stay.FRESH))
    scene.suspects.stay(case, D1, Stay.FRESH)
    scene.suspects.got_on(case, D1, 0)
    assert not scene.suspects.is_suspect(case)
    scene.dies(D2, a=(case, Stay.FRESH))
    assert scene.suspects.accused_of(case) == ()


def test_a_computed_prompt_clears_it_of_deaths_over_prompts_alone(scene):
    case = scene.case(1)
    scene.dies(D0, a=(case, Stay.FRESH))
    scene.suspects.prompt_done(case)
    assert not scene.suspects.is_suspect(case)
    scene.dies(D1, a=(case, Stay.FRESH))  # while it decoded
    scene.suspects.prompt_done(case)
    assert scene.suspects.is_suspect(case)


def test_a_stream_whose_next_worker_dies_at_once_was_only_moved(scene):
    case = scene.case(1)
    scene.suspects.stay(case, D0, Stay.STREAMS)
    scene.suspects.died(D0)
    scene.dies(D1, a=(case, Stay.FRESH))
    assert scene.suspects.accused_of(case) == ()


async def test_a_suspect_is_tried_where_no_other_is_and_those_of_one_fingerprint_one_after_the_other(scene):
    one, two, sibling, innocent = scene.case(1), scene.case(2), scene.case(1), scene.case(3)
    scene.dies(D0, a=(one, Stay.FRESH), b=(two, Stay.FRESH))
    scene.suspects.stay(innocent, D1, Stay.FRESH)
    async with asyncio.timeout(5):
        await scene.suspects.may_try(one, [D1])
        beside, elsewhere, again = scene.tries(two, D1), scene.tries(two, D2), scene.tries(sibling, P)
        await turned()
        assert (beside.done(), elsewhere.done(), again.done()) == (False, True, False)
        scene.suspects.leave(two, D2)
        scene.suspects.got_on(one, D1, 0)
        await asyncio.gather(beside, again)


async def test_one_that_waits_at_a_worker_until_it_may_be_tried_is_no_company_for_another(scene):
    tried, waiting = scene.case(1), scene.case(2)
    scene.suspects.stay(waiting, D0, Stay.FRESH)  # its KV is on its way
    scene.dies(P, a=(tried, Stay.FRESH), b=(waiting, Stay.FRESH))
    waiting.waits = True  # as its pause is longer
    await scene.suspects.may_try(tried, [D0])
    scene.suspects.stay(tried, D0, Stay.FRESH)
    scene.dies(D0)
    assert scene.suspects.accused_of(tried) == (P, D0)
    assert scene.suspects.accused_of(waiting) == ()


async def test_of_many_that_wait_for_a_worker_one_goes_on_when_the_one_before_has_left(scene):
    cases = [scene.case(number) for number in range(10)]
    scene.dies(D0, **{str(number): (case, Stay.FRESH) for number, case in enumerate(cases)})
    trying = [scene.tries(case, D1) for case in cases]
    for number, case in enumerate(cases):
        await turned()
        assert [one.done() for one in trying] == [one <= number for one in range(10)]
        scene.suspects.leave(case, D1)


async def test_choices_whose_prefill_worker_died_before_their_kv_was_sent_go_on_one_after_the_other(scene):
    read, also_read, reading = (scene.case(1) for _ in range(3))
    for case, decode in ((read, D0), (also_read, D1)):
        scene.suspects.stay(case, decode, Stay.FRESH)  # their KV is on its way
    scene.suspects.stay(reading, D2, Stay.AWAITS)
    scene.dies(P, reading=(reading, Stay.FRESH))
    tried: list[Peer] = []

    async def compute(case, decode):
        await scene.suspects.may_try(case, [decode])
        scene.suspects.stay(case, decode, Stay.FRESH)
        tried.append(decode)
        await asyncio.sleep(0)
        assert tried[-1] == decode, "no other suspect of its fingerprint is tried meanwhile"
        scene.suspects.leave(case, decode)

    async with asyncio.timeout(5):
        await asyncio.gather(compute(read, D0), compute(also_read, D1), compute(reading, D2))
    assert set(tried) == {D0, D1, D2}


async def test_a_client_that_leaves_while_its_suspect_waits_holds_nobody_up(scene):
    one, two, three = (scene.case(number) for number in range(3))
    scene.dies(D0, a=(one, Stay.FRESH), b=(two, Stay.FRESH), c=(three, Stay.FRESH))
    first, left, last = (scene.tries(case, D1) for case in (one, two, three))
    await turned()
    left.cancel()
    await turned()
    scene.suspects.leave(one, D1)
    async with asyncio.timeout(5):
        await asyncio.gather(first, last)


async def test_suspects_of_several_routers_are_tried_at_different_times(a_request):
    scene = Scene(a_request, pause_s=0.1)
    pauses = set()
    for name in range(8):
        case = scene.case(name)
        scene.dies(D0, case=(case, Stay.FRESH))
        pauses.add(scene.suspects._paused_until(case) - (scene.now - 1.0))
        scene.now += 1.0
    assert 0.1 <= min(pauses) < max(pauses) <= 0.5
    assert len(pauses) >= 6, "each fingerprint has its own"


async def test_workers_that_live_after_all_prove_nothing(scene):
    case = scene.case(1)
    for worker in (D0, D1):
        scene.dies(worker, case=(case, Stay.FRESH))
        scene.fates[worker] = False
    await scene.suspects.judge(case)
    assert scene.suspects.accused_of(case) == ()
    assert not scene.suspects.is_suspect(case)


async def test_the_guilty_are_refused_for_a_while_and_other_routers_are_told(scene):
    case = scene.case(1)
    await scene.convict(case)
    assert scene.told == [(Verdict(case.fingerprint, 600.0),)]
    with pytest.raises(PoisonRequest) as caught:
        scene.case(1)
    assert (caught.value.status, caught.value.code) == (422, "poison_request")
    scene.case(2)
    scene.now += 100.0
    assert scene.suspects.verdicts() == (Verdict(case.fingerprint, 500.0),)
    scene.now += 501.0
    scene.case(1)


async def test_a_suspect_that_waits_is_refused_when_another_router_has_found_it_guilty(scene):
    tried, waiting = scene.case(1), scene.case(1)
    scene.dies(D0, a=(tried, Stay.FRESH), b=(waiting, Stay.FRESH))
    await scene.suspects.may_try(tried, [D1])
    trying = scene.tries(waiting, D2)
    await turned()
    assert not trying.done()
    scene.suspects.hear([Verdict(waiting.fingerprint, 600.0)])
    async with asyncio.timeout(5):
        with pytest.raises(PoisonRequest):
            await trying


def test_what_another_router_has_found_guilty_is_refused_here_too_and_suspected_no_more(scene):
    case, other = scene.case(1), scene.case(2)
    scene.dies(D0, a=(case, Stay.FRESH), b=(other, Stay.FRESH))
    scene.suspects.hear([Verdict(case.fingerprint, 300.0)])
    with pytest.raises(PoisonRequest):
        scene.suspects.check(case)
    assert not scene.suspects.is_suspect(case)
    assert scene.suspects.is_suspect(other)
    scene.suspects.check(other)
    scene.now += 301.0
    scene.suspects.check(case)


def test_other_routers_verdicts_hold_no_longer_than_its_own_would_and_only_so_many(a_request):
    scene = Scene(a_request, refuse_s=60.0, max_refused=2)
    scene.suspects.hear([Verdict(scene.case(name).fingerprint, 600.0) for name in range(3)])
    scene.case(0)
    for name in (1, 2):
        with pytest.raises(PoisonRequest):
            scene.case(name)
    scene.now = 61.0
    scene.case(1)


def test_old_deaths_are_forgotten(scene):
    case, other = scene.case(1), scene.case(2)
    scene.dies(D0, a=(case, Stay.FRESH))
    scene.now += 200.0
    scene.dies(D1, a=(other, Stay.FRESH))
    assert not scene.suspects.is_suspect(case)
    assert scene.suspects.num_suspects == 1


def test_seed_and_length_make_no_other_request_and_all_else_does(a_request):
    one = a_request()
    same = [a_request(sampling=replace(one.sampling, seed=1)), a_request(max_tokens=1), a_request(request_id="x")]
    others = [
        a_request(token_ids=(1,)),
        a_request(sampling=replace(one.sampling, top_k=3)),
        a_request(stop_token_ids=(5,)),
        a_request(cache_salt=b"a tenant's"),
        a_request(grammar="start: /a+/"),
        a_request(reading=ScoringParams(logprobs=1)),
        a_request(reading=ScoringParams(pooling="last")),
    ]
    assert {fingerprint_of(each) for each in same} == {fingerprint_of(one)}
    assert len({fingerprint_of(each) for each in (one, *others)}) == 8
