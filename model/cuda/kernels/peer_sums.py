"""Sums over the ranks of few tokens, with the residual's addition and the RMSNorm behind them, in one kernel.

NCCL's sum of some KiB takes several times as long as its bytes: it is launches and turns of a ring. Here each rank
leaves its summand in memory that its peers can read, signals, waits for theirs, and reads all of them itself: one shot.
Every rank adds in the ranks' order, in fp32, and rounds once, so all have the same bits. With two ranks these are
NCCL's too; with more NCCL rounds on the way, and may differ in the last bits.

Each rank's memory: int32 flags [MOST_ROWS, ranks], what each rank has signalled for each row; then summands
[2, MOST_ROWS, hidden], by turns. A row's turn counts its sums. A rank that signals turn n has begun it, so it has
ended turn n - 1, and no longer reads what it found in turn n - 2: two halves are enough, and nothing is ever reset.
Turns are kept on the device, so a CUDA graph may hold the kernel. No GPU has run this.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch._C import _distributed_c10d

from twostroke.model.cuda.kernels.launch import power_of_two
from twostroke.model.parallel.form import Shard

MOST_ROWS = 64
"""Maximum rows of a sum: fewer than a GPU has multiprocessors, since programs that wait for peers must all be resident.
"""
_MOST_READ_BYTES = 2 << 20
"""Maximum bytes that one rank loads from all others: beyond them each rank should load a part and pass its sum on, as
NCCL does."""
_MOST_ROWS = tl.constexpr(MOST_ROWS)


@triton.jit
def sum_add_norm_kernel(
    x,
    residual,
    weight,
    peers,
    turns,
    eps,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    HIDDEN: tl.constexpr,
    PADDED: tl.constexpr,
):
    """One program per row. `peers` int64 [RANKS]: where each rank's memory is, multiples of 16."""
    row = tl.program_id(0)
    columns = tl.arange(0, PADDED)
    inside = columns < HIDDEN
    ranks = tl.arange(0, RANKS)
    turn = tl.load(turns + row) + 1
    at = row.to(tl.int64) * HIDDEN + columns
    place = ((turn & 1) * _MOST_ROWS + row).to(tl.int64) * HIDDEN + columns
    dtype = x.dtype.element_ty
    own = tl.multiple_of(tl.load(peers + RANK), 16)
    summands = tl.multiple_of((own + _MOST_ROWS * RANKS * 4).to(tl.pointer_type(dtype)), 16)
    tl.store(summands + place, tl.load(x + at, mask=inside, other=0.0), mask=inside)
    tl.debug_barrier()  # one thread signals for the stores of all
    theirs = tl.load(peers + ranks).to(tl.pointer_type(tl.int32)) + row * RANKS + RANK
    tl.atomic_xchg(theirs, turn, sem="release", scope="sys")
    mine = own.to(tl.pointer_type(tl.int32)) + row * RANKS + ranks
    ahead = tl.min(tl.atomic_add(mine, 0, sem="acquire", scope="sys") - turn, axis=0)
    while ahead < 0:  # the difference: turns may wrap
        ahead = tl.min(tl.atomic_add(mine, 0, sem="acquire", scope="sys") - turn, axis=0)
    tl.debug_barrier()
    total = tl.zeros([PADDED], tl.float32)
    for rank in tl.static_range(RANKS):
        address = tl.multiple_of(tl.load(peers + rank), 16) + _MOST_ROWS * RANKS * 4
        summands = tl.multiple_of(address.to(tl.pointer_type(dtype)), 16)
        total += tl.load(summands + place, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
    value = total.to(dtype).to(tl.float32)
    added = (value + tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)).to(dtype)
    tl.store(residual + at, added, mask=inside)
    value = added.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(value * value, axis=0) / HIDDEN + eps)
    gain = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(x + at, (value * scale * gain).to(dtype), mask=inside)
    tl.store(turns + row, turn)


def memory_bytes(size: int, hidden: int, dtype: torch.dtype) -> int:
    """Return the bytes that each of `size` ranks lends its peers."""
    return MOST_ROWS * size * 4 + 2 * MOST_ROWS * hidden * dtype.itemsize


class PeerSums:
    """One rank's sums over memory that all ranks can read. Used on the engine's thread, `give_up` on any."""

    def __init__(
        self, own: Tensor, addresses: list[int], rank: int, hidden: int, dtype: torch.dtype, keeps: object = None
    ):
        """`own` uint8 [memory_bytes], zeros at first; `addresses` of each rank's, as this rank sees them for as long
        as it `keeps` that."""
        self._keeps = keeps
        device = own.device
        self._flags = own[: MOST_ROWS * len(addresses) * 4].view(torch.int32).view(MOST_ROWS, len(addresses))
        self._rank = rank
        self._size = len(addresses)
        self._hidden = hidden
        self._dtype = dtype
        self._most_rows = min(MOST_ROWS, _MOST_READ_BYTES // (self._size * hidden * dtype.itemsize))
        self._peers = torch.tensor(addresses, dtype=torch.int64, device=device)
        self._turns = torch.zeros(MOST_ROWS, dtype=torch.int32, device=device)

    def takes(self, x: Tensor) -> bool:
        """Return True if x has the width and dtype of these sums, and few enough rows: the same on all ranks."""
        return x.dtype == self._dtype and x.shape[1] == self._hidden and 0 < x.shape[0] <= self._most_rows

    def sum_add_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Implement TensorParallel.sum_add_norm in place, for contiguous tensors that pass `takes`."""
        padded = power_of_two(self._hidden)
        sum_add_norm_kernel[(x.shape[0],)](
            x, residual, weight, self._peers, self._turns, eps, RANK=self._rank, RANKS=self._size,
            HIDDEN=self._hidden, PADDED=padded, num_warps=min(16, max(1, padded // 512)),
        )  # fmt: skip
        return x, residual

    def give_up(self) -> None:
        """Let the sums under way and to come end without the peers, with whatever numbers: they may be dead."""
        on_gpu = self._flags.is_cuda
        # The engine's own stream hangs.
        with torch.cuda.stream(torch.cuda.Stream(self._flags.device)) if on_gpu else nullcontext():
            self._flags.copy_((self._turns + 2**30)[:, None])


def open_peer_sums(shard: Shard, store: Any, *, hidden: int, dtype: torch.dtype, device: torch.device) -> PeerSums:
    """Over torch's symmetric memory, of all ranks at once, which meet in the store.

    Raises RuntimeError where torch can't, AttributeError where it was built without.
    """
    memory, name = _distributed_c10d._SymmetricMemory, "twostroke-sums"
    shape = (memory_bytes(shard.size, hidden, dtype),)
    own = memory.empty_strided_p2p(shape, (1,), torch.uint8, device, name).zero_()
    torch.cuda.synchronize(device)
    with registered_group(name, store, shard.rank, shard.size):
        handle = memory.rendezvous(own, name)
    return PeerSums(own, [int(address) for address in handle.buffer_ptrs], shard.rank, hidden, dtype, keeps=handle)


@contextmanager
def registered_group(name: str, store: Any, rank: int, size: int) -> Iterator[None]:
    """Let torch find a process group of this name, which has a store and no backend, while the context lasts.

    A rendezvous of symmetric memory takes rank, size and store from the group registered under the name.
    """
    registry: Any = _distributed_c10d
    group = registry.ProcessGroup(store, rank, size)  # which the registry refers to weakly
    registry._register_process_group(name, group)
    try:
        yield
    finally:
        registry._unregister_process_group(name)
