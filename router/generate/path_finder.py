"""Finding the workers of an attempt, and waiting for some where there are none."""

import asyncio
from collections.abc import Callable, Collection, Sequence

from twostroke.protocol.clock import Clock
from twostroke.protocol.errors import WorkerLost
from twostroke.protocol.requests import GenerateRequest, Peer
from twostroke.router.channels.token_channels import TokenChannels
from twostroke.router.fleet import NoPath, Path
from twostroke.router.generate.config import PipelineConfig
from twostroke.router.health.worker_records import WorkerRecords
from twostroke.router.routing.chooser import PathChooser
from twostroke.router.routing.in_flight import Hold


class PathFinder:
    """Asks the chooser, around workers that are to be left out, until a decode worker can be reached."""

    def __init__(
        self,
        *,
        chooser: PathChooser,
        channels: TokenChannels,
        records: WorkerRecords,
        clock: Clock,
        config: PipelineConfig,
    ):
        self._chooser = chooser
        self._channels = channels
        self._records = records
        self._clock = clock
        self._config = config
        self.on_decision: Callable[[float], None] = lambda seconds: None
        """Told of every choice how long it took."""

    async def find(self, request: GenerateRequest, sent: Sequence[int], failed: Collection[Peer]) -> tuple[Path, Hold]:
        """The path of the attempt after the outputs `sent`, its decode worker reachable, and the hold on its workers.

        `failed` are workers that failed the request: one that lost a worker waits for another, a new one is refused at
        once. Raises NoPath.
        """
        ejected = self._records.ejected()
        path, hold = await self._reachable(request, sent, failed, ejected)
        strangers = self._records.strangers_to(path.decode.peer)
        if path.prefill is None or path.prefill.peer not in strangers:
            return path, hold
        hold.release()
        return await self._reachable(request, sent, failed, ejected | strangers)

    async def _reachable(
        self, request: GenerateRequest, sent: Sequence[int], failed: Collection[Peer], ejected: Collection[Peer]
    ) -> tuple[Path, Hold]:
        now = self._clock()
        deadline = now + (self._config.retry_wait_s if failed else 0.0)
        while True:
            began = self._clock()
            try:
                path = self._chooser.choose(request, sent, failed, ejected)
            except NoPath:
                if self._clock() >= deadline:
                    raise
                await asyncio.sleep(self._config.retry_poll_s)
                continue
            self.on_decision(self._clock() - began)
            if path.decode.peer in failed and self._clock() < now + self._config.reuse_wait_s:
                await asyncio.sleep(self._config.retry_poll_s)
                continue
            was_down = self._channels.is_down(path.decode.peer)
            # Held before anything is awaited: requests that come together must see each other.
            hold = self._chooser.hold(path, request, sent)
            try:
                await self._channels.ensure(path.decode)
                return path, hold
            except BaseException as error:
                hold.release()
                if not isinstance(error, WorkerLost):
                    raise
                if not was_down:
                    continue  # it is known to be down now, so others come first
                if self._clock() >= deadline:
                    raise NoPath("no decode worker can be reached; try again shortly") from error
            await asyncio.sleep(self._config.retry_poll_s)
