"""Requests that take workers down, through the whole pipeline, with neighbours that must not suffer for it."""

import asyncio

import pytest

from tests.router.generate.reading_tokens import allow, collect, go_on
from twostroke.protocol.errors import RequestError, WorkerLeaving

POISON = (66, 6, 6)


def crash_on_poison(rig, *, position=0):
    """Every worker dies of drawing the poison's output token at `position`."""
    for worker in rig.fleet.all.values():
        worker.poison = lambda tokens: tuple(tokens[:3]) == POISON and len(tokens) == 3 + position


def the_dead(rig):
    return sorted(worker.name for worker in rig.fleet.all.values() if worker.dead)


async def refused(rig, request):
    async with asyncio.timeout(20):
        with pytest.raises(RequestError) as caught:
            await collect(rig, request)
    return caught.value.status, caught.value.code


@pytest.fixture
def poison(a_request):
    return lambda **changes: a_request(token_ids=POISON, num_prompt_tokens=3, **changes)


@pytest.mark.parametrize("num_prefill", [0, 2])
async def test_the_choices_of_one_prompt_are_one_suspect(site_of, num_prefill):
    async with site_of(num_prefill, 4) as site:
        crash_on_poison(site.rig)
        asked = {"model": "fake", "prompt": list(POISON), "n": 4, "max_tokens": 8, "temperature": 1.0}
        for _ in range(2):
            answer = await site.http.post("/v1/completions", json=asked)
            assert (answer.status_code, answer.json()["error"]["code"]) == (422, "poison_request")
        assert len(the_dead(site.rig)) == 2


@pytest.mark.parametrize(("num_prefill", "position", "num_killed"), [(1, 1, 2), (0, 1, 3), (0, 7, 3)])
async def test_a_later_token_kills_one_worker_more_where_the_first_had_given_a_token_of_its_own(
    fleet_of, poison, num_prefill, position, num_killed
):
    async with fleet_of(num_prefill, 4) as rig:
        crash_on_poison(rig, position=position)
        for worker in rig.fleet.all.values():
            if worker.role == "prefill":
                worker.poison = None
        assert await refused(rig, poison()) == (422, "poison_request")
        assert len(the_dead(rig)) == num_killed


async def test_a_request_whose_workers_are_killed_by_chance_is_served(fleet_of, a_request, expected, until):
    async with fleet_of(0, 3) as rig:
        for name in ("d0", "d1", "d2"):
            allow(rig[name], 0)
        requests = [a_request(token_ids=(i, 2, 3), num_prompt_tokens=3) for i in range(3)]
        answers = [asyncio.create_task(collect(rig, one)) for one in requests]
        await until(lambda: len(rig.fleet.owned) == 3)
        await asyncio.gather(rig["d0"].die(), rig["d1"].die())  # a machine with both
        for name in ("d0", "d1"):
            await rig[name].start()
            rig[name].gate = None
        go_on(rig["d2"])
        async with asyncio.timeout(20):
            assert await asyncio.gather(*answers) == [expected(one) for one in requests]


async def test_a_request_whose_channels_dropped_twice_is_innocent_since_its_workers_live(
    fleet_of, a_request, expected, until
):
    async with fleet_of(0, 2) as rig:
        for worker in rig.fleet.all.values():
            allow(worker, 0)
        answer = asyncio.create_task(collect(rig, a_request()))
        for name in ("d0", "d1"):
            await until(lambda name=name: rig[name].owned)
            await rig[name].connections["router-0"].close()
        for worker in rig.fleet.all.values():
            go_on(worker)
        async with asyncio.timeout(20):
            assert await answer == expected(a_request())


async def test_a_leaving_worker_makes_no_suspect_and_has_not_failed(fleet_of, a_request, expected, until):
    async with fleet_of(0, 2) as rig:
        rig["d0"].refusal = WorkerLeaving("draining")
        for _ in range(8):
            assert await collect(rig, a_request()) == expected(a_request())
        assert rig["d0"].seen
        assert not rig.pipeline._records.suspects._deaths
        assert rig.pipeline.ejected() == frozenset()


async def test_a_stream_on_a_leaving_worker_ends_there_and_the_next_request_goes_elsewhere(
    fleet_of, a_request, expected, until
):
    async with fleet_of(0, 2) as rig:
        for worker in rig.fleet.all.values():
            allow(worker, 0)
        answer = asyncio.create_task(collect(rig, a_request()))
        await until(lambda: rig.fleet.owned)
        leaving = next(worker for worker in rig.fleet.all.values() if worker.owned)
        other = next(worker for worker in rig.fleet.all.values() if worker is not leaving)
        leaving.is_leaving = True
        other.gate = None
        assert await collect(rig, a_request()) == expected(a_request())
        assert len(other.seen) == 1
        await until(lambda: leaving.told_to_leave == 1)
        go_on(leaving)
        assert await answer == expected(a_request())
        assert len(leaving.seen) == len(other.seen) == 1, "nothing was moved"
