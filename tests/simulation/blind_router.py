"""A simulated router that asks for pulls which no live router would ask for; its answers and moves are watched."""

import asyncio
import random
from collections import Counter
from collections.abc import Sequence

from tests.rigs.delegate import Delegate
from twostroke.protocol.block_hash import ShortName
from twostroke.protocol.errors import TwostrokeError
from twostroke.protocol.messages import SendPrefix
from twostroke.protocol.requests import DecodeReply, GenerateRequest, Peer, PrefillReply, Ticket, mint_ticket
from twostroke.router.fleet import Fleet
from twostroke.router.generate.config import PipelineConfig
from twostroke.router.generate.moves import MoveReason, RunningStream, StreamMoves
from twostroke.router.token_channels import TokenChannels
from twostroke.simulator.memory_network import MemoryFabric
from twostroke.simulator.sim_fleet import PROMISE_NOTHING, SECRET, SimRouter


class BlindPulls(Delegate):
    """A `Fleet` in which a share of the prompts that decode workers read alone are pulled from others.

    Mostly from one that has been sent the same beginning, whatever has become of it there. `secret` signs the tickets.
    What a router's own index finds is pulled as ever.
    """

    def __init__(self, fleet: Fleet, channels: TokenChannels, *, secret: bytes, share: float, draw: random.Random):
        super().__init__(fleet)
        self._channels = channels
        self._secret = secret
        self._share = share
        self._draw = draw
        self._writers: dict[str, Peer] = {}  # of each client's answer
        self.violations: list[str] = []
        self._readers: dict[tuple[bytes, tuple[int, ...]], list[Peer]] = {}  # by salt and the prompt's beginning

    async def prefill(
        self, worker: Peer, request: GenerateRequest, ticket: Ticket | None, pull: Ticket | None = None
    ) -> PrefillReply:
        self._reads(worker, request)
        return await self._inner.prefill(worker, request, ticket, pull)

    async def decode(
        self, worker: Peer, request: GenerateRequest, ticket: Ticket | None, pull: Ticket | None = None
    ) -> DecodeReply:
        if ticket is None and pull is None and self._draw.random() < self._share:
            pull = self._ask(worker, request)
        self._reads(worker, request)
        client = request.log_context.request_id
        if client in self._writers:
            self.violations.append(f"{client} is written at {worker} and at {self._writers[client]}")
        self._writers[client] = worker
        try:
            return await self._inner.decode(worker, request, ticket, pull)
        finally:
            self._writers.pop(client, None)

    def _reads(self, worker: Peer, request: GenerateRequest) -> None:
        self._readers.setdefault(_beginning(request), []).append(worker)

    def _ask(self, worker: Peer, request: GenerateRequest) -> Ticket | None:
        infos = self._inner.workers()
        target = next((info for info in infos if info.peer == worker), None)
        others = [info for info in infos if info.peer != worker and self._channels.is_connected(info.peer)]
        if target is None or not others:
            return None
        readers = self._readers.get(_beginning(request), ())
        source = self._draw.choice([info for info in others if info.peer in readers] or others)
        ticket = mint_ticket(
            self._secret,
            request.request_id,
            source.peer,
            target.peer,
            target.transfer_addresses,
            source_cut=source.layout.cut,
            target_cut=target.layout.cut,
        )
        self._channels.send(source.peer, SendPrefix(ticket, request.token_ids, request.cache_salt))
        return ticket


def _beginning(request: GenerateRequest) -> tuple[bytes, tuple[int, ...]]:
    return request.cache_salt, request.token_ids[:8]


MOST_MOVES = 2
"""Moves of a stream from workers that do not drain."""
REST_S = 1.0
"""Least time between such a move and the stream's beginning at that worker."""


class BlindRouter(SimRouter):
    """Has a share of the prompts pulled blindly, and watches its moves. What it finds wrong is in `violations`."""

    def __init__(
        self, index: int, fleet: Fleet, fabric: MemoryFabric, config: PipelineConfig, *, blind_pulls: float = 0.0
    ):
        self._blind_pulls = blind_pulls
        self.violations: list[str] = []
        self.reasons = Counter[str]()  # of moves that were begun
        self._ends: dict[int, tuple[Sequence[int], list[float]]] = {}  # when answers moved, by what was sent of them
        super().__init__(index, fleet, fabric, config, PROMISE_NOTHING)
        self._watch(self.pipeline.moves)

    def _watch(self, moves: StreamMoves) -> None:
        move, clock = moves._move, asyncio.get_running_loop().time

        async def watched(stream: RunningStream, reason: MoveReason) -> None:
            self.reasons[reason] += 1
            _, moved = self._ends.setdefault(id(stream.sent), (stream.sent, []))
            if reason != "drain" and (len(moved) >= MOST_MOVES or (moved and clock() - moved[-1] < REST_S)):
                self.violations.append(f"a stream moves at {clock()}, having moved at {moved}")
            end = stream.end

            def end_here(error: TwostrokeError) -> None:
                moved.append(clock())
                end(error)

            stream.end = end_here
            await move(stream, reason)
            stream.end = end

        moves._move = watched

    def _reach(self, channels: TokenChannels) -> Fleet:
        draw = random.Random(f"pulls of {self._index}")
        reached = BlindPulls(self._fleet, channels, secret=SECRET, share=self._blind_pulls, draw=draw)
        reached.violations = self.violations
        return reached

    def known_blocks(self, worker: Peer) -> set[ShortName] | None:
        """Return the worker's cache as this router has understood it; None where it has heard nothing."""
        cached = self.pipeline._chooser._cached
        if cached is None or not self.channels.is_connected(worker) or worker not in cached._workers:
            return None
        bit = 1 << cached._workers[worker].column
        return {name for name, holders in cached._held.items() if holders & bit}
