"""The interfaces of stores and transports: move units of KV from this worker's store into the peer's.

A link carries units, in order, from one rank of one worker to one rank of another. What they are is agreed beforehand
on the control connection (messages.Chunk), so a link has no headers, and the receiving side alone decides where bytes
go. A link that breaks, or damages what it carries, is given up with everything on it: no transport mends anything.

`tcp`, `shm`, `cuda_ipc`, `torch_distributed` (NCCL, gloo) and `nixl` stand behind it, in transports/. Registered memory
and descriptors are a Transport's own business, and remote reads a ReceivingEnd's `receive`.

Checksums of chunks are xxh3-128 of the bytes on the wire, seeded with the chunk's seed. They find damage, not malice:
tickets and the link's one-time token decide which peer may send.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import xxhash

from twostroke.kvtransfer.layout import KVShard, Segment
from twostroke.protocol.kv_layout import KVLayout
from twostroke.protocol.messages import Chunk, encode_message
from twostroke.protocol.requests import Peer

CHECKSUM_BYTES = 16
_EPOCHS = struct.Struct("<QQ")


@dataclass(frozen=True, slots=True)
class ChunkPace:
    """Size and number of chunks that keep a link busy, by the memory that its side's cache is in."""

    chunk_bytes: int  # at most, if nothing else is configured
    chunks_under_way: int  # on one link


ON_HOSTS = ChunkPace(4 * 2**20, 2)
"""While one's bytes move, the next one's call has been made, so that no wire waits for us."""
ON_GPUS = ChunkPace(32 * 2**20, 3)
"""A chunk costs the host some 0.2 ms on each side, in which 200 GB/s move 40 MB: so one chunk moves, one waits for that
on the device, and of one the host learns how it ended. Predicted, not measured."""

STAGING_BYTES = 2**30
"""GPU memory that all links with staging memory (NCCL's) share, unless chunks of 4 MiB need more."""


class StagingNeed(NamedTuple):
    """GPU memory that links with staging memory need."""

    chunk_bytes: int  # at most
    total_bytes: int  # of all links, at most


def staging_need(num_links: int, max_chunk_bytes: int | None = None) -> StagingNeed:
    """Return the staging memory for this many links of one rank at a time. Many links get smaller chunks."""
    wanted = max_chunk_bytes or ON_GPUS.chunk_bytes
    buffers = num_links * ON_GPUS.chunks_under_way
    chunk_bytes = min(wanted, max(ON_HOSTS.chunk_bytes, STAGING_BYTES // max(1, buffers)))
    return StagingNeed(chunk_bytes, buffers * chunk_bytes)


LinkParams = dict[str, str | int]
"""Parameters with which the sending side joins a prepared link: an address, a one-time token (hex), a store."""


def chunk_seed(chunk: Chunk, source: Peer, target: Peer) -> int:
    """64 bits of everything that the chunk's message says, and of both epochs.

    So bytes of another chunk, layer, order, request or incarnation don't fit, however whole they are.
    """
    return int(xxhash.xxh3_64_intdigest(encode_message(chunk) + _EPOCHS.pack(source.epoch, target.epoch)))


class KVStore(Protocol):
    """Block storage, layer by layer: [num_blocks, kinds, heads of this rank, tokens of a block that this rank holds,
    head_dim], contiguous.

    Live: `model/cache/kv_cache.py`; simulated: tests/simulation. A store is of one of the three
    kinds below, which is determined when a link is made.
    """

    @property
    def layout(self) -> KVLayout: ...

    @property
    def rank(self) -> int:
        """Rank of this cache in its worker: it has the layers and heads that `layout` gives this rank."""

    @property
    def num_blocks(self) -> int: ...


@runtime_checkable
class HostStore(KVStore, Protocol):
    """A cache in host memory."""

    def layer_bytes(self, layer: int) -> memoryview:
        """A writable view of uint8 [num_blocks * layout.block_bytes]; block b begins at b * layout.block_bytes."""


@runtime_checkable
class SharedStore(HostStore, Protocol):
    """A cache in host memory that another process can map: one file descriptor for all layers, one after the other."""

    @property
    def memory_fd(self) -> int:
        """Descriptor of a memfd, which stays the store's."""

    def layer_offset(self, layer: int) -> int:
        """Return the offset of a layer in it, in bytes."""


@runtime_checkable
class DeviceStore(KVStore, Protocol):
    """A cache in a GPU's memory: its bytes can't be viewed from the host."""

    @property
    def device(self) -> str:
        """Device by torch's name, `cuda:0`."""

    def layer_tensor(self, layer: int) -> Any:
        """The layer's torch tensor, [num_blocks, ...], contiguous."""


def link_pace(store: KVStore) -> ChunkPace:
    """Return the pace of links that begin or end at this cache."""
    return ON_GPUS if isinstance(store, DeviceStore) else ON_HOSTS


class LinkEnd(Protocol):
    """One end of a link, which has one direction of bytes between a pair of ranks, on stores cut as agreed.

    Calls may overlap and are carried out in the order in which they are made. `seed` is a number below 2**64 that both
    sides derive from the chunk's message: the checksum that follows the bytes depends on it, so that another chunk's
    bytes don't pass for this one's. Every method raises ConnectionLost once the link is broken. A cancelled call leaves
    the link unusable.
    """

    async def close(self) -> None:
        """Break the link. When this returns, nothing writes into the store through it any more."""


class SendingEnd(LinkEnd, Protocol):
    """The source's end."""

    @property
    def max_chunk_bytes(self) -> int | None:
        """Largest chunk that the link has memory for; None: it needs none."""

    @property
    def shortfall(self) -> str | None:
        """Reason why the link is slower than its transport can be, for people; None: none known."""

    async def send(self, segments: Sequence[Segment], seed: int) -> None:
        """Send these units, in this order, and their checksum.

        Returns when this side has done its part. Where the peer reads this side's memory (shm, cuda_ipc) it may still
        do so until the transfer has ended; what it reads after that is refused by its checksum or by its lease.
        """


class ReceivingEnd(LinkEnd, Protocol):
    """The target's end."""

    async def receive(self, segments: Sequence[Segment], seed: int) -> bool:
        """Receive units into these places; returns when all bytes are written, and whether their checksum is right."""

    async def discard(self, num_units: int) -> None:
        """Receive a chunk into nowhere: its transfer was aborted here."""


class DataLink(SendingEnd, ReceivingEnd, Protocol):
    """Both ends in one class."""


class PendingLink(Protocol):
    """A link that the receiving side has prepared and the sending side has not joined yet."""

    @property
    def params(self) -> LinkParams: ...

    async def established(self) -> ReceivingEnd:
        """The link, once the peer has joined. Raises ConnectionLost after the transport's time-out."""

    async def close(self) -> None:
        """Give it up."""


class Transport(Protocol):
    """Makes links for one rank of a worker."""

    @property
    def name(self) -> str:
        """Name in the configuration: `tcp`, `shm`, `torch_distributed`, `cuda_ipc`, `nixl`."""

    async def prepare(self, host: str, shard: KVShard) -> PendingLink:
        """Receiving side: make ready for one peer to join, reachable at `host`. Raises ConnectionLost."""

    async def join(self, params: LinkParams, shard: KVShard) -> SendingEnd:
        """Sending side: join what the peer prepared. Raises ConnectionLost."""

    async def close(self) -> None:
        """Let go of everything, links included."""
