"""Bytes between memory and a socket together with their digest, in one call without the interpreter's lock.

From Python each system call and each view costs microseconds and a turn at the lock, which at several GB/s, and beside
an engine that also wants the lock, is as much as the bytes themselves. So one kernel calls the C library's `sendmsg` or
`recvmsg` and xxhash's C functions: batch by batch, so that the digest reads what is in the processor's cache, just
before the bytes go to the socket or just after they came from it.

Loads numba, so it is imported where a link works, not before.
"""

import ctypes
import functools
import os
import socket
from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

from twostroke.kvtransfer.digest import DIGEST_BYTES
from twostroke.kvtransfer.host_wire import BATCH_BYTES
from twostroke.kvtransfer.run_digest import NativeDigest, feed, make_run_digest

_IOV_MAX = 1024  # pieces in one system call; the kernel's limit
_EINTR = 4
_CLOSED = -(2**31)


@intrinsic  # type: ignore[untyped-decorator]
def _call_on_socket(typingctx: Any, function: Any, descriptor: Any, header: Any, flags: Any) -> Any:
    """ssize_t function(int descriptor, struct msghdr *header, int flags)."""
    del typingctx

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        del context, signature
        number, pointer = ir.IntType(32), cgutils.voidptr_t
        kind = ir.FunctionType(ir.IntType(64), [number, pointer, number])
        called = builder.inttoptr(arguments[0], kind.as_pointer())
        descriptor, flags = (builder.trunc(arguments[i], number) for i in (1, 3))
        return builder.call(called, [descriptor, builder.inttoptr(arguments[2], pointer), flags])

    return types.int64(function, descriptor, header, flags), codegen


@intrinsic  # type: ignore[untyped-decorator]
def _last_error(typingctx: Any, errno_location: Any) -> Any:
    """errno of the calling thread, by way of the C library's `__errno_location`."""
    del typingctx

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        del context, signature
        number = ir.IntType(32)
        kind = ir.FunctionType(number.as_pointer(), [])
        place = builder.call(builder.inttoptr(arguments[0], kind.as_pointer()), [])
        return builder.sext(builder.load(place), ir.IntType(64))

    return types.int64(errno_location), codegen


@intrinsic  # type: ignore[untyped-decorator]
def _finish_digest(typingctx: Any, digest: Any, state: Any, place: Any) -> Any:
    """Write XXH3_128bits_digest(state) to `place`: two words, the high one first, big-endian."""
    del typingctx

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        del signature
        word = ir.IntType(64)
        kind = ir.FunctionType(ir.LiteralStructType([word, word]), [cgutils.voidptr_t])
        called = builder.inttoptr(arguments[0], kind.as_pointer())
        both = builder.call(called, [builder.inttoptr(arguments[1], cgutils.voidptr_t)])
        words = builder.inttoptr(arguments[2], word.as_pointer())
        for index in (0, 1):
            value = builder.bswap(builder.extract_value(both, 1 - index))
            builder.store(value, builder.gep(words, [ir.Constant(ir.IntType(32), index)]), align=1)
        return context.get_dummy_value()

    return types.void(digest, state, place), codegen


