"""A prefill worker in a process of its own, which stalls in the middle of a chunk's bytes. Run by test_lost_process.py.

Arguments: transport, the ticket as hexadecimal msgpack, and the lease in seconds. Prints `stalled` once half a chunk is
out (torch_distributed: once the chunk is announced), goes on when a line comes, and prints how the transfer ended.
"""

import asyncio
import sys
import time
from collections.abc import Sequence
from typing import Any

import msgspec
from transfer_harness import SECRET, BytesStore

from kvtransfer.config import TransferConfig
from kvtransfer.link import DataLink, LinkParams
from kvtransfer.sender import KVSender
from kvtransfer.transports import make_transport
from protocol.errors import TransferFailed
from protocol.requests import SampledToken
from protocol.tcp_network import TcpNetwork
from protocol.tickets import Ticket


class StallingLink:
    """Stalls the whole process in its first send, as a stopped one would be."""

    def __init__(self, inner: Any):
        self._inner = inner
        self._stalled = False

    async def send(self, layer: int, block_ids: Sequence[int]) -> None:
        if not self._stalled:
            self._stalled = True
            half = len(block_ids) // 2
            if hasattr(self._inner, "_socket"):
                await self._inner.send(layer, block_ids[:half])
                block_ids = block_ids[half:]
            print("stalled", flush=True)
            sys.stdin.readline()
        await self._inner.send(layer, block_ids)

    async def receive(self, layer: int, block_ids: Sequence[int]) -> None:
        raise NotImplementedError

    async def discard(self, num_bytes: int) -> None:
        raise NotImplementedError

    async def close(self) -> None:
        await self._inner.close()


async def main(transport_name: str, ticket: Ticket, lease_s: float) -> None:
    store = BytesStore()
    store.fill(1)
    transport = make_transport(transport_name, store)
    join = transport.join

    async def join_stalling(params: LinkParams) -> DataLink:
        return StallingLink(await join(params))

    transport.join = join_stalling  # type: ignore[method-assign]
    sender = KVSender(
        peer=ticket.prefill,
        store=store,
        network=TcpNetwork(SECRET),
        transport=transport,
        config=TransferConfig(lease_s=lease_s),
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
    await transport.close()


if __name__ == "__main__":
    name, encoded, lease = sys.argv[1:]
    asyncio.run(main(name, msgspec.msgpack.decode(bytes.fromhex(encoded), type=Ticket), float(lease)))
