"""xxh3-128 of runs of bytes while they are copied, in one pass: each word is loaded once, stored, and digested.

Beside a copy, which waits for memory, the arithmetic costs nothing; a digest after it, even out of the core's cache,
takes a quarter of the copy's time. Where runs lie on stripes they are stored past the cache, which spares reading what
they overwrite: copy and digest together then take no longer than a plain memcpy. What is digested is what was stored,
whatever another process does to the source meanwhile.

This is the long form of XXH3 (more than 240 bytes), from its specification in the xxhash project,
doc/xxhash_spec.md: blocks of 1024 bytes are 16 stripes of eight 64-bit lanes, each stripe with the secret shifted by 8
bytes, then the lanes are scrambled; the very last stripe has a place of its own in the secret. Runs must be whole
blocks. `can_be_fused` compares the outcome with the xxhash package's before anything relies on it.

Loads numba, so it is imported where a link works, not before.
"""

import functools
from typing import Any

import numpy as np
import xxhash
from llvmlite import ir  # type: ignore[import-untyped]
from numba import njit, types
from numba.extending import intrinsic
from numpy.typing import NDArray

from twostroke.kvtransfer.digest import DIGEST_BYTES
from twostroke.kvtransfer.host_units import Buffer
from twostroke.kvtransfer.run_digest import LINE, SOURCE_PREFETCH, not_within, prefetch
from twostroke.kvtransfer.unit_copy import copy_bytes

