"""Streams that move to another worker while they are written keep their tokens, each once. All of it is real.

What may go wrong with a transfer at each of its steps is shown by tests/faults: a move's KV comes as any prefix does.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.integration.local_fleet import GREEDY, Served, Shape, before_steps, of_one_worker, serve
from tests.integration.test_structured_output import AS_PERSON, Site, site
from tests.integration.test_transfers import some_tokens
from tests.model.architectures.test_conformance import FAMILY_SHAPES
from twostroke.cluster.ranks.worker_parts import WorkerParts
from twostroke.protocol.requests import DecodeReply, GenerateRequest, Peer, PrefillReply, SamplingParams, Ticket
from twostroke.router.generate import moves
from twostroke.router.generate.config import PipelineConfig
from twostroke.router.request_state import RequestState
from twostroke.worker.worker import Worker

ANSWER = 300
PROMPTS = [some_tokens(length, seed=length) for length in (3, 16, 150, 150, 300)]
DRAWN = msgspec.structs.replace(GREEDY, temperature=0.8, seed=5, repetition_penalty=1.1, frequency_penalty=0.2)
LOGGED = msgspec.structs.replace(GREEDY, logprobs=3)
SAMPLINGS: list[SamplingParams] = [GREEDY, DRAWN, LOGGED, msgspec.structs.replace(DRAWN, seed=6), DRAWN]
FIXED = PipelineConfig(roles="fixed", decodes_alone=False)
SHAPE = Shape("tcp", num_prefill=1, num_decode=2, num_blocks=256, pipeline=FIXED)
TRANSPORTS = ["tcp", "shm", "torch_distributed"]


@pytest.fixture(autouse=True)
def _quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moves, "LOOK_S", 0.01)


async def answers(served: Served, states: list[RequestState] | None = None) -> list[list[int]]:
    calls = [served.generate(prompt, ANSWER, how, states) for prompt, how in zip(PROMPTS, SAMPLINGS, strict=True)]
    return list(await asyncio.gather(*calls))


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not is_so():  # noqa: ASYNC110  (no event says so)
            await asyncio.sleep(0.001)


@dataclass
class UnderWay:
    """Answers that are being written, and a decode worker that writes one of them."""

    answers: "asyncio.Task[list[list[int]]]"
    states: list[RequestState]
    source: Worker
    parts: WorkerParts  # the source's


@asynccontextmanager
async def under_way(served: Served, num_tokens: int = 10) -> AsyncIterator[UnderWay]:
    """Have all prompts answered. The longest, which nobody else has, is the source's: its answer has so many tokens."""
    states: list[RequestState] = []
    task = asyncio.create_task(answers(served, states))
    running = served.pipeline.moves._streams

    def sources() -> list[Peer]:
        at_length = max(map(len, PROMPTS)) + num_tokens
        return [
            peer
            for peer, streams in running.items()
            for one in streams
            if len(one.request.token_ids) + len(one.sent) > at_length
        ]

    try:
        await until(lambda: bool(sources()) or task.done())
        source = sources()[0]
        yield UnderWay(task, states, served.fleet.by_peer[source], served.fleet.parts[source])
    finally:
        task.cancel()
        await asyncio.wait([task])


def pulled_tokens(served: Served) -> int:
    """Return the tokens that all workers have pulled."""
    return sum(worker.stats().pulled_tokens for worker in served.fleet.by_peer.values())


def num_moved(states: list[RequestState]) -> int:
    """Streams that went on elsewhere with no error."""
    return sum(tried.error is None for one in states for tried in one.attempts) - len(states)


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    """The right answers, of a single worker."""
    return of_one_worker(folder, answers)


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_streams_leave_a_worker_that_drains_and_lose_nothing(
    transport: str, folder: Path, expected: list[list[int]]
) -> None:
    async with serve(folder, replace(SHAPE, transport=transport)) as served, under_way(served) as run:
        run.source.leave()
        assert await run.answers == expected
        assert run.source.stats().num_decoding == 0
        assert num_moved(run.states) > 0
        assert pulled_tokens(served) > 0
        await served.idle()


# --- faults ---


class Struck:
    """Calls of a fleet, of which the first one of a move's part is struck while it is under way."""

    def __init__(self, served: Served, part: int, strike: Callable[[Peer], Awaitable[None]]):
        self.fleet, self._part, self._strike = served.fleet, part, strike
        self.num_strikes = 0
        self._prefill, self._decode = self.fleet.prefill, self.fleet.decode
        self.fleet.prefill = self.prefill  # type: ignore[method-assign]
        self.fleet.decode = self.decode  # type: ignore[method-assign]

    async def prefill(
        self, worker: Peer, request: GenerateRequest, ticket: Ticket | None, pull: Ticket | None = None
    ) -> PrefillReply:
        call = asyncio.ensure_future(self._prefill(worker, request, ticket, pull))
        return await self._struck(worker, call, is_meant=self._part == 1 and ticket is None)

    async def decode(
        self, worker: Peer, request: GenerateRequest, ticket: Ticket | None, pull: Ticket | None = None
    ) -> DecodeReply:
        call = asyncio.ensure_future(self._decode(worker, request, ticket, pull))
        is_moved = ticket is None and request.num_output_tokens_given > 0
        return await self._struck(worker, call, is_meant=self._part == 2 and is_moved)

    async def _struck(self, worker: Peer, call: "asyncio.Future[Any]", *, is_meant: bool) -> Any:
        try:
            if is_meant and not self.num_strikes:
                self.num_strikes += 1
                target = self.fleet.by_peer[worker]
                await until(lambda: target.stats().num_running > 0 or target.stats().num_transfers > 0 or call.done())
                await self._strike(worker)
            return await call
        finally:
            call.cancel()


