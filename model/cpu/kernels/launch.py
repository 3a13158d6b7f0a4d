"""Launches of numba kernels on torch's own thread pool.

Two OpenMP pools in one process fight for the same cores: the idle one spins while the other works. So our kernels are C
callbacks that torch's OpenMP runtime calls: `GOMP_parallel(callback, words, threads, 0)`, found through libtorch itself
(libiomp exports the same entry point). Where it can't be found, a kernel runs on the calling thread alone.

A kernel takes one pointer to int64 words: word 0 is the next item to be taken, word 1 the number of items, word 2 how
many are taken at a time; the rest are its own arguments, addresses and sizes. Threads take items until none is left, so
one that starts late or is disturbed does less.

How a kernel's numbers are stored, as fp32 or as bf16, is part of its words' type: it is written once and compiled for
both. So is how those of the KV cache are, which may be in FP8 (e4m3) beside either.

**Lent cores** (`CoreLending`). A host's cores are divided among its workers, and work comes in bursts: while prompts
come in, decode workers may idle, and later prefill workers do. So each worker has a row in a table in shared memory:
how many cores it owns, and whether it computes. A worker that computes uses its own cores and an equal share of those
of idle workers. Nobody waits and nobody asks: an owner marks its row, and borrowers see that between two kernels and
go on with fewer threads.

The number of threads changes no bit of a result (tests/model/cpu/test_core_lending.py).

A worker holds a lock on its row as long as it lives, so the kernel frees the rows of workers that were killed.

**Programs** are kernels recorded once and replayed as one parallel region: the CPU's counterpart of a CUDA graph. A
launch from Python costs about 10 us, of packing arguments and of starting and joining threads; a decoder's step has
hundred and more. Here the threads start once and walk the list together. Between two kernels they meet at a barrier, a
counter that all of them raise and wait for (well under 1 us), because the second reads what the first wrote.

**The arena** is memory for what a recorded program writes on its way, shared by all programs of an engine. A
recording only notes addresses, so its intermediate results must lie where every replay may write. As in a CUDA
graph's private pool, a place is handed out again once the tensors on it are gone: first to later results of the same
recording, then to other recordings, since one program runs at a time.

`Launcher` is the one place through which CPU kernels get their output memory and are run, or recorded.
"""

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import inspect
import logging
import math
import mmap
import os
import platform
import struct
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import numba
import numpy as np
import numpy.typing as npt
import torch
from llvmlite import ir  # type: ignore[import-untyped]
from numba import cfunc, njit, types
from numba.core import cgutils
from numba.core.datamodel import models
from numba.extending import intrinsic, overload, register_model
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

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


MAX_WORKERS = 64
"""Rows of the table. Further workers of the host keep to their own cores."""
CHECK_S = 1.0
"""Seconds between two looks for workers that have died."""

_log = logging.getLogger(__name__)
_CORES, _IS_BUSY = 0, 1
"""Columns of a row; a row without cores is free."""
_ROW_BYTES = 16
_TABLE_BYTES = MAX_WORKERS * _ROW_BYTES
_TABLE, _ROW, _HOST_CORES, _NUM_THREADS = range(4)
"""Words for `num_threads`: address of the table, the worker's own row, the host's cores, and the result."""


@compiled
def num_threads(words):
    """The threads that a worker may use now: its own cores, and its share of the idle workers' cores."""
    table, own = as_integers(words[0]), words[1]
    idle, busy, borrowers, before = 0, 0, 0, 0
    for row in range(MAX_WORKERS):
        cores = table[2 * row]
        if row == own or (cores > 0 and table[2 * row + 1] != 0):
            busy += cores
            borrowers += 1
            if row < own:
                before += 1
        else:
            idle += cores
    # Workers may own more cores together than there are: three workers of one core on a host of two.
    lent = max(0, min(idle, words[2] - busy))
    share = lent // borrowers
    if before < lent % borrowers:  # the first rows get what can't be divided
        share += 1
    return max(1, table[2 * own] + share)


@Kernel
def _write_num_threads(words):
    words[3] = num_threads(words)


