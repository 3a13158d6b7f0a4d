"""Launches of numba kernels on torch's own thread pool.

Two OpenMP pools in one process fight for the same cores: the idle one spins while the other works. So our kernels are C
callbacks that torch's OpenMP runtime calls: `GOMP_parallel(callback, words, threads, 0)`, found through libtorch itself
(libiomp exports the same entry point). Where it can't be found, a kernel runs on the calling thread alone.

A kernel takes one pointer to int64 words: word 0 is the next item to be taken, word 1 the number of items, word 2 how
many are taken at a time; the rest are its own arguments, addresses and sizes. Threads take items until none is left, so
one that starts late or is disturbed does less.

How a kernel's numbers are stored, as fp32 or as bf16, is part of its words' type: it is written once and compiled for
both. So is how those of the KV cache are, which may be in FP8 (e4m3) beside either.
"""

import contextlib
import ctypes
import functools
import hashlib
import inspect
import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import numba
import torch
from llvmlite import ir  # type: ignore[import-untyped]
from numba import cfunc, njit, types
from numba.core.datamodel import models
from numba.extending import intrinsic, overload, register_model
from torch import Tensor

_MATH = {"reassoc", "contract", "nsz", "arcp"}
"""Fast-math flags that sums need to be vectorised; NaN and infinity keep their meaning. numpy's error model does too: a
check for a division by zero would end the loop early, and such loops are not vectorised."""

WIDE = ir.IntType(64)


@functools.cache  # ctypes lets go of an array's type with the next collection of garbage, and builds it anew
def _words_type(num_words: int) -> type[ctypes.Array[ctypes.c_int64]]:
    return ctypes.c_int64 * num_words


class Words(types.CPointer):  # type: ignore[misc]
    """The type of a kernel's argument: `int64 *`, and how its numbers, and the KV cache's, are `stored` and `cached`,
    where there is a choice."""

    def __init__(self, stored: types.Type | None = None, cached: types.Type | None = None):
        super().__init__(types.int64)
        self.stored = stored
        self.cached = cached
        self.name = f"words of {stored} and {cached}"

    @property
    def key(self) -> tuple[types.Type | None, types.Type | None]:
        """Key that tells two signatures apart."""
        return self.stored, self.cached


register_model(Words)(models.PointerModel)


