"""Digests of scattered runs, against xxhash over the same bytes in one piece."""

import numpy as np
import pytest
import xxhash

from twostroke.kvtransfer import run_digest
from twostroke.kvtransfer.run_digest import NativeDigest, PortableDigest, RunDigest, make_run_digest

KINDS = pytest.mark.parametrize("make", [make_run_digest, PortableDigest])
RNG = np.random.default_rng(3)


def offsets_of(num_runs: int, run_bytes: int, num_bytes: int) -> np.ndarray:
    places = RNG.permutation(num_bytes // run_bytes)[:num_runs]
    return (places * run_bytes).astype(np.int64)


def gathered(buffer: np.ndarray, offsets: np.ndarray, run_bytes: int) -> bytes:
    return b"".join(buffer[start : start + run_bytes].tobytes() for start in offsets)


def test_this_build_of_xxhash_can_be_called_from_kernels() -> None:
    assert isinstance(make_run_digest(), NativeDigest)


@KINDS
@pytest.mark.parametrize(("num_runs", "run_bytes"), [(1, 1), (1, 240), (7, 241), (100, 64), (9, 16384), (0, 5)])
def test_a_digest_is_that_of_the_runs_one_after_the_other(make: type[RunDigest], num_runs: int, run_bytes: int) -> None:
    digest = make()
    memory = RNG.integers(0, 256, 200_000, dtype=np.uint8)
    for seal in (0, 2**64 - 1):
        first, second = (offsets_of(num_runs, run_bytes, memory.size) for _ in range(2))
        digest.start(seal)
        digest.update(memory, first, run_bytes)
        digest.update(memory.data.toreadonly(), second, run_bytes)
        wire = gathered(memory, first, run_bytes) + gathered(memory, second, run_bytes)
        assert digest.result() == xxhash.xxh3_128_digest(wire, seed=seal)


@KINDS
@pytest.mark.parametrize("run_bytes", [1, 96, 5000])
def test_what_was_copied_is_digested_in_the_order_of_the_wire(make: type[RunDigest], run_bytes: int) -> None:
    source, target = RNG.integers(0, 256, 100_000, dtype=np.uint8), np.zeros(100_000, np.uint8)
    sources, targets = (offsets_of(15, run_bytes, source.size) for _ in range(2))
    digest = make()
    digest.start(4)
    digest.copy(target, targets, source.data.toreadonly(), sources, run_bytes)
    wire = gathered(source, sources, run_bytes)
    assert gathered(target, targets, run_bytes) == wire
    assert digest.result() == xxhash.xxh3_128_digest(wire, seed=4)
    assert np.count_nonzero(target) <= 15 * run_bytes


@KINDS
@pytest.mark.parametrize("outside", [-1, 91, 2**62])
def test_runs_outside_of_their_buffer_are_refused_before_anything_is_copied(
    make: type[RunDigest], outside: int
) -> None:
    buffer, other = np.ones(100, np.uint8), np.zeros(100, np.uint8)
    bad, good = np.array([0, outside], dtype=np.int64), np.array([0, 10], dtype=np.int64)
    digest = make()
    with pytest.raises(ValueError, match="not all within 100 bytes"):
        digest.update(buffer, bad, 10)
    for targets, sources in ((bad, good), (good, bad)):
        with pytest.raises(ValueError, match="not all within"):
            digest.copy(other, targets, buffer, sources, 10)
    assert not other.any()


def test_without_the_symbols_the_same_digest_is_fed_from_python(monkeypatch: pytest.MonkeyPatch) -> None:
    class Hidden:
        def __init__(self) -> None:
            raise AttributeError("undefined symbol: XXH3_createState")

    monkeypatch.setattr(run_digest, "_Functions", Hidden)
    run_digest._native_functions.cache_clear()
    try:
        assert isinstance(make_run_digest(), PortableDigest)
    finally:
        run_digest._native_functions.cache_clear()


def test_functions_that_digest_otherwise_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    real = NativeDigest.result
    monkeypatch.setattr(NativeDigest, "result", lambda self: real(self)[::-1])
    run_digest._native_functions.cache_clear()
    try:
        assert isinstance(make_run_digest(), PortableDigest)
    finally:
        run_digest._native_functions.cache_clear()
