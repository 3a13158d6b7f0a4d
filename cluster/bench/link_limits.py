"""What a machine can do without us: the limits that links are compared with."""

import socket
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import islice, pairwise

import numpy as np
import torch
import xxhash
from torch._C._distributed_c10d import ProcessGroupGloo, TCPStore

from twostroke.cluster.bench.link_case import Message
from twostroke.kvtransfer.host_units import HostUnits

IOV_MAX = 1024
BATCH_BYTES = 256 * 1024  # what links digest at a time
GROUP_TIMEOUT = timedelta(seconds=60)


def send_bare(connected: socket.socket, message: Message) -> None:
    """Every chunk, straight out of its blocks, by `sendmsg`."""
    units = HostUnits(message.cache, message.cut)
    chunks = [units.views(chunk) for chunk in message.chunks]
    for views in chunks:
        _pump(views, connected.sendmsg)


def receive_bare(connected: socket.socket, message: Message) -> None:
    """Every chunk, straight into its blocks, by `recvmsg_into`. Raises ConnectionResetError."""
    units = HostUnits(message.cache, message.cut)
    chunks = [units.views(chunk) for chunk in message.chunks]

    def receive(views: Sequence[memoryview]) -> int:
        received = connected.recvmsg_into(views, 0, socket.MSG_WAITALL)[0]
        if received == 0:
            raise ConnectionResetError("the peer is gone")
        return received

    for views in chunks:
        _pump(views, receive)


def _pump(views: Sequence[memoryview], call: Callable[[Sequence[memoryview]], int]) -> None:
    left = list(views)
    while left:
        moved = call(list(islice(left, IOV_MAX)))
        done = 0
        while done < len(left) and moved >= left[done].nbytes:
            moved -= left[done].nbytes
            done += 1
        del left[:done]
        if moved:
            left[0] = left[0][moved:]


class BareGroup:
    """A gloo group of two that sends one contiguous buffer for each prompt."""

    def __init__(self, rank: int, port: int, message: Message):
        store = TCPStore("127.0.0.1", port, None, rank == 0, GROUP_TIMEOUT, False)
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = GROUP_TIMEOUT
        options._threads = 1
        options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        self._store = store
        self._group = ProcessGroupGloo(store, rank, 2, options)
        self._buffers = [torch.ones(size, dtype=torch.uint8) for size in message.prompt_bytes]

    def send(self) -> None:
        for buffer in self._buffers:
            self._group.send([buffer], 1, 0).wait()  # type: ignore[attr-defined]

    def receive(self) -> None:
        for buffer in self._buffers:
            self._group.recv([buffer], 0, 0).wait()  # type: ignore[attr-defined]


def memcpy_s(message: Message) -> float:
    """Seconds for copying as many bytes from one contiguous piece of memory to another, chunk by chunk."""
    source, target = np.ones(message.num_bytes, np.uint8), np.ones(message.num_bytes, np.uint8)
    bounds = np.cumsum([0, *message.chunk_bytes])
    pieces = [(target[a:b], source[a:b]) for a, b in pairwise(bounds)]
    began = time.monotonic()
    for to, start in pieces:
        np.copyto(to, start)
    return time.monotonic() - began


def digest_s(message: Message) -> float:
    """Seconds that one side's digests add: of bytes that are in the processor's cache, since they are copied anyway.

    So every batch is digested once in passing, and timed when it is digested again.
    """
    units = HostUnits(message.cache, message.cut)
    state = xxhash.xxh3_128()
    seconds = 0.0
    for chunk in message.chunks:
        for view in units.views(chunk):
            for start in range(0, view.nbytes, BATCH_BYTES):
                batch = view[start : start + BATCH_BYTES]
                state.update(batch)
                began = time.perf_counter()
                state.update(batch)
                seconds += time.perf_counter() - began
    return seconds
