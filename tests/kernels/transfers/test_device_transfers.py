"""Whole transfers between caches on devices that take their time: chunks under way, and what is left at a cut.

"Devices" are CPU tensors and Triton's interpreter, which one thread uses at a time. What a device computes is there at
once; the host hears of it when the test lets it.
"""

import asyncio
import struct
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests.rigs.device_store import TensorStore
from tests.rigs.kv_pair import FAST, SECRET, TOKEN, D, P, fails, rank_shard, settle
from twostroke.kvtransfer.config import TransferConfig
from twostroke.kvtransfer.link import ON_GPUS, ON_HOSTS, link_pace, staging_need
from twostroke.kvtransfer.receiver import KVReceiver
from twostroke.kvtransfer.sender import KVSender
from twostroke.kvtransfer.transfer import IncomingTransfer, OutgoingTransfer
from twostroke.kvtransfer.transports import Transports, cuda_ipc
from twostroke.kvtransfer.transports.cuda_ipc import CudaIpcTransport, LayerHandle
from twostroke.kvtransfer.transports.device_units import DeviceQueue
from twostroke.kvtransfer.transports.local import LocalSource
from twostroke.kvtransfer.transports.torch_distributed import TorchDistributedTransport
from twostroke.protocol.kv_layout import KVLayout
from twostroke.protocol.messages import Reach
from twostroke.protocol.network import TcpNetwork
from twostroke.protocol.requests import mint_ticket

pytestmark = pytest.mark.usefixtures("interpreter")

LAYOUT = KVLayout("m", "bfloat16", num_layers=2, num_kv_heads=2, head_dim=8, block_size=4)
NUM_BLOCKS = 24
CHUNK = TransferConfig(lease_s=20, progress_s=20, max_chunk_bytes=4 * LAYOUT.block_bytes)


