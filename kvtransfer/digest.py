"""Digests of chunks: xxh3-128, off the event loop where a chunk is large.

The digest finds damage, not malice: who may send at all is settled by tickets and by the link's one-time token.
"""

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import xxhash

from kvtransfer.block_views import block_views
from kvtransfer.store import DeviceStore, KVStore

INLINE_BYTES = 256 * 1024
"""Up to here, about 30 us of work, a digest is computed where it is asked for: a thread's round trip costs more."""


class Digester:
    """Computes digests for one worker's side. Makes its thread only when a large chunk comes."""

    def __init__(self) -> None:
        self._executor: ThreadPoolExecutor | None = None

    async def digest(self, store: KVStore, layer: int, block_ids: Sequence[int]) -> bytes:
        """16 bytes for the blocks in this order. When this ends, cancelled or not, it reads the blocks no more."""
        if len(block_ids) * store.block_bytes <= INLINE_BYTES:
            return digest_blocks(store, layer, block_ids)
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, "kv-digest")
        work = asyncio.get_running_loop().run_in_executor(self._executor, digest_blocks, store, layer, block_ids)
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            await asyncio.wait([work])
            raise

    def close(self) -> None:
        """End the thread. No digest may be under way."""
        if self._executor is not None:
            self._executor.shutdown()


def digest_blocks(store: KVStore, layer: int, block_ids: Sequence[int]) -> bytes:
    """16 bytes: xxh3-128 of the blocks' bytes, in the order of `block_ids`."""
    if isinstance(store, DeviceStore):
        return bytes(xxhash.xxh3_128(store.read_blocks(layer, block_ids)).digest())
    state = xxhash.xxh3_128()
    for view in block_views(store, layer, block_ids):
        state.update(view)
    return bytes(state.digest())
