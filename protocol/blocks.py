"""Names for KV blocks: a keyed SHA-256 chain over a prompt's full blocks.

Block i's hash covers every token up to its end, so equal hashes mean equal KV: one server's, whose workers share it
also where the weights of some are quantised. The salt (one per tenant) keys the chain: without it nobody can tell, by
timing, what another tenant has cached.

A worker reports its prefix cache to routers: all names to a router that asks, and from then on each change. A worker
with KV tiers reports the names in them likewise, by reports of their own.

All names of a large cache are megabytes. They go in pieces, each when the router has taken the one before it, while
tokens and changes pass between them. A piece is read from the cache in the very moment when it is sent, after all
changes until then have been: so it need not be kept, and whatever comes after it is newer.
"""

import asyncio
import hashlib
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from twostroke.protocol.errors import ConnectionLost, ProtocolError
from twostroke.protocol.messages import BlocksChanged, BlocksHeld
from twostroke.protocol.network import Connection

BlockHash = bytes
"""16 bytes: a collision would serve another prompt's KV, so a short non-cryptographic hash will not do."""

HASH_BYTES = 16

ShortName = int
"""The first 8 bytes of a block's hash, as an unsigned number: what routers know blocks by. Equal ones are only guessed
to mean equal KV, and nothing but a router's choice of a path depends on that."""

NAME_BYTES = 8


def root_hash(salt: bytes) -> BlockHash:
    """The parent of a prompt's first block."""
    return hashlib.sha256(b"twostroke-blocks" + salt).digest()[:HASH_BYTES]


def next_hash(parent: BlockHash, block_tokens: Iterable[int]) -> BlockHash:
    """The hash of a full block that follows the block named `parent`."""
    digest = hashlib.sha256(parent)
    digest.update(array("I", block_tokens).tobytes())
    return digest.digest()[:HASH_BYTES]


def chain_hashes(token_ids: Sequence[int], block_size: int, salt: bytes) -> list[BlockHash]:
    """Hashes of the full blocks of `token_ids`, in order; a partial last block has none."""
    hashes: list[BlockHash] = []
    parent = root_hash(salt)
    for end in range(block_size, len(token_ids) + 1, block_size):
        parent = next_hash(parent, token_ids[end - block_size : end])
        hashes.append(parent)
    return hashes


def short_name(block_hash: BlockHash) -> ShortName:
    """Return the name by which routers know the block."""
    return int.from_bytes(block_hash[:NAME_BYTES], "little")


def pack_hashes(hashes: Iterable[BlockHash]) -> bytes:
    """The names of blocks with these hashes, for a message."""
    return b"".join([block_hash[:NAME_BYTES] for block_hash in hashes])


def pack_names(names: Iterable[ShortName]) -> bytes:
    """Names for a message: 8 little-endian bytes each, one after the other, as in the blocks' hashes."""
    return array("Q", names).tobytes()


def unpack_names(packed: bytes) -> "array[int]":
    """The names in `packed`, in order. Raises ProtocolError where it ends within one."""
    if len(packed) % NAME_BYTES:
        raise ProtocolError(f"{len(packed)} bytes are no block names: each takes {NAME_BYTES}")
    names = array("Q")
    names.frombytes(packed)
    return names


FLUSH_S = 0.05
"""Seconds for which changes are gathered before they are sent."""

PIECE_BLOCKS = 16_384
"""Blocks of the pool whose names are read at once: a millisecond of the event loop's, and 128 KiB."""


@dataclass(frozen=True, slots=True)
class NameChanges:
    """The difference between a prefix cache and what it was."""

    stored: list[BlockHash]
    removed: list[BlockHash]


MAX_CHANGES = 65_536
"""Most names of one window. Reporting more would take longer than reporting all names anew."""


class BlockChanges:
    """The names that entered a prefix cache, and those that left it, within one window of time.

    A name that entered and left within the window is not reported. One that left and returned is reported as stored: it
    is in another block now, which a reader of the cache, block by block, may have passed already. `began` is called
    with the first change of every window.
    """

    def __init__(self, began: Callable[[], None]):
        self._began = began
        self._was_there: dict[BlockHash, bool] = {}  # by changed name: whether it was there at the beginning
        self._stored: set[BlockHash] = set()  # those of them that are there now, and entered within the window
        self._are_too_many = False

    def published(self, name: BlockHash) -> None:
        """Record that a block has this name now, which no other had."""
        self._touch(name, was_there=False)
        self._stored.add(name)

    def evicted(self, name: BlockHash) -> None:
        """Record that no block has this name any more."""
        self._touch(name, was_there=True)
        self._stored.discard(name)

    def take(self) -> NameChanges | None:
        """End the window, and begin another. Return None where too much has changed to be reported."""
        was_there, stored, are_too_many = self._was_there, self._stored, self._are_too_many
        self._was_there, self._stored, self._are_too_many = {}, set(), False
        if are_too_many:
            return None
        removed = [name for name, was in was_there.items() if was and name not in stored]
        return NameChanges(list(stored), removed)

    def _touch(self, name: BlockHash, *, was_there: bool) -> None:
        if not self._was_there:
            self._began()
        if len(self._was_there) < MAX_CHANGES:
            self._was_there.setdefault(name, was_there)
        elif name not in self._was_there:
            self._are_too_many = True


