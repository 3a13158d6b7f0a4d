"""KV that is pulled, and KV that can't be sent: what one worker has computed is not computed by another, a fault on the
way costs time alone, and no answer changes by any of it. Real engines, sockets and transfers.
"""

import asyncio
import logging
import random
import socket
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from tests.integration.local_fleet import GREEDY, HOST, ONLY_PAIRS, SECRET, VOCAB, Served, Shape, of_one_worker, serve
from twostroke.kvtransfer.config import TransferConfig
from twostroke.protocol.messages import SendPrefix
from twostroke.protocol.requests import Address, GenerateRequest, Peer, Ticket, mint_ticket
from twostroke.protocol.stats import WorkerInfo
from twostroke.router.generate.config import PipelineConfig
from twostroke.router.request_state import RequestState

FIRST, ANSWER, MORE, REPLY = 200, 120, 30, 24  # tokens
WAYS = [  # (transport, block size of the source, of the target)
    ("tcp", 16, 16),
    ("tcp", 16, 32),
    ("tcp", 32, 16),
    ("shm", 16, 32),
    ("torch_distributed", 32, 16),
]
SHAPE = Shape("tcp", num_prefill=2, num_blocks=256, pipeline=PipelineConfig(pull_min_tokens=64, **ONLY_PAIRS))


def some_tokens(count: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(VOCAB) for _ in range(count)]


async def two_turns(served: Served, states: list[RequestState] | None = None) -> tuple[list[int], list[int]]:
    """The answers of a chat's first turn and of its second."""
    prompt = some_tokens(FIRST, seed=1)
    first = await served.generate(prompt, ANSWER, GREEDY)
    second = await served.generate([*prompt, *first, *some_tokens(MORE, seed=2)], REPLY, GREEDY, states)
    return first, second


@pytest.fixture(scope="module")
def answers(folder: Path) -> tuple[list[int], list[int]]:
    """The right ones, of a single worker."""
    return of_one_worker(folder, two_turns)


@pytest.mark.parametrize(("transport", "theirs", "ours"), WAYS)
async def test_the_second_turn_computes_only_what_is_new(
    transport: str, theirs: int, ours: int, folder: Path, answers: tuple[list[int], list[int]]
) -> None:
    shape = replace(SHAPE, transport=transport, num_prefill=1, block_size=ours, decode_block_size=theirs)
    async with serve(folder, shape) as served:
        states: list[RequestState] = []
        assert await two_turns(served, states) == answers
        stats = served.fleet.stats("prefill")
        held = (FIRST + ANSWER - 1) // theirs * theirs
        assert stats.pulled_tokens == held - FIRST // ours * ours
        assert stats.computed_tokens == FIRST + (FIRST + ANSWER + MORE - held)
        assert [one.num_cached_tokens for one in states] == [held]
        assert stats.transfers_failed == served.fleet.stats("decode").transfers_failed == 0
        await served.idle()


async def test_without_pulls_the_second_turn_computes_the_answer_again(
    folder: Path, answers: tuple[list[int], list[int]]
) -> None:
    shape = replace(SHAPE, num_prefill=1, pipeline=PipelineConfig(pulls=False, **ONLY_PAIRS))
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
        worker.on_message(SendPrefix(pull, request.token_ids, request.cache_salt, request.log_context))
        return await decode(target, request, None, pull)

    served.fleet.decode = decode_and_pull  # type: ignore[method-assign]


@pytest.mark.parametrize(("transport", "theirs", "ours"), WAYS)
async def test_a_decode_worker_alone_computes_only_what_nobody_holds(
    transport: str, theirs: int, ours: int, folder: Path, answers: tuple[list[int], list[int]]
) -> None:
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
        states: list[RequestState] = []
        again = [*said, *some_tokens(MORE, seed=2)]
        assert await served.generate(again, REPLY, GREEDY, states) == second
        stats = served.fleet.stats("decode")
        held = (FIRST + ANSWER) // theirs * theirs
        assert (stats.pulled_tokens, stats.computed_tokens) == (held, len(again) - held)
        assert [one.num_cached_tokens for one in states] == [held]
        assert stats.transfers_failed == 0
        await served.idle()


async def test_a_prompt_that_another_prefill_worker_has_read_is_pulled_from_there(folder: Path) -> None:
    async with serve(folder, SHAPE) as served:
        prompt = some_tokens(400, seed=1)
        first = await served.generate(prompt, 4, GREEDY)
        busy = asyncio.create_task(served.generate(some_tokens(900, seed=9), 1, GREEDY))
        await asyncio.sleep(0)  # it has chosen the first prefill worker, so that what comes next goes to the second
        assert await served.generate(prompt, 4, GREEDY) == first
        await busy
        assert served.fleet.stats("prefill", 1).pulled_tokens == 384
        assert served.fleet.stats("prefill", 1).computed_tokens == 16
        await served.idle()


@pytest.fixture
def refusing() -> Iterator[Address]:
    """Yield an address that refuses connections: its port is taken, and nobody listens."""
    with socket.socket() as taken:
        taken.bind((HOST, 0))
        yield Address(HOST, taken.getsockname()[1])


@pytest.mark.parametrize(("transport", "fault"), [("tcp", "refused"), ("shm", "a lease too short for anything")])
async def test_a_prompt_whose_kv_can_not_be_sent_is_computed_at_once_where_it_is_decoded(
    transport: str,
    fault: str,
    folder: Path,
    answers: tuple[list[int], list[int]],
    refusing: Address,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The decode worker would wait an hour by itself: an answer that comes at all shows that it was told."""
    prompt, answer = some_tokens(FIRST, seed=1), answers[0][:20]
    is_refused = fault == "refused"
    transfers = TransferConfig() if is_refused else TransferConfig(lease_s=1e-6)
    shape = Shape(transport, num_blocks=256, router_wait_s=3600.0, transfers=transfers)
    async with serve(folder, shape) as served, asyncio.timeout(60):
        if is_refused:
            (decode,) = (index for index, info in enumerate(served.fleet.infos) if info.role == "decode")
            unreachable = msgspec.structs.replace(served.fleet.infos[decode], transfer_addresses=(refusing,))
            served.fleet.infos[decode] = unreachable
        for count in (1, 2):  # the second finds what the first has learned of the pair: nothing
            states: list[RequestState] = []
            assert await served.generate(prompt, 20, GREEDY, states) == answer
            await served.idle()
            assert [(len(one.attempts), one.prefill_failures) for one in states] == [(1, 1)]
            assert served.fleet.stats("prefill").transfers_failed == count
        assert served.fleet.stats("decode").transfers_failed == 0, "it never saw an offer"
    lines = [
        record.getMessage()
        for record in caplog.records
        if record.name == "twostroke.worker.transfers" and record.levelno == logging.WARNING
    ]
    assert len(lines) == 2
    assert all("was not sent" in line for line in lines)
