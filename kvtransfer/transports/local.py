"""Links between two processes of one machine, on which the target reads the source's memory: shm and cuda_ipc.

The source describes its cache once. From then on a chunk is a short message over a unix socket: the ids of the source's
units, int32, and the checksum of their bytes. The target copies those units out of the source's memory into its own,
digests what it has written, and compares. What the memory is, and how it is read, is each transport's own.

Why a zombie can do no harm: the source never maps the target's cache, so whatever it does after its lease, it writes
nothing there. Only the target's own thread writes into the target's blocks, for a transfer that the target still holds
blocks for. What it reads after the source has given a block to another request doesn't fit the checksum, or belongs to
a transfer that has ended.

The socket has an abstract name: nothing is left in the file system.
"""

import hmac
import secrets
import socket
import struct
from abc import abstractmethod
from array import array
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from twostroke.kvtransfer.layout import KVShard, Segment
from twostroke.kvtransfer.link import CHECKSUM_BYTES, LinkParams
from twostroke.kvtransfer.transports.host_units import count_units
from twostroke.kvtransfer.transports.sockets import (
    TOKEN_BYTES,
    LinkListener,
    LinkThread,
    Rest,
    SocketEnd,
    SocketTransport,
    Token,
    dial,
    read_params,
    receive_exactly,
)
from twostroke.protocol.errors import ConnectionLost, ProtocolError
from twostroke.protocol.kv_layout import KVLayout, incompatibility

MAX_UNIT_ID = 2**31 - 1  # they travel as int32
MAX_DESCRIPTION_BYTES = 64 * 1024

_PREFIX = b"\0twostroke-kv-"
_READY = b"\x01"
_ID_BYTES = 4
_LENGTH = struct.Struct("<I")

D = TypeVar("D", bound="PoolDescription")
R = TypeVar("R")


