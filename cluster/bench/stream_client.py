"""Streamed completions as the benches ask for them, by the load tests' client, which costs next to nothing."""

import random
from typing import Any

from twostroke.loadtests.generator.answers import StreamedAnswer, read_stream
from twostroke.loadtests.generator.completions import Exchange, exchange

FIRST_TOKEN_ID, LAST_TOKEN_ID = 300, 1000  # ordinary tokens in any vocabulary
PATIENCE_S = 300.0
"""A request that takes longer in all has failed."""


def random_prompt(draw: random.Random, num_tokens: int) -> list[int]:
    """One whose beginning no cache holds."""
    return [draw.randint(FIRST_TOKEN_ID, LAST_TOKEN_ID) for _ in range(num_tokens)]


async def stream_completion(url: str, body: dict[str, Any]) -> Exchange:
    """POST `body` to the server at `url` and take all that comes, to be read when nobody is measured any more."""
    streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
    return await exchange(f"{url}/v1", streamed, PATIENCE_S)


def whole_answer(came: Exchange, num_tokens: int) -> StreamedAnswer:
    """What came. Raises ValueError where it is no complete answer of so many tokens."""
    answer = read_stream(came)
    fault = fault_of(answer, num_tokens)
    if fault is not None:
        raise ValueError(fault)
    return answer


def fault_of(answer: StreamedAnswer, num_tokens: int) -> str | None:
    """Why it is no complete answer of so many tokens, None where it is one."""
    if answer.error is not None:
        return answer.error
    answered = answer.usage.completion_tokens
    return None if answered == num_tokens else f"{answered} tokens instead of {num_tokens}"
