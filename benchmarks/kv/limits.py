"""A message as it really is: the KV of one prompt of one model, cut into the chunks that a transfer would send.

What a machine can do without us: the limits that links are compared with.
"""

import random
import socket
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import islice, pairwise

import msgspec
import numpy as np
import torch
import xxhash
from torch._C._distributed_c10d import ProcessGroupGloo, TCPStore

from twostroke.kvtransfer.config import TransferConfig
from twostroke.kvtransfer.rules.chunk_plan import ChunkPlan
from twostroke.kvtransfer.rules.layout import Cut, Segment, cut_lane, plan_lanes
from twostroke.kvtransfer.transports.host_units import HostUnits
from twostroke.model.cache.kv_cache import SharedKVCache, make_kv_cache
from twostroke.model.config import ModelConfig, RopeConfig
from twostroke.protocol.errors import ConfigError

POOL_BYTES = 256 * 1024 * 1024
"""Of a case's cache: far more than the processor's caches hold, since KV that is sent was not touched just before.

A short prompt is there many times, each in blocks of its own. Of a longer one the tail is left out: it is the same
chunks for longer.
"""

SHAPES = {  # layers, KV heads, head dimension
    "160M": (12, 4, 64),
    "1B": (16, 8, 64),
    "8B": (32, 8, 128),
}


class Case(msgspec.Struct, frozen=True):
    """A cell of the grid."""

    shape: str
    prompt_tokens: int
    block_size: int

    def __str__(self) -> str:
        return f"{self.shape}, {self.prompt_tokens} tokens, blocks of {self.block_size}"


