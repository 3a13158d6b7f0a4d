"""The part `pull` of `twostroke bench transfer`: KV pulled between two processes of one machine, or of one GPU.

No worker, router or Ray: a sender and a receiver as workers have them, each with a cache in a process of its own. The
source's process is ours to start; the target is this one.

    rate       bytes a second of whole prompts' blocks that are there already, beside a plain copy of as many bytes
    hand-over  from the moment the last layer of a prompt is in the source's cache until the target has verified all of
               it, alone and while the target's device multiplies matrices

All processes of a machine share CLOCK_MONOTONIC.
"""

import asyncio
import contextlib
import random
import statistics
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from twostroke.benchmarks.console import say
from twostroke.benchmarks.random_model import MODELS
from twostroke.benchmarks.transfers.worker_process import Hosted, HostProcess
from twostroke.kvtransfer.config import TransferConfig, TransportName
from twostroke.kvtransfer.receiver import KVReceiver
from twostroke.kvtransfer.sender import KVSender
from twostroke.kvtransfer.transports import make_transports
from twostroke.loadtests.report.estimates import percentile
from twostroke.model.cache.kv_cache import KVCache, make_kv_cache
from twostroke.model.checkpoint.config_file import parse_model_config
from twostroke.protocol.clock import draw_epoch
from twostroke.protocol.errors import TransferFailed
from twostroke.protocol.network import TcpNetwork
from twostroke.protocol.requests import Address, Peer, SampledToken, Ticket, mint_ticket

Device = Literal["cpu", "cuda"]

HOST = "127.0.0.1"
SECRET = b"a secret of these two processes alone"
TRANSPORTS: Mapping[str, TransportName] = {"cpu": "shm", "cuda": "cuda_ipc"}
WARM_UPS = 3
AT_ONCE = 4  # prompts


@dataclass(frozen=True)
class PullSizes:
    """Sizes of what is moved. KV of `AT_ONCE` prompts has to fit into `num_blocks`."""

    shape: str  # of MODELS
    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int  # tokens
    num_blocks: int
    prompt_tokens: int  # of pulls by which the rate is measured
    rounds: int  # of these
    handover_tokens: int
    handovers: int
    layer_s: float  # from one layer of a prompt to the next
    load_size: int  # of the square matrices


SIZES: dict[Device, PullSizes] = {
    # Llama-3.1-8B's KV, 2 GiB on each side. A prompt of 512 tokens takes some 12 ms there, and 32 layers of 0.4 ms.
    "cuda": PullSizes("1.2b", 32, 8, 128, 64, 256, 4096, 20, 512, 200, 0.0004, 4096),
    "cpu": PullSizes("160m", 12, 4, 64, 16, 512, 2048, 20, 256, 200, 0.001, 512),
}
DRY = PullSizes("160m", 3, 2, 64, 16, 64, 64, 2, 32, 3, 0.0, 32)


@dataclass(frozen=True)
class PromptOrder:
    """Prompts that the source is to send, all of one length."""

    prompts: Sequence[tuple[Ticket, Sequence[int]]]  # each with its blocks in the source's cache
    num_tokens: int
    layer_s: float | None  # None: all layers are there from the start


def make_cache(device: Device, sizes: PullSizes) -> KVCache:
    """A cache of bf16 zeros."""
    fields = {
        "num_hidden_layers": sizes.num_layers,
        "num_key_value_heads": sizes.num_kv_heads,
        "head_dim": sizes.head_dim,
    }
    return make_kv_cache(
        parse_model_config({**MODELS[sizes.shape], **fields}, "the pulled shape"),
        num_blocks=sizes.num_blocks,
        block_size=sizes.block_size,
        dtype=torch.bfloat16,
        device=torch.device("cuda", 0) if device == "cuda" else torch.device("cpu"),
        model_digest="",
    )


def fill(layer: Tensor, seed: int) -> None:
    """Random values, the same in both processes."""
    layer.normal_(generator=torch.Generator(layer.device).manual_seed(seed))