class PoolDescription(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The description of a source's memory and of its end of the rank pair. A transport adds the places of its
    layers."""

    layout: KVLayout
    rank: int
    num_blocks: int
    first_head: int
    num_heads: int
    unit_tokens: int


def send_description(connected: socket.socket, description: PoolDescription) -> None:
    """Send a description to the peer. Raises OSError, or ValueError where the peer would refuse it."""
    described = msgspec.msgpack.encode(description)
    num_units = description.num_blocks * (description.layout.rank_tokens // description.unit_tokens)
    if num_units > MAX_UNIT_ID or len(described) > MAX_DESCRIPTION_BYTES:
        raise ValueError("the cache is too large to be read by a peer")
    connected.sendall(_LENGTH.pack(len(described)) + described)


def receive_description(connected: socket.socket, kind: type[D], shard: KVShard) -> tuple[D, KVShard]:
    """Return the peer's description and its end of the rank pair; `shard` is this side's end.

    Raises OSError, and ProtocolError for a description that does not fit.
    """
    (length,) = _LENGTH.unpack(receive_exactly(connected, _LENGTH.size))
    if length > MAX_DESCRIPTION_BYTES:
        raise ProtocolError(f"the peer describes its cache in {length} bytes")
    try:
        description = msgspec.msgpack.decode(receive_exactly(connected, length), type=kind)
    except msgspec.DecodeError as error:
        raise ProtocolError(f"the peer's cache is not described as it must be: {error}") from error
    layout = description.layout
    why = incompatibility(layout, shard.layout)
    if why is not None:
        raise ProtocolError(f"the peer's cache doesn't fit: {why}")
    if (description.num_heads, description.unit_tokens) != (shard.num_heads, shard.unit_tokens):
        raise ProtocolError("the peer's rank pair is cut into other units than ours")
    if not 0 <= description.first_head <= layout.heads_per_rank - description.num_heads:
        raise ProtocolError("the peer's rank pair has heads that its cache has not")
    held = layout.layers_of(description.rank) if 0 <= description.rank < layout.num_ranks else range(0)
    if not held.start <= shard.layers.start < shard.layers.stop <= held.stop:
        raise ProtocolError("the peer's rank pair has layers that its cache has not")
    if layout.rank_tokens % description.unit_tokens:
        raise ProtocolError("the peer's blocks can't be cut into units")
    heads = description.first_head, description.num_heads
    peer_shard = KVShard(layout, description.rank, shard.layers, *heads, description.unit_tokens, "raw")
    if not 0 < description.num_blocks <= MAX_UNIT_ID // peer_shard.units_per_block:
        raise ProtocolError(f"the peer has {description.num_blocks} blocks")
    return description, peer_shard


class SourceMemory(Protocol):
    """The source's cache. Its methods block, on the link's thread, and raise OSError, ValueError or RuntimeError."""

    def describe(self, connected: socket.socket) -> None:
        """Tell the peer how to read it."""

    def checksum(self, segments: Sequence[Segment], seed: int) -> bytes | Rest[bytes]:
        """Return the checksum of these units' bytes now, or a Rest that another thread waits for, in order."""


class TargetMemory(Protocol):
    """The target's cache, and the source's once it is mapped. As SourceMemory."""

    def map(self, connected: socket.socket) -> int:
        """Receive what `describe` sends, and make the peer's memory readable here; returns how many units it has."""

    def copy(self, peer_ids: NDArray[np.int32], segments: Sequence[Segment], seed: int) -> bytes | Rest[bytes]:
        """Copy the peer's units to these places; returns the checksum of what was written, or, as soon as the copy is
        launched, how to wait for it: on another thread, in the order of the copies."""

    def unmap(self) -> None:
        """Let go of the peer's memory; harmless where there is none. The last call, on the link's thread."""


def _then(result: bytes | Rest[bytes], use: Callable[[bytes], R]) -> R | Rest[R]:
    """Apply `use` to the result, once it is there."""
    if isinstance(result, Rest):
        return Rest(lambda: use(result.finish()))
    return use(result)


class LocalSource(SocketEnd):
    """The sending end: says which units to read, and what they must amount to."""

    max_chunk_bytes = None
    shortfall = None

    def __init__(self, thread: LinkThread, memory: SourceMemory, on_close: Callable[["LocalEnd"], None]):
        super().__init__(thread, on_close)
        self._memory = memory

    async def send(self, segments: Sequence[Segment], seed: int) -> None:
        await self.thread.call(self._send, segments, seed)

    def _open(self, timeout_s: float) -> None:
        self._memory.describe(self.thread.socket)
        receive_exactly(self.thread.socket, len(_READY))

    def _send(self, segments: Sequence[Segment], seed: int) -> Rest[None] | None:
        ids = array("i")
        for segment in segments:
            ids.extend(segment.unit_ids)
        return _then(
            self._memory.checksum(segments, seed),
            lambda checksum: self.thread.socket.sendall(ids.tobytes() + checksum),
        )


class LocalTarget(SocketEnd):
    """The receiving end: the only one that copies."""

    def __init__(self, thread: LinkThread, memory: TargetMemory, on_close: Callable[["LocalEnd"], None]):
        super().__init__(thread, on_close)
        self._memory = memory
        self._num_peer_units = 0  # until `open`

    async def receive(self, segments: Sequence[Segment], seed: int) -> bool:
        return await self.thread.call(self._receive, segments, seed)

    async def discard(self, num_units: int) -> None:
        await self.thread.call(self._read_chunk, num_units)

    def _open(self, timeout_s: float) -> None:
        self._num_peer_units = self._memory.map(self.thread.socket)
        self.thread.socket.sendall(_READY)

    def _let_go(self) -> None:
        self._memory.unmap()

    def _read_chunk(self, num_units: int) -> tuple[NDArray[np.int32], bytes]:
        """The ids of the peer's units, and their checksum."""
        received = receive_exactly(self.thread.socket, num_units * _ID_BYTES + CHECKSUM_BYTES)
        return np.frombuffer(received, np.int32, num_units), bytes(received[-CHECKSUM_BYTES:])

    def _receive(self, segments: Sequence[Segment], seed: int) -> bool | Rest[bool]:
        peer_ids, checksum = self._read_chunk(count_units(segments))
        if peer_ids.size and not (peer_ids.min() >= 0 and peer_ids.max() < self._num_peer_units):
            raise ProtocolError(f"the peer names units outside of its {self._num_peer_units}")
        return _then(self._memory.copy(peer_ids, segments, seed), lambda found: hmac.compare_digest(found, checksum))


LocalEnd = LocalSource | LocalTarget


class _LocalParams(msgspec.Struct):
    """LinkParams of a local link."""

    name: str
    token: Token


class LocalTransport(SocketTransport[LocalEnd]):
    """Makes links over unix sockets for one rank of a worker, between processes of one machine and one user."""

    name: str

    async def prepare(self, host: str, shard: KVShard) -> LinkListener[LocalTarget]:
        self._check(shard)
        memory = self._target_memory(shard)
        params = _LocalParams(secrets.token_hex(16), secrets.token_bytes(TOKEN_BYTES))
        try:
            listener = socket.create_server(_PREFIX + params.name.encode(), family=socket.AF_UNIX)
        except OSError as error:
            raise ConnectionLost(f"can't listen for a peer on this machine: {error}") from error

        async def make_link(connections: list[socket.socket]) -> LocalTarget:
            thread = LinkThread(connections[0], f"kv-{self.name}")
            return await self.opened(LocalTarget(thread, memory, self.links.discard))

        return LinkListener(self, listener, params.token, msgspec.to_builtins(params), make_link, most=1)

    async def join(self, params: LinkParams, shard: KVShard) -> LocalSource:
        self._check(shard)
        memory = self._source_memory(shard)
        theirs = read_params(params, _LocalParams, self.name)
        address = _PREFIX + theirs.name.encode()
        (connected,) = await dial(socket.AF_UNIX, address, theirs.token, most=1, join_timeout_s=self.join_timeout_s)
        # The least that the system grants, a few chunks' messages: with room for hundreds, a long prompt's chunks would
        # all be announced before the target copies the first, and a short prompt's wait behind them.
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
        thread = LinkThread(connected, f"kv-{self.name}")
        return await self.opened(LocalSource(thread, memory, self.links.discard))

    @abstractmethod
    def _source_memory(self, shard: KVShard) -> SourceMemory: ...

    @abstractmethod
    def _target_memory(self, shard: KVShard) -> TargetMemory: ...

    def _check(self, shard: KVShard) -> None:
        """Check that this transport can move the rank pair's KV. Raises ConnectionLost."""
        if shard.encoding != "raw":
            raise ConnectionLost(f"{self.name} moves KV as it is stored, not encoded as {shard.encoding}")
