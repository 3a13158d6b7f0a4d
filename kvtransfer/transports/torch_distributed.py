"""KV through torch.distributed: a process group of two ranks per link. Gloo on CPUs, NCCL between GPUs.

One group per link, because a receive that times out closes every connection of its group. Each has a TCPStore of its
own for the rendezvous, on a socket that we bind (left alone, TCPStore listens on every interface), under a one-time
prefix.

A chunk is one message: its units packed one after the other, and their checksum. Staging memory of a link is, for each
chunk that may be under way, the largest one it has carried, which `max_chunk_bytes` bounds on GPUs (link.staging_need).
Where gloo receives, it is the largest chunk possible: gloo ends the process for a message that is larger than its
receive, which happens once chunks and announcements are out of step (and for a source whose chunks are larger than
MAX_CHUNK_BYTES). NCCL asks for equal sizes on both sides: what becomes of chunks
out of step there is not known. Why a hung operation or a woken zombie can't write into blocks: see GroupLink.

Not confirmed on hardware: what concerns NCCL here is written and type-checked, but was not yet run on GPUs.
"""

import asyncio
import contextlib
import secrets
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, TCPStore

from twostroke.kvtransfer.fabric import rdma_obstacle, rdma_ports
from twostroke.kvtransfer.layout import KVShard, Segment
from twostroke.kvtransfer.link import KVStore, LinkParams
from twostroke.kvtransfer.timeouts import finish, within
from twostroke.kvtransfer.transports.host_units import count_units
from twostroke.kvtransfer.transports.staging import HostStaging, make_staging
from twostroke.model.parallel.tensor_parallel import NCCL_LOG, SOCKETS, listening_store, process_group
from twostroke.protocol.errors import ConnectionLost

T = TypeVar("T")

RECEIVER_RANK, SENDER_RANK = 0, 1
_JOINED_KEY = "joined"
_CHUNKS, _FAREWELL = 0, 1  # gloo's tags; nothing is ever sent with the second


class TorchDistributedTransport:
    """Makes GroupLinks for one rank of a worker.

    `join_timeout_s` bounds the rendezvous, `operation_timeout_s` one send or receive, once both sides know of it: it is
    also how long a thread may outlive its link. Both belong at the lease, within which a peer has to do either.
    """

    name = "torch_distributed"

    def __init__(
        self,
        store: KVStore,
        *,
        join_timeout_s: float = 5.0,
        operation_timeout_s: float | None = None,
        max_chunk_bytes: int | None = None,
    ):
        self._store = store
        self._max_chunk_bytes = max_chunk_bytes
        self._join_timeout_s = join_timeout_s
        self._operation_timeout_s = join_timeout_s if operation_timeout_s is None else operation_timeout_s
        self._most_s = self._join_timeout_s + self._operation_timeout_s
        self._links: set[GroupLink] = set()

    async def prepare(self, host: str, shard: KVShard) -> "PendingGroup":
        link = self._make_link(shard, RECEIVER_RANK)
        port = await self._begun(link, lambda: link.open_rendezvous(host, None, self._join_timeout_s))
        return PendingGroup(link, host, port, self._operation_timeout_s, self._most_s)

    async def join(self, params: LinkParams, shard: KVShard) -> "GroupLink":
        host, port, prefix = params.get("host"), params.get("port"), params.get("prefix")
        if not isinstance(host, str) or not isinstance(port, int) or not isinstance(prefix, str):
            raise ConnectionLost("the peer's link parameters are not those of torch_distributed")
        link = self._make_link(shard, SENDER_RANK)

        def form() -> None:
            own_host = _address_towards(host, port)
            link.open_rendezvous(host, port, self._join_timeout_s)
            link.announce(prefix, "joined")
            link.form_group(prefix, own_host, self._operation_timeout_s)

        await self._begun(link, form)
        return link

    async def _begun(self, link: "GroupLink", work: Callable[[], T]) -> T:
        """Return the result of the link's first `work`; the link is closed where that fails."""
        try:
            return await within(self._most_s, link.run(work), "joining a process group")
        except BaseException:
            await finish(link.close())
            raise

    async def close(self) -> None:
        links = tuple(self._links)
        await asyncio.gather(*(link.close() for link in links))
        await asyncio.gather(*(link.ended() for link in links))

    def _make_link(self, shard: KVShard, own_rank: int) -> "GroupLink":
        link = GroupLink(self._store, shard, own_rank, self._links.discard, self._max_chunk_bytes)
        self._links.add(link)
        return link


