"""Requests for prefixes, on a fleet of fake workers. Real transfers: tests/integration."""

import asyncio

import pytest

from tests.router.generate.collecting_tokens import collect, new_state, nth_token
from twostroke.protocol.messages import StatsFrame
from twostroke.protocol.stats import WorkerStats
from twostroke.router.generate.attempt import Attempt, AttemptDeps
from twostroke.router.generate.config import PipelineConfig
from twostroke.router.request_state import AttemptContext, AttemptLog, Path

PROMPT = tuple(range(130))


@pytest.fixture
def prompt_of(a_request):
    return lambda *token_ids, **changes: a_request(token_ids=token_ids, num_prompt_tokens=len(token_ids), **changes)


async def test_the_next_turn_pulls_the_answer_from_the_decode_worker_that_wrote_it(fleet_of, prompt_of, until):
    async with fleet_of(1, 1) as rig:
        written = await collect(rig, prompt_of(*PROMPT, max_tokens=200))
        second = prompt_of(*PROMPT, *written, 1, 2, 3)
        await collect(rig, second)
        (pull,) = rig["p0"].pulls
        assert (pull.source, pull.target) == (rig["d0"].info.peer, rig["p0"].info.peer)
        assert pull.target_addresses == rig["p0"].info.transfer_addresses
        assert pull.request_id == rig["p0"].seen[1].request_id
        await until(lambda: rig["d0"].prefixes)
        (requests,) = rig["d0"].prefixes
        assert (requests.ticket, requests.token_ids, requests.cache_salt) == (pull, second.token_ids, second.cache_salt)


async def cut_short(rig, request):
    events, written = await nth_token(rig, request, 180)
    await events.aclose()
    return written


async def test_an_answer_that_was_cut_short_is_pulled_as_far_as_it_went(fleet_of, prompt_of):
    async with fleet_of(1, 1) as rig:
        written = await cut_short(rig, prompt_of(*PROMPT, max_tokens=300))
        await collect(rig, prompt_of(*PROMPT, *written, 1, 2, 3))
        assert len(rig["p0"].pulls) == 1


async def test_a_prompt_computed_elsewhere_is_pulled_from_there_while_its_answer_is_still_written(
    fleet_of, prompt_of, until
):
    long = (*PROMPT, *PROMPT)
    async with fleet_of(2, 1) as rig:
        rig["d0"].gate = asyncio.Semaphore(0)
        first = rig.pipeline.generate(new_state(prompt_of(*long)))
        await anext(first)
        assert rig["p0"].seen
        rig["d0"].gate, rig["p0"].prefill_gate = None, asyncio.Event()
        busy = asyncio.create_task(collect(rig, prompt_of(*reversed(PROMPT))))
        await until(lambda: rig["p0"].owned)
        await collect(rig, prompt_of(*long, 7))
        assert [pull.source for pull in rig["p1"].pulls] == [rig["p0"].info.peer]
        rig["p0"].prefill_gate.set()
        await busy
        await first.aclose()


async def test_a_conversation_that_moves_between_decode_workers_takes_its_history_along(fleet_of, prompt_of, until):
    async with fleet_of(0, 2) as rig:
        written = await collect(rig, prompt_of(*PROMPT, max_tokens=200))
        idle = WorkerStats(total_blocks=100, free_blocks=100, steps=200)
        rig["d0"].connections["router-0"].send(StatsFrame(idle))
        await until(lambda: rig.channels.stats(rig["d0"].info.peer) == idle)
        rig["d0"].gate = asyncio.Semaphore(0)
        busy = asyncio.create_task(collect(rig, prompt_of(*reversed(PROMPT))))
        await until(lambda: rig["d0"].owned)
        state = new_state(prompt_of(*PROMPT, *written, 1, 2, 3))
        await collect(rig, state)
        (pull,) = rig["d1"].pulls
        assert (pull.source, pull.target) == (rig["d0"].info.peer, rig["d1"].info.peer)
        assert pull.target_addresses == rig["d1"].info.transfer_addresses
        assert pull.request_id == rig["d1"].seen[0].request_id
        await until(lambda: [one.ticket for one in rig["d0"].prefixes] == [pull])
        assert state.transfer_s == 0.03
        busy.cancel()
        await asyncio.wait([busy])


@pytest.mark.parametrize("is_connected", [True, False])
async def test_nobody_waits_for_a_source_that_can_not_be_asked(is_connected, fleet_of, prompt_of):
    requests = []

    class Channels:
        def subscribe(self, worker, request_id, *, max_tokens):
            """No token comes."""

        def is_connected(self, worker):
            return is_connected and worker == source.peer

        def send(self, worker, message):
            requests.append((worker, message.ticket))

    async with fleet_of(1, 2) as rig:
        source = rig["d0"].info
        deps = AttemptDeps(rig.fleet, Channels(), b"secret", PipelineConfig(), None, None)
        for path in (Path(rig["p0"].info, source, source), Path(None, rig["d1"].info, source)):
            log = AttemptLog(AttemptContext(path, prompt_of(*PROMPT), (), None), (), float)
            ticket = Attempt(deps, log, prompt_of(*PROMPT), set())._request_prefix()
            assert requests == ([(source.peer, ticket)] if is_connected else [])
            assert (ticket is not None) == is_connected
            requests.clear()
