"""Tensor parallelism of one engine's ranks by Megatron's scheme (Shoeybi et al. 2019).

Queries, keys, values, gate and up are cut by output rows, attention's output and down by input columns: a layer needs
one sum over the ranks after its attention and one after its MLP. Embedding and LM head are cut by the vocabulary. A
mixture's experts are cut as an MLP is, or divided whole.

They meet in a torch.distributed process group of our own: gloo between CPUs, NCCL between GPUs. No default group is
made: KV links have theirs, and a process may belong to several engines in tests. Nothing overlaps a sum with computing:
in a decoder without parallel branches the next operation needs it.

**Decode context parallelism (DCP)** divides the cached tokens of MLA among a stage's ranks. Each rank has some heads of
a layer's projections, as ever, and of each block of the cache some tokens (protocol/ kv_layout.py). For a decode every
rank attends with the queries of all heads to the tokens that it has, and each head's results go to the rank that has
the head, which merges them by the logarithms of their sums of weights, as segments of a context are merged (Dao et al.
2023). For a prompt's chunk, whose rows are many, latents go about instead: they are one row a token, which all heads
share.

**NCCL's log** alone tells that it fell back to sockets. `NCCL_DEBUG=INFO` has a line for each channel of a connection
between processes (NVIDIA's guide to NCCL, "Environment Variables", has the variables; the lines are those of NCCL 2.19
to 2.28):

    host:53:271 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/Socket/0
    host:53:271 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/IB/0/GDRDMA

Not confirmed on hardware.
"""

import os
import re
import socket
import threading
from collections import Counter
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, TCPStore

from twostroke.model.parallel.form import ONLY_STAGE, WHOLE_MODEL, Shard, Stage
from twostroke.model.parallel.pipeline import StageLink
from twostroke.protocol.requests import Address

SOCKETS = "Socket"

_DEBUG, _SUBSYSTEMS, _FILE = "NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_DEBUG_FILE"
_OURS = "/proc/"
_CHANNEL = re.compile(r"NCCL INFO Channel \d+.*? via NET/([^/\s][^/\n]*)/\d+")


class NcclLog:
    """NCCL's lines about its network, kept in memory; one for a process, since NCCL has one log for each."""

    def __init__(self) -> None:
        self._descriptor: int | None = None
        self._beginning = threading.Lock()

    def begin(self) -> None:
        """Have NCCL write here from its first group on, unless the environment already asks for a log."""
        with self._beginning:
            asked = os.environ.get(_FILE, "") if _DEBUG in os.environ or _FILE in os.environ else _OURS
            # A parent's, which this process has inherited, is as good as none.
            if self._descriptor is None and asked.startswith(_OURS):
                self._descriptor = os.memfd_create("nccl-log", os.MFD_CLOEXEC)
                os.environ[_DEBUG], os.environ[_FILE] = "INFO", f"{_OURS}{os.getpid()}/fd/{self._descriptor}"
                os.environ.setdefault(_SUBSYSTEMS, "NET")

    @property
    def num_bytes(self) -> int:
        """Bytes written so far; 0 where nothing is written here."""
        return 0 if self._descriptor is None else os.fstat(self._descriptor).st_size

    def networks_since(self, start: int) -> Counter[str]:
        """`networks` of what was written behind the first `start` bytes."""
        if self._descriptor is None:
            return Counter()
        return networks(os.pread(self._descriptor, self.num_bytes - start, start).decode(errors="replace"))


NCCL_LOG = NcclLog()


def networks(log: str) -> Counter[str]:
    """Over which networks channels go, by NCCL's names: Socket, IB, AWS Libfabric. None within a host (P2P, SHM)."""
    return Counter(_CHANNEL.findall(log))


