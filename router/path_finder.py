"""Finding the workers of an attempt, and waiting for some where there are none."""

import asyncio
from collections.abc import Collection, Sequence

from protocol.clock import Clock
from protocol.errors import WorkerLost
from protocol.requests import GenerateRequest
from protocol.stats import WorkerInfo
from protocol.tickets import Peer
from router.config import PipelineConfig
from router.fleet import Fleet
from router.in_flight import Hold, InFlight
from router.policy import Candidate, NoPath, Path, choose
from router.prefix_pulls import PrefixPulls
from router.token_channels import TokenChannels


class PathFinder:
    """Asks the policy, with what is known now, and holds the workers' places before another request asks."""

    def __init__(
        self, *, fleet: Fleet, channels: TokenChannels, pulls: PrefixPulls, clock: Clock, config: PipelineConfig
    ):
        self._fleet = fleet
        self._channels = channels
        self._pulls = pulls
        self._clock = clock
        self._config = config
        self._in_flight = InFlight()

    @property
    def in_flight(self) -> int:
        """Places held at workers: 0 when idle."""
        return self._in_flight.total()

    async def find(self, request: GenerateRequest, sent: Sequence[int], failed: Collection[Peer]) -> tuple[Path, Hold]:
        """The path of the attempt after the outputs `sent`, its decode worker reachable, and the hold on the pair.

        `failed` are workers that failed the request: one that lost a worker waits for another, a new one is refused at
        once. Raises NoPath.
        """
        now = self._clock()
        deadline = now + (self._config.retry_wait_s if failed else 0.0)
        num_tokens = len(request.token_ids) + len(sent)
        while True:
            workers = self._fleet.workers()
            self._channels.follow(workers)
            self._pulls.follow(workers)
            down = {info.peer for info in workers if self._channels.is_down(info.peer)}
            candidates = self._candidates(workers)
            avoid = down.union(failed)
            try:
                path = choose(
                    [one for one in candidates if one.info.role == "prefill"],
                    [one for one in candidates if one.info.role == "decode"],
                    num_tokens=num_tokens,
                    avoid=avoid,
                )
            except NoPath:
                if self._clock() >= deadline:
                    raise
                await asyncio.sleep(self._config.retry_poll_s)
                continue
            if path.decode.peer in failed and self._clock() < now + self._config.reuse_wait_s:
                await asyncio.sleep(self._config.retry_poll_s)
                continue
            # Held before anything is awaited: requests that come together must see each other.
            hold = self._in_flight.hold([info.peer for info in (path.prefill, path.decode) if info], num_tokens)
            try:
                await self._channels.ensure(path.decode)
                return self._pulls.with_source(path, request, sent, candidates, avoid), hold
            except BaseException as error:
                hold.release()
                if not isinstance(error, WorkerLost):
                    raise
                if path.decode.peer not in down:
                    continue  # it is known to be down now, so others come first
                if self._clock() >= deadline:
                    raise NoPath("no decode worker can be reached; try again shortly") from error
            await asyncio.sleep(self._config.retry_poll_s)

    def _candidates(self, workers: Sequence[WorkerInfo]) -> list[Candidate]:
        return [
            Candidate(
                info,
                self._channels.stats(info.peer),
                self._in_flight.requests(info.peer),
                self._in_flight.tokens(info.peer),
            )
            for info in workers
        ]