BLOCK_BYTES = 1024
_STRIPE = 64
_STRIPES = BLOCK_BYTES // _STRIPE
_MASK = 2**64 - 1
_PRIME32 = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D)
_PRIME64 = (0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5)
_AVALANCHE = 0x165667919E3779F9
_LANES = np.array(
    [_PRIME32[2], _PRIME64[0], _PRIME64[1], _PRIME64[2], _PRIME64[3], _PRIME32[1], _PRIME64[4], _PRIME32[0]], np.uint64
)
_SECRET = bytes.fromhex(  # XXH3_kSecret
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
    "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
    "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
_SECRET_BYTES = 192
_SCRAMBLE_AT = _SECRET_BYTES - _STRIPE
_LAST_STRIPE_AT = _SECRET_BYTES - _STRIPE - 7
_MERGE_LOW_AT = 11
_MERGE_HIGH_AT = _SECRET_BYTES - _STRIPE - 11

_WORD = ir.IntType(64)
_EIGHT = ir.VectorType(_WORD, 8)
_PAIRS = ir.Constant(ir.VectorType(ir.IntType(32), 8), [1, 0, 3, 2, 5, 4, 7, 6])


def _load(builder: Any, address: Any, offset: int) -> Any:
    pointer = builder.inttoptr(builder.add(address, _WORD(offset)), _EIGHT.as_pointer())
    loaded = builder.load(pointer)
    loaded.align = 1
    return loaded


def _store(builder: Any, value: Any, address: Any, offset: int, *, past_cache: bool = False) -> None:
    pointer = builder.inttoptr(builder.add(address, _WORD(offset)), _EIGHT.as_pointer())
    store = builder.store(value, pointer)
    store.align = _STRIPE if past_cache else 1
    if past_cache:
        store.set_metadata("nontemporal", builder.module.add_metadata([ir.IntType(32)(1)]))


def _all(value: int) -> Any:
    return ir.Constant(_EIGHT, [value] * 8)


def _accumulate(builder: Any, lanes: Any, stripe: Any, secret: Any) -> Any:
    key = builder.xor(stripe, secret)
    product = builder.mul(builder.and_(key, _all(2**32 - 1)), builder.lshr(key, _all(32)))
    return builder.add(lanes, builder.add(product, builder.shuffle_vector(stripe, stripe, _PAIRS)))


def _emit_block(context: Any, builder: Any, arguments: Any, *, past_cache: bool) -> Any:
    to, start, lanes_at, secret_at = arguments
    state = _load(builder, lanes_at, 0)
    for i in range(_STRIPES):
        stripe = _load(builder, start, i * _STRIPE)
        _store(builder, stripe, to, i * _STRIPE, past_cache=past_cache)
        state = _accumulate(builder, state, stripe, _load(builder, secret_at, 8 * i))
    state = builder.xor(state, builder.lshr(state, _all(47)))
    state = builder.xor(state, _load(builder, secret_at, _SCRAMBLE_AT))
    _store(builder, builder.mul(state, _all(_PRIME32[0])), lanes_at, 0)
    return context.get_dummy_value()


@intrinsic  # type: ignore[untyped-decorator]
def _copy_block(typingctx: Any, target: Any, source: Any, lanes: Any, secret: Any) -> Any:
    """Copy a block and take it into the lanes; all four are addresses, and target may be source."""
    del typingctx

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        del signature
        return _emit_block(context, builder, arguments, past_cache=False)

    return types.void(target, source, lanes, secret), codegen


@intrinsic  # type: ignore[untyped-decorator]
def _stream_block(typingctx: Any, target: Any, source: Any, lanes: Any, secret: Any) -> Any:
    """As _copy_block, past the cache: the target, which lies on a stripe, is not read before it is overwritten."""
    del typingctx

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        del signature
        return _emit_block(context, builder, arguments, past_cache=True)

    return types.void(target, source, lanes, secret), codegen


@intrinsic  # type: ignore[untyped-decorator]
def _fence(typingctx: Any) -> Any:
    """Streamed stores are seen by other cores before whatever is stored later."""
    del typingctx

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        del signature, arguments
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic  # type: ignore[untyped-decorator]
def _last_block(typingctx: Any, start: Any, lanes: Any, secret: Any) -> Any:
    """Take the last block of all into the lanes."""
    del typingctx

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        del signature
        start_at, lanes_at, secret_at = arguments
        state = _load(builder, lanes_at, 0)
        for i in range(_STRIPES):
            at = _LAST_STRIPE_AT if i == _STRIPES - 1 else 8 * i
            stripe = _load(builder, start_at, i * _STRIPE)
            state = _accumulate(builder, state, stripe, _load(builder, secret_at, at))
        _store(builder, state, lanes_at, 0)
        return context.get_dummy_value()

    return types.void(start, lanes, secret), codegen


def _copy(
    target: Any,
    target_offsets: Any,
    source: Any,
    source_offsets: Any,
    run_bytes: int,
    waiting: int,
    lanes: Any,
    secret: Any,
) -> int:
    """The address of the last block copied, which is not in the lanes yet; 0, and nothing copied, for wrong runs."""
    if target_offsets.size != source_offsets.size:
        return 0
    last_target, last_source = target.size - run_bytes, source.size - run_bytes
    for i in range(target_offsets.size):
        if not (0 <= target_offsets[i] <= last_target and 0 <= source_offsets[i] <= last_source):
            return 0
    to, start, state, key = target.ctypes.data, source.ctypes.data, lanes.ctypes.data, secret.ctypes.data
    if waiting != 0:
        _copy_block(waiting, waiting, state, key)
    num_runs = target_offsets.size
    is_streamed = True
    for i in range(num_runs):
        is_streamed = is_streamed and (to + target_offsets[i]) % _STRIPE == 0
    for i in range(num_runs):
        if i + 1 < num_runs:  # where blocks are scattered, each one's beginning would be waited for
            for line in range(0, SOURCE_PREFETCH, LINE):
                prefetch(start + source_offsets[i + 1] + line)
        end = run_bytes if i + 1 < num_runs else run_bytes - BLOCK_BYTES
        if is_streamed:
            for at in range(0, end, BLOCK_BYTES):
                _stream_block(to + target_offsets[i] + at, start + source_offsets[i] + at, state, key)
        else:
            for at in range(0, end, BLOCK_BYTES):
                _copy_block(to + target_offsets[i] + at, start + source_offsets[i] + at, state, key)
    _fence()
    waiting = to + target_offsets[num_runs - 1] + run_bytes - BLOCK_BYTES
    copy_bytes(waiting, start + source_offsets[num_runs - 1] + run_bytes - BLOCK_BYTES, BLOCK_BYTES)
    return waiting


def _finish(waiting: int, lanes: Any, secret: Any) -> None:
    _last_block(waiting, lanes.ctypes.data, secret.ctypes.data)


_BYTES = types.Array(types.uint8, 1, "C")
_READ_ONLY = types.Array(types.uint8, 1, "C", readonly=True)
_OFFSETS = types.Array(types.int64, 1, "C")
_STATE = types.Array(types.uint64, 1, "C")
_COPY = [
    types.intp(_BYTES, _OFFSETS, source, _OFFSETS, types.intp, types.intp, _STATE, _STATE)
    for source in (_BYTES, _READ_ONLY)
]
_FINISH = types.void(types.intp, _STATE, _STATE)
try:
    _copy_kernel = njit(_COPY, nogil=True, cache=True)(_copy)
    _finish_kernel = njit(_FINISH, nogil=True, cache=True)(_finish)
except RuntimeError:  # there is no writable folder for numba's cache: every start compiles anew
    _copy_kernel = njit(_COPY, nogil=True)(_copy)
    _finish_kernel = njit(_FINISH, nogil=True)(_finish)


class FusedDigest:
    """The digest of one chunk after another, of whole blocks that it copies. Not thread-safe."""

    def __init__(self) -> None:
        self._lanes = _LANES.copy()
        self._secret = np.zeros(_SECRET_BYTES // 8, np.uint64)
        self._waiting = 0
        self._num_bytes = 0

    def start(self, seal: int) -> None:
        """Begin a chunk."""
        self._lanes[:] = _LANES
        words = np.frombuffer(_SECRET, "<u8")
        self._secret[0::2] = words[0::2] + np.uint64(seal)
        self._secret[1::2] = words[1::2] - np.uint64(seal)
        self._waiting = 0
        self._num_bytes = 0

    def copy(
        self,
        target: Buffer,
        target_offsets: NDArray[np.int64],
        source: Buffer,
        source_offsets: NDArray[np.int64],
        run_bytes: int,
    ) -> None:
        """Copy runs as `copy_runs` does; what then is in `target` are the digest's next runs.

        Until `result` nobody may write there. Raises ValueError where runs are not whole blocks, or not within the
        buffers; nothing is copied then.
        """
        if run_bytes < 1 or run_bytes % BLOCK_BYTES:
            raise ValueError(f"runs of {run_bytes} bytes are not whole blocks of {BLOCK_BYTES}")
        if not target_offsets.size and not source_offsets.size:
            return
        to, start = np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8)
        waiting = _copy_kernel(
            to, target_offsets, start, source_offsets, run_bytes, self._waiting, self._lanes, self._secret
        )
        if not waiting:
            raise ValueError(not_within(run_bytes, min(to.size, start.size)))
        self._waiting = waiting
        self._num_bytes += run_bytes * target_offsets.size

    def result(self) -> bytes:
        """The chunk's digest, as xxhash writes it. Raises ValueError for a chunk of nothing."""
        if not self._waiting:
            raise ValueError("nothing was copied")
        _finish_kernel(self._waiting, self._lanes, self._secret)
        lanes, secret = [int(lane) for lane in self._lanes], self._secret.tobytes()
        low = _merge(lanes, secret[_MERGE_LOW_AT:], self._num_bytes * _PRIME64[0] & _MASK)
        high = _merge(lanes, secret[_MERGE_HIGH_AT:], ~(self._num_bytes * _PRIME64[1]) & _MASK)
        return (high << 64 | low).to_bytes(DIGEST_BYTES, "big")


def _merge(lanes: list[int], secret: bytes, start: int) -> int:
    total = start
    for i in range(0, 8, 2):
        one = lanes[i] ^ int.from_bytes(secret[8 * i : 8 * i + 8], "little")
        other = lanes[i + 1] ^ int.from_bytes(secret[8 * i + 8 : 8 * i + 16], "little")
        product = one * other
        total += (product & _MASK) ^ (product >> 64)
    total &= _MASK
    total ^= total >> 37
    total = total * _AVALANCHE & _MASK
    return total ^ total >> 32


@functools.cache
def can_be_fused() -> bool:
    """Whether our kernels come to the same as the xxhash package on this machine."""
    source = np.random.default_rng(1).integers(0, 256, 16 * BLOCK_BYTES, dtype=np.uint8)
    target = np.zeros_like(source)
    digest = FusedDigest()
    digest.start(2**63 + 11)
    first, second = np.array([0, 4, 8], np.int64) * BLOCK_BYTES, np.array([13], np.int64) * BLOCK_BYTES
    digest.copy(target, first, source, first, 2 * BLOCK_BYTES)
    digest.copy(target, second, source, second, BLOCK_BYTES)
    starts = ((0, 2), (4, 2), (8, 2), (13, 1))
    wire = b"".join(source[at * BLOCK_BYTES : (at + count) * BLOCK_BYTES].tobytes() for at, count in starts)
    return digest.result() == xxhash.xxh3_128_digest(wire, seed=2**63 + 11)