class Device:
    """Says how a launch ended once its gate is open, and counts."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.launched = {"digest_units": 0, "copy_and_digest_units": 0}
        self.num_told = 0
        self._one_at_a_time = threading.Lock()

    def launching(self, name: str, kernel: Callable[..., None]) -> Callable[..., None]:
        def launch(*arguments: Any) -> None:
            with self._one_at_a_time:
                kernel(*arguments)
            self.launched[name] += 1

        return launch

    def later(self, queue: DeviceQueue, found: torch.Tensor) -> Callable[[], bytes]:
        def wait() -> bytes:
            assert self.gate.wait(30)
            self.num_told += 1
            return found.numpy().tobytes()

        return wait


@dataclass
class DevicePair:
    device: Device
    source: TensorStore
    target: TensorStore
    sender: KVSender
    receiver: KVReceiver
    address: Any

    def begin(self, name: str) -> tuple[OutgoingTransfer, IncomingTransfer]:
        """Send all blocks, to the same places in reverse order."""
        ticket, tokens = mint_ticket(SECRET, name, P, D, (self.address,)), NUM_BLOCKS * LAYOUT.block_size
        incoming = self.receiver.expect_transfer(ticket, range(NUM_BLOCKS)[::-1], tokens, 0)
        outgoing = self.sender.begin_transfer(ticket, tokens, range(NUM_BLOCKS), tokens)
        outgoing.commit(TOKEN)
        return outgoing, incoming

    def has_arrived(self) -> bool:
        return all(
            torch.equal(there, here.flip(0)) for here, there in zip(self.source.layers, self.target.layers, strict=True)
        )


class Address:
    """A storage that is somewhere."""

    def __init__(self, address: int):
        self._address = address

    def data_ptr(self) -> int:
        return self._address


@pytest.fixture
async def pair(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[DevicePair]:
    device = Device()
    for name in device.launched:
        monkeypatch.setattr(cuda_ipc, name, device.launching(name, getattr(cuda_ipc, name)))
    for name in ("warm_up_source", "warm_up_target"):  # which would launch beside the other side's
        monkeypatch.setattr(cuda_ipc, name, lambda *_: None)
    monkeypatch.setattr(DeviceQueue, "later", lambda queue, found: device.later(queue, found))

    def share(tensor: torch.Tensor) -> LayerHandle:
        return LayerHandle(struct.pack("<Q", tensor.data_ptr()), tensor.nbytes, 0, b"", 0, 0)

    monkeypatch.setattr(cuda_ipc, "share_layer", share)
    monkeypatch.setattr(cuda_ipc, "open_layer", lambda handle, _: Address(struct.unpack("<Q", handle.handle)[0]))
    source, target = (TensorStore(LAYOUT, NUM_BLOCKS, "cpu", seed) for seed in (1, None))
    made = [
        Transports({"cuda_ipc": CudaIpcTransport(store, join_timeout_s=20)}, Reach(("cuda_ipc",), "one", "a GPU"))
        for store in (source, target)
    ]
    parts: dict[str, Any] = {"network": TcpNetwork(SECRET), "config": CHUNK, "clock": time.monotonic}
    sender = KVSender(peer=P, store=source, transports=made[0], **parts)
    receiver = KVReceiver(peer=D, store=target, transports=made[1], secret=SECRET, **parts)
    (address,) = await receiver.start("127.0.0.1")
    try:
        async with asyncio.timeout(60):
            yield DevicePair(device, source, target, sender, receiver, address)
    finally:
        device.gate.set()
        await sender.close()
        await receiver.close()
        for transports in made:
            await transports.close()


def checksum_at_once(source: cuda_ipc.CudaIpcSource, segments: Any, seed: int) -> bytes:
    found = torch.empty(2, dtype=torch.int64)
    cuda_ipc.digest_units(source._units.places, source._units.addresses(segments), seed, found)
    return found.numpy().tobytes()


async def test_three_chunks_are_under_way_on_each_side_while_the_first_has_not_ended(pair: DevicePair) -> None:
    outgoing, incoming = pair.begin("warm")
    rank_pair = outgoing.pairs[0]
    await asyncio.gather(outgoing.done(), incoming.verified())
    chunks = rank_pair.num_chunks
    assert chunks == 2 * NUM_BLOCKS // 4
    launched, told = pair.device.launched, pair.device.num_told
    assert launched == dict.fromkeys(launched, chunks)
    for layer in pair.target.layers:
        layer.zero_()
    pair.device.gate.clear()
    outgoing, incoming = pair.begin("held up")
    await settle(lambda: launched["digest_units"] == chunks + ON_GPUS.chunks_under_way)
    assert pair.device.num_told == told
    pair.device.gate.set()
    await asyncio.gather(outgoing.done(), incoming.verified())
    assert pair.has_arrived()


async def test_a_target_launches_copies_while_earlier_ones_have_not_ended(
    pair: DevicePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_ipc.CudaIpcSource, "checksum", checksum_at_once)
    pair.device.gate.clear()
    outgoing, incoming = pair.begin("r")
    await settle(lambda: pair.device.launched["copy_and_digest_units"] == ON_GPUS.chunks_under_way)
    assert pair.device.num_told == 0
    pair.device.gate.set()
    await asyncio.gather(outgoing.done(), incoming.verified())
    assert pair.has_arrived()


@pytest.mark.parametrize("side", ["source", "target"])
async def test_at_a_cut_blocks_are_kept_until_what_was_launched_has_ended_and_the_next_transfer_arrives(
    side: str, pair: DevicePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = {"source": "digest_units", "target": "copy_and_digest_units"}[side]
    if side == "target":
        monkeypatch.setattr(cuda_ipc.CudaIpcSource, "checksum", checksum_at_once)
    pair.device.gate.clear()
    outgoing, incoming = pair.begin("cut")
    await settle(lambda: pair.device.launched[name] >= ON_GPUS.chunks_under_way)
    (link,) = pair.sender.transports.by_name["cuda_ipc"].links  # type: ignore[attr-defined]
    link.thread.break_off()
    await settle(lambda: not pair.sender._connections)
    ending = asyncio.create_task((outgoing if side == "source" else incoming).end())
    await asyncio.wait([ending], timeout=0.05)
    assert not ending.done(), "the device still works on these blocks"
    pair.device.gate.set()
    await fails(ending, outgoing.done(), incoming.verified())
    assert pair.sender.stats.in_flight == pair.receiver.stats.in_flight == 0
    outgoing, incoming = pair.begin("again")
    await asyncio.gather(outgoing.done(), incoming.verified())
    assert pair.has_arrived()


def test_a_gpus_links_have_larger_chunks_and_more_of_them_under_way_than_a_hosts() -> None:
    store = TensorStore(LAYOUT, NUM_BLOCKS, "cpu")
    assert (link_pace(store), ON_GPUS.chunk_bytes, ON_GPUS.chunks_under_way) == (ON_GPUS, 32 * 2**20, 3)
    assert (ON_HOSTS.chunk_bytes, ON_HOSTS.chunks_under_way) == (4 * 2**20, 2)
    assert FAST.max_chunk_bytes is None


async def test_a_links_chunks_are_no_larger_than_the_memory_that_it_has_for_them(
    pair: DevicePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LocalSource, "max_chunk_bytes", 2 * LAYOUT.block_bytes)
    outgoing, incoming = pair.begin("r")
    rank_pair = outgoing.pairs[0]
    await asyncio.gather(outgoing.done(), incoming.verified())
    assert rank_pair.num_chunks == 2 * NUM_BLOCKS // 2


async def test_a_group_between_gpus_has_memory_for_each_chunk_under_way_of_the_size_that_it_is_told() -> None:
    store = TensorStore(LAYOUT, NUM_BLOCKS, "cpu")
    transport = TorchDistributedTransport(store, max_chunk_bytes=12345)
    pending = await transport.prepare("127.0.0.1", rank_shard(LAYOUT, 0, 2, 4, "raw"))
    link = pending.link
    assert (link.max_chunk_bytes, link._free.qsize()) == (12345, ON_GPUS.chunks_under_way)
    await pending.close()
    await transport.close()


@pytest.mark.parametrize(
    ("links", "most", "chunk_mib", "total_mib"),
    [
        (0, None, 32, 0),
        (2, None, 32, 192),
        (10, None, 32, 960),
        (20, None, 17, 1023),
        (200, None, 4, 2400),
        (2, 2**20, 1, 6),
    ],
)
def test_staging_memory_of_all_links_is_bounded_and_known(
    links: int, most: int | None, chunk_mib: int, total_mib: int
) -> None:
    chunk_bytes, total_bytes = staging_need(links, most)
    assert (chunk_bytes // 2**20, total_bytes // 2**20) == (chunk_mib, total_mib)
