"""Two turns of a chat: what one worker has computed is not computed by another, and no answer changes by that.

Real engines, sockets and transfers; each fault on the way of a prefix costs time alone.
"""

import asyncio
import contextlib
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.integration.local_fleet import SECRET, Served, Shape, serve
from twostroke.prefill_worker.worker import PrefillWorker
from twostroke.protocol.requests import GenerateRequest, Peer, SamplingParams, Ticket, mint_ticket
from twostroke.protocol.stats import WorkerInfo
from twostroke.router.generate.config import PipelineConfig
from twostroke.router.observe.stages import Stages
from twostroke.worker.block_pool import BlockPool

GREEDY = SamplingParams(temperature=0.0)
FIRST, ANSWER, MORE, REPLY = 200, 120, 30, 24  # tokens
HELD = (FIRST + ANSWER - 1) // 16 * 16  # by the decode worker, of the second turn's prompt
TRANSPORTS = ("tcp", "shm", "torch_distributed")
VOCAB = 96  # of the checkpoints that tests write
SHAPE = Shape("tcp", num_prefill=2, num_blocks=256, pipeline=PipelineConfig(pull_min_tokens=64, decodes_alone=False))


@pytest.fixture(scope="module")
def folder(write_checkpoint: Any) -> Path:
    """A model of random weights."""
    return write_checkpoint(seed=3, num_attention_heads=8, num_key_value_heads=2)


def some_tokens(count: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(VOCAB) for _ in range(count)]


async def two_turns(served: Served, stages: Stages | None = None) -> tuple[list[int], list[int]]:
    """The answers of a chat's first turn and of its second."""
    prompt = some_tokens(FIRST, seed=1)
    first = await served.generate(prompt, ANSWER, GREEDY)
    second = await served.generate([*prompt, *first, *some_tokens(MORE, seed=2)], REPLY, GREEDY, stages)
    return first, second


@pytest.fixture(scope="module")
def answers(folder: Path) -> tuple[list[int], list[int]]:
    """The right ones, of a single worker."""

    async def ask() -> tuple[list[int], list[int]]:
        async with serve(folder, Shape(None, num_blocks=256)) as served:
            return await two_turns(served)

    return asyncio.run(ask())


async def is_clean(served: Served) -> bool:
    """Whether nobody owns a block, once all is quiet."""
    await served.idle()
    return all(worker.stats().owned_blocks == 0 for worker in served.fleet.by_peer.values())


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("sizes", [(16, 16), (16, 32), (32, 16)])
async def test_the_second_turn_computes_only_what_is_new(
    transport: str, sizes: tuple[int, int], folder: Path, answers: tuple[list[int], list[int]]
) -> None:
    ours, theirs = sizes
    shape = replace(SHAPE, transport=transport, num_prefill=1, block_size=ours, decode_block_size=theirs)
    async with serve(folder, shape) as served:
        stages = Stages(time.monotonic())
        assert await two_turns(served, stages) == answers
        stats = served.fleet.stats("prefill")
        held = (FIRST + ANSWER - 1) // theirs * theirs
        assert stats.pulled_tokens == held - FIRST // ours * ours
        assert stats.computed_tokens == FIRST + (FIRST + ANSWER + MORE - held)
        assert stages.num_cached_tokens == held
        assert stats.transfers_failed == served.fleet.stats("decode").transfers_failed == 0
        assert await is_clean(served)


