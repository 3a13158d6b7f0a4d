"""The fake model agrees with its oracle, and only while every block is right."""

import asyncio

from tests.simulation.fake_model import FakeEngine, expected_tokens
from tests.simulation.fake_store import FakeStore, SpoilingPool, fake_layout
from tests.simulation.virtual_loop import run_virtually
from twostroke.protocol.requests import GenerateRequest, SamplingParams
from twostroke.worker.sequence import SequenceState

REQUEST = GenerateRequest(
    request_id="r",
    router_id="",
    token_ids=tuple(range(10)),
    num_prompt_tokens=10,
    sampling=SamplingParams(seed=5),
    max_tokens=8,
    min_tokens=2,
    stop_token_ids=(3,),
)


def generate(chunk: int, spoiled_block: int | None = None) -> list[int]:
    """All tokens of REQUEST by steps of the engine, with one block of the prompt spoiled before the last tokens."""

    async def main() -> list[int]:
        store = FakeStore(fake_layout(num_layers=2, block_size=4), num_blocks=8)
        pool, engine = SpoilingPool(store), FakeEngine(store)
        sequence = SequenceState(REQUEST, 4)
        while sequence.num_output_tokens < len(expected_tokens(REQUEST, 2)):
            count = min(chunk, sequence.num_uncomputed)
            sequence.reserve(pool, count)
            if spoiled_block is not None and sequence.num_output_tokens == 3:
                store.spoil([sequence.block_ids[spoiled_block]])
            (token,) = await engine.step([sequence.step(count)])
            sequence.num_computed += count
            if token is not None:
                sequence.append(token.token_id)
        await asyncio.sleep(0)
        return sequence.token_ids[10:]

    return run_virtually(main())


def test_the_engine_agrees_with_the_oracle_whatever_the_chunks():
    for chunk in (1, 3, 4, 64):
        assert generate(chunk) == expected_tokens(REQUEST, 2)


def test_one_wrong_block_anywhere_changes_the_tokens():
    expected = expected_tokens(REQUEST, 2)
    assert len(expected) > 5
    for block in range(3):
        assert generate(64, spoiled_block=block) != expected
