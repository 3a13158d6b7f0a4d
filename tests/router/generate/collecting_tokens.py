"""Steps of pipeline tests: collect tokens from a rig, and let its workers go on."""

import asyncio
from contextlib import aclosing

from twostroke.router.request_state import ChoiceJob, RequestState


def new_state(request, **fields):
    """The record of a request that has just come."""
    return RequestState(ChoiceJob(request), 0.0, **fields)


async def collect(rig, request):
    """All tokens of a request, or of its record; checks that indices are contiguous and the end is told once."""
    return await rest(generate(rig, request), [])


def generate(rig, request):
    return rig.pipeline.generate(request if isinstance(request, RequestState) else new_state(request))


async def rest(events, tokens):
    """`tokens`, which have been read already, and all that follow, checked in the same way."""
    finishes = []
    async with aclosing(events):
        async for event in events:
            assert event.index == len(tokens)
            tokens += [token.token_id for token in event.tokens]
            if event.finish_reason:
                finishes.append(event.finish_reason)
    assert len(finishes) == 1
    return tokens


async def nth_token(rig, request, n):
    """A generator that has yielded `n` tokens, and those tokens."""
    events = generate(rig, request)
    tokens = []
    while len(tokens) < n:
        tokens += [token.token_id for token in (await anext(events)).tokens]
    return events, tokens


def allow(worker, steps):
    worker.gate = asyncio.Semaphore(steps)


def go_on(worker, steps=100):
    for _ in range(steps):
        worker.gate.release()
