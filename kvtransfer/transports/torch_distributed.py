"""KV through torch.distributed: a process group of two ranks per pair of workers. Gloo on CPUs, NCCL between GPUs.

One group per pair, because a receive that times out closes every pair of its group. Each has a TCPStore of its own for
the rendezvous, on a socket that we bind (left alone, TCPStore listens on every interface), under a one-time prefix.

Blocks travel packed in a staging buffer, and only this side's threads touch the store, under a lock: a call that hangs
in gloo (a peer killed while it sends is noticed only at the operation's time-out) can be abandoned safely, since what
it still receives goes into staging memory and nowhere else. Its thread ends with the time-out.

Not confirmed on hardware: what concerns NCCL here is written and type-checked, but was not yet run on GPUs.
"""

import asyncio
import contextlib
import secrets
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, TCPStore

from kvtransfer.link import LinkParams
from kvtransfer.store import DeviceStore, KVStore
from kvtransfer.transports.staging import CudaStaging, HostStaging, Staging
from protocol.errors import ConnectionLost

T = TypeVar("T")

RECEIVER_RANK, SENDER_RANK = 0, 1
_JOINED_KEY = "joined"


class GroupLink:
    """A DataLink over a process group of two, which it owns, with its thread."""

    def __init__(self, store: KVStore, own_rank: int, on_close: Callable[["GroupLink"], None]):
        self._staging: Staging = CudaStaging(store) if isinstance(store, DeviceStore) else HostStaging(store)
        self._block_bytes = store.block_bytes
        self._own_rank = own_rank
        self._peer_rank = SENDER_RANK if own_rank == RECEIVER_RANK else RECEIVER_RANK
        self._on_close = on_close
        self._thread = ThreadPoolExecutor(1, "kv-group")
        self._rendezvous: Any = None  # a TCPStore; the stubs don't know `clone`
        self._group: Any = None  # torch's stubs know neither `send` and `recv` of a backend nor gloo's options
        self._touching_store = threading.Lock()
        self._closed = False
        self._busy: asyncio.Future[Any] | None = None
        self._dropping: asyncio.Future[None] | None = None

    async def run(self, call: Callable[[], T]) -> T:
        """Run a blocking `call` on the link's thread. Raises ConnectionLost."""
        if self._closed:
            raise ConnectionLost("the link is closed")
        work = asyncio.get_running_loop().run_in_executor(self._thread, _mapped, call)
        work.add_done_callback(_retrieve)
        self._busy = work
        try:
            return await asyncio.shield(work)
        except BaseException:
            self._shut_store()
            raise

    def open_rendezvous(self, host: str, port: int | None, timeout_s: float) -> int:
        """Connect to the store at `port`, or make it where that is None; returns its port. Blocks."""
        limit = timedelta(seconds=timeout_s)
        if port is not None:
            self._rendezvous = TCPStore(host, port, None, False, limit, False)
            return port
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, 0), family=family)
        port = int(listener.getsockname()[1])
        self._rendezvous = TCPStore(host, port, None, True, limit, False, master_listen_fd=listener.detach())
        return port

    def announce(self, prefix: str, word: str) -> None:
        """Let the side that waits in `await_peer` go on. Blocks shortly."""
        if self._rendezvous is not None:
            PrefixStore(prefix, self._rendezvous.clone()).set(_JOINED_KEY, word)

    def await_peer(self, prefix: str) -> None:
        """Wait until the peer has come, or `announce` was called here. Blocks, for the store's time-out at most."""
        if self._rendezvous is not None:
            PrefixStore(prefix, self._rendezvous).get(_JOINED_KEY)
        if self._closed:
            raise ConnectionLost("the link was given up")

    def form_group(self, prefix: str, own_host: str, timeout_s: float) -> None:
        """Form the group with the peer, which does the same. Blocks."""
        if self._rendezvous is None:
            raise ConnectionLost("there is no rendezvous")
        # A client of its own: groups that are formed by several threads over one client deadlock.
        rendezvous = PrefixStore(prefix, self._rendezvous.clone())
        if isinstance(self._staging, CudaStaging):
            nccl = dist.ProcessGroupNCCL.Options()
            nccl._timeout = timedelta(seconds=timeout_s)
            self._group = dist.ProcessGroupNCCL(rendezvous, self._own_rank, 2, nccl)
        else:
            gloo = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            gloo._timeout = timedelta(seconds=timeout_s)
            gloo._threads = 1
            gloo._devices = [ProcessGroupGloo.create_device(hostname=own_host)]
            self._group = ProcessGroupGloo(rendezvous, self._own_rank, 2, gloo)

    async def send(self, layer: int, block_ids: Sequence[int]) -> None:
        await self.run(lambda: self._send(layer, block_ids))

    async def receive(self, layer: int, block_ids: Sequence[int]) -> None:
        await self.run(lambda: self._receive(layer, block_ids))

    async def discard(self, num_bytes: int) -> None:
        await self.run(lambda: self._wait_for(self._staging.buffer(num_bytes), is_send=False))

    async def close(self) -> None:
        """Nothing touches the store when this returns; a hanging call ends later, see `ended`."""
        self._shut_store()
        if self._dropping is None:
            self._dropping = asyncio.get_running_loop().run_in_executor(self._thread, self._drop)
            self._dropping.add_done_callback(lambda _: self._on_close(self))
            self._thread.shutdown(wait=False)
        if self._busy is None or self._busy.done():
            await asyncio.wait([self._dropping])
        elif isinstance(self._staging, CudaStaging) and self._group is not None:
            # NCCL's operations end when their communicator is aborted; gloo's end with their time-out.
            await asyncio.to_thread(self._group.abort)

    async def ended(self) -> None:
        """Wait until the thread has ended: after `close`, for an operation's time-out at most."""
        if self._dropping is not None:
            await asyncio.wait([self._dropping])

    def _drop(self) -> None:
        """Let go of the group and the rendezvous, which wait for threads of their own."""
        self._group = None
        self._rendezvous = None

    def _send(self, layer: int, block_ids: Sequence[int]) -> None:
        packed = self._staging.buffer(len(block_ids) * self._block_bytes)
        with self._open_store():
            self._staging.pack(layer, block_ids, packed)
        self._wait_for(packed, is_send=True)

    def _receive(self, layer: int, block_ids: Sequence[int]) -> None:
        packed = self._staging.buffer(len(block_ids) * self._block_bytes)
        self._wait_for(packed, is_send=False)
        with self._open_store():
            self._staging.unpack(layer, block_ids, packed)

    def _wait_for(self, packed: Tensor, *, is_send: bool) -> None:
        """Send or receive `packed`. Blocks."""
        if self._group is None:
            raise ConnectionLost("the group is not formed")
        move = self._group.send if is_send else self._group.recv
        self._staging.wait(move([packed], self._peer_rank, 0))

    @contextlib.contextmanager
    def _open_store(self) -> Iterator[None]:
        """Hold off `close` while the store is touched. Raises ConnectionLost where it came first."""
        with self._touching_store:
            if self._closed:
                raise ConnectionLost("the link is closed")
            yield

    def refuse_peer(self) -> None:
        """Whoever joins now finds the link closed."""
        self._shut_store()

    def _shut_store(self) -> None:
        with self._touching_store:  # waits for a copy at most
            self._closed = True


