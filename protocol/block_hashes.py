"""Names for KV blocks: a keyed SHA-256 chain over a prompt's full blocks.

Block i's hash covers every token up to its end, so equal hashes mean equal KV. The salt (one per tenant) keys the
chain: without it nobody can tell, by timing, what another tenant has cached.
"""

import hashlib
from array import array
from collections.abc import Iterable, Sequence

BlockHash = bytes
"""16 bytes: a collision would serve another prompt's KV, so a short non-cryptographic hash will not do."""

HASH_BYTES = 16


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
