"""A worker beside the one of a rig that sends it KV, of what its prefix cache is told to hold or of whole prompts."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

from tests.simulation.fake_model import FakeEngine
from tests.simulation.worker_rig import BLOCK, SECRET, Parts, Rig, a_request, make_parts
from twostroke.kvtransfer.sides import Outgoing
from twostroke.protocol.errors import TransferFailed
from twostroke.protocol.requests import GenerateRequest, Peer, SampledToken, Ticket, mint_ticket
from twostroke.worker.pulls import PrefixExports, Transfers
from twostroke.worker.sequence import SequenceState

SOURCE = Peer("source-9", 99)


@dataclass
class Source:
    """Another worker, with nothing but a cache and the sending side of its transfers."""

    rig: Rig
    peer: Peer
    parts: Parts
    exports: PrefixExports
    transfers: Transfers

    async def compute(self, request: GenerateRequest) -> None:
        """Have the request's whole blocks in the cache."""
        sequence = SequenceState(request, self.parts.store.layout.block_size)
        sequence.reserve(self.parts.pool, sequence.num_uncomputed)
        await FakeEngine(self.parts.store).step([sequence.step(sequence.num_uncomputed)])
        sequence.num_computed = len(request.token_ids)
        sequence.publish_full_blocks(self.parts.pool)
        sequence.reset(self.parts.pool)

    def ticket(self, name: str = "r", target: Peer | None = None, secret: bytes = SECRET) -> Ticket:
        """Permission for a transfer from here to the rig's worker, or `target`."""
        info = self.rig.info
        return mint_ticket(secret, name, self.peer, target or info.peer, info.transfer_addresses)

    def send(self, ticket: Ticket, request: GenerateRequest) -> bool:
        """As PrefixExports.send."""
        return self.exports.send(ticket, request.token_ids, request.cache_salt)

    def offer(self, request: GenerateRequest) -> Ticket:
        """Send what is cached of a request to the rig's worker, which is to be told so with this ticket."""
        ticket = self.ticket(request.request_id)
        self.send(ticket, request)
        return ticket

    async def hand_over(self, ticket: Ticket, request: GenerateRequest) -> tuple[Outgoing, SampledToken | None]:
        """Compute a prompt, and offer all of it as a prefill worker does; the first token is to be committed."""
        sequence = SequenceState(request, self.parts.store.layout.block_size)
        num_tokens = sequence.num_uncomputed
        sequence.reserve(self.parts.pool, num_tokens)
        (token,) = await FakeEngine(self.parts.store).step([sequence.step(num_tokens)])
        transfer = self.parts.sender.open(ticket, num_tokens, sequence.block_ids, num_tokens)

        async def see_off() -> None:
            with suppress(TransferFailed):
                await transfer.done()
            sequence.reset(self.parts.pool)

        self.transfers.see(see_off(), "hand over")
        return transfer, token

    def vanish(self) -> None:
        """Nothing of this worker reaches anybody any more."""
        self.rig.fabric.cut(self.peer.worker_id)
        self.rig.links.cut(self.peer.worker_id)


@asynccontextmanager
async def source_beside(
    rig: Rig, num_cached: int = 0, *, peer: Peer = SOURCE, block_size: int = BLOCK
) -> AsyncIterator[Source]:
    """It has the blocks of so many tokens of a request cached. Afterwards nothing of it may be left."""
    parts = make_parts(peer, rig.fabric, rig.links, block_size=block_size)
    transfers = Transfers(lambda: None)
    exports = PrefixExports(sender=parts.sender, pool=parts.pool, transfers=transfers)
    try:
        source = Source(rig, peer, parts, exports, transfers)
        if num_cached:
            await source.compute(a_request(num_cached))
        yield source
    finally:
        await parts.sender.close()
        await transfers.ended()
        await parts.transports.close()
        assert parts.pool.owned_blocks == 0
        parts.pool.check_integrity()
