"""What one rank of a simulated worker keeps KV in, and moves it with."""

import asyncio
from dataclasses import dataclass

from tests.simulation.fake_store import FakeStore, SpoilingPool
from tests.simulation.memory_network import MemoryNetwork
from tests.simulation.memory_transport import KINDS, LinkFabric, memory_transports
from twostroke.kvtransfer.config import TransferConfig
from twostroke.kvtransfer.receiver import KVReceiver
from twostroke.kvtransfer.sender import KVSender
from twostroke.kvtransfer.transports import Transports
from twostroke.protocol.requests import Peer


@dataclass(frozen=True)
class Parts:
    """Sender, receiver and transports are to be closed."""

    store: FakeStore
    pool: SpoilingPool
    network: MemoryNetwork
    transports: Transports
    sender: KVSender
    receiver: KVReceiver


def parts_around(
    store: FakeStore,
    peer: Peer,
    network: MemoryNetwork,
    links: LinkFabric,
    config: TransferConfig,
    secret: bytes,
    kinds: tuple[str, ...] = KINDS,
) -> Parts:
    """All that the worker `peer` needs besides an engine, around its store. `kinds` are the links that it can make."""
    transports = memory_transports(links, peer.worker_id, store, kinds)
    clock = asyncio.get_running_loop().time
    sender = KVSender(peer=peer, store=store, network=network, transports=transports, config=config, clock=clock)
    receiver = KVReceiver(
        peer=peer, store=store, network=network, transports=transports, config=config, clock=clock, secret=secret
    )
    return Parts(store, SpoilingPool(store), network, transports, sender, receiver)