class Kernel:
    """A function of words that torch's threads run: compiled, or read from numba's cache, when it is first needed,
    since not every CPU can compile every kernel."""

    def __init__(
        self, function: Callable[[Any], None], stored: types.Type | None = None, cached: types.Type | None = None
    ):
        self._function = function
        self._signature = types.void(Words(stored, cached))

    @functools.cached_property
    def _compiled(self) -> Any:
        with _cache_of_these_sources():
            try:
                return cfunc(self._signature, cache=True, fastmath=_MATH, error_model="numpy")(self._function)
            except RuntimeError:  # no writable folder for a cache: every start compiles anew
                return cfunc(self._signature, fastmath=_MATH, error_model="numpy")(self._function)

    @functools.cached_property
    def address(self) -> int:
        """Address of the machine code: a C function from a pointer to words to nothing."""
        return cast(int, self._compiled.address)

    @functools.cached_property
    def _callback(self) -> Callable[[int], None]:
        return ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self.address)

    def run(self, num_items: int, grain: int, *arguments: Tensor | float) -> None:
        """Run over items 0 to `num_items`, `grain` at a time; `arguments` are as for `packed`."""
        words = packed(num_items, grain, arguments)
        memory = _words_type(len(words))(*words)
        self.run_team(ctypes.addressof(memory), min(torch.get_num_threads(), -(-num_items // grain)))

    def run_team(self, words: int, threads: int) -> None:
        """Have up to `threads` threads call it with the address `words`, and wait for them."""
        run_parallel = _run_parallel()
        if threads > 1 and run_parallel is not None:
            run_parallel(self.address, words, threads, 0)
        else:
            self._callback(words)


class Kernels:
    """One operation as a kernel for numbers in fp32 and one for bf16, each over a KV cache of those, or of FP8."""

    def __init__(self, function: Callable[[Any], None]):
        self._of: dict[tuple[torch.dtype, torch.dtype], Kernel] = {}
        for dtype, stored in ((torch.float32, types.float32), (torch.bfloat16, types.uint16)):
            self._of[dtype, dtype] = Kernel(function, stored, stored)
            self._of[dtype, torch.float8_e4m3fn] = Kernel(function, stored, types.uint8)

    def of(self, dtype: torch.dtype, kv_dtype: torch.dtype | None = None) -> Kernel:
        """The kernel of `dtype`, and of a cache of `kv_dtype` (None: the same). Raises KeyError for another than fp32
        and bf16, and for a cache that is neither of it nor of FP8."""
        return self._of[dtype, kv_dtype or dtype]


def packed(num_items: int, grain: int, arguments: Sequence[Tensor | float]) -> list[int]:
    """A kernel's words: of a contiguous tensor the address, of a float its bits as fp32, of an integer itself."""
    words = [0, num_items, grain]
    for argument in arguments:
        if isinstance(argument, Tensor):
            words.append(argument.data_ptr())
        elif isinstance(argument, float):
            words.append(int.from_bytes(struct.pack("<f", argument), "little"))
        else:
            words.append(argument)
    return words


@contextlib.contextmanager
def _cache_of_these_sources() -> Iterator[None]:
    """Give each state of all CPU kernels' sources a cache folder of its own. numba checks only the kernel's own file
    for changes, not the modules whose functions are compiled into it."""
    folder = Path(__file__).parent
    sources = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
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
    """`numba.njit` for the parts of a kernel; they are inlined into the kernels, and cached with them.

    A part left as a function would be in memory several times: by itself where it was compiled, and in each kernel
    read from the cache, optimised once more, with sums in another order. The first one loaded would stand in for all,
    so that a first start rounded otherwise than those after it.
    """
    return njit(nogil=True, fastmath=_MATH, error_model="numpy", forceinline=True)(function)


def written_in_llvm(result: Any = types.int64, *parameters: Any) -> Callable[[Callable[..., Any]], Any]:
    """Make a function for compiled code of one that writes its LLVM: (builder, *arguments) -> its value, or None for 0.

    Arguments are of the types `parameters`, or else int64, as addresses are; words stay what they are.
    """

    def decorate(write: Callable[..., Any]) -> Any:
        def typed(typingctx: Any, *given: Any) -> Any:
            kinds = parameters or [kind if isinstance(kind, Words) else types.int64 for kind in given]

            def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
                value = write(builder, *arguments)
                return WIDE(0) if value is None else value

            return result(*kinds), codegen

        typed.__name__, typed.__doc__ = write.__name__, write.__doc__
        typed.__signature__ = inspect.signature(write)  # type: ignore[attr-defined]
        return intrinsic(typed)

    return decorate


def at(builder: Any, base: Any, offset: Any, kind: Any) -> Any:
    """The pointer to a `kind` that many bytes behind the address `base`."""
    return builder.inttoptr(builder.add(base, offset), kind.as_pointer())


def _pointer_to(kind: types.Type, pointee: Any) -> Any:
    """int64 address -> pointer to numbers of this kind."""

    @written_in_llvm(types.CPointer(kind))
    def as_pointer(builder: Any, address: Any) -> Any:
        return builder.inttoptr(address, pointee.as_pointer())

    return as_pointer


as_bytes = _pointer_to(types.uint8, ir.IntType(8))
as_floats = _pointer_to(types.float32, ir.FloatType())
as_halves = _pointer_to(types.uint16, ir.IntType(16))  # the bits of bf16 values
as_integers = _pointer_to(types.int64, WIDE)
as_short_integers = _pointer_to(types.int32, ir.IntType(32))


def as_stored(words, address):
    """int64 address -> pointer to numbers that are stored as the kernel's are."""
    raise NotImplementedError("compiled code only")


@overload(as_stored)
def _as_stored(words, address):
    as_pointer = as_floats if words.stored == types.float32 else as_halves
    return lambda words, address: as_pointer(address)


def as_cached(words, address):
    """int64 address -> pointer to numbers that are stored as the KV cache's are."""
    raise NotImplementedError("compiled code only")


@overload(as_cached)
def _as_cached(words, address):
    as_pointer = {types.float32: as_floats, types.uint16: as_halves, types.uint8: as_bytes}[words.cached]
    return lambda words, address: as_pointer(address)


@written_in_llvm()
def take_items(builder, words):
    """The first item of the next portion: an atomic add of `grain` to word 0."""
    return builder.atomic_rmw("add", words, builder.load(builder.gep(words, [WIDE(2)])), "monotonic")


@compiled
def taken(words, items):
    """Yield the items, of 0 to `items`, that fall to this thread."""
    grain = words[2]
    while True:
        begin = take_items(words)
        if begin >= items:
            return
        end = min(begin + grain, items)
        while begin < end:
            yield begin
            begin += 1


@written_in_llvm(types.float32, types.uint32)
def float_of_bits(builder, bits):
    """uint32 -> the float32 with these bits."""
    return builder.bitcast(bits, ir.FloatType())


@written_in_llvm(types.uint32, types.float32)
def bits_of_float(builder, value):
    """float32 -> its bits as uint32."""
    return builder.bitcast(value, ir.IntType(32))


@written_in_llvm(types.float32, types.uint16)
def float_of_half(builder, bits):
    """uint16 -> the float32 of the fp16 number with these bits."""
    return builder.fpext(builder.bitcast(bits, ir.HalfType()), ir.FloatType())
