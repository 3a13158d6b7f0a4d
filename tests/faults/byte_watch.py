"""Something that happens in the middle of a chunk: once a number of its bytes has gone over this process's sockets."""

import contextlib
import fcntl
import os
import socket
import struct
import termios
import threading
from collections.abc import Callable
from typing import Any

from tests.faults.census import socket_inodes

_SO_MAX_PACING_RATE = 47  # asm-generic/socket.h; the kernel itself paces, on loopback too
_ACKED_AND_RECEIVED = struct.Struct("<QQ")
_ACKED_AT = 120  # of tcpi_bytes_acked in struct tcp_info; tcpi_bytes_received follows
_TICK_S = 0.0002
PACE_BYTES_S = 20_000_000  # a chunk of 256 KiB takes 13 ms: time enough to be in its middle
SEND_BUFFER_BYTES = 64 * 1024


class ByteWatch:
    """Slows down what the TCP sockets among `inodes` send, and calls `act(self, argument)`, on a thread of its own,
    once `num_bytes` more have gone either way. Bytes that have come and were not read yet are among these."""

    def __init__(self, inodes: set[int], num_bytes: int, act: Callable[["ByteWatch", Any], None], argument: Any):
        self._sockets = contextlib.ExitStack()
        self._tcp = [self._sockets.enter_context(each) for each in _tcp_sockets(inodes)]
        for each in self._tcp:
            each.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, struct.pack("I", PACE_BYTES_S))
            # What the kernel has taken it sends on, though the process is stopped or dead.
            each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        self._due = self._moved() - sum(_num_unread(each) for each in self._tcp) + num_bytes
        self._act = act
        self._argument = argument
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="byte watch")
        self._thread.start()

    def cut(self) -> None:
        """Break all of the sockets, as a lost network would."""
        for each in self._tcp:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        with self._sockets:
            while not self._stopped.wait(_TICK_S):
                if self._moved() >= self._due:
                    self._act(self, self._argument)
                    break
            for each in self._tcp:
                each.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, struct.pack("I", 0xFFFFFFFF))

    def _moved(self) -> int:
        moved = 0
        for each in self._tcp:
            moved += sum(
                _ACKED_AND_RECEIVED.unpack_from(each.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 136), _ACKED_AT)
            )
        return moved


def _num_unread(tcp: socket.socket) -> int:
    (count,) = struct.unpack("i", fcntl.ioctl(tcp, termios.FIONREAD, bytes(4)))
    return int(count)


def _tcp_sockets(inodes: set[int]) -> list[socket.socket]:
    """Descriptors of our own for the connected TCP sockets among these."""
    found = []
    for inode, descriptor in socket_inodes().items():
        if inode in inodes:
            each = socket.socket(fileno=os.dup(descriptor))
            connected = False
            if each.family in (socket.AF_INET, socket.AF_INET6) and each.type == socket.SOCK_STREAM:
                with contextlib.suppress(OSError):
                    each.getpeername()
                    connected = True
            if connected:
                found.append(each)
            else:
                each.close()
    return found
