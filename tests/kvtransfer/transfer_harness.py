"""Two workers' sides in one process, over the real network and a transport, with stores of plain bytes."""

import asyncio
import contextlib
import functools
import os
import random
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from kvtransfer.config import TransferConfig
from kvtransfer.link import Transport
from kvtransfer.receiver import KVReceiver
from kvtransfer.sender import KVSender
from kvtransfer.store import KVStore
from kvtransfer.transports import make_transport
from protocol.network import Network
from protocol.requests import SampledToken
from protocol.tcp_network import TcpNetwork
from protocol.tickets import Address, Peer, Ticket, mint_ticket

SECRET = b"a secret of tests"
P, D = Peer("prefill-0", 11), Peer("decode-0", 22)
TOKEN = SampledToken(42, -0.5, ((42, -0.5), (7, -1.5)))
BLOCK_SIZE = 4


class BytesStore:
    """A KVStore in a bytearray per layer."""

    def __init__(self, num_layers: int = 3, num_blocks: int = 32, block_bytes: int = 96, fingerprint: str = "f"):
        self.num_layers = num_layers
        self.num_blocks = num_blocks
        self.block_size = BLOCK_SIZE
        self.block_bytes = block_bytes
        self.fingerprint = fingerprint
        self.layers = [bytearray(num_blocks * block_bytes) for _ in range(num_layers)]

    def layer_bytes(self, layer: int) -> memoryview:
        return memoryview(self.layers[layer])

    def fill(self, seed: int) -> None:
        """Random bytes everywhere."""
        draw = random.Random(seed)
        for layer in self.layers:
            layer[:] = draw.randbytes(len(layer))

    def block(self, layer: int, block_id: int) -> bytes:
        return bytes(self.layers[layer][block_id * self.block_bytes : (block_id + 1) * self.block_bytes])

    def copy(self) -> list[bytes]:
        return [bytes(layer) for layer in self.layers]


FAST = TransferConfig(lease_s=20.0, progress_s=20.0)
"""Leases that never end within a test: for tests of anything else."""


LIMIT_S = 60.0
"""A test that waits for what never comes fails, instead of holding up the others."""


@dataclass
class Pair:
    """A prefill worker's sender and a decode worker's receiver."""

    sender: KVSender
    receiver: KVReceiver
    source: BytesStore
    target: BytesStore
    address: Address
    network: Network
    transports: list[Transport] = field(default_factory=list)

    def ticket(self, request_id: str = "r", prefill: Peer = P, decode: Peer = D, secret: bytes = SECRET) -> Ticket:
        return mint_ticket(secret, request_id, prefill, decode, self.address)

    def make_sender(self, peer: Peer = P, store: KVStore | None = None, config: TransferConfig = FAST) -> KVSender:
        return KVSender(
            peer=peer,
            store=store if store is not None else self.source,
            network=self.network,
            transport=self.transports[0],
            config=config,
            clock=time.monotonic,
        )


Wrap = Callable[[Transport], Transport]


def unwrapped(transport: Transport) -> Transport:
    return transport


@contextlib.asynccontextmanager
async def make_pair(
    transport: str = "tcp",
    *,
    source: BytesStore | None = None,
    target: BytesStore | None = None,
    config: TransferConfig = FAST,
    sender_config: TransferConfig | None = None,
    wrap_source: Wrap = unwrapped,
    wrap_target: Wrap = unwrapped,
) -> AsyncIterator[Pair]:
    """Both sides, started; checks at the end that neither tasks, threads' work nor descriptors are left over."""
    if transport == "torch_distributed":
        await warm_up_torch()
    source = source if source is not None else BytesStore()
    target = target if target is not None else BytesStore()
    tasks_before = asyncio.all_tasks()
    descriptors_before = open_descriptors()
    transports = [wrap_source(make_transport(transport, source)), wrap_target(make_transport(transport, target))]
    network = TcpNetwork(SECRET)
    receiver = KVReceiver(
        peer=D,
        store=target,
        network=network,
        transport=transports[1],
        config=config,
        clock=time.monotonic,
        secret=SECRET,
    )
    address = await receiver.start("127.0.0.1")
    pair = Pair(None, receiver, source, target, address, network, transports)  # type: ignore[arg-type]
    pair.sender = pair.make_sender(config=sender_config if sender_config is not None else config)
    try:
        async with asyncio.timeout(LIMIT_S):
            yield pair
    finally:
        await pair.sender.close()
        await receiver.close()
        for made in transports:
            await made.close()
    await settle(lambda: asyncio.all_tasks() == tasks_before)
    await settle(lambda: open_descriptors() <= descriptors_before)
    assert pair.sender.stats.in_flight == 0
    assert receiver.stats.in_flight == 0


@functools.cache
def _torch_warmth() -> list[bool]:
    return []


async def warm_up_torch() -> None:
    """Let torch and gloo open what they keep for the process's life, so that it does not look like a leak."""
    if not _torch_warmth():
        store = BytesStore()
        source, target = make_transport("torch_distributed", store), make_transport("torch_distributed", store)
        pending = await target.prepare("127.0.0.1")
        await asyncio.gather(source.join(pending.params), pending.established())
        await source.close()
        await target.close()
        _torch_warmth().append(True)


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


async def settle(condition: Callable[[], bool], limit_s: float = 10.0) -> None:
    """Let the event loop run until `condition` holds: for ends that have no event of their own."""
    async with asyncio.timeout(limit_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)