class CoreLending:
    """One worker's row, used on the engine's thread."""

    def __init__(self, cores: int, path: Path, clock: Callable[[], float] = time.monotonic):
        """Join the workers of the table at `path`, with `cores` of its own; busy until the first `end`.

        Raises OSError where that is impossible.
        """
        self._clock = clock
        self._checked_at = clock()
        self._path = path
        _make_private(path.parent)
        for other in path.parent.iterdir():
            if other != path:
                _remove_unused(other)
        self._file, self._row = _claim_row(path)
        self._table = np.frombuffer(mmap.mmap(self._file, _TABLE_BYTES), np.int64).reshape(MAX_WORKERS, 2)
        self._table[self._row, _IS_BUSY] = 1
        self._table[self._row, _CORES] = cores
        host_cores = len(os.sched_getaffinity(0))
        self._words = np.array([self._table.ctypes.data, self._row, host_cores, 0], np.int64)

    @property
    def address(self) -> int:
        """Address of the words for `num_threads`."""
        return self._words.ctypes.data

    def num_threads(self) -> int:
        """Return how many threads a kernel that starts now may use."""
        _write_num_threads.run_team(self.address, 1)
        return int(self._words[_NUM_THREADS])

    def begin(self) -> None:
        """Take the worker's own cores back: it has something to compute."""
        self._table[self._row, _IS_BUSY] = 1
        if (now := self._clock()) - self._checked_at >= CHECK_S:
            self._checked_at = now
            self._free_dead_rows()

    def end(self) -> None:
        """Lend the worker's cores: it has nothing to compute."""
        self._table[self._row, _IS_BUSY] = 0

    def close(self) -> None:
        """Leave the table."""
        self._table[self._row] = 0
        _lock(self._file, fcntl.F_UNLCK, self._row)  # the mapping keeps the open file
        os.close(self._file)
        _remove_unused(self._path)

    def _free_dead_rows(self) -> None:
        """Empty the rows of workers that ended without doing so, or their cores would be lent twice."""
        for row in np.flatnonzero(self._table[:, _CORES]):
            if row != self._row and _lock(self._file, fcntl.F_WRLCK, int(row)):
                self._table[row] = 0
                _lock(self._file, fcntl.F_UNLCK, int(row))


def lend_cores(cores: int, path: Path) -> CoreLending | None:
    """Join the table at `path`; None, and a line in the log, where that is impossible."""
    try:
        return CoreLending(cores, path)
    except (OSError, AttributeError) as error:  # AttributeError: a system without locks of open files
        _log.warning("steps keep to their own %d cores, since idle workers' can't be lent: %s", cores, error)
        return None