class Message:
    """A case's cache in this process, its blocks scattered over the pool, and the chunks of all its copies."""

    def __init__(self, case: Case):
        num_layers, num_kv_heads, head_dim = SHAPES[case.shape]
        config = ModelConfig(
            vocab_size=1,
            hidden_size=num_kv_heads * head_dim,
            intermediate_size=1,
            num_layers=num_layers,
            num_heads=num_kv_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            max_position=case.prompt_tokens,
            rms_norm_eps=1e-5,
            rope=RopeConfig(),
        )
        pool_blocks = max(1, POOL_BYTES // (num_layers * 4 * num_kv_heads * head_dim * case.block_size))
        prompt_blocks = min(-(-case.prompt_tokens // case.block_size), pool_blocks)
        copies = pool_blocks // prompt_blocks
        num_blocks = copies * prompt_blocks
        cache = make_kv_cache(
            config,
            num_blocks=num_blocks,
            block_size=case.block_size,
            dtype=torch.bfloat16,
            device=torch.device("cpu"),
            model_digest="bench",
        )
        if not isinstance(cache, SharedKVCache):
            raise ConfigError("this machine has no memfd, and the bench of shm needs one")
        self.cache = cache
        for layer, tensor in enumerate(cache.tensors):
            tensor.fill_(layer + 1)
        layout = cache.layout
        self.cut: Cut = cut_lane(plan_lanes(1, 1, num_kv_heads)[0], layout, layout, "raw")[0]
        table = list(range(num_blocks))
        random.Random(0).shuffle(table)
        self.chunks: list[tuple[Segment, ...]] = []
        for first in range(0, num_blocks, prompt_blocks):
            self.chunks += self._chunks(tuple(table[first : first + prompt_blocks]))
        self.num_bytes = num_layers * num_blocks * layout.block_bytes
        self.prompt_bytes = [self.num_bytes // copies] * copies  # of each prompt

    def _chunks(self, table: tuple[int, ...]) -> list[tuple[Segment, ...]]:
        """Of one prompt whose KV is all ready."""
        num_tokens = len(table) * self.cut.layout.block_size
        plan = ChunkPlan(num_layers=self.cut.layout.num_layers, num_tokens=num_tokens, num_ready_tokens=num_tokens)
        plan.begin(self.cut.unit_tokens, 0)
        max_units = max(1, TransferConfig().max_chunk_bytes // self.cut.unit_bytes)
        chunks: list[tuple[Segment, ...]] = []
        while runs := plan.next_runs(max_units):
            chunks.append(self.cut.segments(runs, table))
        return chunks

    @property
    def chunk_bytes(self) -> list[int]:
        """Of each chunk."""
        return [sum(len(segment.unit_ids) for segment in chunk) * self.cut.unit_bytes for chunk in self.chunks]

    def close(self) -> None:
        self.cache.close()


IOV_MAX = 1024
BATCH_BYTES = 256 * 1024  # what links digest at a time
GROUP_TIMEOUT = timedelta(seconds=60)


def send_bare(connected: socket.socket, message: Message) -> None:
    """Every chunk, straight out of its blocks, by `sendmsg`."""
    units = HostUnits(message.cache, message.cut)
    chunks = [units.views(chunk) for chunk in message.chunks]
    for views in chunks:
        _pump(views, connected.sendmsg)


def receive_bare(connected: socket.socket, message: Message) -> None:
    """Every chunk, straight into its blocks, by `recvmsg_into`. Raises ConnectionResetError."""
    units = HostUnits(message.cache, message.cut)
    chunks = [units.views(chunk) for chunk in message.chunks]

    def receive(views: Sequence[memoryview]) -> int:
        received = connected.recvmsg_into(views, 0, socket.MSG_WAITALL)[0]
        if received == 0:
            raise ConnectionResetError("the peer is gone")
        return received

    for views in chunks:
        _pump(views, receive)


def _pump(views: Sequence[memoryview], call: Callable[[Sequence[memoryview]], int]) -> None:
    left = list(views)
    while left:
        moved = call(list(islice(left, IOV_MAX)))
        done = 0
        while done < len(left) and moved >= left[done].nbytes:
            moved -= left[done].nbytes
            done += 1
        del left[:done]
        if moved:
            left[0] = left[0][moved:]


class BareGroup:
    """A gloo group of two that sends one contiguous buffer for each prompt."""

    def __init__(self, rank: int, port: int, message: Message):
        store = TCPStore("127.0.0.1", port, None, rank == 0, GROUP_TIMEOUT, False)
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = GROUP_TIMEOUT
        options._threads = 1
        options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        self._store = store
        self._group = ProcessGroupGloo(store, rank, 2, options)
        self._buffers = [torch.ones(size, dtype=torch.uint8) for size in message.prompt_bytes]

    def send(self) -> None:
        for buffer in self._buffers:
            self._group.send([buffer], 1, 0).wait()  # type: ignore[attr-defined]

    def receive(self) -> None:
        for buffer in self._buffers:
            self._group.recv([buffer], 0, 0).wait()  # type: ignore[attr-defined]


def memcpy_s(message: Message) -> float:
    """Seconds for copying as many bytes from one contiguous piece of memory to another, chunk by chunk."""
    source, target = np.ones(message.num_bytes, np.uint8), np.ones(message.num_bytes, np.uint8)
    bounds = np.cumsum([0, *message.chunk_bytes])
    pieces = [(target[a:b], source[a:b]) for a, b in pairwise(bounds)]
    began = time.monotonic()
    for to, start in pieces:
        np.copyto(to, start)
    return time.monotonic() - began


def digest_s(message: Message) -> float:
    """Seconds that one side's digests add: of bytes that are in the processor's cache, since they are copied anyway.

    So every batch is digested once in passing, and timed when it is digested again.
    """
    units = HostUnits(message.cache, message.cut)
    state = xxhash.xxh3_128()
    seconds = 0.0
    for chunk in message.chunks:
        for view in units.views(chunk):
            for start in range(0, view.nbytes, BATCH_BYTES):
                batch = view[start : start + BATCH_BYTES]
                state.update(batch)
                began = time.perf_counter()
                state.update(batch)
                seconds += time.perf_counter() - began
    return seconds
