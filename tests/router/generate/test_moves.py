"""Streams that move between fake workers: their tokens come once each, whoever dies, refuses or leaves, and when."""

import asyncio
from contextlib import asynccontextmanager

import msgspec
import pytest

from tests.router.generate.collecting_tokens import allow, go_on, new_state, nth_token, rest
from twostroke.protocol.errors import RequestError
from twostroke.protocol.messages import StatsFrame
from twostroke.router.generate import moves
from twostroke.router.generate.config import PipelineConfig


@pytest.fixture(autouse=True)
def _quick_looks(monkeypatch):
    monkeypatch.setattr(moves, "LOOK_S", 0.005)
    monkeypatch.setattr(moves, "REST_S", 0.01)


def tell(worker, **numbers):
    """Have the worker tell the router these numbers from now on."""
    worker.stats = msgspec.structs.replace(worker.stats, **numbers)
    for connection in worker.connections.values():
        connection.send(StatsFrame(worker.stats))


class Scene:
    """A stream that has 3 tokens at `source`, which goes no further until it is told to; `others` are idle."""

    def __init__(self, rig, until, expected, request):
        self.rig, self.until, self.request = rig, until, request
        self.expected = expected(request)
        self.state = new_state(request)

    async def begin(self):
        workers = [one for one in self.rig.fleet.all.values() if one.role == "decode"]
        for worker in workers:
            allow(worker, 3)
        self.events, self.tokens = await nth_token(self.rig, self.state, 3)
        (self.source,) = (one for one in workers if one.owned)
        self.others = [one for one in workers if one is not self.source]
        for worker in self.others:
            worker.gate = None

    @property
    def target(self):
        """The worker that computes the stream's first part."""
        return next(one for one in self.others if one.seen)

    @property
    def moves(self):
        return self.rig.pipeline.moves

    async def drain(self):
        tell(self.source, is_draining=True)

    async def first_part_begins(self):
        """Let the source drain, and hold up the first part at whichever target."""
        for other in self.others:
            other.prefill_gate = asyncio.Event()
        await self.drain()
        await self.until(lambda: any(one.owned for one in self.others))

    def first_part_ends(self):
        for other in self.others:
            other.prefill_gate.set()

    def decode_calls(self, worker):
        return [one for one in worker.seen if one.sampling == self.request.sampling]

    async def ends_right(self):
        async with asyncio.timeout(20):
            assert await rest(self.events, self.tokens) == self.expected
        assert not self.rig.fleet.owned
        assert self.rig.pipeline.in_flight == 0
        assert self.moves._streams == {}


@pytest.fixture
def scene_of(fleet_of, until, expected, a_request):
    @asynccontextmanager
    async def make(num_prefill=0, num_decode=2, **changes):
        async with fleet_of(num_prefill, num_decode) as rig:
            scene = Scene(rig, until, expected, a_request(**changes))
            await scene.begin()
            yield scene

    return make


async def test_a_stream_leaves_a_worker_that_drains_and_its_kv_is_pulled_before(scene_of):
    async with scene_of() as scene:
        await scene.drain()
        await scene.ends_right()
        first, second = scene.target.seen
        assert first.token_ids == second.token_ids == (*scene.request.token_ids, *scene.expected[:3])
        assert (first.num_output_tokens_given, second.num_output_tokens_given) == (3, 3)
        (pull,) = scene.target.pulls
        assert (pull.source, pull.request_id) == (scene.source.info.peer, first.request_id)
        assert [one.token_ids for one in scene.source.prefixes] == [first.token_ids]
        assert scene.source.cancelled == [scene.source.seen[0].request_id]
        assert [one.error for one in scene.state.attempts] == [None, None]
        assert (scene.moves.num_moved.total(), scene.moves.num_failed.total()) == (1, 0)


async def test_the_source_goes_on_while_the_target_computes(scene_of):
    async with scene_of() as scene:
        await scene.first_part_begins()
        go_on(scene.source, 4)
        while len(scene.tokens) < 7:
            scene.tokens += [token.token_id for token in (await anext(scene.events)).tokens]
        scene.first_part_ends()
        await scene.ends_right()
        assert [one.num_output_tokens_given for one in scene.target.seen] == [3, 7]


async def test_a_stream_with_grammar_and_penalties_is_computed_without_them_and_goes_on_with_them(scene_of, a_request):
    sampling = msgspec.structs.replace(a_request().sampling, presence_penalty=0.5, logprobs=2)
    async with scene_of(sampling=sampling, grammar="root ::= [a-z]*") as scene:
        await scene.drain()
        await scene.ends_right()
        first, second = scene.target.seen
        assert (first.grammar, first.sampling.logprobs, first.sampling.presence_penalty) == ("", None, 0.0)
        assert (second.grammar, second.sampling) == (scene.request.grammar, sampling)