def _make_private(folder: Path) -> None:
    """Make a folder that belongs to this user alone. Raises OSError."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = os.lstat(folder)
    if found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise PermissionError(f"{folder}: others may write there")


def _claim_row(path: Path) -> tuple[int, int]:
    """Return the open file of the table at `path`, and the number of a row that is locked for it. Raises OSError."""
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(file, _TABLE_BYTES)
            row = next((row for row in range(MAX_WORKERS) if _lock(file, fcntl.F_WRLCK, row)), None)
            if row is None:
                raise OSError(f"{MAX_WORKERS} workers share the table {path} already")
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.stat(path), os.fstat(file)):
                    return file, row
        except BaseException:
            os.close(file)
            raise
        os.close(file)  # somebody has removed it meanwhile


def _remove_unused(path: Path) -> None:
    """Remove a table of which no worker has a row."""
    with contextlib.suppress(OSError):  # somebody else has removed it
        file = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            if _lock(file, fcntl.F_WRLCK, 0, MAX_WORKERS):
                os.unlink(path)
        finally:
            os.close(file)


def _lock(file: int, kind: int, row: int, rows: int = 1) -> bool:
    """Lock or unlock rows for an open file, without waiting; False: another worker holds one of them."""
    # struct flock: type, whence, start, length, process
    request = struct.pack("hhqqi4x", kind, os.SEEK_SET, row * _ROW_BYTES, rows * _ROW_BYTES, 0)
    try:
        fcntl.fcntl(file, fcntl.F_OFD_SETLK, request)
    except BlockingIOError:
        return False
    return True


PATIENCE = 500
"""Polls of a waiting thread before it offers its core to others at each poll: about 10 us."""

_LINE = 8  # words of a cache line
_ARRIVED, _RELEASED, _NUM_OPS, _COUNT_THREADS, _THREAD, _YIELD, _LENDING, _OPS = (
    *(0, _LINE),
    *range(2 * _LINE, 2 * _LINE + 5),
    3 * _LINE,
)
"""Words of a program: arrivals at all barriers so far, and the last barrier that thread 0 has opened, each on a line of
its own; number of kernels; addresses of omp_get_num_threads, omp_get_thread_num (0: one thread) and sched_yield;
address of the words of core_lending.num_threads (0: no core is borrowed); from _OPS on (kernel, its words) pairs."""
MAX_THREADS = 1 << 16


class Program:
    """Kernels in the order in which they were appended. What they point to must outlive the program."""

    def __init__(self) -> None:
        self._ops: list[tuple[int, list[int]]] = []
        self._memory: npt.NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return len(self._ops)

    def append(self, kernel: Kernel, num_items: int, grain: int, *arguments: Tensor | float) -> None:
        """Append a `Kernel.run`, with the same arguments at every replay."""
        self._ops.append((kernel.address, packed(num_items, grain, arguments)))
        self._memory = None

    def replay(self, lending: CoreLending | None = None) -> None:
        """Run all kernels, one after the other, on all threads of torch's pool.

        With `lending`, threads on borrowed cores leave between two kernels once the cores' owner needs them.
        """
        if self._memory is None:
            self._memory = _laid_out(self._ops)
        self._memory[_ARRIVED] = self._memory[_RELEASED] = 0
        self._memory[_LENDING] = 0 if lending is None else lending.address
        _walk.run_team(self._memory.ctypes.data, torch.get_num_threads())


def _laid_out(ops: list[tuple[int, list[int]]]) -> npt.NDArray[np.int64]:
    """The words of a program and of its kernels, each kernel's on cache lines of its own."""
    starts = np.cumsum([_round(_OPS + 2 * len(ops)), *(_round(len(words)) for _, words in ops)])
    memory = np.zeros(int(starts[-1]) + _LINE, np.int64)
    memory = memory[-memory.ctypes.data % (8 * _LINE) // 8 :]
    memory[_NUM_OPS] = len(ops)
    memory[_COUNT_THREADS] = openmp_function("omp_get_num_threads")
    memory[_THREAD] = openmp_function("omp_get_thread_num")
    memory[_YIELD] = _sched_yield()
    for index, (address, words) in enumerate(ops):
        start = int(starts[index])
        memory[_OPS + 2 * index : _OPS + 2 * index + 2] = address, memory.ctypes.data + 8 * start
        memory[start : start + len(words)] = words
    return memory


@functools.cache
def _sched_yield() -> int:
    """The address of the C library's function."""
    return ctypes.cast(ctypes.CDLL(None).sched_yield, ctypes.c_void_p).value or 0


def _round(words: int) -> int:
    return -(-words // _LINE) * _LINE


@written_in_llvm()
def call_kernel(builder, address, words):
    """Call the kernel at an address with its words' address."""
    pointer = WIDE.as_pointer()
    function = builder.inttoptr(address, ir.FunctionType(ir.VoidType(), (pointer,)).as_pointer())
    builder.call(function, (builder.inttoptr(words, pointer),))


@written_in_llvm()
def call(builder, address):
    """The result of the C function at an address, which takes nothing and returns an int."""
    function = builder.inttoptr(address, ir.FunctionType(ir.IntType(32), ()).as_pointer())
    return builder.sext(builder.call(function, ()), WIDE)


@written_in_llvm()
def arrive(builder, program):
    """Count one arrival. A thread that sees the count also sees what this thread wrote before it."""
    builder.atomic_rmw("add", program, WIDE(1), "acq_rel")


@written_in_llvm()
def arrivals(builder, program):
    """Emit the load of the number of arrivals so far."""
    return builder.load_atomic(program, "acquire", 8)


@written_in_llvm()
def released(builder, program):
    """Emit the load of the barrier that thread 0 has opened."""
    return builder.load_atomic(builder.gep(program, [WIDE(_RELEASED)]), "acquire", 8)


@written_in_llvm()
def release(builder, program, barrier):
    """Emit the store that opens a barrier."""
    builder.store_atomic(barrier, builder.gep(program, [WIDE(_RELEASED)]), "release", 8)


@written_in_llvm()
def pause(builder):
    """Emit the instruction that marks a waiting loop, on cores that have one."""
    if platform.machine() in ("x86_64", "AMD64"):
        function = ir.FunctionType(ir.VoidType(), ())
        builder.call(cgutils.get_or_insert_function(builder.module, function, "llvm.x86.sse2.pause"), ())
    elif platform.machine() in ("aarch64", "arm64"):
        function = ir.FunctionType(ir.VoidType(), (ir.IntType(32),))
        hint = cgutils.get_or_insert_function(builder.module, function, "llvm.aarch64.hint")
        builder.call(hint, (ir.IntType(32)(1),))


@compiled
def _wait(program, looks):
    """Wait before the next look at a barrier, after so many."""
    if looks < PATIENCE:
        pause()
    else:
        call(program[_YIELD])


@compiled
def _threads_left(program, threads):
    """The threads of a team of `threads` that may go on."""
    return min(threads, num_threads(as_integers(program[_LENDING]))) if program[_LENDING] != 0 else threads


@Kernel
def _walk(program):
    """The body of the parallel region, run by every thread of the team, whose size only OpenMP knows."""
    threads, thread = 1, 0
    if program[_COUNT_THREADS] != 0:
        threads, thread = call(program[_COUNT_THREADS]), call(program[_THREAD])
    expected = 0
    for op in range(program[_NUM_OPS]):
        words = program[_OPS + 2 * op + 1]
        call_kernel(program[_OPS + 2 * op], words)
        looks = 0
        if thread > 0:
            arrive(program)
            while released(program) // MAX_THREADS <= op:
                _wait(program, looks)
                looks += 1
            if released(program) % MAX_THREADS <= thread:
                return  # the owner of a borrowed core needs it
            continue
        if threads > 1:
            expected += threads - 1
            while arrivals(program) < expected:
                _wait(program, looks)
                looks += 1
        as_integers(words)[0] = 0  # the items, for the next replay: no thread takes any now
        if threads > 1:
            threads = _threads_left(program, threads)
            release(program, (op + 1) * MAX_THREADS + threads)


ALIGNMENT = 64  # bytes: a cache line, and a vector


class Arena:
    """Places for tensors, each free again when the last tensor on it is gone. Belongs to one thread.

    They are never given back to the system: programs point into them.
    """

    def __init__(self) -> None:
        self._places: list[npt.NDArray[np.uint8]] = []
        self._free: list[int] = []  # by index

    @property
    def num_bytes(self) -> int:
        """Bytes of all places together; pages that were never written take no memory."""
        return sum(map(len, self._places))

    @property
    def free_bytes(self) -> int:
        return sum(len(self._places[index]) for index in self._free)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Uninitialised, contiguous and aligned."""
        used = math.prod(shape) * dtype.itemsize
        fitting = [index for index in reversed(self._free) if len(self._places[index]) >= used]  # the latest first
        if fitting:
            index = min(fitting, key=lambda index: len(self._places[index]))
            self._free.remove(index)
        else:
            index = self._add_place(used)
        # The storage holds this array: views live on it even where torch forgets what they are views of.
        memory = self._places[index][:]
        weakref.finalize(memory, self._free.append, index).atexit = False
        return torch.from_numpy(memory)[:used].view(dtype).view(shape)

    def _add_place(self, size: int) -> int:
        memory = np.empty(max(size, 1) + ALIGNMENT, np.uint8)
        skipped = -memory.ctypes.data % ALIGNMENT
        self._places.append(memory[skipped : skipped + max(size, 1)])
        return len(self._places) - 1

    def borrow(self, tensor: Tensor) -> Tensor:
        """A contiguous tensor of this arena once more, without holding its place: good until others write there.

        Raises ValueError for a tensor that is not of this arena.
        """
        for place in self._places:
            if tensor.data_ptr() == place.ctypes.data:
                return torch.from_numpy(place[: tensor.nbytes]).view(tensor.dtype).view(tensor.shape)
        raise ValueError(f"a tensor at {tensor.data_ptr():#x} does not begin a place of this arena")


class NotRecordable(Exception):
    """Something other than our kernels was to compute: torch runs at once, and can't be replayed."""


class Launcher:
    """Runs kernels at once, or records them. Belongs to one engine, and is used on its thread.

    With `lending`, which is the engine's, kernels also use the cores of idle workers.
    """

    def __init__(self, lending: CoreLending | None = None) -> None:
        self.arena = Arena()
        """Arena of the programs' intermediate results."""
        self._program: Program | None = None
        self._lending = lending

    def run(self, kernel: Kernel, num_items: int, grain: int, *arguments: Tensor | float) -> None:
        """Run a kernel as Kernel.run does."""
        if self._program is None:
            self._settle_threads()
            kernel.run(num_items, grain, *arguments)
        else:
            self._program.append(kernel, num_items, grain, *arguments)

    def replay(self, program: Program) -> None:
        """Run a program as Program.replay does."""
        self._settle_threads()
        program.replay(self._lending)

    def _settle_threads(self) -> None:
        """Have torch, and so our kernels, use as many threads as this worker may use now."""
        if self._lending is not None and (threads := self._lending.num_threads()) != torch.get_num_threads():
            torch.set_num_threads(threads)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Uninitialised, contiguous memory for a kernel's output."""
        if self._program is None:
            return torch.empty(shape, dtype=dtype)
        return self.arena.empty(shape, dtype)

    @contextlib.contextmanager
    def recording(self) -> Iterator[Program]:
        """Within, `run` only notes what is to be run, and `empty` gives places of the arena: tensors without values.

        Raises NotRecordable, within, where torch is asked to compute: only views may be taken.
        """
        program = Program()
        self._program = program
        try:
            with _OnlyViews():
                yield program
        finally:
            self._program = None


class _OnlyViews(TorchDispatchMode):
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here. Torch would import its compiler to keep that out: a second of every start."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        if not func.is_view:
            raise NotRecordable(f"{func} computes at once, so it can't be part of a program")
        return func(*args, **(kwargs or {}))