async def test_without_pulls_the_second_turn_computes_the_answer_again(
    folder: Path, answers: tuple[list[int], list[int]]
) -> None:
    shape = replace(SHAPE, num_prefill=1, pipeline=PipelineConfig(pulls=False, decodes_alone=False))
    async with serve(folder, shape) as served:
        assert await two_turns(served) == answers
        stats = served.fleet.stats("prefill")
        assert stats.pulled_tokens == 0
        assert stats.computed_tokens == FIRST + (FIRST + ANSWER + MORE - FIRST // 16 * 16)


async def prefix_elsewhere(served: Served, tokens: Sequence[int]) -> WorkerInfo:
    """Have the prefill worker compute so much, and take it from the router's sight; D alone serves what comes."""
    (source,) = [info for info in served.fleet.infos if info.role == "prefill"]
    await served.fleet.prefill(
        source.peer, GenerateRequest("held", "router", tuple(tokens), len(tokens), GREEDY, 1), None
    )
    served.fleet.infos.remove(source)
    return source


def pull_from(served: Served, source: WorkerInfo) -> None:
    """Have the decode worker pull whatever it is to compute."""
    decode, worker = served.fleet.decode, served.fleet.by_peer[source.peer]

    async def decode_and_pull(
        target: Peer, request: GenerateRequest, ticket: Ticket | None, pull: Ticket | None = None
    ):
        assert ticket is None
        pull = mint_ticket(SECRET, request.request_id, source.peer, target, served.fleet.infos[0].transfer_addresses)
        worker._send_prefix(pull, request.token_ids, request.cache_salt)
        return await decode(target, request, None, pull)

    served.fleet.decode = decode_and_pull  # type: ignore[method-assign]


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("sizes", [(16, 16), (16, 32), (32, 16)])
async def test_a_decode_worker_alone_computes_only_what_nobody_holds(
    transport: str, sizes: tuple[int, int], folder: Path, answers: tuple[list[int], list[int]]
) -> None:
    theirs, ours = sizes
    first, second = answers
    shape = replace(
        SHAPE,
        transport=transport,
        num_prefill=1,
        block_size=theirs,
        decode_block_size=ours,
        decode={"pull_wait_s": 30.0},
    )
    async with serve(folder, shape) as served:
        said = [*some_tokens(FIRST, seed=1), *first]
        pull_from(served, await prefix_elsewhere(served, said))
        stages = Stages(time.monotonic())
        again = [*said, *some_tokens(MORE, seed=2)]
        assert await served.generate(again, REPLY, GREEDY, stages) == second
        stats = served.fleet.stats("decode")
        held = (FIRST + ANSWER) // theirs * theirs
        assert (stats.pulled_tokens, stats.computed_tokens) == (held, len(again) - held)
        assert stages.num_cached_tokens == held
        assert stats.transfers_failed == 0
        assert await is_clean(served)


@contextlib.asynccontextmanager
async def first_prefill_worker_busy(served: Served):
    """So that what comes next goes to the second."""
    busy = asyncio.create_task(served.generate(some_tokens(900, seed=9), 1, GREEDY))
    await asyncio.sleep(0)  # it has chosen its workers
    try:
        yield
    finally:
        await busy


async def test_a_prompt_that_another_prefill_worker_has_read_is_pulled_from_there(folder: Path) -> None:
    async with serve(folder, SHAPE) as served:
        prompt = some_tokens(400, seed=1)
        first = await served.generate(prompt, 4, GREEDY)
        async with first_prefill_worker_busy(served):
            assert await served.generate(prompt, 4, GREEDY) == first
        assert served.fleet.stats("prefill", 1).pulled_tokens == 384
        assert served.fleet.stats("prefill", 1).computed_tokens == 16
        assert await is_clean(served)


def forget_everything(pool: BlockPool) -> None:
    """Evict all that is cached."""
    pool.release(pool.allocate(pool.free_blocks))


Spoil = Callable[[Served], None]


def source_forgets(served: Served) -> None:
    forget_everything(served.fleet.worker("decode")._pool)


def source_never_hears(served: Served) -> None:
    served.fleet.worker("decode")._exports.send = lambda *_: False  # type: ignore[method-assign,union-attr]


def source_breaks_off(served: Served) -> None:
    """Its side of the transfers closes as soon as the first is under way."""
    worker = served.fleet.worker("decode")
    exports, sender = worker._exports, worker._sender  # type: ignore[union-attr]
    send, tasks = exports.send, set()  # type: ignore[union-attr]

    def send_and_close(ticket: Ticket, token_ids: Sequence[int], cache_salt: bytes) -> bool:
        sent = send(ticket, token_ids, cache_salt)
        tasks.add(asyncio.create_task(sender.close()))  # type: ignore[union-attr]
        return sent

    exports.send = send_and_close  # type: ignore[method-assign,union-attr]


def target_gives_up(served: Served) -> None:
    """The pull is aborted right after it was granted."""
    worker = served.fleet.worker("prefill")
    assert isinstance(worker, PrefillWorker)
    expect = worker._receiver.expect  # type: ignore[union-attr]

    def expect_and_abort(*args: Any, **kwargs: Any) -> Any:
        incoming = expect(*args, **kwargs)
        incoming.abort("a test wants it")
        return incoming

    worker._receiver.expect = expect_and_abort  # type: ignore[method-assign,union-attr]


@pytest.mark.parametrize("transport", ["tcp", "shm"])
@pytest.mark.parametrize("spoil", [source_forgets, source_never_hears, source_breaks_off, target_gives_up])
async def test_a_pull_that_fails_changes_no_answer_and_keeps_no_block(
    transport: str, spoil: Spoil, folder: Path, answers: tuple[list[int], list[int]]
) -> None:
    shape = replace(SHAPE, transport=transport, num_prefill=1)
    if spoil in (source_never_hears, source_breaks_off):  # no offer comes
        shape = replace(shape, pull_wait_s=0.2)
    async with serve(folder, shape) as served:
        prompt = some_tokens(FIRST, seed=1)
        first = await served.generate(prompt, ANSWER, GREEDY)
        await served.idle()
        spoil(served)
        second = await served.generate([*prompt, *first, *some_tokens(MORE, seed=2)], REPLY, GREEDY)
        assert (first, second) == answers
        assert served.fleet.stats("prefill").pulled_tokens == 0
        assert await is_clean(served)


@pytest.mark.parametrize("transport", ["tcp", "shm"])
async def test_a_client_that_leaves_during_a_pull_leaves_no_block_behind(
    transport: str, folder: Path, answers: tuple[list[int], list[int]]
) -> None:
    async with serve(folder, replace(SHAPE, transport=transport, num_prefill=1)) as served:
        prompt = some_tokens(FIRST, seed=1)
        first = await served.generate(prompt, ANSWER, GREEDY)
        await served.idle()
        again = (*prompt, *first, *some_tokens(MORE, seed=2))
        worker = served.fleet.worker("prefill")
        pulling = asyncio.Event()
        expect = worker._receiver.expect  # type: ignore[union-attr]

        def expect_and_tell(*args: Any, **kwargs: Any) -> Any:
            pulling.set()
            return expect(*args, **kwargs)

        worker._receiver.expect = expect_and_tell  # type: ignore[method-assign,union-attr]
        request = GenerateRequest("", "", again, len(again), GREEDY, REPLY)
        events = served.pipeline.generate(request, Stages(0.0))
        reading = asyncio.ensure_future(anext(events))
        await pulling.wait()
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        await events.aclose()
        assert await is_clean(served)
        assert (first, await served.generate(again, REPLY, GREEDY)) == answers
        assert await is_clean(served)