class NamedBlocks(Protocol):
    """The part of a block pool that reports need; worker/scheduling/block_pool.py implements it.

    The index of KV tiers implements it too. Its blocks are places in the index, and a block that several tiers hold has
    one.
    """

    @property
    def num_blocks(self) -> int: ...

    def names(self, first: int, end: int) -> list[BlockHash]:
        """Names in the prefix cache that blocks `first` up to `end` have."""

    def record_changes(self, began: Callable[[], None] | None) -> None:
        """Record from now on, and call `began` when there is something to `take_changes` of; with None, end that."""

    def take_changes(self) -> NameChanges | None:
        """Return the changes since the last call; None where they are too many to send."""


Send = Callable[[str, Connection, BlocksHeld | BlocksChanged], None]
"""Sends to a router by its connection, and drops the router where that fails."""


@dataclass(slots=True)
class _Reader:
    """A router that has asked."""

    connection: Connection
    num_told: int = 0  # blocks that it has been told of, by their ids; once there are some, it is told changes
    telling: asyncio.Task[None] | None = None  # all names


class BlockReports:
    """One worker's reports of its prefix cache or, with `is_tier`, of its KV tiers.

    Nothing is recorded while no router has asked.
    """

    def __init__(self, blocks: NamedBlocks, send: Send, *, is_tier: bool = False):
        self._blocks = blocks
        self._send = send
        self._is_tier = is_tier
        self._readers: dict[str, _Reader] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._sequence = 0
        self._flushing: asyncio.TimerHandle | None = None

    def begin(self, router_id: str, connection: Connection) -> None:
        """Tell this router all names, and from then on each change; from the beginning, where that goes on already."""
        if not self._readers:
            self._blocks.record_changes(self._flush_later)
        reader = self._readers.setdefault(router_id, _Reader(connection))
        self._tell_anew(router_id, reader)

    def end(self, router_id: str) -> None:
        """Tell this router nothing more. Harmless for one that never asked."""
        reader = self._readers.pop(router_id, None)
        if reader is None:
            return
        if reader.telling is not None:
            reader.telling.cancel()
        if not self._readers:
            self._blocks.record_changes(None)
            if self._flushing is not None:
                self._flushing.cancel()
                self._flushing = None

    async def close(self) -> None:
        """End all; returns when nothing goes on any more."""
        for router_id in list(self._readers):
            self.end(router_id)
        await asyncio.gather(*self._ending, return_exceptions=True)

    def _tell_anew(self, router_id: str, reader: _Reader) -> None:
        reader.num_told = 0
        if reader.telling is None:
            what = "tiers' blocks" if self._is_tier else "blocks"
            reader.telling = asyncio.create_task(self._tell_all(router_id, reader), name=f"{what} to {router_id}")
            self._ending.add(reader.telling)
            reader.telling.add_done_callback(self._ending.discard)

    async def _tell_all(self, router_id: str, reader: _Reader) -> None:
        try:
            while True:
                await reader.connection.drain()
                self._flush()
                first, end = reader.num_told, min(reader.num_told + PIECE_BLOCKS, self._blocks.num_blocks)
                names = pack_hashes(self._blocks.names(first, end))
                is_last = end == self._blocks.num_blocks
                reader.num_told = end
                if is_last:
                    reader.telling = None
                if names or first == 0 or is_last:
                    held = BlocksHeld(
                        names,
                        is_first=first == 0,
                        is_last=is_last,
                        sequence=self._sequence,
                        is_tier=self._is_tier,
                    )
                    self._send(router_id, reader.connection, held)
                if is_last:
                    return
                await asyncio.sleep(0)  # the connection may take it all at once, but others have things to do
        except ConnectionLost:
            return  # the listener of this router notices it too, and ends its reports

    def _flush_later(self) -> None:
        if self._flushing is None:
            self._flushing = asyncio.get_running_loop().call_later(FLUSH_S, self._flush)

    def _flush(self) -> None:
        """Tell what has changed until now."""
        if self._flushing is None:
            return  # nothing has
        self._flushing.cancel()
        self._flushing = None
        changes = self._blocks.take_changes()
        if changes is None:
            for router_id, reader in self._readers.items():
                self._tell_anew(router_id, reader)
        elif changes.stored or changes.removed:
            self._sequence += 1
            stored, removed = pack_hashes(changes.stored), pack_hashes(changes.removed)
            message = BlocksChanged(self._sequence, stored, removed, is_tier=self._is_tier)
            for router_id, reader in list(self._readers.items()):
                if reader.num_told:
                    self._send(router_id, reader.connection, message)
