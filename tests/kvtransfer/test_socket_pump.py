"""The kernel behind TCP streams, on pairs of connected sockets."""

import random
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import xxhash
from numpy.typing import NDArray

from twostroke.kvtransfer.digest import DIGEST_BYTES
from twostroke.kvtransfer.host_wire import BATCH_BYTES
from twostroke.kvtransfer.socket_pump import SocketPump, make_socket_pump


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as one:
        other, _ = server.accept()
        with other:
            yield one, other


def pump(run_bytes: int) -> SocketPump:
    made = make_socket_pump(run_bytes)
    if made is None:
        pytest.skip("this system's or xxhash's C functions can't be called")
    return made


def memory(num_runs: int, run_bytes: int, seed: int) -> tuple[NDArray[np.uint8], NDArray[np.int64], bytes]:
    """Random bytes, the addresses of all runs in a random order with some neighbours together, and those bytes."""
    array = np.frombuffer(bytearray(random.Random(seed).randbytes(num_runs * run_bytes)), np.uint8)
    groups = [list(range(first, min(first + 3, num_runs))) for first in range(0, num_runs, 3)]
    random.Random(seed).shuffle(groups)
    order = np.array([run for group in groups for run in group], np.int64)
    content = array.reshape(num_runs, run_bytes)[order].tobytes() if num_runs else b""
    return array, array.ctypes.data + order * run_bytes, content


SIZES = [(0, 8), (1, 1), (5, 24), (3000, 8), (7, BATCH_BYTES // 2 + 3), (2, 3 * BATCH_BYTES), (3, BATCH_BYTES)]


@pytest.mark.parametrize(("num_runs", "run_bytes"), SIZES)
def test_what_is_sent_are_the_runs_in_their_order_and_xxhashs_own_digest(
    num_runs: int, run_bytes: int, ends: tuple[socket.socket, socket.socket]
) -> None:
    _, addresses, content = memory(num_runs, run_bytes, 1)
    sending = threading.Thread(target=pump(run_bytes).send, args=(ends[0], addresses, 2**64 - 3))
    sending.start()
    received = b""
    while len(received) < len(content) + DIGEST_BYTES:
        received += ends[1].recv(2**20)
    sending.join()
    assert received == content + xxhash.xxh3_128(content, seed=2**64 - 3).digest()


@pytest.mark.parametrize(("num_runs", "run_bytes"), SIZES)
def test_what_is_received_lands_in_the_runs_in_their_order(
    num_runs: int, run_bytes: int, ends: tuple[socket.socket, socket.socket]
) -> None:
    array, addresses, content = memory(num_runs, run_bytes, 1)
    array[:] = 0
    receiver = pump(run_bytes)
    for trailer, expected in ((xxhash.xxh3_128(content, seed=6).digest(), True), (bytes(DIGEST_BYTES), False)):
        sending = threading.Thread(target=ends[0].sendall, args=(content + trailer,))
        sending.start()
        assert receiver.receive(ends[1], addresses, 6) is expected
        sending.join()
        order = (addresses - array.ctypes.data) // run_bytes
        assert not num_runs or array.reshape(num_runs, run_bytes)[order].tobytes() == content


def test_a_peer_that_has_closed_is_an_error_of_the_system(ends: tuple[socket.socket, socket.socket]) -> None:
    array, addresses, content = memory(4, 1000, 1)
    array[:] = 0
    ends[0].sendall(content[:2500])
    ends[0].close()
    with pytest.raises(ConnectionResetError):
        pump(1000).receive(ends[1], addresses, 1)
    ends[1].shutdown(socket.SHUT_RDWR)
    with pytest.raises(BrokenPipeError):
        pump(1000).send(ends[1], addresses, 1)
    ends[1].close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        pump(1000).send(ends[1], addresses, 1)


def test_a_signal_does_not_end_a_call(ends: tuple[socket.socket, socket.socket]) -> None:
    array, addresses, content = memory(4, 100_000, 1)
    array[:] = 0
    whole = content + xxhash.xxh3_128(content, seed=1).digest()
    caught: list[int] = []
    main, main_stat = threading.get_ident(), Path(f"/proc/self/task/{threading.get_native_id()}/stat")

    def interrupt() -> None:
        for at in range(0, len(whole), 50_000):
            while main_stat.read_text(encoding="ascii").rsplit(")", 1)[1].split()[0] != "S":
                pass  # until it sleeps in the call, with no byte to return
            signal.pthread_kill(main, signal.SIGUSR1)
            ends[0].sendall(whole[at : at + 50_000])

    before = signal.signal(signal.SIGUSR1, lambda number, _: caught.append(number))
    sending = threading.Thread(target=interrupt)
    try:
        sending.start()
        assert pump(100_000).receive(ends[1], addresses, 1) is True
    finally:
        sending.join()
        signal.signal(signal.SIGUSR1, before)
    assert caught


def test_the_interpreter_is_left_to_other_threads(ends: tuple[socket.socket, socket.socket]) -> None:
    _, addresses, _ = memory(4, 1000, 1)
    closing = threading.Timer(0.05, ends[0].close)
    closing.start()  # could never run while a waiting call held the lock
    with pytest.raises(ConnectionResetError):
        pump(1000).receive(ends[1], addresses, 1)
    closing.join()
