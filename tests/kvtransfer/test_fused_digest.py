"""Digests that are made while runs are copied, against xxhash over the same bytes in one piece."""

import numpy as np
import pytest
import xxhash

from twostroke.kvtransfer.fused_digest import BLOCK_BYTES, FusedDigest, can_be_fused

RNG = np.random.default_rng(5)


def starts_of(num_runs: int, run_bytes: int, num_bytes: int) -> np.ndarray:
    return (RNG.permutation(num_bytes // run_bytes)[:num_runs] * run_bytes).astype(np.int64)


def aligned(num_bytes: int) -> np.ndarray:
    """Zeros that begin on a page."""
    memory = np.zeros(num_bytes + 4096, np.uint8)
    first = -memory.ctypes.data % 4096
    return memory[first : first + num_bytes]


def test_this_machine_comes_to_the_same_as_xxhash() -> None:
    assert can_be_fused()


@pytest.mark.parametrize("seal", [0, 1, 2**63, 2**64 - 1])
@pytest.mark.parametrize("calls", [[(1, 1)], [(1, 2)], [(7, 1), (1, 1)], [(3, 5), (20, 2), (1, 16)], [(100, 4)]])
def test_a_digest_is_that_of_the_runs_one_after_the_other(calls: list[tuple[int, int]], seal: int) -> None:
    digest = FusedDigest()
    for shift in (0, 64, 1):  # on a stripe twice, beside one once
        source, target = RNG.integers(0, 256, 2**20, dtype=np.uint8), aligned(2**20 + shift)[shift:]
        digest.start(seal)
        wire, place = b"", 0
        for num_runs, blocks in calls:
            size = blocks * BLOCK_BYTES
            starts = starts_of(num_runs, size, source.size)
            places = place + RNG.permutation(num_runs).astype(np.int64) * size
            digest.copy(target, places, source.data.toreadonly(), starts, size)
            copied = b"".join(source[start : start + size].tobytes() for start in starts)
            assert b"".join(target[at : at + size].tobytes() for at in places) == copied
            wire += copied
            place += num_runs * size
        assert digest.result() == xxhash.xxh3_128_digest(wire, seed=seal)
        assert not target[place:].any()


@pytest.mark.parametrize("outside", [-1, 3 * BLOCK_BYTES + 1, 2**62])
def test_runs_outside_of_their_buffer_are_refused_before_anything_is_copied(outside: int) -> None:
    source, target = np.ones(4 * BLOCK_BYTES, np.uint8), np.zeros(4 * BLOCK_BYTES, np.uint8)
    bad, good = np.array([0, outside], np.int64), np.array([0, BLOCK_BYTES], np.int64)
    digest = FusedDigest()
    digest.start(1)
    for targets, sources in ((bad, good), (good, bad), (good, good[:1])):
        with pytest.raises(ValueError, match="not all within"):
            digest.copy(target, targets, source, sources, BLOCK_BYTES)
    for size in (0, -BLOCK_BYTES, BLOCK_BYTES - 1):
        with pytest.raises(ValueError, match="not whole blocks"):
            digest.copy(target, good, source, good, size)
    assert not target.any()


def test_a_chunk_of_nothing_has_no_digest() -> None:
    digest = FusedDigest()
    digest.start(1)
    nothing = np.zeros(0, np.int64)
    digest.copy(np.zeros(0, np.uint8), nothing, np.zeros(0, np.uint8), nothing, BLOCK_BYTES)
    with pytest.raises(ValueError, match="nothing was copied"):
        digest.result()
