"""Kernels recorded once and replayed as one parallel region: the CPU's counterpart of a CUDA graph.

A launch from Python costs about 10 us, of packing arguments and of starting and joining threads; a decoder's step has
hundred and more. Here the threads start once and walk the list together. Between two kernels they meet at a barrier, a
counter that all of them raise and wait for (well under 1 us), because the second reads what the first wrote.

Memory for what a recorded program writes on its way: places that stay, shared by all programs of an engine.

A recording only notes addresses, so its intermediate results must lie where every replay may write. As in a CUDA
graph's private pool, a place is handed out again once the tensors on it are gone: first to later results of the same
recording, then to other recordings, since one program runs at a time.

The one place through which CPU kernels get their output memory and are run, or recorded.
"""

import bisect
import contextlib
import ctypes
import functools
import math
import platform
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from twostroke.model.cpu.kernels.launch import WORDS, Kernel, as_integers, compiled, openmp_function

PATIENCE = 500
"""How often a waiting thread looks again before it offers its core to others at each look: some 10 us."""

_LINE = 8  # words of a cache line
_ARRIVED, _NUM_OPS, _NUM_THREADS, _THREAD, _YIELD, _OPS = 0, _LINE, _LINE + 1, _LINE + 2, _LINE + 3, 2 * _LINE
"""Words of a program: arrivals at all barriers so far, on a line of their own; number of kernels; addresses of
omp_get_num_threads, omp_get_thread_num (0: one thread) and sched_yield; from _OPS on (kernel, its words) pairs."""


class Program:
    """Kernels in the order in which they were appended. What they point to must outlive the program."""

    def __init__(self) -> None:
        self._ops: list[tuple[int, tuple[int, ...]]] = []
        self._memory: npt.NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return len(self._ops)

    def append(self, kernel: Kernel, num_items: int, grain: int, arguments: tuple[int, ...]) -> None:
        """One more `Kernel.run`, with the same arguments at every replay."""
        self._ops.append((kernel.address, (0, num_items, grain, *arguments)))
        self._memory = None

    def replay(self) -> None:
        """Run all kernels, one after the other, on all threads of torch's pool."""
        if self._memory is None:
            self._memory = _packed(self._ops)
        self._memory[_ARRIVED] = 0
        _walker().run_team(self._memory.ctypes.data, torch.get_num_threads())


