"""Suspects of a worker's death: which wait for others, and which are blocked."""

import asyncio

import pytest
from msgspec.structs import replace

from twostroke.protocol.requests import BlockedRequest, BlockedRequests, Peer, ScoringParams, fingerprint_of
from twostroke.router.worker_health import PoisonRequest, Suspects, SuspectsConfig

P, D0, D1, D2 = (Peer(name, 1) for name in ("p", "d0", "d1", "d2"))


class Scene:
    """Suspects whose clock goes on by a second with every death. `told` has what other routers are told."""

    def __init__(self, a_request, **config):
        self.now = 0.0
        self.told: list[tuple[BlockedRequest, ...]] = []
        self.gone = dict.fromkeys((P, D0, D1, D2), True)
        config = SuspectsConfig(**config)
        self.blocked = BlockedRequests(lambda: self.now, most=config.max_refused, longest_s=config.refuse_s)
        self.suspects = Suspects(
            config, lambda: self.now, blocked=self.blocked, is_gone=self.gone.__getitem__, tell=self.told.append
        )
        self._a_request = a_request

    def request(self, name: int):
        return self.suspects.open(self._a_request(token_ids=(name,), num_prompt_tokens=1))

    def dies(self, worker: Peer, *running) -> None:
        for request in running:
            self.suspects.run(request, worker)
        self.suspects.died(worker)
        self.now += 1.0

    def suspected(self, *requests) -> list[bool]:
        return [self.suspects.is_suspect(request) for request in requests]

    def turn(self, request, *workers: Peer) -> asyncio.Task[None]:
        return asyncio.create_task(self.suspects.await_exclusive_try(request, workers))


async def turned():
    """All that can go on now has."""
    for _ in range(5):
        await asyncio.sleep(0)


@pytest.fixture
def scene(a_request):
    return Scene(a_request)


def test_a_death_makes_suspects_of_the_requests_that_ran_there_without_a_token(scene):
    fresh, streaming, elsewhere = (scene.request(number) for number in range(3))
    scene.suspects.run(streaming, D0)
    scene.suspects.leave(streaming, D0)
    scene.suspects.run(elsewhere, D1)
    scene.dies(D0, fresh)
    assert scene.suspected(fresh, streaming, elsewhere) == [True, False, False]


def test_the_only_suspect_at_a_second_death_has_killed_both(scene):
    request = scene.request(1)
    scene.dies(D0, request)
    assert scene.suspects.killed_by(request) == ()
    scene.dies(D1, request)
    assert scene.suspects.killed_by(request) == (D0, D1)


def test_a_newcomer_beside_a_suspect_does_not_clear_it_and_is_innocent(scene):
    request, newcomer = scene.request(1), scene.request(2)
    scene.dies(D0, request)
    scene.dies(D1, request, newcomer)
    assert scene.suspects.killed_by(request) == (D0, D1)
    assert scene.suspects.killed_by(newcomer) == ()


def test_of_two_suspects_at_one_death_none_is_blocked(scene):
    one, two = scene.request(1), scene.request(2)
    for worker in (D0, D1):
        scene.dies(worker, one, two)
    assert scene.suspects.killed_by(one) == scene.suspects.killed_by(two) == ()
    scene.dies(D2, two)
    assert scene.suspects.killed_by(two) == (D1, D2)


def test_a_request_that_comes_to_a_worker_which_has_just_died_is_innocent(scene):
    request, guilty = scene.request(1), scene.request(2)
    scene.dies(D0, request, guilty)
    scene.suspects.run(guilty, D1)
    scene.suspects.died(D1)
    scene.dies(D1, request)
    assert scene.suspects.killed_by(guilty) == (D0, D1)
    assert scene.suspects.killed_by(request) == ()


def test_a_token_clears_a_suspect(scene):
    request = scene.request(1)
    scene.dies(D0, request)
    scene.suspects.clear(request)
    assert scene.suspected(request) == [False]
    scene.dies(D2, request)
    assert scene.suspects.killed_by(request) == ()