class Source(Hosted):
    """The sending side, in a process of its own."""

    def __init__(self, device: Device, sizes: PullSizes):
        super().__init__()
        self._peer = Peer("source", draw_epoch())
        self._num_layers = sizes.num_layers
        self._run(self._start(device, sizes))

    def peer(self) -> Peer:
        return self._peer

    def send(self, order: PromptOrder) -> float:
        """Carry out an order; return when the last layer of its prompts was there, in seconds of CLOCK_MONOTONIC.

        Raises TransferFailed.
        """
        return self._run(self._send(order))

    def stop(self) -> None:
        self._run(self._sender.close())
        self._run(self._transports.close())

    async def _start(self, device: Device, sizes: PullSizes) -> None:
        cache = make_cache(device, sizes)
        for index, layer in enumerate(cache.tensors):
            fill(layer, index)
        if device == "cuda":
            torch.cuda.synchronize()
        self._transports = make_transports(TransferConfig(transport=TRANSPORTS[device]), cache, peers=[cache.layout])
        self._sender = KVSender(
            peer=self._peer,
            store=cache,
            network=TcpNetwork(SECRET),
            transports=self._transports,
            config=TransferConfig(),
            clock=time.monotonic,
        )

    async def _send(self, order: PromptOrder) -> float:
        ready = order.num_tokens if order.layer_s is None else 0
        began = time.monotonic()
        sending = [
            self._sender.begin_transfer(ticket, order.num_tokens, blocks, ready) for ticket, blocks in order.prompts
        ]
        if order.layer_s is not None:
            for layer in range(self._num_layers):
                await asyncio.sleep(order.layer_s)
                began = time.monotonic()
                for transfer in sending:
                    transfer.layer_ready(layer, order.num_tokens)
        for transfer in sending:
            transfer.commit(SampledToken(0))
        await asyncio.gather(*(transfer.done() for transfer in sending))
        return began


