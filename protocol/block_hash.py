"""The hashes that name KV blocks: a keyed SHA-256 chain over a prompt's full blocks. And changes of a cache's names.

Block i's hash covers every token up to its end, so equal hashes mean equal KV: one server's, whose workers share it
also where the weights of some are quantised. The salt (one per tenant) keys the chain: without it nobody can tell, by
timing, what another tenant has cached.

"""

import hashlib
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from twostroke.protocol.errors import ProtocolError

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
