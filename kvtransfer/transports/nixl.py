"""KV by NIXL, over RDMA: the target reads each chunk out of the source's registered memory, with one descriptor.

The link's own socket (sockets.py: a listener, a one-time token) carries few bytes. The source sends its agent's
metadata and its buffers' addresses once, then, for each chunk, its buffer and length; the target answers with one byte
when it has read that. NIXL moves the chunk itself, from a buffer of the source's into one of the target's.

Why packed, and not block by block: a descriptor costs about 10 us wherever it was measured, and a chunk of 4 MiB in
rows of 4 KiB (heads shared unequally) has 1024 of them. Packed it has one, whatever the blocks' sizes are, encodings
work, and what is registered (and locked in memory) is a few chunks a link instead of the whole cache. The price is one
copy on either side, of bytes that the checksum reads anyway.

Why a zombie, or a read that hangs, can do no harm: the target reads, the source never writes; and it reads into its
buffer. From there bytes get into blocks by the target's own thread, after their checksum held, and not once the link is
closed. NIXL itself can't be trusted with more: releasing a read that is under way returns as if it had ended, while UCX
goes on with it until the agent is gone. So each link has an agent, which ends with it, and then its buffers.

Two sockets listen: our LinkListener, on the worker's address, until the peer has connected; and UCX, which needs TCP to
find out that a peer is gone, on that address's interface alone (UCX_NET_DEVICES, unless it is set already). NIXL's
listener and its progress thread, which takes a whole core even when idle, are off: UCX's part in a read is done by the
threads that wait for its end.

Two machines need RDMA hardware for this. Over TCP, UCX emulates reads, at a third of what our own `tcp` moves, and ends
the source's process ("Fatal: unexpected error") where a target leaves amid one: so such pairs are refused. Within a
machine it copies from process to process (cross-memory attach), which is how this runs, and is tested, on CPU hosts.

Not confirmed on hardware: RDMA devices, and buffers in a GPU's memory.
"""

import contextlib
import importlib
import logging
import os
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Annotated, Any

import msgspec
import torch
from torch import Tensor

from twostroke.kvtransfer.fabric import interface_at, rdma_ports
from twostroke.kvtransfer.layout import KVShard, Segment
from twostroke.kvtransfer.link import DeviceStore, KVStore, LinkParams
from twostroke.kvtransfer.transports.host_units import count_units
from twostroke.kvtransfer.transports.sockets import (
    TOKEN_BYTES,
    LinkListener,
    LinkThread,
    Rest,
    SocketEnd,
    SocketTransport,
    Token,
    dial_host,
    listen_on,
    read_params,
    receive_exactly,
)
from twostroke.kvtransfer.transports.staging import MAX_CHUNK_BYTES, Staging, make_staging
from twostroke.protocol.errors import ConnectionLost, ProtocolError, how_to_install

PACKAGE = "nixl._api"

_NET_DEVICES = "UCX_NET_DEVICES"
_LENGTH = struct.Struct("<I")
_CHUNK = struct.Struct("<BI")  # which of the source's buffers, how many bytes of it
_DONE = b"\x01"
_MAX_OFFER_BYTES = 64 * 1024
_GREETING_BYTES = 8
_SPINS, _NAP_S = 50, 20e-6  # polls without a pause, about as long as a chunk over a fast network takes; then with one
_PROGRESS_S = 0.2e-3  # between the source's turns at helping along, which no read over real RDMA needs

Positive = Annotated[int, msgspec.Meta(ge=1)]


def missing() -> str | None:
    """Return what this process lacks for NIXL; None: nothing."""
    try:
        importlib.import_module(PACKAGE)
    except ImportError as error:
        return f"the package nixl ({how_to_install('nixl')}): {error}"
    return None


class _NixlParams(msgspec.Struct):
    """LinkParams of a nixl link."""

    host: str
    port: int
    token: Token
    machine: str
    has_rdma: Annotated[int, msgspec.Meta(ge=0, le=1)]
    chunk_bytes: Positive  # that the target has room for


