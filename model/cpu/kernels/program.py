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
from numba.core import cgutils
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from twostroke.model.cpu.kernels.core_lending import CoreLending, num_threads
from twostroke.model.cpu.kernels.launch import (
    WIDE,
    Kernel,
    as_integers,
    compiled,
    openmp_function,
    packed,
    written_in_llvm,
)

PATIENCE = 500
"""Polls of a waiting thread before it offers its core to others at each poll: about 10 us."""

_LINE = 8  # words of a cache line
_ARRIVED, _RELEASED, _NUM_OPS, _NUM_THREADS, _THREAD, _YIELD, _LENDING, _OPS = (
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
    memory[_NUM_THREADS] = openmp_function("omp_get_num_threads")
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
    if program[_NUM_THREADS] != 0:
        threads, thread = call(program[_NUM_THREADS]), call(program[_THREAD])
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
