"""Two workers' sides in one process, over the real network and a transport, with stores of plain bytes."""

import asyncio
import contextlib
import functools
import os
import random
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from twostroke.kvtransfer.config import TransferConfig
from twostroke.kvtransfer.layout import KVShard
from twostroke.kvtransfer.link import Transport
from twostroke.kvtransfer.receiver import KVReceiver
from twostroke.kvtransfer.sender import KVSender
from twostroke.kvtransfer.transports import Transports
from twostroke.kvtransfer.transports.shm import ShmTransport
from twostroke.kvtransfer.transports.tcp import TcpTransport
from twostroke.protocol.errors import TransferFailed
from twostroke.protocol.kv_layout import Encoding, KVLayout
from twostroke.protocol.messages import Reach
from twostroke.protocol.network import Network, TcpNetwork
from twostroke.protocol.requests import Address, Peer, SampledToken, Ticket, mint_ticket

SECRET = b"a secret of tests"
P, D = Peer("prefill-0", 11), Peer("decode-0", 22)
TOKEN = SampledToken(42, -0.5, ((42, -0.5), (7, -1.5)))
BLOCK_SIZE = 4
BLOCK_BYTES = 96  # of a BytesStore, if nothing else is said


class BytesStore:
    """A HostStore in a bytearray per layer; a block is 16 * head_dim * heads per rank bytes by default."""

    def __init__(
        self,
        num_layers: int = 3,
        num_blocks: int = 32,
        head_dim: int = 6,
        *,
        model: str = "f",
        dtype: str = "bfloat16",
        num_kv_heads: int = 1,
        block_size: int = BLOCK_SIZE,
        tp_size: int = 1,
        pp_size: int = 1,
        rank: int = 0,
        windows: tuple[int, ...] = (),
        kinds: int = 2,
    ):
        self.layout = KVLayout(
            model,
            dtype,
            num_layers,
            num_kv_heads,
            head_dim,
            block_size,
            tp_size,
            windows=windows,
            kinds=kinds,
            pp_size=pp_size,
        )
        self.rank = rank
        self.num_blocks = num_blocks
        self.block_bytes = self.layout.block_bytes
        self.layers = [bytearray(num_blocks * self.block_bytes) for _ in range(self.layout.groups_of(rank).num_tensors)]

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


def rank_shard(
    layout: KVLayout, first_head: int, num_heads: int, unit_tokens: int, encoding: Encoding, rank: int = 0
) -> KVShard:
    """Return the cut of all layers that this rank has."""
    return KVShard(layout, rank, layout.layers_of(rank), first_head, num_heads, unit_tokens, encoding)


@dataclass
class Pair:
    """A source's sender and a target's receiver, one rank each."""

    sender: KVSender
    receiver: KVReceiver
    source: BytesStore
    target: BytesStore
    address: Address
    network: Network
    transports: tuple[Transports, Transports]

    def ticket(self, request_id: str = "r", source: Peer = P, target: Peer = D, secret: bytes = SECRET) -> Ticket:
        return mint_ticket(secret, request_id, source, target, (self.address,))

    def make_sender(self, peer: Peer = P, store: BytesStore | None = None, config: TransferConfig = FAST) -> KVSender:
        return KVSender(
            peer=peer,
            store=store if store is not None else self.source,
            network=self.network,
            transports=self.transports[0],
            config=config,
            clock=time.monotonic,
        )

    @property
    def target_cut(self) -> KVShard:
        """The target's end of the one rank pair."""
        layout = self.target.layout
        return rank_shard(layout, 0, layout.heads_per_rank, layout.block_size, "raw")


Wrap = Callable[[Transport], Transport]


def unwrapped(transport: Transport) -> Transport:
    return transport


def make_transport(name: str, store: Any, **options: Any) -> Transport:
    if name == "torch_distributed":
        from twostroke.kvtransfer.transports.torch_distributed import TorchDistributedTransport

        return TorchDistributedTransport(store, **options)
    if name == "nixl":
        from twostroke.kvtransfer.transports.nixl import NixlTransport

        return NixlTransport(store, **{"machine": "a machine", "max_chunk_bytes": 2**24, **options})
    if name == "shm":
        return ShmTransport(store, **options)
    return TcpTransport(store, streams=3, **options)


def reach(*names: str) -> Reach:
    return Reach(names, "a machine", "cpu")


@contextlib.asynccontextmanager
async def make_pair(
    transport: str | Sequence[str] = "tcp",
    *,
    source: BytesStore | None = None,
    target: BytesStore | None = None,
    config: TransferConfig = FAST,
    sender_config: TransferConfig | None = None,
    wrap_source: Wrap = unwrapped,
    wrap_target: Wrap = unwrapped,
) -> AsyncIterator[Pair]:
    """Both sides, started; checks at the end that neither tasks, threads' work nor descriptors are left over."""
    names = (transport,) if isinstance(transport, str) else tuple(transport)
    if "torch_distributed" in names:
        await warm_up_torch()
    source = source if source is not None else BytesStore()
    target = target if target is not None else BytesStore()
    tasks_before = asyncio.all_tasks()
    descriptors_before = open_descriptors()
    transports = (
        Transports({name: wrap_source(make_transport(name, source)) for name in names}, reach(*names)),
        Transports({name: wrap_target(make_transport(name, target)) for name in names}, reach(*names)),
    )
    network = TcpNetwork(SECRET)
    receiver = KVReceiver(
        peer=D,
        store=target,
        network=network,
        transports=transports[1],
        config=config,
        clock=time.monotonic,
        secret=SECRET,
    )
    (address,) = await receiver.start("127.0.0.1")
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
        shard = rank_shard(store.layout, 0, 1, BLOCK_SIZE, "raw")
        source, target = make_transport("torch_distributed", store), make_transport("torch_distributed", store)
        pending = await target.prepare("127.0.0.1", shard)
        await asyncio.gather(source.join(pending.params, shard), pending.established())
        await source.close()
        await target.close()
        _torch_warmth().append(True)


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def link_threads() -> int:
    """Threads of links; the event loop's own, for names of hosts, come and stay."""
    return sum(thread.name.startswith("kv-") for thread in threading.enumerate())


async def fails(*transfers: Awaitable[object], match: str | None = None) -> None:
    """Each of these, a transfer's `done` or `verified`, ends in TransferFailed, for a reason like this."""
    for transfer in transfers:
        with pytest.raises(TransferFailed, match=match):
            await transfer


async def settle(condition: Callable[[], bool], limit_s: float = 10.0) -> None:
    """Let the event loop run until `condition` holds: for ends that have no event of their own."""
    async with asyncio.timeout(limit_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)
