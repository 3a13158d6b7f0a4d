"""What a peer may claim of the cache that it hands over, and what is mapped of it."""

import fcntl
import mmap
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.rigs.shm_links import NUM_LAYERS, assert_nothing_is_left, belongings, cuts, make_cache
from twostroke.kvtransfer.transports.shared_pool import PoolDescription, receive_pool, send_pool
from twostroke.model.cache.kv_cache import SharedKVCache
from twostroke.protocol.errors import ProtocolError


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    for end in (left, right):
        end.settimeout(5)
    with left, right:
        yield left, right


def describe(cache: SharedKVCache, **changes: Any) -> PoolDescription:
    offsets = tuple(cache.layer_offset(layer) for layer in range(NUM_LAYERS))
    described = PoolDescription(cache.layout, cache.num_blocks, offsets, 0, 2, 4)
    return msgspec.structs.replace(described, **changes)


def hand_over(end: socket.socket, descriptors: list[int], payload: bytes) -> None:
    socket.send_fds(end, [len(payload).to_bytes(4, "little")], descriptors)
    end.sendall(payload)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"num_blocks": 17}, "not all within"),
        ({"num_blocks": 0}, "has 0 blocks"),
        ({"num_blocks": 2**40}, "blocks"),
        ({"layer_offsets": (0, 4096, -8)}, "not all within"),
        ({"layer_offsets": (0, 4096, 2**60)}, "not all within"),
        ({"layer_offsets": (0,)}, "places 1 of its 3 layers"),
        ({"first_head": 1}, "heads that its cache has not"),
        ({"first_head": -1}, "heads that its cache has not"),
        ({"num_heads": 1}, "other units"),
        ({"unit_tokens": 2}, "other units"),
    ],
)
def test_a_pool_that_is_not_as_agreed_is_not_mapped(
    changes: dict[str, Any], complaint: str, ends: tuple[socket.socket, socket.socket]
) -> None:
    cache = make_cache(16, head_dim=32)
    before = belongings()
    hand_over(ends[0], [cache.memory_fd], msgspec.msgpack.encode(describe(cache, **changes)))
    with pytest.raises(ProtocolError, match=complaint):
        receive_pool(ends[1], cuts(cache, cache)[1])
    assert_nothing_is_left(before)


@pytest.mark.parametrize(("field", "value"), [("model", "other"), ("dtype", "bfloat16"), ("num_layers", 0)])
def test_a_pool_of_another_layout_is_not_mapped(
    field: str, value: Any, ends: tuple[socket.socket, socket.socket]
) -> None:
    cache = make_cache()
    described = describe(cache, layout=msgspec.structs.replace(cache.layout, **{field: value}))
    hand_over(ends[0], [cache.memory_fd], msgspec.msgpack.encode(described))
    with pytest.raises(ProtocolError, match="doesn't fit"):
        receive_pool(ends[1], cuts(cache, cache)[1])


def test_memory_that_could_shrink_is_not_mapped(ends: tuple[socket.socket, socket.socket], tmp_path: Path) -> None:
    cache = make_cache()
    size = os.fstat(cache.memory_fd).st_size
    unsealed = os.memfd_create("unsealed", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    ordinary = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    try:
        for descriptor, complaint in ((unsealed, "could shrink"), (ordinary, "not a memfd|could shrink")):
            os.ftruncate(descriptor, size)
            hand_over(ends[0], [descriptor], msgspec.msgpack.encode(describe(cache)))
            with pytest.raises(ProtocolError, match=complaint):
                receive_pool(ends[1], cuts(cache, cache)[1])
    finally:
        os.close(unsealed)
        os.close(ordinary)


@pytest.mark.parametrize(
    ("payload", "complaint"),
    [(b"\xc1", "not described"), (msgspec.msgpack.encode([1, 2]), "not described"), (bytes(70_000), "in 70000 bytes")],
)
def test_a_pool_that_is_not_described_is_not_mapped(
    payload: bytes, complaint: str, ends: tuple[socket.socket, socket.socket]
) -> None:
    cache = make_cache()
    hand_over(ends[0], [cache.memory_fd], payload)
    with pytest.raises(ProtocolError, match=complaint):
        receive_pool(ends[1], cuts(cache, cache)[1])


def test_a_peer_that_sends_no_descriptor_or_leaves_is_noticed(ends: tuple[socket.socket, socket.socket]) -> None:
    cache = make_cache()
    ends[0].sendall(b"\0\0\0\0")
    with pytest.raises(ProtocolError, match="no descriptor"):
        receive_pool(ends[1], cuts(cache, cache)[1])
    ends[0].close()
    with pytest.raises(ConnectionResetError):
        receive_pool(ends[1], cuts(cache, cache)[1])


def test_the_target_gets_a_descriptor_by_which_it_cannot_write(ends: tuple[socket.socket, socket.socket]) -> None:
    cache = make_cache()
    send_pool(ends[0], cache, cuts(cache, cache)[0])
    _, (descriptor,), _, _ = socket.recv_fds(ends[1], 4, 1)
    try:
        assert fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
        with pytest.raises(PermissionError):
            mmap.mmap(descriptor, os.fstat(descriptor).st_size)
    finally:
        os.close(descriptor)


def test_a_cache_that_is_closed_is_not_handed_out(ends: tuple[socket.socket, socket.socket]) -> None:
    cache = make_cache()
    source_cut = cuts(cache, cache)[0]
    cache.close()
    with pytest.raises(ValueError, match="closed"):
        send_pool(ends[0], cache, source_cut)