class PullTarget:
    """This process's cache and receiver."""

    def __init__(
        self,
        receiver: KVReceiver,
        cache: KVCache,
        address: Address,
        source: Peer,
        sending: Callable[[PromptOrder], Any],
    ):
        self._receiver = receiver
        self._cache = cache
        self._address = address
        self._source = source
        self._send = sending
        self._draw = random.Random(0)

    def kv_bytes_of(self, num_tokens: int) -> int:
        """KV of so many tokens, in whole blocks."""
        layout = self._cache.layout
        return -(-num_tokens // layout.block_size) * layout.block_bytes * layout.num_tensors

    async def pull(
        self, num_tokens: int, layer_s: float | None, at_once: int = 1, *, is_checked: bool = False
    ) -> float:
        """Seconds until so many prompts are verified, from when all of their KV was there. Raises TransferFailed,
        WorkerLost."""
        blocks = -(-num_tokens // self._cache.block_size)
        chosen = [self._draw.sample(range(self._cache.num_blocks), at_once * blocks) for _ in range(2)]
        tables = [[ids[at : at + blocks] for at in range(0, at_once * blocks, blocks)] for ids in chosen]
        peers = self._source, self._receiver.peer
        tickets = [mint_ticket(SECRET, "bench", *peers, (self._address,)) for _ in range(at_once)]
        incoming = [
            self._receiver.expect_transfer(ticket, table, num_tokens, 0)
            for ticket, table in zip(tickets, tables[1], strict=True)
        ]
        order = PromptOrder(list(zip(tickets, tables[0], strict=True)), num_tokens, layer_s)

        async def verified() -> float:
            await asyncio.gather(*(one.verified() for one in incoming))
            return time.monotonic()

        began, ended = await asyncio.gather(self._send(order), verified())
        if is_checked:
            self._check(*chosen)
        return float(ended - began)

    def _check(self, source_blocks: Sequence[int], target_blocks: Sequence[int]) -> None:
        for index, layer in enumerate(self._cache.tensors):
            expected = torch.empty_like(layer)
            fill(expected, index)
            if not torch.equal(layer[target_blocks], expected[source_blocks]):
                raise TransferFailed(f"what came of layer {index} is not what the source has")


@contextlib.asynccontextmanager
async def _target(device: Device, sizes: PullSizes) -> AsyncIterator[PullTarget]:
    cache = make_cache(device, sizes)
    process = HostProcess(Source, device, sizes)
    transports = make_transports(TransferConfig(transport=TRANSPORTS[device]), cache, peers=[cache.layout])
    receiver = KVReceiver(
        peer=Peer("target", draw_epoch()),
        store=cache,
        network=TcpNetwork(SECRET),
        transports=transports,
        config=TransferConfig(),
        clock=time.monotonic,
        secret=SECRET,
    )
    try:
        source = await process.start("peer")
        (address,) = await receiver.start(HOST)
        yield PullTarget(receiver, cache, address, source, lambda order: process.call("send", order))
    finally:
        await receiver.close()
        await transports.close()
        await process.end()


class BackgroundLoad:
    """A thread that multiplies matrices on the target's device, without a pause."""

    QUEUED = 8  # products that the device has before it, as an engine that runs ahead does

    def __init__(self, device: Device, size: int):
        self._left, self._right = (torch.randn(size, size, device=device).to(torch.bfloat16) for _ in range(2))
        self._operations = 2.0 * size**3
        self._on_gpu = device == "cuda"
        self._products = 0
        self._is_wanted = True
        self._thread = threading.Thread(target=self._run, name="load", daemon=True)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        self._thread.start()
        try:
            yield
        finally:
            self._is_wanted = False
            self._thread.join()

    def mark(self) -> tuple[float, int]:
        """Now, for `rate_since`."""
        return time.perf_counter(), self._products

    def rate_since(self, mark: tuple[float, int]) -> float:
        """Operations a second."""
        began, products = mark
        return (self._products - products) * self._operations / (time.perf_counter() - began)

    def _run(self) -> None:
        if self._on_gpu:
            torch.cuda.set_device(self._left.device)  # a thread has a current device of its own
        while self._is_wanted:
            for _ in range(self.QUEUED):
                torch.mm(self._left, self._right)
            if self._on_gpu:
                done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
                done.record()
                done.synchronize()
            self._products += self.QUEUED


async def measure_pulls(device: Device, sizes: PullSizes) -> dict[str, float]:
    """The part's figures, each told as soon as it is known.

    Raises TransferFailed or WorkerLost, or ConfigError where the device can't share memory.
    """
    async with _target(device, sizes) as target:
        prompt_bytes = target.kv_bytes_of(sizes.prompt_tokens)
        say(f"both processes serve, by {TRANSPORTS[device]}; a pulled prompt's KV has {prompt_bytes / 1e6:.0f} MB")
        for _ in range(WARM_UPS):
            await target.pull(sizes.prompt_tokens, None, is_checked=True)
        figures = _told({"copy_gb_s": prompt_bytes / _copy_s(device, prompt_bytes) / 1e9})
        figures |= await _rate(target, sizes, "pull_gb_s")
        figures |= await _rate(target, sizes, "pull_at_once_gb_s", AT_ONCE)
        figures |= await _handovers(target, sizes, "pulled_alone")
        load = BackgroundLoad(device, sizes.load_size)
        with load.running():
            mark = load.mark()
            await asyncio.sleep(0.5)
            alone, mark = load.rate_since(mark), load.mark()
            figures |= await _handovers(target, sizes, "pulled_under_load")
            beside = load.rate_since(mark)
            figures |= await _rate(target, sizes, "pull_under_load_gb_s")
        return figures | _told({"load_tflop_s": alone / 1e12, "load_kept": beside / alone if alone else 0.0})


def _told(figures: dict[str, float]) -> dict[str, float]:
    say(", ".join(f"{name} {value:.4g}" for name, value in figures.items()))
    return figures


async def _rate(target: PullTarget, sizes: PullSizes, name: str, at_once: int = 1) -> dict[str, float]:
    """Pull whole prompts, so many at a time, and return bytes a second."""
    times = [await target.pull(sizes.prompt_tokens, None, at_once) for _ in range(sizes.rounds)]
    return _told({name: at_once * target.kv_bytes_of(sizes.prompt_tokens) / statistics.median(times) / 1e9})


async def _handovers(target: PullTarget, sizes: PullSizes, name: str) -> dict[str, float]:
    for _ in range(WARM_UPS):
        await target.pull(sizes.handover_tokens, sizes.layer_s)
    seconds = [await target.pull(sizes.handover_tokens, sizes.layer_s) for _ in range(sizes.handovers)]
    return _told({f"{name}_p{percent}_s": percentile(seconds, percent) or 0.0 for percent in (50, 99)})


def _copy_s(device: Device, num_bytes: int) -> float:
    """The least of some copies from one place of the device to another."""
    words = torch.ones(num_bytes // 4, dtype=torch.float32, device=device)
    copied = torch.empty_like(words)

    def copy() -> float:
        began = time.perf_counter()
        copied.copy_(words)
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began

    copy()
    return min(copy() for _ in range(5))