def _pump(
    function: int,
    errno_location: int,
    descriptor: int,
    flags: int,
    is_send: bool,
    addresses: Any,
    run_bytes: int,
    trailer: int,
    update: int,
    digest: int,
    state: int,
) -> int:
    """Move the runs at `addresses`, int64 [n], and then the trailer. Returns 0, _CLOSED or minus errno."""
    batch = np.empty((_IOV_MAX, 2), np.int64)  # struct iovec: address, bytes
    left = np.empty((_IOV_MAX, 2), np.int64)
    header = np.zeros(7, np.int64)  # struct msghdr of 64-bit Linux: words 2 and 3 are msg_iov and msg_iovlen
    run, offset = 0, 0
    is_done = False
    while not is_done:
        count, room = 0, BATCH_BYTES
        while run < addresses.size and room > 0:
            start = addresses[run] + offset
            size = min(run_bytes - offset, room)
            if count > 0 and batch[count - 1, 0] + batch[count - 1, 1] == start:  # adjacent runs are one piece
                batch[count - 1, 1] += size
            elif count == _IOV_MAX - 1:
                break
            else:
                batch[count, 0] = start
                batch[count, 1] = size
                count += 1
            room -= size
            offset += size
            if offset == run_bytes:
                run, offset = run + 1, 0
        num_data = count
        if is_send:
            for i in range(num_data):
                feed(update, state, batch[i, 0], batch[i, 1])
        if run == addresses.size:
            if is_send:
                _finish_digest(digest, state, trailer)
            batch[count, 0] = trailer
            batch[count, 1] = DIGEST_BYTES
            count += 1
            is_done = True
        left[:count] = batch[:count]
        first = 0
        while first < count:
            header[2] = left.ctypes.data + 16 * first
            header[3] = count - first
            moved = _call_on_socket(function, descriptor, header.ctypes.data, flags)
            if moved < 0:
                error = _last_error(errno_location)
                if error == _EINTR:
                    continue
                return int(-error)
            if moved == 0:
                return _CLOSED
            while first < count and moved >= left[first, 1]:
                moved -= left[first, 1]
                first += 1
            if moved > 0:
                left[first, 0] += moved
                left[first, 1] -= moved
        if not is_send:
            for i in range(num_data):
                feed(update, state, batch[i, 0], batch[i, 1])
    return 0


_WORD = types.int64
_SIGNATURE = _WORD(*[_WORD] * 4, types.boolean, types.Array(_WORD, 1, "C"), _WORD, _WORD, _WORD, _WORD, _WORD)
try:
    _kernel = njit(_SIGNATURE, nogil=True, cache=True)(_pump)
except RuntimeError:  # there is no writable folder for numba's cache: every start compiles anew
    _kernel = njit(_SIGNATURE, nogil=True)(_pump)


def make_socket_pump(run_bytes: int) -> "SocketPump | None":
    """None where the system's or xxhash's C functions can't be called: not Linux, or a build that hides its symbols."""
    system, digest = _system(), make_run_digest()
    return SocketPump(system, digest, run_bytes) if system is not None and isinstance(digest, NativeDigest) else None


class SocketPump:
    """Moves parts of chunks over blocking sockets, in runs of `run_bytes`; one thread at a time."""

    def __init__(self, system: "_System", digest: NativeDigest, run_bytes: int):
        self._system = system
        self._digest = digest
        self._run_bytes = run_bytes
        self._trailer = np.zeros(DIGEST_BYTES, np.uint8)

    def send(self, connected: socket.socket, addresses: NDArray[np.int64], seed: int) -> None:
        """Send the runs at `addresses`, int64 [n], and their digest. Raises OSError.

        The caller vouches for the memory there until this returns.
        """
        self._move(connected, addresses, seed, is_send=True)

    def receive(self, connected: socket.socket, addresses: NDArray[np.int64], seed: int) -> bool:
        """Receive into the runs at `addresses`; whether the digest that follows holds. Otherwise as `send`."""
        self._move(connected, addresses, seed, is_send=False)
        return bool(self._trailer.tobytes() == self._digest.result())

    def _move(self, connected: socket.socket, addresses: NDArray[np.int64], seed: int, *, is_send: bool) -> None:
        self._digest.start(seed)
        function, flags = self._system.sending if is_send else self._system.receiving
        result = _kernel(
            function,
            self._system.errno_location,
            connected.fileno(),
            flags,
            is_send,
            addresses,
            self._run_bytes,
            self._trailer.ctypes.data,
            *self._digest.addresses,
        )
        if result == _CLOSED:
            raise ConnectionResetError("the peer closed it")
        if result:
            raise OSError(-result, os.strerror(-result))


class _System:
    """The C library's functions, by their addresses. Raises OSError or AttributeError where it has not all of them."""

    def __init__(self) -> None:
        library = ctypes.CDLL(None)

        def address(name: str) -> int:
            return int(ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0)

        self.errno_location = address("__errno_location")
        self.sending = (address("sendmsg"), int(socket.MSG_NOSIGNAL))
        self.receiving = (address("recvmsg"), int(socket.MSG_WAITALL))


@functools.cache
def _system() -> _System | None:
    try:
        return _System()
    except (OSError, AttributeError):
        return None
