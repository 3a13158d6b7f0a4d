"""KV through torch.distributed: a process group of two ranks per link. Gloo on CPUs, NCCL between GPUs.

One group per link, because a receive that times out closes every connection of its group. Each has a TCPStore of its
own for the rendezvous, on a socket that we bind (left alone, TCPStore listens on every interface), under a one-time
prefix.

A chunk is one message: its units packed one after the other, and their digest. Staging memory of a link is twice the
largest chunk it has carried. Where gloo receives, it is twice the largest chunk possible: gloo ends the process for a
message that is larger than its receive, which happens once chunks and announcements are out of step (and for a source
whose chunks are larger than `max_chunk_bytes` here). NCCL asks for equal sizes on both sides: what becomes of chunks
out of step there is not known. Why a hung operation or a woken zombie can't write into blocks: see `group_link`.

Not confirmed on hardware: what concerns NCCL here is written and type-checked, but was not yet run on GPUs.
"""

import asyncio
import contextlib
import secrets
import socket

from twostroke.kvtransfer.layout import Cut
from twostroke.kvtransfer.link import LinkParams
from twostroke.kvtransfer.store import KVStore
from twostroke.kvtransfer.transports.group_link import RECEIVER_RANK, SENDER_RANK, GroupLink
from twostroke.kvtransfer.transports.staging import MAX_CHUNK_BYTES
from twostroke.protocol.errors import ConnectionLost


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
    """Makes GroupLinks for one rank of a worker.

    `join_timeout_s` bounds the rendezvous, `operation_timeout_s` one send or receive, once both sides know of it: it is
    also how long a thread may outlive its link. Both belong at the lease, within which a peer has to do either.
    `max_chunk_bytes` is what any source sends at once at most, as in its TransferConfig.
    """

    name = "torch_distributed"

    def __init__(
        self,
        store: KVStore,
        *,
        join_timeout_s: float = 5.0,
        operation_timeout_s: float | None = None,
        max_chunk_bytes: int = MAX_CHUNK_BYTES,
    ):
        self._store = store
        self._join_timeout_s = join_timeout_s
        self._operation_timeout_s = join_timeout_s if operation_timeout_s is None else operation_timeout_s
        self._max_chunk_bytes = max_chunk_bytes
        self._links: set[GroupLink] = set()

    async def prepare(self, host: str, cut: Cut) -> PendingGroup:
        link = self._make_link(cut, RECEIVER_RANK)
        try:
            port = await link.run(lambda: link.open_rendezvous(host, None, self._join_timeout_s))
        except BaseException:
            await link.close()
            raise
        return PendingGroup(link, host, port, self._operation_timeout_s)

    async def join(self, params: LinkParams, cut: Cut) -> GroupLink:
        host, port, prefix = params.get("host"), params.get("port"), params.get("prefix")
        if not isinstance(host, str) or not isinstance(port, int) or not isinstance(prefix, str):
            raise ConnectionLost("the peer's link parameters are not those of torch_distributed")
        link = self._make_link(cut, SENDER_RANK)

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

    def _make_link(self, cut: Cut, own_rank: int) -> GroupLink:
        link = GroupLink(self._store, cut, own_rank, self._links.discard, self._max_chunk_bytes)
        self._links.add(link)
        return link


def _address_towards(host: str, port: int) -> str:
    """Our own address on the way to `host`: gloo would otherwise pick one by the host's name. Raises OSError."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])
