"""Steps of pipeline tests: collect tokens from a rig, and let its workers go on."""

import asyncio
from contextlib import aclosing

from twostroke.router.observe.stages import SequenceStages


async def collect(rig, request, stages=None):
    """All tokens; checks that indices are contiguous and the end is told once."""
    return await rest(rig.pipeline.generate(request, stages or SequenceStages(0.0)), [])


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


async def nth_token(rig, request, n, stages=None):
    """A generator that has yielded `n` tokens, and those tokens."""
    events = rig.pipeline.generate(request, stages or SequenceStages(0.0))
    tokens = []
    while len(tokens) < n:
        tokens += [token.token_id for token in (await anext(events)).tokens]
    return events, tokens


def allow(worker, steps):
    worker.gate = asyncio.Semaphore(steps)


def go_on(worker, steps=100):
    for _ in range(steps):
        worker.gate.release()