class Offered(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The description of a source's buffers."""

    metadata: bytes  # of its agent
    addresses: tuple[int, ...]
    num_units: Positive  # that each has room for
    device: int  # that they are on


class NixlTransport(SocketTransport["NixlEnd"]):
    """Makes nixl links for one rank of a worker."""

    name = "nixl"

    def __init__(
        self, store: KVStore, *, machine: str, join_timeout_s: float = 10.0, max_chunk_bytes: int | None = None
    ):
        """`machine` is equal where two processes can copy each other's memory. Chunks have `max_chunk_bytes` at most,
        or one unit."""
        super().__init__(join_timeout_s)
        self._store = store
        self._machine = machine
        self._has_rdma = any(port.is_active for port in rdma_ports())
        self._max_chunk_bytes = max_chunk_bytes or MAX_CHUNK_BYTES

    async def prepare(self, host: str, shard: KVShard) -> "LinkListener[NixlTarget]":
        """Listen on `host`. Raises ConnectionLost where it is not an address of this machine."""
        listener = await listen_on(host)
        token = secrets.token_bytes(TOKEN_BYTES)
        port = listener.getsockname()[1]
        params = _NixlParams(host, port, token, self._machine, int(self._has_rdma), self._max_chunk_bytes)

        async def make_link(connections: list[socket.socket]) -> NixlTarget:
            return await self.opened(
                NixlTarget(connections[0], self._store, shard, self._units(shard), self.links.discard)
            )

        return LinkListener(self, listener, token, msgspec.to_builtins(params), make_link, most=1)

    async def join(self, params: LinkParams, shard: KVShard) -> "NixlSource":
        theirs = read_params(params, _NixlParams, self.name)
        if theirs.machine != self._machine and not (theirs.has_rdma and self._has_rdma):
            side = "the source's" if theirs.has_rdma else "the target's"
            raise ConnectionLost(
                f"nixl joins two machines over RDMA, and {side} has no active port of any: "
                "set kv_transfer.transport to auto"
            )
        (connected,) = await dial_host(
            theirs.host, theirs.port, theirs.token, most=1, join_timeout_s=self.join_timeout_s
        )
        units = min(self._units(shard), max(1, theirs.chunk_bytes // shard.unit_bytes))
        return await self.opened(NixlSource(connected, self._store, shard, units, self.links.discard))

    def _units(self, shard: KVShard) -> int:
        """Return the most units of one chunk."""
        return max(1, self._max_chunk_bytes // shard.unit_bytes)


class NixlEnd(SocketEnd):
    """The common part of both ends: the link's threads, a NIXL agent, and its buffers, which a queue hands out."""

    def __init__(
        self,
        connected: socket.socket,
        store: KVStore,
        shard: KVShard,
        num_units: int,
        on_close: Callable[["NixlEnd"], None],
    ):
        """`num_units` is what a buffer has room for, at most."""
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        super().__init__(LinkThread(connected, "kv-nixl"), on_close)
        self._staging: Staging = make_staging(store, shard)
        self._unit_bytes = shard.unit_bytes
        self._num_units = num_units
        self._memory, self._device = "DRAM", 0
        if isinstance(store, DeviceStore):
            self._memory, self._device = "VRAM", torch.device(store.device).index or 0
        self._agent: Any = None  # from `_register` to `_let_go`
        self._buffers: list[Tensor] = []
        self._registered: Any = None
        self._free: SimpleQueue[int] = SimpleQueue()

    def _register(self) -> None:
        """Make the agent and the buffers."""
        self._agent = make_agent(self.thread.socket.getsockname()[0])
        self._buffers = [self._staging.buffer(index, self._num_units) for index in range(self._staging.num_buffers)]
        places = [(buffer.data_ptr(), buffer.numel(), self._device, "") for buffer in self._buffers]
        self._registered = ask(self._agent.register_memory, places, self._memory)
        for index in range(len(self._buffers)):
            self._free.put(index)

    def _let_go(self) -> None:
        """End the agent first, and with it every read that was under way, then drop what it may have read into."""
        if self._registered is not None:
            with contextlib.suppress(ConnectionLost):
                ask(self._agent.deregister_memory, self._registered)
        self._registered = None
        self._agent = None
        self._buffers = []

    def _packed(self, index: int, num_units: int) -> Tensor:
        """Return the beginning of a buffer, with room for the units and their checksum. Raises ProtocolError."""
        if num_units > self._num_units:
            raise ProtocolError(f"a chunk of {num_units} units has no room in buffers of {self._num_units}")
        return self._staging.buffer(index, num_units)

    def _places(self, address: int, num_bytes: int, device: int) -> Any:
        """One descriptor."""
        return ask(self._agent.get_xfer_descs, [(address, num_bytes, device)], self._memory)


class NixlSource(NixlEnd):
    """The sending end: packs a chunk, says where it is, and waits until it was read."""

    shortfall = None

    @property
    def max_chunk_bytes(self) -> int | None:
        return self._num_units * self._unit_bytes

    async def send(self, segments: Sequence[Segment], seed: int) -> None:
        await self.thread.call(self._send, segments, seed)

    def _open(self, timeout_s: float) -> None:
        self._register()
        metadata = ask(self._agent.get_agent_metadata)
        addresses = tuple(buffer.data_ptr() for buffer in self._buffers)
        offered = msgspec.msgpack.encode(Offered(metadata, addresses, self._num_units, self._device))
        self.thread.socket.sendall(_LENGTH.pack(len(offered)) + offered)
        self._await_done(time.monotonic() + timeout_s)

    def _send(self, segments: Sequence[Segment], seed: int) -> Rest[None] | None:
        index = self._free.get()  # while all are being read, this thread waits: until then, or until the link breaks
        try:
            packed = self._packed(index, count_units(segments))
            self._staging.pack(segments, seed, packed)
            self._announce(index, packed)
        except BaseException:
            self._free.put(index)
            raise
        return Rest(lambda: self._taken(index))

    def _announce(self, index: int, packed: Tensor) -> None:
        self.thread.socket.sendall(_CHUNK.pack(index, packed.numel()))

    def _taken(self, index: int) -> None:
        try:
            self._await_done(None)
        finally:
            self._free.put(index)

    def _await_done(self, until_s: float | None) -> None:
        """Wait for the target's word, and let UCX do what it has to meanwhile."""
        connected = self.thread.socket
        while not select.select([connected], (), (), _PROGRESS_S)[0]:
            if until_s is not None and time.monotonic() > until_s:
                raise ConnectionLost("the target has not read from this side in time")
            ask(self._agent.get_new_notifs)
        receive_exactly(connected, len(_DONE))


class NixlTarget(NixlEnd):
    """The receiving end: the only one that moves bytes."""

    def __init__(
        self,
        connected: socket.socket,
        store: KVStore,
        shard: KVShard,
        num_units: int,
        on_close: Callable[[NixlEnd], None],
    ):
        super().__init__(connected, store, shard, num_units, on_close)
        self._peer = ""  # its agent's name, and where its buffers are: from `_open` on
        self._offered = Offered(b"", (), 1, 0)

    async def receive(self, segments: Sequence[Segment], seed: int) -> bool:
        return await self.thread.call(self._receive, segments, seed)

    async def discard(self, num_units: int) -> None:
        await self.thread.call(self._discard)

    def _open(self, timeout_s: float) -> None:
        connected = self.thread.socket
        (length,) = _LENGTH.unpack(receive_exactly(connected, _LENGTH.size))
        if length > _MAX_OFFER_BYTES:
            raise ProtocolError(f"the peer describes its buffers in {length} bytes")
        try:
            offered = msgspec.msgpack.decode(receive_exactly(connected, length), type=Offered)
        except msgspec.DecodeError as error:
            raise ProtocolError(f"the peer's buffers are not described as they must be: {error}") from error
        if offered.num_units > self._num_units or not offered.addresses:
            raise ProtocolError(f"the peer's buffers have {offered.num_units} units, and ours {self._num_units}")
        self._offered, self._num_units = offered, offered.num_units
        self._register()
        self._peer = str(ask(self._agent.add_remote_agent, offered.metadata), "utf-8")
        # UCX connects with the first read, for some of its seconds: no chunk, whose time is limited, shall be that one.
        self._read(offered.addresses[0], self._buffers[0][:_GREETING_BYTES], time.monotonic() + timeout_s)
        connected.sendall(_DONE)

    def _receive(self, segments: Sequence[Segment], seed: int) -> bool | Rest[bool]:
        index = self._free.get()  # while all are being unpacked, this thread waits
        try:
            packed = self._packed(index, count_units(segments))
            self._fetch(packed)
        except BaseException:
            self._free.put(index)
            raise
        return Rest(lambda: self._unpack(index, segments, seed, packed))

    def _fetch(self, packed: Tensor) -> None:
        """The next chunk, into this buffer."""
        theirs, num_bytes = self._next_chunk()
        if num_bytes != packed.numel():
            raise ProtocolError(f"a chunk of {packed.numel()} bytes was announced, and one of {num_bytes} was packed")
        self._read(self._offered.addresses[theirs], packed, None)
        self.thread.socket.sendall(_DONE)

    def _unpack(self, index: int, segments: Sequence[Segment], seed: int, packed: Tensor) -> bool:
        try:
            if self.thread.is_broken:
                raise ConnectionLost("the link is closed")
            return self._staging.unpack(segments, seed, packed)
        finally:
            self._free.put(index)

    def _discard(self) -> None:
        self._next_chunk()
        self.thread.socket.sendall(_DONE)

    def _next_chunk(self) -> tuple[int, int]:
        """Return the index of the source's buffer that holds the next chunk, and its bytes there."""
        index, num_bytes = _CHUNK.unpack(receive_exactly(self.thread.socket, _CHUNK.size))
        if index >= len(self._offered.addresses):
            raise ProtocolError(f"the peer names a buffer outside of its {len(self._offered.addresses)}")
        return index, num_bytes

    def _read(self, address: int, into: Tensor, until_s: float | None) -> None:
        """Read from the peer's memory. Raises ConnectionLost, also where the link was broken off meanwhile."""
        here = self._places(into.data_ptr(), into.numel(), self._device)
        there = self._places(address, into.numel(), self._offered.device)
        handle = ask(self._agent.initialize_xfer, "READ", here, there, self._peer)
        try:
            state, polls = ask(self._agent.transfer, handle), 0
            while state == "PROC":
                if self.thread.is_broken or (until_s is not None and time.monotonic() > until_s):
                    raise ConnectionLost("a read was given up before it had ended")
                polls += 1
                if polls > _SPINS:
                    time.sleep(_NAP_S)
                state = ask(self._agent.check_xfer_state, handle)
            if state != "DONE":
                raise ConnectionLost("the peer's memory could not be read")
        finally:
            with contextlib.suppress(ConnectionLost):
                ask(self._agent.release_xfer_handle, handle)
            del handle  # an exception's traceback would keep it, and it the agent


def ask(method: Callable[..., Any], *arguments: Any) -> Any:
    """Return what NIXL answers. Raises ConnectionLost for its errors: many classes with no base but Exception.

    Neither the error nor its call is kept: a traceback would keep the agent.
    """
    try:
        return method(*arguments)
    except Exception as error:
        reason = f"nixl: {type(error).__name__} {error}"
    del method, arguments
    raise ConnectionLost(reason)


_making_agents = threading.Lock()


def make_agent(address: str) -> Any:
    """A nixl_agent over UCX, for links of this machine's `address`. Raises ConnectionLost."""
    with _making_agents:
        if _NET_DEVICES not in os.environ:
            interface = interface_at(address)
            if interface is None:
                raise ConnectionLost(
                    f"no interface has {address} as its first IPv4 address: name UCX's in {_NET_DEVICES}"
                )
            # UCX reads it, NIXL has no other way to say it: its option ucx_devices leaves TCP listening everywhere.
            active = [port.name for port in rdma_ports() if port.is_active]
            os.environ[_NET_DEVICES] = ",".join([*active, interface])
        logging.getLogger("nixl").setLevel(logging.WARNING)
        nixl = importlib.import_module(PACKAGE)
        config = nixl.nixl_agent_config(
            enable_prog_thread=False,
            enable_listen_thread=False,
            backends=["UCX"],
            sync_mode=nixl.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT,  # a link has two threads
        )
        return ask(nixl.nixl_agent, secrets.token_hex(16), config)
