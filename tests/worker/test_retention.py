"""Prompts whose clients want their KV kept: they outlast the traffic of others, within a share and for a time."""

import asyncio
from itertools import count

import pytest
from msgspec import structs

from tests.worker.worker_rig import BLOCK, Rig, a_request, of_both_roles
from twostroke.protocol.requests import GenerateRequest

NUM_BLOCKS = 48  # of which a client may have 12 kept
PROMPT = 4 * BLOCK
IDS = count()
ROUNDS = 8  # of others' prompts, each a quarter of the cache


def a_prompt(number: int, client: bytes = b"", keep_s: float = 0.0, length: int = PROMPT) -> GenerateRequest:
    """A request whose prompt is unlike those with other numbers."""
    return structs.replace(
        a_request(length, f"request-{next(IDS)}"), token_ids=(number, *range(1, length)), client=client, keep_s=keep_s
    )


async def hits(rig: Rig, request: GenerateRequest) -> int:
    """Have a request answered; return how many tokens of its prompt were cached."""
    before = rig.worker.stats().prefix_hits
    assert await rig.is_right(request, await rig.ask(request))
    return int(rig.worker.stats().prefix_hits) - before


async def traffic(rig: Rig, client: bytes = b"", keep_s: float = 0.0) -> None:
    """Have other prompts answered, which together need the cache twice."""
    for number in range(1, 1 + ROUNDS):
        assert await hits(rig, a_prompt(number, client, keep_s, length=3 * PROMPT)) == 0


@of_both_roles(num_blocks=NUM_BLOCKS)
@pytest.mark.parametrize("keep_s", [0.0, 300.0])
async def test_a_prompt_that_is_kept_outlasts_the_traffic_of_others(rig: Rig, role: str, keep_s: float) -> None:
    assert await hits(rig, a_prompt(0, b"client", keep_s)) == 0
    await traffic(rig)
    assert await hits(rig, a_prompt(0)) == (PROMPT - 1 if keep_s else 0)
    if keep_s:
        assert len(rig.pool._kept) == PROMPT // BLOCK, "the answer is not kept, and a use without a wish ends none"


@of_both_roles(num_blocks=NUM_BLOCKS)
async def test_a_client_beyond_its_share_evicts_no_other_clients_prompt(rig: Rig, role: str) -> None:
    await hits(rig, a_prompt(0, b"client", 300.0))
    await traffic(rig, b"greedy", 300.0)
    assert len(rig.pool._kept) == PROMPT // BLOCK + NUM_BLOCKS // 4
    assert await hits(rig, a_prompt(0)) == PROMPT - 1


@of_both_roles(num_blocks=NUM_BLOCKS)
async def test_one_huge_prompt_leaves_the_prompts_that_its_client_wished_kept_before(rig: Rig, role: str) -> None:
    await hits(rig, a_prompt(0, b"client", 300.0))
    await hits(rig, a_prompt(100, b"client", 300.0, length=4 * PROMPT))
    assert len(rig.pool._kept) == NUM_BLOCKS // 4
    await traffic(rig)
    assert await hits(rig, a_prompt(0)) == PROMPT - 1
    assert await hits(rig, a_prompt(100, length=4 * PROMPT)) == 2 * PROMPT, "its beginning fills the rest of the share"


@of_both_roles(num_blocks=NUM_BLOCKS)
async def test_clients_that_fill_their_shares_together_evict_no_prompt_of_one_that_keeps_little(
    rig: Rig, role: str
) -> None:
    await hits(rig, a_prompt(0, b"client", 300.0))
    for greedy in (b"first", b"second", b"third"):
        for number in range(1, 4):
            await hits(rig, a_prompt(100 * greedy[0] + number, greedy, 300.0, length=3 * PROMPT))
    assert len(rig.pool._kept) == NUM_BLOCKS // 2
    assert await hits(rig, a_prompt(0)) == PROMPT - 1


@of_both_roles(num_blocks=NUM_BLOCKS)
async def test_a_prompt_is_kept_for_its_time_after_its_last_use(rig: Rig, role: str) -> None:
    await hits(rig, a_prompt(0, b"client", 3.0))
    await asyncio.sleep(2.0)
    assert await hits(rig, a_prompt(0)) == PROMPT - 1
    await asyncio.sleep(1.5)
    await traffic(rig)
    assert await hits(rig, a_prompt(0)) == PROMPT - 1
    await asyncio.sleep(3.0)
    await traffic(rig)
    assert await hits(rig, a_prompt(0)) == 0


@of_both_roles(num_blocks=NUM_BLOCKS)
async def test_prompts_that_are_kept_give_way_to_requests_that_need_the_whole_cache(rig: Rig, role: str) -> None:
    await hits(rig, a_prompt(0, b"client", 300.0))
    assert rig.worker.stats().free_blocks == NUM_BLOCKS
    large = [a_prompt(number, length=90) for number in (1, 2)]
    replies = await asyncio.gather(*[rig.ask(request) for request in large])
    assert [await rig.is_right(request, reply) for request, reply in zip(large, replies, strict=True)] == [True, True]
    assert len(rig.pool._kept) < PROMPT // BLOCK