def _mapped(call: Callable[[], T]) -> T:
    """The call's result; torch's errors (all RuntimeErrors) and the system's as ConnectionLost."""
    try:
        return call()
    except (RuntimeError, ValueError, OSError) as error:
        reason = str(error)
    # Raised afresh, without the cause: its traceback would keep the group, its threads and sockets alive.
    raise ConnectionLost(f"the link broke: {reason}")


def _retrieve(work: asyncio.Future[Any]) -> None:
    """An error of abandoned work has nobody left to be told to."""
    if not work.cancelled():
        work.exception()


class PendingGroup:
    """A rendezvous that waits for the peer."""

    def __init__(self, link: GroupLink, host: str, port: int, operation_timeout_s: float):
        self._link = link
        self._host = host
        self._port = port
        self._prefix = secrets.token_hex(16)
        self._operation_timeout_s = operation_timeout_s
        self._established = False

    @property
    def params(self) -> LinkParams:
        return {"host": self._host, "port": self._port, "prefix": self._prefix}

    async def established(self) -> GroupLink:
        def form() -> None:
            self._link.await_peer(self._prefix)
            self._link.form_group(self._prefix, self._host, self._operation_timeout_s)

        await self._link.run(form)
        self._established = True
        return self._link

    async def close(self) -> None:
        if self._established:
            return
        # A thread that waits for the peer wakes up, to find the link closed; if the word does not reach it, it wakes
        # with the store's time-out. Without a group it can't touch the store, so nobody waits for it here.
        self._link.refuse_peer()
        with contextlib.suppress(RuntimeError):
            await asyncio.to_thread(self._link.announce, self._prefix, "given up")
        await self._link.close()


class TorchDistributedTransport:
    """Makes GroupLinks for one worker.

    `join_timeout_s` bounds the rendezvous, `operation_timeout_s` one send or receive, once both sides know of it: it is
    also how long a thread may outlive its link.
    """

    name = "torch_distributed"

    def __init__(self, store: KVStore, *, join_timeout_s: float = 10.0, operation_timeout_s: float = 10.0):
        self._store = store
        self._join_timeout_s = join_timeout_s
        self._operation_timeout_s = operation_timeout_s
        self._links: set[GroupLink] = set()

    async def prepare(self, host: str) -> PendingGroup:
        link = self._make_link(RECEIVER_RANK)
        try:
            port = await link.run(lambda: link.open_rendezvous(host, None, self._join_timeout_s))
        except BaseException:
            await link.close()
            raise
        return PendingGroup(link, host, port, self._operation_timeout_s)

    async def join(self, params: LinkParams) -> GroupLink:
        host, port, prefix = params.get("host"), params.get("port"), params.get("prefix")
        if not isinstance(host, str) or not isinstance(port, int) or not isinstance(prefix, str):
            raise ConnectionLost("the peer's link parameters are not those of torch_distributed")
        link = self._make_link(SENDER_RANK)

        def form() -> None:
            own_host = _address_towards(host, port)
            link.open_rendezvous(host, port, self._join_timeout_s)
            link.announce(prefix, "joined")
            link.form_group(prefix, own_host, self._operation_timeout_s)

        try:
            await link.run(form)
        except BaseException:
            await link.close()
            raise
        return link

    async def close(self) -> None:
        links = tuple(self._links)
        await asyncio.gather(*(link.close() for link in links))
        await asyncio.gather(*(link.ended() for link in links))

    def _make_link(self, own_rank: int) -> GroupLink:
        link = GroupLink(self._store, own_rank, self._links.discard)
        self._links.add(link)
        return link


def _address_towards(host: str, port: int) -> str:
    """Our own address on the way to `host`: gloo would otherwise pick one by the host's name. Raises OSError."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])
