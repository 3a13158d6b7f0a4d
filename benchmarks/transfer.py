"""`twostroke bench transfer`: what a request feels of its KV's transfer, and links against the limits of this machine.

Three parts, all between processes of this machine:

    hand-over  from the end of a prompt's prefill to its first decode step, with several requests at a time
    exposed    the same of one prompt alone, as a share of the prefill's time, on a link on which the whole KV takes
               half as long as the prefill
    links      tcp against a bare sendmsg/recvmsg_into loop, shm against memcpy

For the first two there are two real workers in processes of their own, the router's pipeline before them, no Ray.
Moments are the engines' own: the end of the step that drew the first token, the beginning of the first decode step.
What lies between is everything that disaggregation adds to a request: the last layers' bytes, digests, commit, the
decode worker's wake-up, and the wait for its step under way.

Links and the limits of this machine are measured turn by turn (limit, link, limit, ...), between two processes.
A message is as it really is: the KV of prompts of one model, its blocks scattered over a cache, cut into the chunks
that a transfer would send. Links carry digests and check them, the limits don't. All processes of a machine share
CLOCK_MONOTONIC, by which the receiving end tells when it was done.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import itertools
import json
import multiprocessing
import random
import socket
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from itertools import islice, pairwise
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from twostroke.benchmarks.console import positive, say
from twostroke.benchmarks.engine import write_random_model
from twostroke.benchmarks.worker_process import Served, Settings, serve_workers
from twostroke.cluster.config.model_folder import resolve_model_folder
from twostroke.cluster.config.sections import TransportChoice
from twostroke.kvtransfer.config import TransferConfig
from twostroke.kvtransfer.link import DataLink
from twostroke.kvtransfer.rules.layout import ChunkPlan, Cut, Segment, cut_lane, plan_lanes
from twostroke.kvtransfer.transports import make_transports
from twostroke.kvtransfer.transports.host_units import HostUnits
from twostroke.loadtests.report.estimates import percentile
from twostroke.model.architectures.llama import decoder_spec
from twostroke.model.cache.kv_cache import SharedKVCache, kv_block_bytes, make_kv_cache
from twostroke.model.checkpoint.config_file import load_model_config
from twostroke.model.config import ModelConfig, RopeConfig
from twostroke.protocol.errors import ConfigError, TransferFailed

PROMPT_TOKENS = (128, 1024, 8192, 32768)  # of the links' cases
BLOCK_SIZES = (16, 32, 64)
EXPOSED_TOKENS = {"exposed_1k": 1024, "exposed_8k": 8192}
HANDOVER_TOKENS, HANDOVER_ANSWER_TOKENS = 256, 32
BLOCK_SIZE = 16
SECRET = "a secret of this bench alone"
FIRST_TOKEN_ID = 300
QUICK_ROUNDS, QUICK_REQUESTS = 2, 100

# Of the links part.
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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=None, help="what to measure (default: all)")
    parser.add_argument(
        "--quick", action="store_true", help="hand-over and exposed with few rounds, in a minute and a half"
    )
    parser.add_argument(
        "--shapes", nargs="+", choices=tuple(SHAPES), default=tuple(SHAPES), help="models of the links part"
    )
    parser.add_argument("--rounds", type=positive, help="turns a figure; medians count (default: 5; quick: 2)")
    parser.add_argument("--requests", type=positive, help="of the hand-over part (default: 400; quick: 100)")
    parser.add_argument(
        "--concurrency", type=positive, default=8, help="requests at a time there (default: %(default)s)"
    )
    parser.add_argument("--transport", default="auto", help="kv_transfer.transport there (default: %(default)s)")


def run(arguments: argparse.Namespace) -> int:
    """Measure and print; the last line of stdout is one JSON object. A part that fails is named there, with its reason,
    and the others are measured all the same; then the exit code is 1."""
    figures: dict[str, float] = {}
    failed: dict[str, str] = {}
    if arguments.quick:
        arguments.parts = arguments.parts or ("handover", "exposed")
    arguments.rounds = arguments.rounds or (QUICK_ROUNDS if arguments.quick else 5)
    arguments.requests = arguments.requests or (QUICK_REQUESTS if arguments.quick else 400)
    for part in arguments.parts or PARTS:
        try:
            asyncio.run(PARTS[part](arguments, figures))
        except Exception as error:  # whatever it is, minutes of other measurements are not lost for it
            failed[part] = f"{type(error).__name__}: {error}"
            say(f"{part} failed: {failed[part]}")
    print(json.dumps(figures | ({"failed": failed} if failed else {})))
    return 1 if failed else 0


async def _measure_links(arguments: argparse.Namespace, figures: dict[str, float]) -> None:
    cases = [Case(*cell) for cell in itertools.product(arguments.shapes, PROMPT_TOKENS, BLOCK_SIZES)]
    results: list[Ratios] = []
    async with peer_process() as peer:
        for number, case in enumerate(cases, 1):
            ratios = await measure_case(peer, case, arguments.rounds)
            results.append(ratios)
            say(
                f"links {number}/{len(cases)}  {case!s:>34}  "
                f"tcp {ratios.tcp_over_bare:.2f} of bare ({ratios.tcp_bytes_per_s / 1e9:.1f} GB/s), "
                f"shm {ratios.shm_over_memcpy:.2f} of memcpy ({ratios.shm_bytes_per_s / 1e9:.1f})"
            )
    for field in dataclasses.fields(Ratios):
        figures[field.name] = statistics.median(getattr(one, field.name) for one in results)


async def _measure_exposed(arguments: argparse.Namespace, figures: dict[str, float]) -> None:
    """Prefill times over a free link first, then over one that is throttled accordingly."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        say("writing a random model of 12 layers x 768")
        write_random_model(folder, max_position=2 * max(EXPOSED_TOKENS.values()))
        async with _served(folder, max(EXPOSED_TOKENS.values()), 1, "tcp", None) as served:
            free = {
                tokens: await _send(served, folder, arguments.rounds, 1, tokens, 2)
                for tokens in EXPOSED_TOKENS.values()
            }
        for figure, tokens in EXPOSED_TOKENS.items():
            prefill_s = statistics.median(one.prefill_s for one in free[tokens])
            block_bytes = kv_block_bytes(load_model_config(folder), BLOCK_SIZE, torch.bfloat16)
            rate = int(-(-tokens // BLOCK_SIZE) * block_bytes / (prefill_s / 2))
            async with _served(folder, tokens, 1, "tcp", rate) as served:
                paced = await _send(served, folder, arguments.rounds, 1, tokens, 2)
            prefill_s = statistics.median(one.prefill_s for one in paced)
            handover_s = statistics.median(one.handover_s for one in paced)
            figures[figure] = handover_s / prefill_s
            say(
                f"exposed at {tokens} tokens: {handover_s * 1e3:.1f} ms of {prefill_s * 1e3:.0f} ms, "
                f"{figures[figure]:.1%}, on a link of {rate / 1e6:.0f} MB/s"
            )


async def _measure_handover(arguments: argparse.Namespace, figures: dict[str, float]) -> None:
    """Over a free link, with the bundled model."""
    folder, at_once = resolve_model_folder("bundled"), arguments.concurrency
    async with _served(folder, HANDOVER_TOKENS, at_once, arguments.transport, None) as served:
        handovers = await _send(served, folder, arguments.requests, at_once, HANDOVER_TOKENS, HANDOVER_ANSWER_TOKENS)
    seconds = [one.handover_s for one in handovers]
    figures |= {f"handover_p{percent}_s": percentile(seconds, percent) or 0.0 for percent in (50, 99)}
    say(
        f"hand-over, {at_once} requests at a time: P50 {figures['handover_p50_s'] * 1e3:.1f} ms, "
        f"P99 {figures['handover_p99_s'] * 1e3:.1f} ms, the wait for the decode step under way included"
    )


PARTS: Mapping[str, Callable[[argparse.Namespace, dict[str, float]], Coroutine[Any, Any, None]]] = {
    "handover": _measure_handover,
    "exposed": _measure_exposed,
    "links": _measure_links,
}


@dataclass(frozen=True)
class Handover:
    """One request's, in seconds."""

    prefill_s: float
    handover_s: float


def _served(
    folder: Path, prompt_tokens: int, concurrency: int, transport: TransportChoice, max_bytes_per_s: int | None
) -> AbstractAsyncContextManager[Served]:
    prefill = Settings(
        role="prefill",
        model=str(folder),
        dtype="bfloat16",
        num_blocks=2 * (concurrency + 1) * (-(-prompt_tokens // BLOCK_SIZE) + 8),
        block_size=BLOCK_SIZE,
        transport=transport,
        secret=SECRET,
        tcp_max_bytes_per_s=max_bytes_per_s,
    )
    return serve_workers(prefill, msgspec.structs.replace(prefill, role="decode"))


async def _send(
    served: Served, folder: Path, requests: int, concurrency: int, prompt_tokens: int, max_tokens: int
) -> list[Handover]:
    """Hand-overs of `requests` requests, `concurrency` at a time, after some that warm everything up.

    Prompts share no prefix: each begins with a token that no other begins with, which names it. A prompt that the
    decode worker computed itself has none. Raises TransferFailed where a transfer
    failed, or all prompts were computed so: then there is nothing to speak of.
    """
    vocab_size = load_model_config(folder).vocab_size
    draw = random.Random(0)
    firsts = range(FIRST_TOKEN_ID, vocab_size)

    async def send(names: range, num_tokens: int) -> None:
        left = iter(names)

        async def client() -> None:
            for name in left:
                prompt = [firsts[name % len(firsts)], *(draw.choice(firsts) for _ in range(num_tokens - 1))]
                await served.generate(prompt, max_tokens)

        await asyncio.gather(*(client() for _ in range(concurrency)))

    warm_up = 2 * concurrency if concurrency > 1 else 1
    await send(range(warm_up), min(prompt_tokens, 1024))
    await asyncio.gather(served.prefill.notes(), served.decode.notes())
    await send(range(warm_up, warm_up + requests), prompt_tokens)
    source, target = await asyncio.gather(served.prefill.notes(), served.decode.notes())
    if source.stats.transfers_failed or target.stats.transfers_failed:
        raise TransferFailed(f"{target.stats.transfers_failed} transfers failed")
    handovers = [
        Handover(read.first_token_drawn - read.first_step_began, written.first_step_began - read.first_token_drawn)
        for name, read in source.moments.items()
        if (written := target.moments.get(name)) is not None
    ]
    if not handovers:
        raise TransferFailed("the decode worker computed all prompts itself: no KV was handed over")
    if len(handovers) < requests:
        say(f"{requests - len(handovers)} of {requests} prompts were computed by the decode worker itself")
    return handovers


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
