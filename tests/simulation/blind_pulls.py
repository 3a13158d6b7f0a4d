"""What routers ask for that are wrong about caches: prefixes from workers that may hold much, little or nothing."""

import random
from collections.abc import Sequence

from twostroke.protocol.messages import ProbeTimes, SendPrefix
from twostroke.protocol.requests import DecodeReply, GenerateRequest, Peer, PrefillReply, Ticket, mint_ticket
from twostroke.protocol.stats import WorkerInfo
from twostroke.router.channels.token_channels import TokenChannels
from twostroke.router.fleet import Fleet


class BlindPulls:
    """A `Fleet` in which a share of the prompts that decode workers read alone are pulled from others.

    Mostly from one that has been sent the same beginning, whatever has become of it there. `secret` signs the tickets.
    What a router's own index finds is pulled as ever.
    """

    def __init__(self, fleet: Fleet, channels: TokenChannels, *, secret: bytes, share: float, draw: random.Random):
        self._fleet = fleet
        self._channels = channels
        self._secret = secret
        self._share = share
        self._draw = draw
        self._readers: dict[tuple[bytes, tuple[int, ...]], list[Peer]] = {}  # by salt and the prompt's beginning

    def workers(self) -> Sequence[WorkerInfo]:
        return self._fleet.workers()

    async def prefill(
        self, worker: Peer, request: GenerateRequest, ticket: Ticket | None, pull: Ticket | None = None
    ) -> PrefillReply:
        self._reads(worker, request)
        return await self._fleet.prefill(worker, request, ticket, pull)

    async def decode(
        self, worker: Peer, request: GenerateRequest, ticket: Ticket | None, pull: Ticket | None = None
    ) -> DecodeReply:
        if ticket is None and pull is None and self._draw.random() < self._share:
            pull = self._ask(worker, request)
        self._reads(worker, request)
        return await self._fleet.decode(worker, request, ticket, pull)

    async def probe_source(self, worker: Peer, tickets: Sequence[Ticket], num_tokens: int) -> ProbeTimes:
        return await self._fleet.probe_source(worker, tickets, num_tokens)

    async def probe_target(self, worker: Peer, tickets: Sequence[Ticket], num_tokens: int) -> None:
        await self._fleet.probe_target(worker, tickets, num_tokens)

    def _reads(self, worker: Peer, request: GenerateRequest) -> None:
        self._readers.setdefault(_beginning(request), []).append(worker)

    def _ask(self, worker: Peer, request: GenerateRequest) -> Ticket | None:
        infos = self._fleet.workers()
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
            source_ranks=source.layout.tp_size,
        )
        self._channels.send(source.peer, SendPrefix(ticket, request.token_ids, request.cache_salt))
        return ticket


def _beginning(request: GenerateRequest) -> tuple[bytes, tuple[int, ...]]:
    return request.cache_salt, request.token_ids[:8]
