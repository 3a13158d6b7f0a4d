"""How numba kernels run on torch's own thread pool.

Two OpenMP pools in one process fight for the same cores: the idle one spins while the other works. So our kernels are C
callbacks that torch's OpenMP runtime calls: `GOMP_parallel(callback, words, threads, 0)`, found through libtorch itself
(libiomp exports the same entry point). Where it can't be found, a kernel runs on the calling thread alone.

A kernel takes one pointer to int64 words: word 0 is the next item to be taken, word 1 the number of items, word 2 how
many are taken at a time; the rest are its own arguments, addresses and sizes. Threads take items until none is left, so
one that starts late or is disturbed does less.
"""

import contextlib
import ctypes
import functools
import hashlib
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import numba
import torch
from llvmlite import ir  # type: ignore[import-untyped]
from numba import cfunc, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

FIRST_ARGUMENT = 3
_MATH = {"reassoc", "contract", "nsz", "arcp"}
"""What sums need to be vectorised; NaN and infinity keep their meaning. numpy's error model does too: a check for a
division by zero would end the loop early, and such loops are not vectorised."""

WORDS = types.CPointer(types.int64)


class Kernel:
    """A compiled callback and the way to run it."""

    def __init__(self, function: Callable[[Any], None]):
        # Without a writable folder for its cache numba refuses `cache=True`; then every start compiles anew.
        with _cache_of_these_sources():
            try:
                self._compiled = cfunc(types.void(WORDS), cache=True, error_model="numpy")(function)
            except RuntimeError:
                self._compiled = cfunc(types.void(WORDS), error_model="numpy")(function)
        self._callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self._compiled.address)

    @property
    def address(self) -> int:
        """Where the machine code is: a C function from a pointer to words to nothing."""
        return cast(int, self._compiled.address)

    def run(self, num_items: int, grain: int, *arguments: int) -> None:
        """Run over items 0 to `num_items`, `grain` at a time; `arguments` are addresses and sizes, all contiguous."""
        words = (ctypes.c_int64 * (FIRST_ARGUMENT + len(arguments)))(0, num_items, grain, *arguments)
        self.run_team(ctypes.addressof(words), min(torch.get_num_threads(), -(-num_items // grain)))

    def run_team(self, words: int, threads: int) -> None:
        """Have up to `threads` threads call it with the address `words`, and wait for them."""
        run_parallel = _run_parallel()
        if threads > 1 and run_parallel is not None:
            run_parallel(self.address, words, threads, 0)
        else:
            self._callback(words)


class KernelPair:
    """One operation for fp32 and for bf16, each compiled (or read from numba's cache) when it is first needed."""

    def __init__(self, fp32: Callable[[Any], None], bf16: Callable[[Any], None]):
        self._functions = {torch.float32: fp32, torch.bfloat16: bf16}
        self._kernels: dict[torch.dtype, Kernel] = {}

    def of(self, dtype: torch.dtype) -> Kernel:
        """The kernel of `dtype`. Raises KeyError for another than fp32 and bf16."""
        kernel = self._kernels.get(dtype)
        if kernel is None:
            kernel = self._kernels[dtype] = Kernel(self._functions[dtype])
        return kernel


@contextlib.contextmanager
def _cache_of_these_sources() -> Iterator[None]:
    """To see whether machine code is out of date, numba looks only at the kernel's own file, not at the modules whose
    functions are compiled into it. So each state of all CPU kernels' sources gets a cache folder of its own."""
    folder = Path(__file__).parent
    sources = hashlib.sha256()
    for path in sorted(folder.glob("*.py")):
        sources.update(path.read_bytes())
    before = numba.config.CACHE_DIR
    base = Path(before) if before else folder / "__pycache__"
    numba.config.CACHE_DIR = str(base / f"numba-{sources.hexdigest()[:12]}")
    try:
        yield
    finally:
        numba.config.CACHE_DIR = before


@functools.cache
def _run_parallel() -> Callable[[int, int, int, int], None] | None:
    address = openmp_function("GOMP_parallel")
    arguments = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    return ctypes.CFUNCTYPE(None, *arguments)(address) if address else None


@functools.cache
def openmp_function(name: str) -> int:
    """The address of a function of torch's OpenMP runtime; 0 where that can't be found."""
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        function = getattr(ctypes.CDLL(str(library)), name)  # looked up in libtorch's own dependencies
    except (OSError, AttributeError):
        return 0
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def compiled(function: Callable[..., Any]) -> Any:
    """`numba.njit` for the parts of a kernel; they are cached with the callback that they become part of."""
    return njit(nogil=True, fastmath=_MATH, error_model="numpy")(function)


def float_bits(value: float) -> int:
    """An fp32 argument as a word; the kernel reads it back with `float_of_bits`."""
    return int.from_bytes(struct.pack("<f", value), "little")


@intrinsic
def take_items(typingctx: Any, words: Any) -> Any:
    """The first item of the next portion: an atomic add of `grain` to word 0."""
    del typingctx, words

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        del context, signature
        (pointer,) = arguments
        grain = builder.load(builder.gep(pointer, [ir.Constant(ir.IntType(64), 2)]))
        return builder.atomic_rmw("add", pointer, grain, "monotonic")

    return types.int64(WORDS), codegen


@intrinsic
def as_floats(typingctx: Any, address: Any) -> Any:
    """int64 address -> float32*."""
    del typingctx, address
    return types.CPointer(types.float32)(types.int64), _to_pointer


@intrinsic
def as_halves(typingctx: Any, address: Any) -> Any:
    """int64 address -> uint16*, the bits of bf16 values."""
    del typingctx, address
    return types.CPointer(types.uint16)(types.int64), _to_pointer


@intrinsic
def as_integers(typingctx: Any, address: Any) -> Any:
    """int64 address -> int64*."""
    del typingctx, address
    return types.CPointer(types.int64)(types.int64), _to_pointer


@intrinsic
def as_short_integers(typingctx: Any, address: Any) -> Any:
    """int64 address -> int32*."""
    del typingctx, address
    return types.CPointer(types.int32)(types.int64), _to_pointer


def _to_pointer(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))


@intrinsic
def float_of_bits(typingctx: Any, bits: Any) -> Any:
    """uint32 -> the float32 with these bits."""
    del typingctx, bits

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        del context, signature
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.uint32), codegen


@intrinsic
def bits_of_float(typingctx: Any, value: Any) -> Any:
    """float32 -> its bits as uint32."""
    del typingctx, value

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        del context, signature
        return builder.bitcast(arguments[0], ir.IntType(32))

    return types.uint32(types.float32), codegen


@intrinsic
def prefetch(typingctx: Any, address: Any) -> Any:
    """Ask for the cache line at an int64 address, to be read soon; returns 0."""
    del typingctx, address

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        del context, signature
        byte, flag = ir.IntType(8).as_pointer(), ir.IntType(32)
        function = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(ir.VoidType(), (byte, flag, flag, flag)), "llvm.prefetch.p0"
        )
        read, keep, data = ir.Constant(flag, 0), ir.Constant(flag, 3), ir.Constant(flag, 1)
        builder.call(function, (builder.inttoptr(arguments[0], byte), read, keep, data))
        return ir.Constant(ir.IntType(64), 0)

    return types.int64(types.int64), codegen