@dataclass
class PendingGroup:
    """A rendezvous that waits for the peer."""

    link: "GroupLink"
    host: str
    port: int
    operation_timeout_s: float
    most_s: float  # that both sides may take together; NCCL itself waits for ever
    prefix: str = field(default_factory=lambda: secrets.token_hex(16))
    _established: bool = False

    @property
    def params(self) -> LinkParams:
        return {"host": self.host, "port": self.port, "prefix": self.prefix}

    async def established(self) -> "GroupLink":
        def form() -> None:
            self.link.await_peer(self.prefix)
            self.link.form_group(self.prefix, self.host, self.operation_timeout_s)

        await within(self.most_s, self.link.run(form), "forming a process group")
        self._established = True
        return self.link

    async def close(self) -> None:
        if self._established:
            return
        # A thread that waits for the peer wakes up, to find the link closed; if the word does not reach it, it wakes
        # with the store's time-out. Without a group it can't touch the store, so nothing waits for it here.
        self.link.shut_store()
        with contextlib.suppress(RuntimeError):
            await asyncio.to_thread(self.link.announce, self.prefix, "given up")
        await self.link.close()


class GroupLink:
    """A DataLink over a process group, which it owns, with two threads and a staging buffer for each chunk under way.

    The first thread packs and posts a send, or posts a receive; the second waits for it, and unpacks. So while chunk n
    is on the wire, chunk n + 1 is packed, or its receive posted, and chunk n - 1 unpacked. A send returns once its
    units are packed and posted: the store is not read after that. Should it fail later, the next call tells.
    Only these threads touch the store, under a lock: what hangs in gloo can be abandoned safely, since what it still
    receives goes into staging memory and nowhere else.
    """

    def __init__(
        self,
        store: KVStore,
        shard: KVShard,
        own_rank: int,
        on_close: Callable[["GroupLink"], None],
        max_chunk_bytes: int | None = None,
    ):
        self.max_chunk_bytes = max_chunk_bytes
        self.shortfall: str | None = None  # known once the group is formed
        self._staging = make_staging(store, shard)
        self._own_rank = own_rank
        self._peer_rank = SENDER_RANK if own_rank == RECEIVER_RANK else RECEIVER_RANK
        self._on_close = on_close
        self._posting = ThreadPoolExecutor(1, "kv-group-post")
        self._waiting = ThreadPoolExecutor(1, "kv-group-wait")
        self._free: SimpleQueue[int] = SimpleQueue()  # staging buffers
        for index in range(self._staging.num_buffers):
            self._free.put(index)
        self._rendezvous: Any = None  # a TCPStore; the stubs don't know `clone`
        self._group: Any = None
        self._touching_store = threading.Lock()
        self._closed = False
        self._busy = 0  # calls that have not returned
        self._dropped: Future[None] = Future()
        self._closing: asyncio.Future[None] | None = None

    # --- the rendezvous; its calls block and run on the posting thread ---

    async def run(self, call: Callable[[], T]) -> T:
        """Run a blocking `call` on the posting thread. Raises ConnectionLost."""

        def work(outcome: Future[T]) -> None:
            outcome.set_result(call())

        return await self._carry_out(work)

    def open_rendezvous(self, host: str, port: int | None, timeout_s: float) -> int:
        """Connect to the store at `port`, or make it where that is None; returns its port."""
        if port is None:
            self._rendezvous, port = listening_store(host, timeout_s)
        else:
            self._rendezvous = TCPStore(host, port, None, False, timedelta(seconds=timeout_s), False)
        return port

    def announce(self, prefix: str, word: str) -> None:
        """Let the side that waits in `await_peer` go on. On any thread, shortly."""
        if self._rendezvous is not None:
            PrefixStore(prefix, self._rendezvous.clone()).set(_JOINED_KEY, word)

    def await_peer(self, prefix: str) -> None:
        """Wait until the peer has joined, or `announce` was called here: for the store's time-out at most."""
        if self._rendezvous is not None:
            PrefixStore(prefix, self._rendezvous).get(_JOINED_KEY)
        if self._closed:
            raise ConnectionLost("the link was given up")

    def form_group(self, prefix: str, own_host: str, timeout_s: float) -> None:
        """Compile what is missing, form the group with the peer, which does the same, and connect."""
        if self._rendezvous is None:
            raise ConnectionLost("there is no rendezvous")
        self._staging.warm_up()
        log_bytes = NCCL_LOG.num_bytes
        # A client of its own: groups that are formed by several threads over one client deadlock.
        rendezvous = PrefixStore(prefix, self._rendezvous.clone())
        gloo_host = own_host if isinstance(self._staging, HostStaging) else None
        self._group = process_group(rendezvous, self._own_rank, 2, timeout_s, gloo_host)
        # NCCL connects with the first message, for seconds: no chunk, whose time is limited, shall be that message.
        is_sender = self._own_rank == SENDER_RANK
        greeting = self._staging.buffer(0, 1) if is_sender else self._staging.landing(0, 1)
        self._staging.wait(self._post(greeting, is_send=is_sender))
        # Of other links that connect meanwhile, too: a process has one log.
        if SOCKETS in NCCL_LOG.networks_since(log_bytes):
            self.shortfall = f"torch_distributed: NCCL goes over sockets; {rdma_obstacle(rdma_ports())}"

    # --- chunks ---

    async def send(self, segments: Sequence[Segment], seed: int) -> None:
        def pack(packed: Tensor) -> None:
            with self._touching_store:
                self._check_open()
                self._staging.pack(segments, seed, packed)

        await self._exchange(count_units(segments), pack, None)

    async def receive(self, segments: Sequence[Segment], seed: int) -> bool:
        def unpack(packed: Tensor) -> bool:
            with self._touching_store:
                self._check_open()
                return self._staging.unpack(segments, seed, packed)

        return await self._exchange(count_units(segments), None, unpack)

    async def discard(self, num_units: int) -> None:
        await self._exchange(num_units, None, None)

    async def _exchange(
        self, num_units: int, pack: Callable[[Tensor], None] | None, unpack: Callable[[Tensor], bool] | None
    ) -> bool:
        """Send what `pack` fills in, or receive what `unpack` takes out; return whether its checksum was right."""

        def post(outcome: Future[bool]) -> None:
            index = self._free.get()  # while all are in use this thread waits: for an operation's time-out at most
            try:
                if pack is not None:
                    packed = self._staging.buffer(index, num_units)
                    pack(packed)
                    work = self._post(packed, is_send=True)
                    outcome.set_result(True)
                    outcome = Future()
                else:
                    work = self._post(self._staging.landing(index, num_units), is_send=False)
                    packed = self._staging.buffer(index, num_units)
                self._waiting.submit(_into, outcome, lambda outcome: settle(outcome, index, packed, work))
            except BaseException:
                self._free.put(index)
                raise

        def settle(outcome: Future[bool], index: int, packed: Tensor, work: dist.Work) -> None:
            try:
                self._staging.wait(work)
                is_right = unpack is None or unpack(packed)
            except BaseException:
                self.shut_store()
                raise
            finally:
                self._free.put(index)
            outcome.set_result(is_right)

        return await self._carry_out(post)

    def _post(self, tensor: Tensor, *, is_send: bool) -> dist.Work:
        if self._group is None:
            raise ConnectionLost("the group is not formed")
        move = self._group.send if is_send else self._group.recv
        return self._staging.post(lambda: move([tensor], self._peer_rank, _CHUNKS))

    async def _carry_out(self, work: Callable[[Future[T]], None]) -> T:
        """Run `work` on the posting thread and return its Future's result. Failure and cancellation end the link."""
        if self._closed:
            raise ConnectionLost("the link is closed")
        outcome: Future[T] = Future()
        self._busy += 1
        ended = asyncio.wrap_future(outcome)
        ended.add_done_callback(self._retire)
        self._posting.submit(_into, outcome, work)
        try:
            return await asyncio.shield(ended)
        except BaseException:
            self.shut_store()
            raise

    def _retire(self, ended: asyncio.Future[Any]) -> None:
        self._busy -= 1
        if not ended.cancelled():
            ended.exception()  # no caller is left for an error of abandoned work

    # --- the end ---

    async def close(self) -> None:
        """End the link; when this returns nothing touches the store. A hanging call ends later, see `ended`."""
        self.shut_store()
        if self._closing is None:
            self._closing = asyncio.wrap_future(self._dropped)
            self._closing.add_done_callback(lambda _: self._on_close(self))
            self._posting.submit(self._drop_after_the_last)
            self._posting.shutdown(wait=False)
        if self._busy == 0 and self._free.qsize() == self._staging.num_buffers:
            await self.ended()
        elif self._group is not None:
            await asyncio.to_thread(self._break_group)

    async def ended(self) -> None:
        """Wait until the threads have ended: after `close`, for an operation's time-out at most.

        NCCL's groups keep to that because NCCL_ENVIRONMENT forgoes dumps, for which torch would wait a minute more.
        """
        if self._closing is not None:
            await asyncio.wait([self._closing])
            self._waiting.shutdown()  # it has nothing left to do but to return

    def _drop_after_the_last(self) -> None:
        """Let the waiting thread drop the group at its end. Runs on the posting thread, as its last work."""
        self._waiting.submit(self._drop)
        self._waiting.shutdown(wait=False)

    def _drop(self) -> None:
        """Let go of the group and the rendezvous, which wait for threads of their own."""
        if self._group is not None and not isinstance(self._staging, HostStaging):
            self._group.abort()  # harmless where it was done; without it NCCL may wait for a peer that is dead
        self._group = None
        self._rendezvous = None
        self._dropped.set_result(None)

    def _break_group(self) -> None:
        """Close the group's connection while a call hangs in it. Blocks shortly."""
        group = self._group
        if group is None:
            return
        if not isinstance(self._staging, HostStaging):
            group.abort()  # also ends the operations
            return
        # Gloo closes a connection on which a wait has expired, and `abort` does not. A call that waits for its first
        # byte ends then, and the peer hears of it; one in the midst gets no more bytes, but returns at its time-out.
        try:
            group.recv([torch.empty(1, dtype=torch.uint8)], self._peer_rank, _FAREWELL).wait(timedelta(milliseconds=1))
        except RuntimeError:
            return

    def _check_open(self) -> None:
        if self._closed:
            raise ConnectionLost("the link is closed")

    def shut_store(self) -> None:
        """Close the store: nothing touches it any more, and a peer that joins now finds the link closed."""
        with self._touching_store:  # waits for a copy at most
            self._closed = True


def _address_towards(host: str, port: int) -> str:
    """Our own address on the way to `host`: gloo would otherwise pick one by the host's name. Raises OSError."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def _into(outcome: Future[T], work: Callable[[Future[T]], None]) -> None:
    """Do a part of the outcome's work; torch's errors (all RuntimeErrors) and the system's become ConnectionLost."""
    try:
        work(outcome)
    except (RuntimeError, ValueError, OSError) as error:
        # Made afresh, without the cause: its traceback would keep the group, its threads and sockets alive.
        outcome.set_exception(ConnectionLost(f"the link broke: {error}"))
    except BaseException as error:
        outcome.set_exception(error.with_traceback(None))
