"""A cache handed to a peer process on the same machine, to be read where it lies.

The source sends a read-only descriptor of its memfd over a unix socket, and says how its layers lie in it. The target
believes none of it: it maps the memory, read-only, once it has seen that the file can't shrink (to read beyond the end
of a mapped file is a SIGBUS), and that everything described is inside.
"""

import errno
import fcntl
import mmap
import os
import socket
import struct
from collections.abc import Sequence

import msgspec

from twostroke.kvtransfer.rules.layout import Cut, Segment
from twostroke.kvtransfer.store import SharedStore
from twostroke.kvtransfer.transports.host_units import HostUnits
from twostroke.kvtransfer.transports.link_thread import receive_exactly
from twostroke.protocol.errors import ProtocolError
from twostroke.protocol.kv_layout import KVLayout, incompatibility

MAX_DESCRIPTION_BYTES = 64 * 1024
_LENGTH = struct.Struct("<I")
_MAX_UNIT_ID = 2**31 - 1  # they travel as int32


class PoolDescription(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What the source says of its memory, and its end of the lane."""

    layout: KVLayout
    num_blocks: int
    layer_offsets: tuple[int, ...]  # bytes
    first_head: int
    num_heads: int
    unit_tokens: int


def send_pool(connected: socket.socket, store: SharedStore, cut: Cut) -> None:
    """Let the peer read `store`. Raises OSError, or ValueError where the store is closed."""
    offsets = tuple(store.layer_offset(layer) for layer in range(cut.layout.num_layers))
    described = msgspec.msgpack.encode(
        PoolDescription(cut.layout, store.num_blocks, offsets, cut.first_head, cut.num_heads, cut.unit_tokens)
    )
    if store.num_blocks * cut.units_per_block > _MAX_UNIT_ID or len(described) > MAX_DESCRIPTION_BYTES:
        raise ValueError("the cache is too large for the shm transport")
    # Reopened, not duplicated: a duplicate would be as writable as ours.
    read_only = os.open(f"/proc/self/fd/{store.memory_fd}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        socket.send_fds(connected, [_LENGTH.pack(len(described))], [read_only])
    finally:
        os.close(read_only)
    connected.sendall(described)


def receive_pool(connected: socket.socket, cut: Cut) -> "PeerPool":
    """Map what the peer's `send_pool` sends; `cut` is our end of the lane.

    Raises OSError where descriptors or memory are exhausted, and ProtocolError for a pool that is not what was agreed.
    """
    head, descriptors, flags, _ = socket.recv_fds(connected, _LENGTH.size, 1, socket.MSG_CMSG_CLOEXEC)
    try:
        if not head:
            raise ConnectionResetError("the peer closed it")
        if flags & socket.MSG_CTRUNC:  # the kernel had to drop the descriptor
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        if len(descriptors) != 1 or len(head) != _LENGTH.size:
            raise ProtocolError("the peer sent no descriptor of its cache")
        (length,) = _LENGTH.unpack(head)
        if length > MAX_DESCRIPTION_BYTES:
            raise ProtocolError(f"the peer describes its cache in {length} bytes")
        try:
            description = msgspec.msgpack.decode(receive_exactly(connected, length), type=PoolDescription)
        except msgspec.DecodeError as error:
            raise ProtocolError(f"the peer's cache is not described as it must be: {error}") from error
        peer_cut = checked_cut(description, cut)
        size = os.fstat(descriptors[0]).st_size
        layer_bytes = description.num_blocks * description.layout.block_bytes
        if min(description.layer_offsets) < 0 or max(description.layer_offsets) + layer_bytes > size:
            raise ProtocolError(f"the peer's layers are not all within its {size} bytes of memory")
        _check_seals(descriptors[0])
        mapping = mmap.mmap(descriptors[0], size, mmap.MAP_SHARED, mmap.PROT_READ)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
    return PeerPool(mapping, description, peer_cut)


def checked_cut(description: PoolDescription, cut: Cut) -> Cut:
    """The peer's end of the lane. Raises ProtocolError where it doesn't meet ours."""
    layout = description.layout
    why = incompatibility(layout, cut.layout)
    if why is not None:
        raise ProtocolError(f"the peer's cache doesn't fit: {why}")
    if len(description.layer_offsets) != layout.num_layers:
        raise ProtocolError(f"the peer places {len(description.layer_offsets)} of its {layout.num_layers} layers")
    if (description.num_heads, description.unit_tokens) != (cut.num_heads, cut.unit_tokens):
        raise ProtocolError("the peer's lane is cut into other units than ours")
    if not 0 <= description.first_head <= layout.heads_per_rank - description.num_heads:
        raise ProtocolError("the peer's lane has heads that its cache has not")
    if layout.block_size % description.unit_tokens:
        raise ProtocolError("the peer's blocks can't be cut into units")
    if not 0 < description.num_blocks <= _MAX_UNIT_ID // (layout.block_size // description.unit_tokens):
        raise ProtocolError(f"the peer has {description.num_blocks} blocks")
    return Cut(layout, description.first_head, description.num_heads, description.unit_tokens, "raw")


def _check_seals(descriptor: int) -> None:
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError as error:
        raise ProtocolError("the peer's cache is not a memfd") from error
    if not seals & fcntl.F_SEAL_SHRINK:
        raise ProtocolError("the peer's cache could shrink while we read it")


class PeerPool:
    """The source's cache, mapped read-only. It lives until `close`, whatever becomes of the source."""

    def __init__(self, mapping: mmap.mmap, description: PoolDescription, cut: Cut):
        self._mapping = mapping
        self._memory = memoryview(mapping)
        layer_bytes = description.num_blocks * description.layout.block_bytes
        self._layers = [self._memory[start : start + layer_bytes] for start in description.layer_offsets]
        self._num_units = description.num_blocks * cut.units_per_block
        self.num_blocks = description.num_blocks
        self.units = HostUnits(self, cut)

    def layer_bytes(self, layer: int) -> memoryview:
        """Read-only uint8 [num_blocks * block_bytes] of the peer's layer."""
        return self._layers[layer]

    def check(self, segments: Sequence[Segment]) -> None:
        """Raises ProtocolError for units that the peer has not."""
        for segment in segments:
            ids = segment.unit_ids
            if ids and not (min(ids) >= 0 and max(ids) < self._num_units):
                raise ProtocolError(f"the peer names units outside of its {self._num_units}")

    def close(self) -> None:
        """Unmap. Nothing may be reading."""
        self.units.release()
        for layer in self._layers:
            layer.release()
        self._memory.release()
        self._mapping.close()
