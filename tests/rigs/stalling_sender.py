"""A source in a process of its own, which stalls in the middle of a transfer. Run by test_lost_process.py.

Arguments: transport, the ticket as hexadecimal msgpack, and the lease in seconds. Prints `stalled` once its second
chunk is announced and the first bytes are out, goes on when a line comes, and prints how the transfer ended.
"""

import asyncio
import sys
import time
from collections.abc import Sequence

import msgspec

from tests.rigs.delegate import Delegate
from tests.rigs.kv_pair import BLOCK_BYTES, SECRET, BytesStore, make_transport, reach
from twostroke.kvtransfer.config import TransferConfig
from twostroke.kvtransfer.link import DataLink, LinkParams
from twostroke.kvtransfer.rules.layout import Cut, Segment
from twostroke.kvtransfer.sender import KVSender
from twostroke.kvtransfer.transports import Transports
from twostroke.protocol.errors import TransferFailed
from twostroke.protocol.network import TcpNetwork
from twostroke.protocol.requests import SampledToken, Ticket


class StallingLink(Delegate):
    """Stalls the whole process in its second send, as a stopped one would be."""

    def __init__(self, inner: DataLink):
        super().__init__(inner)
        self._num_sends = 0

    async def send(self, segments: Sequence[Segment], seal: int) -> None:
        self._num_sends += 1
        if self._num_sends == 2:
            print("stalled", flush=True)
            sys.stdin.readline()
        await self._inner.send(segments, seal)


class StallingTransport(Delegate):
    """Makes StallingLinks."""

    async def join(self, params: LinkParams, cut: Cut) -> DataLink:
        return StallingLink(await self._inner.join(params, cut))


async def main(transport_name: str, ticket: Ticket, lease_s: float) -> None:
    store = BytesStore()
    store.fill(1)
    transport = StallingTransport(make_transport(transport_name, store))
    transports = Transports({transport_name: transport}, reach(transport_name))
    sender = KVSender(
        peer=ticket.source,
        store=store,
        network=TcpNetwork(SECRET),
        transports=transports,
        config=TransferConfig(lease_s=lease_s, max_chunk_bytes=8 * BLOCK_BYTES),
        clock=time.monotonic,
    )
    out = sender.open(ticket, 32, range(8), 32)
    out.commit(SampledToken(1))
    try:
        await out.done()
        print("done", flush=True)
    except TransferFailed as error:
        print(f"failed: {error}", flush=True)
    await sender.close()
    await transports.close()


if __name__ == "__main__":
    name, encoded, lease = sys.argv[1:]
    asyncio.run(main(name, msgspec.msgpack.decode(bytes.fromhex(encoded), type=Ticket), float(lease)))