async def fail_by_refusal(scene):
    for other in scene.others:
        other.refusal = RequestError("full", status=429)


async def fail_by_a_bug(scene):
    prefill = scene.rig.fleet.prefill

    async def broken(worker, request, ticket, pull=None):
        await prefill(worker, request, ticket, pull)
        raise RuntimeError("a bug")

    scene.rig.fleet.prefill = broken


async def fail_by_an_error_in_the_reply(scene):
    prefill = scene.rig.fleet.prefill

    async def failing(worker, request, ticket, pull=None):
        reply = await prefill(worker, request, ticket, pull)
        return msgspec.structs.replace(reply, event=msgspec.structs.replace(reply.event, error="no engine"))

    scene.rig.fleet.prefill = failing


async def fail_by_taking_too_long(scene):
    for other in scene.others:
        other.prefill_gate = asyncio.Event()


@pytest.mark.parametrize(
    "fail", [fail_by_refusal, fail_by_a_bug, fail_by_an_error_in_the_reply, fail_by_taking_too_long]
)
async def test_the_stream_stays_where_the_first_part_fails(scene_of, fail, monkeypatch):
    monkeypatch.setattr(moves, "MOVE_LIMIT_S", 0.05)
    async with scene_of() as scene:
        await fail(scene)
        await scene.drain()
        await scene.until(lambda: scene.moves.num_failed.total() >= 2)  # it is tried again
        assert not scene.decode_calls(scene.others[0])
        go_on(scene.source)
        await scene.ends_right()
        assert len(scene.state.attempts) == 1
        assert len(scene.source.seen) == 1
        is_blamed = not scene.rig.pipeline._records._ejection.is_empty
        assert is_blamed == (fail in (fail_by_a_bug, fail_by_an_error_in_the_reply))


async def test_the_stream_stays_where_the_target_dies_in_the_first_part(scene_of):
    async with scene_of() as scene:
        await scene.first_part_begins()
        await scene.target.die()
        await scene.until(lambda: scene.moves.num_failed.total() == 1)
        go_on(scene.source)
        await scene.ends_right()
        assert len(scene.state.attempts) == 1


async def test_the_stream_stays_where_nobody_reaches_the_target_any_more(scene_of, monkeypatch):
    monkeypatch.setattr(moves, "MOVE_LIMIT_S", 60.0)
    async with scene_of() as scene:
        await scene.first_part_begins()
        await scene.target.close()  # its call goes on, as that of a stopped process does
        await scene.until(lambda: scene.moves.num_failed.total() == 1)
        go_on(scene.source)
        await scene.ends_right()
        assert len(scene.state.attempts) == 1
        assert not scene.target.owned, "its call is cancelled"


async def test_a_moved_stream_waits_for_a_worker_where_its_target_has_gone(scene_of):
    async with scene_of() as scene:
        await scene.first_part_begins()
        target = scene.target
        prefill = target.prefill

        async def prefill_and_leave(request, decode):
            reply = await prefill(request, decode)
            target.is_leaving = True
            await target.close()
            asyncio.get_running_loop().call_later(0.1, lambda: tell(scene.source, is_draining=False))
            return reply

        target.prefill = prefill_and_leave
        go_on(scene.source)
        scene.first_part_ends()
        await scene.ends_right()


async def test_another_worker_goes_on_where_the_target_dies_as_the_stream_comes(scene_of):
    async with scene_of(num_decode=3) as scene:
        decode, victims = scene.rig.fleet.decode, []

        async def die_first(worker, request, ticket, pull=None):
            if not victims:
                victims.append(scene.rig[worker.worker_id])
                await victims[0].die()
            return await decode(worker, request, ticket, pull)

        scene.rig.fleet.decode = die_first
        await scene.drain()
        await scene.ends_right()
        assert victims[0] is not scene.source
        assert len(scene.decode_calls(scene.source)) == 1


@pytest.mark.parametrize("more", [1, 5])
async def test_another_worker_goes_on_where_the_target_dies_in_the_second_part(scene_of, more):
    async with scene_of(num_decode=3) as scene:
        for other in scene.others:
            allow(other, more)
        await scene.drain()
        while len(scene.tokens) < 3 + more:
            scene.tokens += [token.token_id for token in (await anext(scene.events)).tokens]
        target = next(one for one in scene.others if one.owned)
        await target.die()
        (third,) = (one for one in scene.others if one is not target)
        go_on(third)
        await scene.ends_right()
        assert scene.decode_calls(third)[-1].num_output_tokens_given == 3 + more


