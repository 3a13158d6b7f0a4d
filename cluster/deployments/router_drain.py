"""How the routers of an application that is to end let go of what they have under way."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Literal

from twostroke.protocol.clock import Clock

FAREWELL_S = 0.5
"""Before the end, for the errors that end streams to reach their clients."""
LOOK_S = 0.2

Ask = Callable[[Literal["drain", "cut"]], Awaitable[int]]
"""Calls this method of every router; returns how many choices all of them have under way."""


async def drain_routers(
    ask: Ask, grace_s: float, notice_s: float, tell: Callable[[str], None], clock: Clock = time.monotonic
) -> None:
    """Have the routers say that they are not ready, and let answers end for as long as `grace_s`; the rest is cut.

    New requests are taken for `notice_s`, and so long this takes at least. `tell` is given lines for people.
    """
    began = clock()
    under_way = await ask("drain")
    if under_way > 0:
        tell(f"Waiting up to {grace_s:g} s for {_choices(under_way)} under way ...")
    while (under_way := await ask("drain")) > 0 or clock() - began < notice_s:
        if clock() - began >= grace_s - min(FAREWELL_S, grace_s / 2):
            break
        await asyncio.sleep(LOOK_S)
    if under_way == 0:
        return
    tell(f"Cut {_choices(await ask('cut'))} that had not ended in time.")
    while await ask("drain") > 0 and clock() - began < grace_s:  # noqa: ASYNC110  (the routers are other processes)
        await asyncio.sleep(LOOK_S / 4)


async def drain_application(app_name: str, grace_s: float, notice_s: float, tell: Callable[[str], None]) -> None:
    """As `drain_routers`, of an application on the Ray that this process is connected to. Raises RayServeException."""
    from ray import serve

    routers = serve.get_deployment_handle("Router", app_name)

    async def ask(method: Literal["drain", "cut"]) -> int:
        return sum(await routers.broadcast(method).results_async(timeout_s=5.0))

    await drain_routers(ask, grace_s, notice_s, tell)


def _choices(count: int) -> str:
    return "1 answer" if count == 1 else f"{count} answers"
