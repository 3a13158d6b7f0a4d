"""Which fault comes when: three lanes beside each other, each with one fault after another, drawn from a seed.

A lane for each role takes one worker out of use at a time, so that another is always sound; the third has faults that
leave every worker in use.
"""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from tests.chaos.control import Gone
from tests.chaos.faults import Injected, Injector

Strike = Callable[[], Awaitable[Injected | None]]

PAUSE_S = (0.2, 1.0)  # between two faults of a lane


@dataclass
class Chaos:
    """What has been injected so far. `idle` strikes found nothing to harm."""

    faults: list[Injected] = field(default_factory=list)
    idle: int = 0


async def wreak(injector: Injector, chaos: Chaos, seconds: float, seed: int, tell: Callable[[Injected], None]) -> None:
    """Inject faults for so long. Raises NotBack."""
    end = time.monotonic() + seconds
    lanes = [role_lane(injector, "prefill"), role_lane(injector, "decode"), small_lane(injector)]
    tasks = [
        asyncio.create_task(_run(injector, lane, chaos, end, random.Random(f"{seed} {number}"), tell))
        for number, lane in enumerate(lanes)
    ]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def role_lane(injector: Injector, role: str) -> Sequence[tuple[int, Strike]]:
    """Strikes with their weights."""
    return [
        (5, lambda: injector.kill(role)),
        (1, lambda: injector.lose_engine(role)),
        (4, lambda: injector.stop(role)),
        (3, lambda: injector.partition(role, "routers")),
        (3, lambda: injector.partition(role, "workers")),
        (3, lambda: injector.cut(role, "routers")),
        (3, lambda: injector.cut(role, "workers")),
    ]


def small_lane(injector: Injector) -> Sequence[tuple[int, Strike]]:
    """Strikes with their weights."""
    return [
        (5, injector.damage),
        (3, injector.cut_link),
        (2, lambda: injector.tamper("decode", "TokenFrame", "drop")),
        (2, lambda: injector.tamper("decode", "TokenFrame", "repeat")),
        (2, lambda: injector.tamper("prefill", "Commit", "repeat")),
        (2, lambda: injector.tamper("prefill", "Offer", "repeat")),
        (2, lambda: injector.tamper("decode", "Grant", "repeat")),
        (2, lambda: injector.tamper("decode", "Verified", "repeat")),
        (4, injector.slow),
        (5, injector.leave),
        (1, injector.burst),
        (1, injector.kill_router),
    ]


async def _run(
    injector: Injector,
    lane: Sequence[tuple[int, Strike]],
    chaos: Chaos,
    end: float,
    draw: random.Random,
    tell: Callable[[Injected], None],
) -> None:
    bag: list[Strike] = []
    while time.monotonic() < end:
        if not bag:  # each kind as often as it weighs, in an order of its own
            bag = [strike for weight, strike in lane for _ in range(weight)]
            draw.shuffle(bag)
        under_way = injector.requests_under_way
        try:
            injected = await bag.pop()()
        except Gone:
            injected = None
        if injected is None or not under_way:
            chaos.idle += 1
        else:
            chaos.faults.append(injected)
            tell(injected)
        await asyncio.sleep(draw.uniform(*PAUSE_S))
