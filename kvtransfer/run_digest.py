"""xxh3-128 over many runs of bytes in one call without the interpreter's lock, as they are copied or where they lie.

Fed run by run from Python, a digest of small or scattered blocks costs more for the calls than for the bytes, and each
call contends for the interpreter's lock. So kernels call the C function of the xxhash package, whose wheels export its
symbols; where they don't, the same digest is fed from Python.

Loads numba, so it is imported where a link works, not before.
"""

import ctypes
import functools
from typing import Any, Protocol

import numpy as np
import xxhash
import xxhash._xxhash
from llvmlite import ir  # type: ignore[import-untyped]
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

from twostroke.kvtransfer.digest import DIGEST_BYTES
from twostroke.kvtransfer.host_units import Buffer
from twostroke.kvtransfer.unit_copy import copy_bytes, copy_runs

_WRITABLE = types.Array(types.uint8, 1, "C")
_READ_ONLY = types.Array(types.uint8, 1, "C", readonly=True)
_OFFSETS = types.Array(types.int64, 1, "C")
LINE = 64  # bytes of a cache line
SOURCE_PREFETCH = 4096  # bytes; then the hardware has seen where it goes
TARGET_PREFETCH = 1024


class RunDigest(Protocol):
    """The digest of one chunk after another, fed with runs of bytes in the order of the wire. Not thread-safe."""

    def start(self, seal: int) -> None:
        """Begin a chunk."""

    def update(self, buffer: Buffer, offsets: NDArray[np.int64], run_bytes: int) -> None:
        """The next runs, `run_bytes` from each of `offsets`. Raises ValueError where they are not within `buffer`."""

    def copy(
        self,
        target: Buffer,
        target_offsets: NDArray[np.int64],
        source: Buffer,
        source_offsets: NDArray[np.int64],
        run_bytes: int,
    ) -> None:
        """Copy runs as `copy_runs` does; what then is in `target` are the digest's next runs. Raises ValueError."""

    def result(self) -> bytes:
        """The chunk's digest, as xxhash writes it."""


def make_run_digest() -> RunDigest:
    """The faster kind where the xxhash package lets us."""
    functions = _native_functions()
    return PortableDigest() if functions is None else NativeDigest(functions)


class PortableDigest:
    """A RunDigest by way of the xxhash package's Python interface."""

    def __init__(self) -> None:
        self._hash = xxhash.xxh3_128()

    def start(self, seal: int) -> None:
        self._hash = xxhash.xxh3_128(seed=seal)

    def update(self, buffer: Buffer, offsets: NDArray[np.int64], run_bytes: int) -> None:
        view = np.frombuffer(buffer, np.uint8).data
        for start in offsets.tolist():
            if not 0 <= start <= view.nbytes - run_bytes:
                raise ValueError(not_within(run_bytes, view.nbytes))
            self._hash.update(view[start : start + run_bytes])

    def copy(
        self,
        target: Buffer,
        target_offsets: NDArray[np.int64],
        source: Buffer,
        source_offsets: NDArray[np.int64],
        run_bytes: int,
    ) -> None:
        copy_runs(target, target_offsets, source, source_offsets, run_bytes)
        self.update(target, target_offsets, run_bytes)

    def result(self) -> bytes:
        return bytes(self._hash.digest())


class _Digest128(ctypes.Structure):
    _fields_ = (("low", ctypes.c_uint64), ("high", ctypes.c_uint64))


class _Functions:
    """xxhash's C interface, found in the package's extension module. Raises OSError or AttributeError."""

    def __init__(self) -> None:
        library = ctypes.CDLL(str(xxhash._xxhash.__file__))
        self.create = library.XXH3_createState
        self.create.restype = ctypes.c_void_p
        self.create.argtypes = ()
        self.free = library.XXH3_freeState
        self.free.argtypes = (ctypes.c_void_p,)
        self.reset = library.XXH3_128bits_reset_withSeed
        self.reset.argtypes = (ctypes.c_void_p, ctypes.c_uint64)
        self.digest = library.XXH3_128bits_digest
        self.digest.restype = _Digest128
        self.digest.argtypes = (ctypes.c_void_p,)
        # On x86 this one picks the widest vector instructions at run time; elsewhere there is but one.
        update = getattr(library, "XXH3_128bits_update_dispatch", None) or library.XXH3_128bits_update
        self.update_address = int(ctypes.cast(update, ctypes.c_void_p).value or 0)
        self.digest_address = int(ctypes.cast(self.digest, ctypes.c_void_p).value or 0)


@functools.cache
def _native_functions() -> _Functions | None:
    try:
        functions = _Functions()
    except (OSError, AttributeError):  # a build of xxhash that hides its symbols
        return None
    sample = np.arange(5000, dtype=np.int64).view(np.uint8)
    starts = np.array([0, 9000, 20000], dtype=np.int64)
    digests: list[RunDigest] = [NativeDigest(functions), PortableDigest()]
    for digest in digests:
        digest.start(2**63 + 11)
        digest.update(sample, starts, 7001)
    return functions if digests[0].result() == digests[1].result() else None


