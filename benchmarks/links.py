"""Links against the limits of this machine, turn by turn (limit, link, limit, ...), between two processes.

A message is as it really is: the KV of prompts of one model, its blocks scattered over a cache, cut into the chunks
that a transfer would send. Links carry digests and check them, the limits don't. All processes of a machine share
CLOCK_MONOTONIC, by which the receiving end tells when it was done.
"""

import asyncio
import contextlib
import multiprocessing
import random
import socket
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from multiprocessing.connection import Connection as Pipe
from typing import Any

import numpy as np
import torch

from twostroke.kvtransfer.config import TransferConfig
from twostroke.kvtransfer.link import DataLink
from twostroke.kvtransfer.rules.chunk_plan import ChunkPlan
from twostroke.kvtransfer.rules.layout import Cut, Segment, cut_lane, plan_lanes
from twostroke.kvtransfer.transports import make_transports
from twostroke.kvtransfer.transports.host_units import HostUnits
from twostroke.model.architectures.llama import decoder_spec
from twostroke.model.cache.kv_cache import SharedKVCache, make_kv_cache
from twostroke.model.config import ModelConfig, RopeConfig
from twostroke.protocol.errors import ConfigError, TransferFailed

HOST = "127.0.0.1"
TRANSPORTS = ("tcp", "shm")
POOL_BYTES = 256 * 1024 * 1024
"""Of a case's cache: far more than the processor's caches hold, since KV that is sent was not touched just before.

A short prompt is there many times, each in blocks of its own. Of a longer one the tail is left out: it is the same
chunks for longer.
"""
IOV_MAX = 1024
SHAPES = {  # layers, KV heads, head dimension
    "160M": (12, 4, 64),
    "1B": (16, 8, 64),
    "8B": (32, 8, 128),
}


@dataclass(frozen=True)
class Case:
    """A cell of the grid."""

    shape: str
    prompt_tokens: int
    block_size: int

    def __str__(self) -> str:
        return f"{self.shape}, {self.prompt_tokens} tokens, blocks of {self.block_size}"


@dataclass(frozen=True)
class Ratios:
    """Of one case: medians over its turns."""

    tcp_over_bare: float
    shm_over_memcpy: float
    tcp_bytes_per_s: float
    shm_bytes_per_s: float


async def measure_case(peer: "Peer", case: Case, rounds: int) -> Ratios:
    """All links of one case. Raises TransferFailed where a chunk comes damaged, or the peer ends."""
    port = await peer.order("begin", case)
    end = End(case)

    async def turn(send: Callable[[], Awaitable[None]], *order: Any) -> float:
        peer.begin(*order)
        began = time.monotonic()
        await send()
        return float(await peer.done()) - began

    def over_link(name: str) -> Callable[[], Awaitable[float]]:
        return lambda: turn(lambda: end.send(name), "receive", name)

    def over_bare() -> Awaitable[float]:
        return turn(lambda: asyncio.to_thread(end.send_bare), "receive_bare")

    async def memcpy() -> float:
        return float(await peer.order("memcpy"))

    try:
        end.bare = socket.create_connection((HOST, port))
        for name, transport in end.transports.items():
            params = await peer.order("link", name)
            peer.begin("linked", name)
            end.links[name] = await transport.join(params, end.message.cut)
            await peer.done()
        tcp, tcp_s = await _in_turns(over_bare, over_link("tcp"), rounds)
        shm, shm_s = await _in_turns(memcpy, over_link("shm"), rounds)
    finally:
        await end.close()
    await peer.order("end")
    moved = end.message.num_bytes
    return Ratios(tcp, shm, moved / tcp_s, moved / shm_s)


async def _in_turns(
    limit: Callable[[], Awaitable[float]], subject: Callable[[], Awaitable[float]], rounds: int
) -> tuple[float, float]:
    """Medians of limit / subject, each subject against the limits on both sides of it, and of the subject's seconds."""
    await limit()
    await subject()
    limits, subjects = [await limit()], []
    for _ in range(rounds):
        subjects.append(await subject())
        limits.append(await limit())
    ratios = [(limits[i] + limits[i + 1]) / 2 / each for i, each in enumerate(subjects)]
    return statistics.median(ratios), statistics.median(subjects)


class Peer:
    """The other process, in which a case's receiving end is."""

    def __init__(self, pipe: Pipe):
        self._pipe = pipe

    def begin(self, *order: Any) -> None:
        """Have it done: one of those in `_serve`."""
        self._pipe.send(order)

    async def done(self) -> Any:
        """What the order brought. Raises TransferFailed where it failed."""
        try:
            return await asyncio.to_thread(self._pipe.recv)
        except EOFError:
            raise TransferFailed("the peer has ended; its standard error says why") from None

    async def order(self, *order: Any) -> Any:
        """Both."""
        self.begin(*order)
        return await self.done()