async def die(served: Served, worker: Worker) -> None:
    """End a worker as its process would, and have the fleet know it no more."""
    fleet = served.fleet
    (peer,) = (peer for peer, one in fleet.by_peer.items() if one is worker)
    fleet.infos = [info for info in fleet.infos if info.peer != peer]
    await worker.stop()


FAULTS = [("target dies", 1), ("target dies", 2), ("source dies", 1), ("source dies", 2), ("source sends nothing", 1)]


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(("fault", "part"), FAULTS, ids=[f"{fault} in part {part}" for fault, part in FAULTS])
async def test_streams_that_move_lose_nothing_where(
    fault: str, part: int, transport: str, folder: Path, expected: list[list[int]]
) -> None:
    shape = replace(SHAPE, transport=transport, num_decode=3, pull_wait_s=1.0)
    async with serve(folder, shape) as served, under_way(served) as run:

        async def strike(target: Peer) -> None:
            match fault:
                case "target dies":
                    await die(served, served.fleet.by_peer[target])
                case "source dies":
                    await die(served, run.source)
                case _:
                    await run.parts.deps.sender.close()

        struck = Struck(served, part, strike)
        run.source.leave()
        assert await run.answers == expected
        assert struck.num_strikes == 1
        assert num_moved(run.states) > 0 or "dies" in fault
        await served.idle()
        assert served.pipeline.in_flight == 0


# --- kinds of KV ---

KINDS: dict[str, tuple[str | None, Shape]] = {
    "windows in some layers": ("ministral", SHAPE),
    "windows in all layers": ("mistral_window", SHAPE),
    "chunks": ("llama4", SHAPE),
    "rows of several blocks": ("gemma4", SHAPE),
    "latents": ("deepseek_v3_experts", SHAPE),
    "states": ("qwen3_5", replace(SHAPE, num_blocks=1024)),
    "FP8": (None, replace(SHAPE, kv_cache_dtype="fp8")),
    "unequal blocks": (
        None,
        replace(SHAPE, num_decode=1, decode_block_size=8, pipeline=PipelineConfig(decodes_alone=False)),
    ),
    "2 ranks to 1": (None, replace(SHAPE, num_decode=1, decode_ranks=2, pipeline=PipelineConfig(decodes_alone=False))),
}


@pytest.mark.parametrize("kind", KINDS)
async def test_streams_move_with_every_kind_of_kv(kind: str, folder: Path, write_checkpoint: Any) -> None:
    family, shape = KINDS[kind]
    if family is not None:
        folder = write_checkpoint(seed=3, **FAMILY_SHAPES[family])
    alone = replace(shape, transport=None, num_decode=1, decode_block_size=None, decode_ranks=1)
    async with serve(folder, alone) as served:
        expected = await answers(served)
    # A prefill worker has read the prompts, and lacks the answers alone: so many tokens are worth a pull.
    async with serve(folder, shape) as served, under_way(served, num_tokens=150) as run:
        run.source.leave()
        assert await run.answers == expected
        assert num_moved(run.states) > 0
        assert pulled_tokens(served) > 0 or kind == "windows in all layers"
        await served.idle()


# --- forms of answers ---

FORMS: dict[str, dict[str, Any]] = {
    "several choices": {"n": 2, "temperature": 1.0, "seed": 3},
    "a schema": {"response_format": AS_PERSON, "seed": 2, "min_tokens": 40},
    "a stop string": {"stop": ["return self"], "temperature": 0.0},
    "log-probabilities and penalties": {"logprobs": 2, "presence_penalty": 0.5, "frequency_penalty": 0.5, "seed": 4},
}


async def of_all_forms(here: Site) -> Any:
    body = {"model": "bundled", "prompt": "import os\n", "max_tokens": 200, "return_token_ids": True}
    asked = [here.http.post("/v1/completions", json={**body, **form}) for form in FORMS.values()]
    answers = [answer.json()["choices"] for answer in await asyncio.gather(*asked)]
    # The last bits of log-probabilities depend on what else is in a step.
    return json.loads(json.dumps(answers), parse_float=lambda number: round(float(number), 3))


async def test_answers_of_every_form_are_the_same_where_their_streams_move() -> None:
    async with site(transport=None) as here:
        undisturbed = await of_all_forms(here)
    assert [choice["finish_reason"] for choices in undisturbed for choice in choices].count("stop") >= 2
    async with site(num_decode=2, pipeline=FIXED) as here:
        first, second = (here.served.fleet.worker("decode", number) for number in (0, 1))
        pause_s = 0.0
        before_steps(here.served.fleet.engine("decode"), lambda _: asyncio.sleep(pause_s))
        second.leave()
        task = asyncio.create_task(of_all_forms(here))
        streams = here.served.pipeline.moves._streams
        await until(lambda: sum(len(one.sent) > 2 for running in streams.values() for one in running) == 5)
        pause_s = 0.2  # so that no answer ends there
        second.resume()
        first.leave()
        await until(lambda: here.served.pipeline.moves.num_moved.total() == 5)
        assert await task == undisturbed
