"""Prompts that are read by real workers, whatever their roles and ranks, through the pipeline."""

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from typing import Any

import numpy as np
import pytest

from tests.integration.local_fleet import GREEDY, Served, Shape, new_state, serve
from twostroke.protocol.requests import GenerateRequest, ScoringParams
from twostroke.router.request_state import PromptScored, RequestState

PROMPT = list(range(3, 53))
BY_BOTH = ScoringParams(logprobs=2, pooling="mean")


async def read(
    served: Served, prompt: Sequence[int], params: ScoringParams, max_tokens: int = 0
) -> tuple[PromptScored, RequestState]:
    state = new_state(GenerateRequest("", "", tuple(prompt), len(prompt), GREEDY, max_tokens, scoring=params))
    async with aclosing(served.pipeline.generate(state)) as events:
        (event,) = [event async for event in events]
    assert isinstance(event, PromptScored)
    return event, state


def assert_alike(event: PromptScored, expected: PromptScored) -> None:
    assert event.scores is not None
    assert expected.scores is not None
    assert (event.scores.token_ids, event.scores.ranks) == (expected.scores.token_ids, expected.scores.ranks)
    assert len(event.scores.logprobs) == 4 * 3 * (len(PROMPT) - 1)
    for some, others in ((event.scores.logprobs, expected.scores.logprobs), (event.embedding, expected.embedding)):
        np.testing.assert_allclose(np.frombuffer(some, "<f4"), np.frombuffer(others, "<f4"), atol=1e-5)


@pytest.mark.parametrize(
    "shape",
    [Shape("tcp", prefill_step_tokens=16), Shape(None, decode_step_tokens=16), Shape("tcp", prefill_ranks=2)],
    ids=["a prefill worker", "a decode worker", "two ranks"],
)
def test_any_worker_reads_all_of_a_prompt_however_much_is_cached(shape: Shape, write_checkpoint: Any) -> None:
    folder = write_checkpoint()

    async def run() -> None:
        async with serve(folder, Shape(None)) as alone:
            expected, _ = await read(alone, PROMPT, BY_BOTH)
        async with serve(folder, shape) as served:
            answer = await served.generate(PROMPT, 3, GREEDY)  # and its blocks are cached
            for _ in range(2):
                event, state = await read(served, PROMPT, BY_BOTH, max_tokens=1)
                assert [token.token_id for token in event.tokens] == answer[:1]
                assert_alike(event, expected)
                assert state.num_cached_tokens == 0
            last, state = await read(served, PROMPT, ScoringParams(pooling="last"))
            assert state.num_cached_tokens == 48
            assert not last.tokens
            assert last.finish_reason == "length"
            await served.idle()
            if shape.transport is not None:
                assert served.fleet.stats("decode").finished_requests == 1

    asyncio.run(run())
