"""Names for KV blocks: a keyed SHA-256 chain over a prompt's full blocks.

Block i's hash covers every token up to its end, so equal hashes mean equal KV. The salt (one per tenant) keys the
chain: without it nobody can tell, by timing, what another tenant has cached.
"""

import hashlib
import sys
from array import array
from collections.abc import Iterable, Sequence

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
    """What a router calls the block."""
    return int.from_bytes(block_hash[:NAME_BYTES], "little")


def pack_hashes(hashes: Iterable[BlockHash]) -> bytes:
    """The names of blocks with these hashes, for a message."""
    return b"".join([block_hash[:NAME_BYTES] for block_hash in hashes])


def pack_names(names: Iterable[ShortName]) -> bytes:
    """Names for a message: 8 bytes each, one after the other, as in the blocks' hashes."""
    return _in_little_endian(array("Q", names)).tobytes()


def unpack_names(packed: bytes) -> "array[int]":
    """The names in `packed`, in order. Raises ProtocolError where it ends within one."""
    if len(packed) % NAME_BYTES:
        raise ProtocolError(f"{len(packed)} bytes are no block names: each takes {NAME_BYTES}")
    names = array("Q")
    names.frombytes(packed)
    return _in_little_endian(names)


def _in_little_endian(names: "array[int]") -> "array[int]":
    if sys.byteorder == "big":
        names.byteswap()
    return names
