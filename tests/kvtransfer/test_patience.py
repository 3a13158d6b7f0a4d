"""Limits in time, of one call and of several that overlap."""

import asyncio

import pytest

from twostroke.kvtransfer.timeouts import Patience, within
from twostroke.protocol.errors import ConnectionLost


async def test_within_names_what_took_too_long() -> None:
    with pytest.raises(ConnectionLost, match=r"the welcome took longer than 0\.01 s"):
        await within(0.01, asyncio.Event().wait(), "the welcome")


async def test_a_call_that_waits_behind_another_has_its_own_time_after_it() -> None:
    patience = Patience(0.2)
    loop = asyncio.get_running_loop()
    start = loop.time()
    first_done = loop.create_future()
    loop.call_later(0.15, first_done.set_result, None)

    async def first() -> None:
        await patience.wait(first_done, "the first")

    second = asyncio.create_task(patience.wait(asyncio.Event().wait(), "the second"))
    await first()
    with pytest.raises(ConnectionLost, match=r"the second took longer than 0\.2 s"):
        await second
    assert loop.time() - start >= 0.35 - 1e-3
