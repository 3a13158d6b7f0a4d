"""A worker beside the one of a rig, whose prefix cache holds what it is told to: for tests of pulls."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from tests.simulation.fake_model import FakeEngine
from tests.simulation.worker_rig import BLOCK, SECRET, Parts, Rig, make_parts
from twostroke.protocol.requests import GenerateRequest, Peer, Ticket, mint_ticket
from twostroke.worker.pulls import PrefixExports, Transfers
from twostroke.worker.sequence import SequenceState

SOURCE = Peer("source-9", 99)


@dataclass
class Source:
    """Another worker, with nothing but a cache and the sending side of its transfers."""

    rig: Rig
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
        return mint_ticket(secret, name, SOURCE, target or info.peer, info.transfer_addresses)

    def send(self, ticket: Ticket, request: GenerateRequest) -> bool:
        """As PrefixExports.send."""
        return self.exports.send(ticket, request.token_ids, request.cache_salt)

    def vanish(self) -> None:
        """Nothing of this worker reaches anybody any more."""
        self.rig.fabric.cut(SOURCE.worker_id)
        self.rig.links.cut(SOURCE.worker_id)


@asynccontextmanager
async def source_beside(rig: Rig, block_size: int = BLOCK) -> AsyncIterator[Source]:
    """Afterwards nothing of it may be left."""
    parts = make_parts(SOURCE, rig.fabric, rig.links, block_size=block_size)
    transfers = Transfers(lambda: None)
    exports = PrefixExports(sender=parts.sender, pool=parts.pool, transfers=transfers)
    try:
        yield Source(rig, parts, exports, transfers)
    finally:
        await parts.sender.close()
        await transfers.ended()
        await parts.transports.close()
        assert parts.pool.owned_blocks == 0
        parts.pool.check_integrity()