async def test_another_worker_goes_on_where_the_source_dies_in_the_first_part(scene_of):
    async with scene_of() as scene:
        await scene.first_part_begins()
        await scene.source.die()
        await scene.ends_right()
        assert scene.moves.num_moved.total() == 0
        assert len(scene.decode_calls(scene.others[0])) == 1


async def test_the_target_goes_on_where_the_source_dies_as_the_stream_leaves(scene_of):
    async with scene_of() as scene:
        await scene.first_part_begins()
        dying = asyncio.create_task(scene.source.die())
        scene.first_part_ends()
        await scene.ends_right()
        await dying
        assert len(scene.decode_calls(scene.others[0])) == 1


async def test_the_target_goes_on_where_the_source_dies_in_the_second_part(scene_of):
    async with scene_of() as scene:
        allow(scene.others[0], 2)
        await scene.drain()
        while len(scene.tokens) < 5:
            scene.tokens += [token.token_id for token in (await anext(scene.events)).tokens]
        await scene.source.die()
        go_on(scene.others[0])
        await scene.ends_right()
        assert len(scene.state.attempts) == 2


@pytest.mark.parametrize("part", [1, 2])
async def test_a_client_that_leaves_ends_the_move_and_all_calls(scene_of, part):
    async with scene_of() as scene:
        if part == 1:
            await scene.first_part_begins()
        else:
            allow(scene.others[0], 1)
            await scene.drain()
            scene.tokens += [token.token_id for token in (await anext(scene.events)).tokens]
            assert scene.moves.num_moved.total() == 1
        await scene.events.aclose()
        assert not scene.rig.fleet.owned
        assert scene.rig.pipeline.in_flight == 0
        assert scene.moves._streams == {}


async def test_streams_that_move_at_once_are_spread_over_workers_with_room(fleet_of, a_request, expected, until):
    requests = [a_request(token_ids=(number, 2, 3), num_prompt_tokens=3) for number in range(2)]
    async with fleet_of(0, 3) as rig:
        for name in ("d1", "d2"):
            rig[name].is_leaving = True
        allow(rig["d0"], 0)
        beginning = [asyncio.create_task(nth_token(rig, request, 1)) for request in requests]
        await until(lambda: len(rig["d0"].owned) == 2)
        go_on(rig["d0"], 2)
        streams = await asyncio.gather(*beginning)
        for name in ("d1", "d2"):
            rig[name].is_leaving = False
            rig[name].prefill_gate = asyncio.Event()
        tell(rig["d0"], is_draining=True)
        await until(lambda: all(rig[name].owned for name in ("d1", "d2")))
        for name in ("d1", "d2"):
            rig[name].prefill_gate.set()
        for (events, tokens), request in zip(streams, requests, strict=True):
            assert await rest(events, tokens) == expected(request)


async def test_a_worker_that_keeps_failing_gets_no_streams(scene_of, monkeypatch):
    async with scene_of() as scene:
        (other,), looks = scene.others, []

        def ejected():
            looks.append(other)
            return frozenset({other.info.peer})

        monkeypatch.setattr(scene.rig.pipeline._records, "ejected", ejected)
        await scene.drain()
        await scene.until(lambda: len(looks) > 1)
        go_on(scene.source)
        await scene.ends_right()
        assert not other.seen


async def test_a_stream_that_kills_two_targets_of_its_move_kills_no_third(scene_of):
    async with scene_of(num_decode=5) as scene:
        for other in scene.others:
            other.poison = lambda tokens: True
        await scene.drain()
        await scene.until(lambda: scene.moves.num_failed.total() >= 4)
        assert sum(other.dead for other in scene.others) == 2
        go_on(scene.source)
        await scene.ends_right()


async def test_without_moves_a_stream_stays_on_a_worker_that_drains(scene_of, monkeypatch):
    async with scene_of() as scene:
        await scene.events.aclose()
        monkeypatch.setattr(scene.rig.pipeline, "_config", PipelineConfig(moves=False, roles="fixed"))
        for worker in (scene.source, *scene.others):
            allow(worker, 3)
        scene.state = new_state(scene.request)
        scene.events, scene.tokens = await nth_token(scene.rig, scene.state, 3)
        assert scene.moves._streams == {}
        for worker in (scene.source, *scene.others):
            go_on(worker)
        await scene.ends_right()