async def test_suspects_are_tried_apart_and_those_of_one_fingerprint_one_after_the_other(scene):
    one, two, sibling = scene.request(1), scene.request(2), scene.request(1)
    scene.dies(D0, one, two)
    async with asyncio.timeout(5):
        await scene.suspects.await_exclusive_try(one, [D1])
        beside, elsewhere, again = scene.turn(two, D1), scene.turn(two, D2), scene.turn(sibling, P)
        await turned()
        assert (beside.done(), elsewhere.done(), again.done()) == (False, True, False)
        scene.suspects.clear(one)
        await asyncio.gather(beside, again)


async def test_of_many_that_wait_for_a_worker_one_goes_on_when_the_one_before_has_ended(scene):
    requests = [scene.request(number) for number in range(10)]
    scene.dies(D0, *requests)
    turns = [scene.turn(request, D1) for request in requests]
    for number, request in enumerate(requests):
        await turned()
        assert [one.done() for one in turns] == [one <= number for one in range(10)]
        scene.suspects.end_turn(request)


async def test_a_client_that_leaves_while_its_suspect_waits_holds_nobody_up(scene):
    one, two, three = (scene.request(number) for number in range(3))
    scene.dies(D0, one, two, three)
    first, left, last = (scene.turn(request, D1) for request in (one, two, three))
    await turned()
    left.cancel()
    await turned()
    scene.suspects.end_turn(one)
    async with asyncio.timeout(5):
        await asyncio.gather(first, last)


async def test_suspects_of_several_routers_are_tried_at_different_times(a_request):
    scene = Scene(a_request, pause_s=0.1)
    pauses = set()
    for name in range(8):
        request = scene.request(name)
        scene.dies(D0, request)
        pauses.add(scene.suspects._next_try_at(request) - (scene.now - 1.0))
        scene.now += 1.0
    assert 0.1 <= min(pauses) < max(pauses) <= 0.5
    assert len(pauses) >= 6, "each fingerprint has its own"


async def test_workers_that_live_after_all_prove_nothing(scene):
    request = scene.request(1)
    for worker in (D0, D1):
        scene.dies(worker, request)
        scene.gone[worker] = False
    await scene.suspects.judge(request)
    assert scene.suspected(request) == [False]


async def test_a_request_that_has_killed_two_workers_is_refused_for_a_while_and_other_routers_are_told(scene):
    request = scene.request(1)
    for worker in (D0, D1):
        scene.dies(worker, request)
    with pytest.raises(PoisonRequest):
        await scene.suspects.judge(request)
    assert scene.told == [(BlockedRequest(request.fingerprint, 600.0),)]
    with pytest.raises(PoisonRequest) as caught:
        scene.request(1)
    assert (caught.value.status, caught.value.code) == (422, "poison_request")
    scene.request(2)
    scene.now += 601.0
    scene.request(1)


async def test_a_suspect_that_waits_is_refused_when_another_router_has_blocked_it(scene):
    tried, waiting = scene.request(1), scene.request(1)
    scene.dies(D0, tried, waiting)
    await scene.suspects.await_exclusive_try(tried, [D1])
    turn = scene.turn(waiting, D2)
    await turned()
    scene.blocked.learn([BlockedRequest(waiting.fingerprint, 600.0)])
    scene.suspects.end_turn(tried)
    async with asyncio.timeout(5):
        with pytest.raises(PoisonRequest):
            await turn


def test_old_deaths_are_forgotten(scene):
    request, other = scene.request(1), scene.request(2)
    scene.dies(D0, request)
    scene.now += 200.0
    scene.dies(D1, other)
    assert scene.suspected(request, other) == [False, True]


def test_seed_and_length_make_no_other_request_and_all_else_does(a_request):
    one = a_request()
    same = [a_request(sampling=replace(one.sampling, seed=1)), a_request(max_tokens=1), a_request(request_id="x")]
    others = [
        a_request(token_ids=(1,)),
        a_request(sampling=replace(one.sampling, top_k=3)),
        a_request(stop_token_ids=(5,)),
        a_request(cache_salt=b"a tenant's"),
        a_request(grammar="start: /a+/"),
        a_request(scoring=ScoringParams(logprobs=1)),
        a_request(scoring=ScoringParams(pooling="last")),
    ]
    assert {fingerprint_of(each) for each in same} == {fingerprint_of(one)}
    assert len({fingerprint_of(each) for each in (one, *others)}) == 8