class NativeDigest:
    """A RunDigest by way of xxhash's C functions."""

    def __init__(self, functions: _Functions):
        self._functions = functions
        self._free = functions.free
        self._state: int | None = functions.create()
        if self._state is None:
            raise MemoryError("no memory for a digest")
        self.start(0)

    def __del__(self) -> None:
        if getattr(self, "_state", None) is not None:
            self._free(self._state)

    def start(self, seal: int) -> None:
        self._functions.reset(self._state, seal)

    def update(self, buffer: Buffer, offsets: NDArray[np.int64], run_bytes: int) -> None:
        array = np.frombuffer(buffer, np.uint8)
        if not _digest_kernel(array, offsets, run_bytes, self._state, self._functions.update_address):
            raise ValueError(not_within(run_bytes, array.size))

    def copy(
        self,
        target: Buffer,
        target_offsets: NDArray[np.int64],
        source: Buffer,
        source_offsets: NDArray[np.int64],
        run_bytes: int,
    ) -> None:
        to, start = np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8)
        update = self._functions.update_address
        if not _copy_kernel(to, target_offsets, start, source_offsets, run_bytes, self._state, update):
            raise ValueError(not_within(run_bytes, min(to.size, start.size)))

    @property
    def addresses(self) -> tuple[int, int, int]:
        """Of XXH3_128bits_update, of XXH3_128bits_digest and of the state, for other kernels."""
        if self._state is None:
            raise ValueError("there is no state")
        return self._functions.update_address, self._functions.digest_address, self._state

    def result(self) -> bytes:
        digest = self._functions.digest(self._state)
        return int(digest.high << 64 | digest.low).to_bytes(DIGEST_BYTES, "big")


def not_within(run_bytes: int, num_bytes: int) -> str:
    return f"runs of {run_bytes} bytes are not all within {num_bytes} bytes"


@intrinsic  # type: ignore[untyped-decorator]
def feed(typingctx: Any, update: Any, state: Any, start: Any, size: Any) -> Any:
    """Call XXH3_128bits_update(state, start, size) at the address `update`."""
    del typingctx

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        del context, signature
        pointer = cgutils.voidptr_t
        function = ir.FunctionType(ir.IntType(32), [pointer, pointer, ir.IntType(64)])
        called = builder.inttoptr(arguments[0], function.as_pointer())
        first, second = (builder.inttoptr(word, pointer) for word in arguments[1:3])
        return builder.call(called, [first, second, arguments[3]])

    return types.int32(update, state, start, size), codegen


@intrinsic  # type: ignore[untyped-decorator]
def prefetch(typingctx: Any, address: Any) -> Any:
    """Ask for the cache line at an address. It may be any address: a wrong one does nothing."""
    del typingctx

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        del signature
        number, pointer = ir.IntType(32), cgutils.voidptr_t
        kind = ir.FunctionType(ir.VoidType(), [pointer, number, number, number])
        prefetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
        builder.call(prefetch, [builder.inttoptr(arguments[0], pointer), number(0), number(2), number(1)])
        return context.get_dummy_value()

    return types.void(address), codegen


def _digest_runs(buffer: Any, offsets: Any, run_bytes: int, state: int, update: int) -> bool:
    last = buffer.size - run_bytes
    if run_bytes < 1:
        return False
    for i in range(offsets.size):
        if not 0 <= offsets[i] <= last:
            return False
    start = buffer.ctypes.data
    for i in range(offsets.size):
        if i + 1 < offsets.size:  # where blocks are scattered, each one's beginning would be waited for
            for line in range(0, SOURCE_PREFETCH, LINE):
                prefetch(start + offsets[i + 1] + line)
        feed(update, state, start + offsets[i], run_bytes)
    return True


def _copy_and_digest(
    target: Any, target_offsets: Any, source: Any, source_offsets: Any, run_bytes: int, state: int, update: int
) -> bool:
    if target_offsets.size != source_offsets.size or run_bytes < 1:
        return False
    last_target, last_source = target.size - run_bytes, source.size - run_bytes
    for i in range(target_offsets.size):
        if not (0 <= target_offsets[i] <= last_target and 0 <= source_offsets[i] <= last_source):
            return False
    to, start = target.ctypes.data, source.ctypes.data
    for i in range(target_offsets.size):
        copy_bytes(to + target_offsets[i], start + source_offsets[i], run_bytes)
        if i + 1 < target_offsets.size:
            for line in range(0, SOURCE_PREFETCH, LINE):
                prefetch(start + source_offsets[i + 1] + line)
            for line in range(0, TARGET_PREFETCH, LINE):
                prefetch(to + target_offsets[i + 1] + line)
        feed(update, state, to + target_offsets[i], run_bytes)  # what was written, while the core's cache has it
    return True


_DIGEST = [types.boolean(array, _OFFSETS, types.intp, types.intp, types.intp) for array in (_WRITABLE, _READ_ONLY)]
_COPY = [
    types.boolean(_WRITABLE, _OFFSETS, array, _OFFSETS, types.intp, types.intp, types.intp)
    for array in (_WRITABLE, _READ_ONLY)
]
try:
    _digest_kernel = njit(_DIGEST, nogil=True, cache=True)(_digest_runs)
    _copy_kernel = njit(_COPY, nogil=True, cache=True)(_copy_and_digest)
except RuntimeError:  # there is no writable folder for numba's cache: every start compiles anew
    _digest_kernel = njit(_DIGEST, nogil=True)(_digest_runs)
    _copy_kernel = njit(_COPY, nogil=True)(_copy_and_digest)
