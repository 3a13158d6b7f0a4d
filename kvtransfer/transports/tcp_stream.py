"""One TCP connection of a link: units and their digest, through a thread of its own.

A part of a chunk is its units' bytes and then their digest, which is computed batch by batch while the bytes are hot:
the sender's just before they go to the kernel, the receiver's just after they came from it.
"""

import socket
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import xxhash
from numpy.typing import NDArray

from twostroke.kvtransfer.digest import DIGEST_BYTES
from twostroke.kvtransfer.host_wire import BATCH_BYTES, HostWire
from twostroke.kvtransfer.layout import Segment
from twostroke.kvtransfer.transports.link_thread import LinkThread
from twostroke.protocol.errors import ConnectionLost

if TYPE_CHECKING:
    from twostroke.kvtransfer.socket_pump import SocketPump

_Call = Callable[[list[memoryview], tuple[()], int], int]

_IOV_MAX = 1024  # views in one system call; the kernel's limit


class TcpStream:
    """Owns a connected socket and, in `thread`, the thread that blocks on it, which all methods belong to."""

    def __init__(self, connected: socket.socket, wire: HostWire, pump: "SocketPump | None"):
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.thread = LinkThread(connected, "kv-tcp")
        self._socket = connected
        self._wire = wire
        self._pump = pump

    # --- parts of chunks; these block, and raise OSError, ConnectionLost or ValueError ---

    def send_blocks(self, addresses: NDArray[np.int64], seed: int) -> None:
        """Send whole blocks and their digest. Only with a pump."""
        self._own_pump().send(self._socket, addresses, seed)

    def receive_blocks(self, addresses: NDArray[np.int64], seed: int) -> bool:
        """Receive whole blocks into their places; whether their digest holds. Only with a pump."""
        return self._own_pump().receive(self._socket, addresses, seed)

    def send(self, segments: Sequence[Segment], num_bytes: int, seed: int) -> None:
        """Send units, `num_bytes` on the wire, and their digest."""
        digest = xxhash.xxh3_128(seed=seed)
        for batch in self._wire.outgoing(segments):
            for view in batch:
                digest.update(view)
                num_bytes -= view.nbytes
            if num_bytes == 0:
                batch.append(memoryview(digest.digest()))
            self._move(batch, self._socket.sendmsg)

    def receive(self, segments: Sequence[Segment], num_bytes: int, seed: int) -> bool:
        """Receive units into their places; whether their digest holds."""
        digest = xxhash.xxh3_128(seed=seed)
        trailer = memoryview(bytearray(DIGEST_BYTES))
        for batch in self._wire.incoming(segments):
            num_bytes -= sum(view.nbytes for view in batch)
            self._move([*batch, trailer] if num_bytes == 0 else batch, self._read)
            for view in batch:
                digest.update(view)
        return bool(digest.digest() == trailer)

    def discard(self, num_bytes: int) -> None:
        """Receive units and their digest into nowhere."""
        left = num_bytes + DIGEST_BYTES
        scratch = memoryview(bytearray(min(left, BATCH_BYTES)))
        while left:
            count = min(left, len(scratch))
            self._move([scratch[:count]], self._read)
            left -= count

    # --- small parts, tried on the event loop while the thread is idle ---

    def try_send(self, views: Sequence[memoryview], seed: int) -> list[memoryview]:
        """Send `views` and their digest as far as that goes without waiting. Returns what is left, for `send_rest`."""
        return self._move([*views, memoryview(_digest(views, seed))], self._socket.sendmsg, socket.MSG_DONTWAIT)

    def send_rest(self, views: Sequence[memoryview]) -> None:
        self._move(views, self._socket.sendmsg)

    def try_receive(self, views: Sequence[memoryview]) -> list[memoryview]:
        """As `try_send`: fill `views`, the digest's included."""
        return self._move(views, self._read, socket.MSG_DONTWAIT)

    def receive_rest(self, views: Sequence[memoryview]) -> None:
        self._move(views, self._read)

    # --- inside ---

    def _move(self, views: Sequence[memoryview], call: _Call, flags: int = 0) -> list[memoryview]:
        """Empty or fill `views`; what is left where that would have to wait and `flags` say not to."""
        left = list(views)
        while left:
            if self.thread.is_broken:
                raise ConnectionLost("the link is closed")
            try:
                moved = call(left[:_IOV_MAX], (), flags)
            except BlockingIOError:
                break
            done = 0
            while done < len(left) and moved >= left[done].nbytes:
                moved -= left[done].nbytes
                done += 1
            del left[:done]
            if moved:
                left[0] = left[0][moved:]
        return left

    def _own_pump(self) -> "SocketPump":
        if self._pump is None:
            raise ValueError("this stream has no pump")
        return self._pump

    def _read(self, views: Sequence[memoryview], _: tuple[()], flags: int) -> int:
        received = self._socket.recvmsg_into(views, 0, flags or socket.MSG_WAITALL)[0]
        if received == 0:
            raise ConnectionResetError("the peer closed it")
        return received


def is_intact(views: Sequence[memoryview], trailer: memoryview, seed: int) -> bool:
    """Whether what was received into `views` fits its digest."""
    return _digest(views, seed) == trailer


def _digest(views: Sequence[memoryview], seed: int) -> bytes:
    digest = xxhash.xxh3_128(seed=seed)
    for view in views:
        digest.update(view)
    return bytes(digest.digest())
