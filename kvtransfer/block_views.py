"""Views of a store's blocks, for whoever reads or writes their bytes."""

from collections.abc import Iterator, Sequence

from kvtransfer.store import KVStore


def block_views(store: KVStore, layer: int, block_ids: Sequence[int]) -> Iterator[memoryview]:
    """The blocks' memory in the order of `block_ids`; a run of adjacent blocks is one view.

    Few large views make scatter/gather and digests fast; a table that was allocated at once is often one run.
    """
    view = store.layer_bytes(layer)
    size = store.block_bytes
    start = 0
    for end in range(1, len(block_ids) + 1):
        if end == len(block_ids) or block_ids[end] != block_ids[end - 1] + 1:
            first = block_ids[start]
            yield view[first * size : (first + end - start) * size]
            start = end