@contextlib.asynccontextmanager
async def peer_process() -> AsyncIterator[Peer]:
    """It ends with the pipe to it."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_serve_all, args=(theirs,), daemon=True)
    await asyncio.to_thread(process.start)
    theirs.close()
    try:
        yield Peer(ours)
    finally:
        ours.close()
        await asyncio.to_thread(process.join)


def _serve_all(pipe: Pipe) -> None:
    with contextlib.suppress(EOFError):  # the other process closes the pipe when it has no more cases
        asyncio.run(_serve(pipe))


async def _serve(pipe: Pipe) -> None:
    """Orders one after the other, each answered when it is done; the moment is the answer where there is no other."""
    end: End | None = None
    pending: dict[str, Any] = {}
    while True:
        answer: Any = None
        match await asyncio.to_thread(pipe.recv), end:
            case ("begin", case), None:
                end = End(case)
                answer = end.listen()
            case ("link", name), End():
                pending[name] = await end.transports[name].prepare(HOST, end.message.cut)
                answer = pending[name].params
            case ("linked", name), End():
                end.links[name] = await pending[name].established()
            case ("receive", name), End():
                await end.receive(name)
            case ("receive_bare",), End():
                end.receive_bare()
            case ("memcpy",), End():
                answer = memcpy_s(end.message)
            case ("end",), End():
                await end.close()
                end = None
            case order, _:
                raise ValueError(f"{order}: no order, or not now")
        pipe.send(time.monotonic() if answer is None else answer)


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
            spec=decoder_spec(),
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


class End:
    """One side of a case: its message, its ends of the links and of a bare connection."""

    def __init__(self, case: Case):
        self.message = Message(case)
        self.transports = {name: make_transports(name, self.message.cache).by_name[name] for name in TRANSPORTS}
        self.links: dict[str, DataLink] = {}
        self.bare: socket.socket | None = None
        self._listener: socket.socket | None = None

    def listen(self) -> int:
        """The port to which the bare connection is made."""
        self._listener = socket.create_server((HOST, 0))
        return int(self._listener.getsockname()[1])

    async def send(self, name: str) -> None:
        """Every chunk over a link; two are under way at a time, as in a transfer."""
        link, turns = self.links[name], iter(enumerate(self.message.chunks))

        async def mover() -> None:
            for seal, chunk in turns:
                await link.send(chunk, seal)

        await asyncio.gather(mover(), mover())

    async def receive(self, name: str) -> None:
        """The other end of `send`. Raises TransferFailed where a chunk came damaged."""
        link, turns = self.links[name], iter(enumerate(self.message.chunks))

        async def mover() -> None:
            for seal, chunk in turns:
                if not await link.receive(chunk, seal):
                    raise TransferFailed(f"a chunk came damaged over {name}")

        await asyncio.gather(mover(), mover())

    def send_bare(self) -> None:
        """Every chunk, straight out of its blocks, by `sendmsg`."""
        assert self.bare is not None  # connected when the case began
        self._pump(self.bare.sendmsg)

    def receive_bare(self) -> None:
        """Every chunk, straight into its blocks, by `recvmsg_into`. Raises ConnectionResetError."""
        if self.bare is None and self._listener is not None:
            self.bare, _ = self._listener.accept()
        bare = self.bare
        assert bare is not None  # an end that listens accepts

        def receive(views: Sequence[memoryview]) -> int:
            received = bare.recvmsg_into(views, 0, socket.MSG_WAITALL)[0]
            if received == 0:
                raise ConnectionResetError("the peer is gone")
            return received

        self._pump(receive)

    def _pump(self, call: Callable[[Sequence[memoryview]], int]) -> None:
        units = HostUnits(self.message.cache, self.message.cut)
        for chunk in self.message.chunks:
            left = list(units.views(chunk))
            while left:
                moved = call(list(islice(left, IOV_MAX)))
                done = 0
                while done < len(left) and moved >= left[done].nbytes:
                    moved -= left[done].nbytes
                    done += 1
                del left[:done]
                if moved:
                    left[0] = left[0][moved:]

    async def close(self) -> None:
        for link in self.links.values():
            await link.close()
        for transport in self.transports.values():
            await transport.close()
        for connection in (self.bare, self._listener):
            if connection is not None:
                connection.close()
        self.message.cache.close()


def memcpy_s(message: Message) -> float:
    """Seconds for copying as many bytes from one contiguous piece of memory to another, chunk by chunk."""
    source, target = np.ones(message.num_bytes, np.uint8), np.ones(message.num_bytes, np.uint8)
    bounds = np.cumsum([0, *message.chunk_bytes])
    pieces = [(target[a:b], source[a:b]) for a, b in pairwise(bounds)]
    began = time.monotonic()
    for to, start in pieces:
        np.copyto(to, start)
    return time.monotonic() - began
