"""S3-FIFO keeps what is used, and lets scans pass through."""

from bisect import bisect
from collections import OrderedDict
from collections.abc import Iterator
from itertools import accumulate
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twostroke.kvtiers.storage.eviction import S3Fifo


def trace(seed: int, num_blobs: int, length: int, scan_share: float) -> Iterator[str]:
    """Yield keys: of a Zipf distribution, and scans of keys that never come again."""
    random = Random(seed)
    weights = list(accumulate(1 / rank for rank in range(1, num_blobs + 1)))
    scanned = 0
    while scanned < length:
        if random.random() < scan_share / 100:
            for _ in range(100):
                yield f"scan-{scanned}"
                scanned += 1
        else:
            yield f"blob-{bisect(weights, random.random() * weights[-1])}"
            scanned += 1


def size_of(key: str) -> int:
    return 1 + hash_of(key) % 4


def hash_of(key: str) -> int:
    return sum(ord(letter) * 31**place for place, letter in enumerate(key))


def hits_of_fifo(keys: list[str], max_bytes: int) -> int:
    cache, hits = S3Fifo(max_bytes), 0
    for key in keys:
        if key in cache:
            hits += 1
            cache.use(key)
            continue
        while cache.num_bytes + size_of(key) > max_bytes:
            assert cache.evict() is not None
        cache.insert(key, size_of(key))
    return hits


def hits_of_lru(keys: list[str], max_bytes: int) -> int:
    cache: OrderedDict[str, int] = OrderedDict()
    used = hits = 0
    for key in keys:
        if key in cache:
            hits += 1
            cache.move_to_end(key)
            continue
        while used + size_of(key) > max_bytes:
            used -= cache.popitem(last=False)[1]
        cache[key] = size_of(key)
        used += size_of(key)
    return hits


@pytest.mark.parametrize("max_bytes", [200, 1000])
@pytest.mark.parametrize("scan_share", [0.3, 0.5])
def test_it_hits_more_often_than_lru_where_scans_come_between(scan_share: float, max_bytes: int) -> None:
    keys = list(trace(1, 2000, 60_000, scan_share))
    ours, lru = hits_of_fifo(keys, max_bytes), hits_of_lru(keys, max_bytes)
    assert ours > 1.1 * lru, (ours, lru)


def test_what_nobody_asks_for_again_leaves_first() -> None:
    cache = S3Fifo(100)
    for number in range(10):
        cache.insert(str(number), 10)
    for _ in range(2):
        cache.use("0")
    assert [cache.evict() for _ in range(2)] == [("1", 10), ("2", 10)]
    assert "0" in cache


def test_what_comes_back_is_kept() -> None:
    cache = S3Fifo(100)
    cache.insert("back", 10)
    for number in range(5):
        cache.insert(str(number), 10)
    assert cache.evict() == ("back", 10)
    cache.insert("back", 10)
    for number in range(5, 9):
        cache.insert(str(number), 10)
    assert [cache.evict() for _ in range(8)] == [(str(number), 10) for number in range(8)]
    assert "back" in cache


def test_uses_keep_a_blob_at_most_three_rounds() -> None:
    cache = S3Fifo(20)
    for key in ("used", "other"):
        cache.insert(key, 10, is_proven=True)
    for _ in range(100):
        cache.use("used")
    assert cache.evict() == ("other", 10)
    assert cache.evict() == ("used", 10)
    assert cache.evict() is None


def test_removed_and_resized_blobs_count_as_they_are() -> None:
    cache = S3Fifo(100)
    cache.insert("small", 5)
    cache.insert("main", 7, is_proven=True)
    cache.insert("small", 6)
    cache.insert("main", 1)
    assert (cache.num_bytes, len(cache), cache.bytes_of("small"), cache.bytes_of("none")) == (7, 2, 6, None)
    for key in ("small", "small", "main", "none"):
        cache.remove(key)
    cache.use("none")
    assert (cache.num_bytes, len(cache), cache.evict()) == (0, 0, None)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("iupre"), st.integers(0, 12), st.integers(0, 30))))
def test_its_account_is_that_of_a_dictionary(steps: list[tuple[str, int, int]]) -> None:
    cache, model = S3Fifo(60), dict[str, int]()
    for what, number, size in steps:
        key = str(number)
        if what in "ip":
            cache.insert(key, size, is_proven=what == "p")
            model[key] = size
        elif what == "u":
            cache.use(key)
        elif what == "r":
            cache.remove(key)
            model.pop(key, None)
        else:
            victim = cache.evict()
            assert (victim is None) == (not model)
            if victim is not None:
                assert model.pop(victim[0]) == victim[1]
        assert cache.keys() == model.keys()
        assert len(cache) == len(model)
        assert cache.num_bytes == sum(model.values())
        assert cache._in_ghosts == sum(cache._ghosts.values()) <= 54
        assert cache._uses.keys() <= model.keys()
