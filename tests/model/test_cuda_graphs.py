"""Which batches have a graph of their own."""

import pytest

from model.cuda_graphs import batch_sizes


@pytest.mark.parametrize("largest", [1, 3, 8, 9, 60, 100, 256, 1000])
def test_every_batch_finds_a_graph_that_is_little_larger(largest: int) -> None:
    sizes = batch_sizes(largest)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == largest
    for count in range(9, largest + 1):
        size = next(size for size in sizes if size >= count)
        assert size <= max(count + 7, 1.25 * count)
