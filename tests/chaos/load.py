"""Steady load: so many clients at once, each with one request after another."""

import asyncio
import random
import time
from collections.abc import Sequence

from tests.chaos.client import Answer, ask
from tests.chaos.requests import ClientRequest

RETRY_S = 1.0
PAUSE_S = (0.1, 0.9)  # between two requests of a client: steady load, and no more than the machine can do


class SteadyLoad:
    """Keeps `clients` requests under way between `start` and `stop`, and all answers in `answers`."""

    def __init__(self, url: str, requests: Sequence[ClientRequest], clients: int, seed: int):
        self.answers: list[Answer] = []
        self.under_way = 0
        self._url = url
        self._requests = requests
        self._clients = clients
        self._draw = random.Random(seed)
        self._stopping = False
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._run()) for _ in range(self._clients)]

    async def stop(self) -> None:
        """Let what is under way end; nothing new begins."""
        self._stopping = True
        await asyncio.gather(*self._tasks)

    async def one_more(self, *, leave_after: int | None = None) -> Answer:
        """Send a request; returns its answer, which is among `answers` too."""
        self.under_way += 1
        try:
            answer = await ask(self._url, self._draw.choice(self._requests), leave_after=leave_after)
        finally:
            self.under_way -= 1
        self.answers.append(answer)
        return answer

    async def _run(self) -> None:
        while not self._stopping:
            answer = await self.one_more()
            if not answer.is_accepted:  # 429: another time; anything else is looked at when all is over
                await asyncio.sleep(min(answer.retry_after_s or RETRY_S, RETRY_S))
            await asyncio.sleep(self._draw.uniform(*PAUSE_S))


async def answers_of_all(url: str, requests: Sequence[ClientRequest], clients: int) -> dict[int, Answer]:
    """Each request's answer, by key, with as many under way as the steady load has."""
    found: dict[int, Answer] = {}
    left = list(reversed(requests))
    draw = random.Random(len(requests))

    async def run() -> None:
        while left:
            request = left.pop()
            found[request.key] = await ask(url, request)
            await asyncio.sleep(draw.uniform(*PAUSE_S))

    began = time.monotonic()
    await asyncio.gather(*(run() for _ in range(clients)))
    took_s = time.monotonic() - began
    for answer in found.values():
        if not answer.has_end or answer.error is not None:
            raise RuntimeError(f"a request failed without any fault: {answer.status} {answer.error}")
    tokens = sum((answer.usage or {})["completion_tokens"] for answer in found.values())
    print(f"    {len(found)} requests without faults: {tokens} tokens in {took_s:.1f} s", flush=True)
    return found