def _packed(ops: list[tuple[int, tuple[int, ...]]]) -> npt.NDArray[np.int64]:
    """The words of a program and of its kernels, each kernel's on cache lines of its own."""
    starts = np.cumsum([_round(_OPS + 2 * len(ops)), *(_round(len(words)) for _, words in ops)])
    memory = np.zeros(int(starts[-1]) + _LINE, np.int64)
    memory = memory[-memory.ctypes.data % (8 * _LINE) // 8 :]
    memory[_NUM_OPS] = len(ops)
    memory[_NUM_THREADS] = openmp_function("omp_get_num_threads")
    memory[_THREAD] = openmp_function("omp_get_thread_num")
    memory[_YIELD] = ctypes.cast(ctypes.CDLL(None).sched_yield, ctypes.c_void_p).value or 0
    for index, (address, words) in enumerate(ops):
        start = int(starts[index])
        memory[_OPS + 2 * index : _OPS + 2 * index + 2] = address, memory.ctypes.data + 8 * start
        memory[start : start + len(words)] = words
    return memory


def _round(words: int) -> int:
    return -(-words // _LINE) * _LINE


@compiled
def _meet(program, expected):
    """Wait until `expected` arrivals have been counted, this thread's included."""
    arrive(program)
    looks = 0
    while arrivals(program) < expected:
        looks += 1
        if looks < PATIENCE:
            pause()
        else:
            call(program[_YIELD])


def _walk(program):
    """The body of the parallel region, run by every thread of the team, whose size only OpenMP knows."""
    threads, thread = 1, 0
    if program[_NUM_THREADS] != 0:
        threads, thread = call(program[_NUM_THREADS]), call(program[_THREAD])
    for op in range(program[_NUM_OPS]):
        words = program[_OPS + 2 * op + 1]
        call_kernel(program[_OPS + 2 * op], words)
        if threads > 1:
            _meet(program, (op + 1) * threads)
        if thread == 0:
            as_integers(words)[0] = 0  # the items, for the next replay: nobody takes any now


@functools.cache
def _walker() -> Kernel:
    return Kernel(_walk)


@intrinsic
def call_kernel(typingctx: Any, address: Any, words: Any) -> Any:
    """Call the kernel at an address with its words' address; both int64. Returns 0."""
    del typingctx, address, words

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        del context, signature
        word = ir.IntType(64)
        function = builder.inttoptr(arguments[0], ir.FunctionType(ir.VoidType(), (word.as_pointer(),)).as_pointer())
        builder.call(function, (builder.inttoptr(arguments[1], word.as_pointer()),))
        return ir.Constant(word, 0)

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def call(typingctx: Any, address: Any) -> Any:
    """The result of the C function at an int64 address, which takes nothing and returns an int."""
    del typingctx, address

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        del context, signature
        function = builder.inttoptr(arguments[0], ir.FunctionType(ir.IntType(32), ()).as_pointer())
        return builder.sext(builder.call(function, ()), ir.IntType(64))

    return types.int64(types.int64), codegen


@intrinsic
def arrive(typingctx: Any, program: Any) -> Any:
    """Count one arrival; what this thread wrote before is seen by those who see the count. Returns 0."""
    del typingctx, program

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        del context, signature
        builder.atomic_rmw("add", arguments[0], ir.Constant(ir.IntType(64), 1), "acq_rel")
        return ir.Constant(ir.IntType(64), 0)

    return types.int64(WORDS), codegen


@intrinsic
def arrivals(typingctx: Any, program: Any) -> Any:
    """How many arrivals have been counted."""
    del typingctx, program

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        del context, signature
        return builder.load_atomic(arguments[0], "acquire", 8)

    return types.int64(WORDS), codegen


@intrinsic
def pause(typingctx: Any) -> Any:
    """Tell the core that this is a waiting loop, where there is such an instruction. Returns 0."""
    del typingctx

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        del context, signature, arguments
        number = ir.IntType(32)
        if platform.machine() in ("x86_64", "AMD64"):
            function = ir.FunctionType(ir.VoidType(), ())
            builder.call(cgutils.get_or_insert_function(builder.module, function, "llvm.x86.sse2.pause"), ())
        elif platform.machine() in ("aarch64", "arm64"):
            function = ir.FunctionType(ir.VoidType(), (number,))
            hint = cgutils.get_or_insert_function(builder.module, function, "llvm.aarch64.hint")
            builder.call(hint, (ir.Constant(number, 1),))
        return ir.Constant(ir.IntType(64), 0)

    return types.int64(), codegen


ALIGNMENT = 64  # bytes: a cache line, and a vector
CHUNK_BYTES = 1 << 20


class Arena:
    """Belongs to one thread. Memory is taken from the system in chunks and never given back: programs point into it."""

    def __init__(self) -> None:
        self._chunks: list[npt.NDArray[np.uint8]] = []
        self._free: list[tuple[int, int, int]] = []
        """(chunk, begin, end) of free places, ascending; neighbours are merged."""

    @property
    def num_bytes(self) -> int:
        """All chunks together; pages that nobody wrote take no memory."""
        return sum(map(len, self._chunks))

    @property
    def free_bytes(self) -> int:
        return sum(end - begin for _, begin, end in self._free)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Uninitialised, contiguous and aligned; its place is free again when the last tensor on it is gone."""
        used = math.prod(shape) * dtype.itemsize
        chunk, begin, end = self._take(-(-max(used, 1) // ALIGNMENT) * ALIGNMENT)
        # The storage holds this array: views live on it even where torch forgets what they are views of.
        place = self._chunks[chunk][begin:end]
        weakref.finalize(place, self._give_back, chunk, begin, end).atexit = False
        return torch.from_numpy(place)[:used].view(dtype).view(shape)

    def borrow(self, tensor: Tensor) -> Tensor:
        """A contiguous tensor of this arena once more, without holding its place: good until others write there.

        Raises ValueError for a tensor that is not of this arena.
        """
        for chunk in self._chunks:
            offset = tensor.data_ptr() - chunk.ctypes.data
            if 0 <= offset < len(chunk):
                return torch.from_numpy(chunk[offset : offset + tensor.nbytes]).view(tensor.dtype).view(tensor.shape)
        raise ValueError(f"a tensor at {tensor.data_ptr():#x} is not of this arena")

    def _take(self, size: int) -> tuple[int, int, int]:
        fitting = [place for place in self._free if place[2] - place[1] >= size]
        if not fitting:
            fitting = [self._add_chunk(size)]
        chunk, begin, end = min(fitting, key=lambda place: place[2] - place[1])
        index = self._free.index((chunk, begin, end))
        self._free[index : index + 1] = [(chunk, begin + size, end)] if begin + size < end else []
        return chunk, begin, begin + size

    def _add_chunk(self, size: int) -> tuple[int, int, int]:
        size = max(size, CHUNK_BYTES)
        memory = np.empty(size + ALIGNMENT, np.uint8)
        skipped = -memory.ctypes.data % ALIGNMENT
        self._chunks.append(memory[skipped : skipped + size])
        place = (len(self._chunks) - 1, 0, size)
        self._free.append(place)
        return place

    def _give_back(self, chunk: int, begin: int, end: int) -> None:
        index = bisect.bisect(self._free, (chunk, begin, end))
        if index < len(self._free) and self._free[index][:2] == (chunk, end):
            end = self._free.pop(index)[2]
        if index > 0 and self._free[index - 1][::2] == (chunk, begin):
            index -= 1
            begin = self._free.pop(index)[1]
        self._free.insert(index, (chunk, begin, end))


class NotRecordable(Exception):
    """Something other than our kernels was to compute: torch runs at once, and can't be replayed."""


class Launcher:
    """Runs kernels at once, or records them. Belongs to one engine, and is used on its thread."""

    def __init__(self) -> None:
        self.arena = Arena()
        """Where programs have their intermediate results."""
        self._program: Program | None = None

    def run(self, kernel: Kernel, num_items: int, grain: int, *arguments: int) -> None:
        """As Kernel.run."""
        if self._program is None:
            kernel.run(num_items, grain, *arguments)
        else:
            self._program.append(kernel, num_items, grain, arguments)

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