class TensorParallel(Protocol):
    """The collectives of a step, called by all ranks in one order on their engines' threads."""

    @property
    def shard(self) -> Shard: ...

    @property
    def stage(self) -> Stage:
        """Stage of these ranks."""

    @property
    def link(self) -> StageLink | None:
        """Link with the other stages; None: there are none."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over the ranks; may be written into x."""

    def gather(self, x: Tensor) -> list[Tensor]:
        """Gather x, of one shape and dtype, on rank 0, which alone draws, in the ranks' order; returns nothing on the
        others."""

    def exchange_rows(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """All-to-all: `rows` [sum of sent, hidden] are for rank 0 the first sent[0], and so on. Returns what came, from
        rank 0 first: received[r] rows of rank r, which has to send as many."""

    def gather_rows(self, rows: Tensor) -> Tensor:
        """Gather all ranks' rows, the same number of each, one rank's below the other's, on all of them."""

    def from_rank_0(self, x: Tensor) -> Tensor:
        """Rank 0's x on every rank; may be written into x, which has one shape and dtype on all."""

    def exchange(self, word: str) -> list[str]:
        """Every rank's word, of all stages, in their order: for what they have to agree on before they step."""

    def leave(self) -> None:
        """End the group, though others may wait in it. No step runs after this."""


class SingleRank:
    """Implements TensorParallel for an engine of one rank."""

    shard = WHOLE_MODEL
    stage = ONLY_STAGE
    link = None

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def gather(self, x: Tensor) -> list[Tensor]:
        return [x]

    def exchange_rows(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        return rows

    def gather_rows(self, rows: Tensor) -> Tensor:
        return rows

    def from_rank_0(self, x: Tensor) -> Tensor:
        return x

    def exchange(self, word: str) -> list[str]:
        return [word]

    def leave(self) -> None:
        """There is no group."""


GROUP_TIMEOUT_S = 300.0
"""Seconds that a rank waits in a collective for others, which may still load. Dead ranks are noticed elsewhere."""
JOIN_S = 5.0
NCCL_ENVIRONMENT = {
    # By default torch ends the process once an operation fails or is too long under way: a dead peer would take this
    # worker along. Whoever has the group aborts it instead.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    # Its watchdog signals a dump all the same, and the monitor of the process's first group, which waits for the dump,
    # ends the process eight minutes later.
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    # The watchdog of a group with a failed operation sleeps four times as long, by default a minute, and an abort of
    # the group waits for it.
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1",
}
"""Environment that torch reads when a group of NCCL is made, some of it with the process's first one alone."""


def listening_store(host: str, timeout_s: float) -> tuple[Any, int]:
    """A store for a rendezvous, and its port of `host`: left alone, TCPStore listens on every interface."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, 0), family=family)
    port, limit = int(listener.getsockname()[1]), timedelta(seconds=timeout_s)
    return TCPStore(host, port, None, True, limit, False, master_listen_fd=listener.detach()), port


def process_group(store: PrefixStore, rank: int, size: int, timeout_s: float, gloo_host: str | None) -> Any:
    """Return a group of gloo that listens on `gloo_host`, or of NCCL where that is None.

    Torch's stubs know neither gloo's options nor a backend's operations.
    """
    if gloo_host is None:
        os.environ.update(NCCL_ENVIRONMENT)
        NCCL_LOG.begin()
        nccl = dist.ProcessGroupNCCL.Options()
        nccl._timeout = timedelta(seconds=timeout_s)
        return dist.ProcessGroupNCCL(store, rank, size, nccl)
    gloo = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    gloo._timeout = timedelta(seconds=timeout_s)
    gloo._threads = 1
    gloo._devices = [ProcessGroupGloo.create_device(hostname=gloo_host)]
    return ProcessGroupGloo(store, rank, size, gloo)


class Rendezvous:
    """Meeting point of one engine's ranks. Rank 0's process has it, for as long as the group lives."""

    def __init__(self, host: str):
        """Listens on a free port of `host`."""
        self._store, port = listening_store(host, GROUP_TIMEOUT_S)
        self.address = Address(host, port)


@dataclass(frozen=True)
class RankPlace:
    """Rank of an engine that this process is to be, and the address of the others."""

    rank: int  # of all stages
    rendezvous: Address
    host: str | None = None  # where the others reach it; None: they are on one machine, and it is the rendezvous'


class GroupRanks:
    """Implements TensorParallel for one rank of several, which may be the only one of its stage."""

    def __init__(
        self,
        shard: Shard,
        rendezvous: Address,
        device: torch.device,
        stage: Stage = ONLY_STAGE,
        host: str | None = None,
    ):
        """Returns once all ranks have come. Raises RuntimeError, as torch does, where they don't within the time.

        `host` as RankPlace.host.
        """
        self.shard = shard
        self.stage = stage
        # The rendezvous starts before any rank: a rank that can't reach it at once is late, after its end.
        joined = TCPStore(rendezvous.host, rendezvous.port, None, False, timedelta(seconds=JOIN_S), False)
        joined.set_timeout(timedelta(seconds=GROUP_TIMEOUT_S))
        self._store = PrefixStore(f"tp/{stage.index}", joined)
        self._device = device
        self._words = PrefixStore("words", joined)
        self._num_words = 0
        self._is_nccl = device.type == "cuda"
        gloo_host = None if self._is_nccl else host or rendezvous.host
        self._group = process_group(self._store, shard.rank, shard.size, GROUP_TIMEOUT_S, gloo_host)
        self.link: StageLink | None = None
        if stage.count > 1:
            store = PrefixStore(f"stages/{shard.rank}", joined)
            group = process_group(store, stage.index, stage.count, GROUP_TIMEOUT_S, gloo_host)
            self.link = StageLink(group, stage)

    def all_reduce(self, x: Tensor) -> Tensor:
        """Implement TensorParallel.all_reduce; writes into x."""
        if self.shard.size > 1:
            self._group.allreduce([x]).wait()
        return x

    def gather(self, x: Tensor) -> list[Tensor]:
        """Implement TensorParallel.gather."""
        parts = [torch.empty_like(x) for _ in range(self.shard.size)] if self.shard.rank == 0 else []
        self._group.gather(parts, x, 0).wait()
        return parts

    def exchange_rows(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """Implement TensorParallel.exchange_rows."""
        found = rows.new_empty((sum(received), *rows.shape[1:]))
        self._group.alltoall_base(found, rows, received, sent).wait()
        return found

    def gather_rows(self, rows: Tensor) -> Tensor:
        """Implement TensorParallel.gather_rows."""
        found = rows.new_empty((len(rows) * self.shard.size, *rows.shape[1:]))
        self._group._allgather_base(found, rows).wait()
        return found

    def from_rank_0(self, x: Tensor) -> Tensor:
        """Implement TensorParallel.from_rank_0; writes into x."""
        self._group.broadcast(x, 0).wait()
        return x

    def exchange(self, word: str) -> list[str]:
        """Implement TensorParallel.exchange over the rendezvous."""
        self._num_words += 1
        self._words.set(f"{self._num_words}/{self._rank}", word)
        ranks = range(self.stage.count * self.shard.size)
        return [self._words.get(f"{self._num_words}/{rank}").decode() for rank in ranks]

    @property
    def _rank(self) -> int:
        """Rank among those of all stages."""
        return self.stage.index * self.shard.size + self.shard.rank

    def leave(self) -> None:
        """Implement TensorParallel.leave. Gloo's groups end by themselves, once a rank's process or group has."""
        if self._is_nccl:
            self._group.abort()
            if self.link is not None:
                self.link.abort()


class ContextParts:
    """Exchange of queries, results and latents among the ranks of a stage. Used on the engine's thread."""

    def __init__(self, parallel: TensorParallel):
        self._parallel = parallel
        self.ranks = parallel.shard.size

    def of_all_heads(self, queries: Tensor) -> Tensor:
        """[T, heads of this rank, W] -> [T, all heads, W], both contiguous."""
        tokens, heads, width = queries.shape
        found = self._parallel.gather_rows(queries.view(tokens, -1)).view(self.ranks, tokens, heads, width)
        return found.transpose(0, 1).contiguous().view(tokens, self.ranks * heads, width)

    def merged(self, mixed: Tensor, log_sums: Tensor) -> Tensor:
        """Merge all ranks' results for the heads of this rank.

        mixed [T, all heads, R] are averages over this rank's tokens, and log_sums, fp32 [T, all heads], natural
        logarithms of their sums of weights, -inf where it has none. Returns [T, heads, R].
        """
        tokens, all_heads, rank = mixed.shape
        heads = all_heads // self.ranks
        # The logarithms go along, bit by bit, as more numbers of mixed's dtype.
        rows = torch.cat((mixed, log_sums.unsqueeze(-1).view(mixed.dtype)), dim=2).view(tokens, self.ranks, -1)
        rows = rows.transpose(0, 1).contiguous().view(self.ranks * tokens, -1)
        each = [tokens] * self.ranks
        found = self._parallel.exchange_rows(rows, each, each).view(self.ranks, tokens, heads, -1)
        logs = found[..., rank:].contiguous().view(torch.float32)
        weights = logs.softmax(0)
        return (found[..., :rank] * weights).sum(0).to(mixed.dtype)

    def whole_blocks(self, parts: Tensor) -> Tensor:
        """[blocks, tokens of this rank, W] -> [blocks, block_size, W], both contiguous."""
        blocks, tokens, width = parts.shape
        found = self._parallel.gather_rows(parts.view(blocks, -1)).view(self.ranks, blocks, tokens, width)
        return found.transpose(0, 1).contiguous().view(blocks, self.ranks * tokens, width)
