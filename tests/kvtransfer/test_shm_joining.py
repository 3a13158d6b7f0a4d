"""How two ends of the shm transport find each other: who is let in, and what the system may refuse."""

import asyncio
import contextlib
import errno
import os
import resource
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from shm_links import cuts, filled, make_cache, move, transports

from twostroke.kvtransfer.rules.layout import Cut, Segment
from twostroke.kvtransfer.transports import local, shared_pool, shm
from twostroke.kvtransfer.transports.shared_pool import receive_pool, send_pool
from twostroke.protocol.errors import ConnectionLost

# --- joining ---


async def test_a_peer_that_does_not_join_is_not_awaited_for_ever() -> None:
    cache = make_cache()
    async with transports(cache, cache, join_timeout_s=0.1) as (_, receiving):
        pending = await receiving.prepare("", cuts(cache, cache)[1])
        with pytest.raises(ConnectionLost, match="did not join"):
            await pending.established()
        await pending.close()


async def test_a_pending_link_may_be_given_up_while_it_is_awaited() -> None:
    cache = make_cache()
    async with transports(cache, cache) as (_, receiving):
        pending = await receiving.prepare("", cuts(cache, cache)[1])
        waiting = asyncio.create_task(pending.established())
        await asyncio.wait([waiting], timeout=0.02)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await pending.close()


async def test_a_transport_lets_go_of_links_that_nobody_awaits() -> None:
    cache = make_cache()
    async with transports(cache, cache) as (sending, receiving):
        source_cut, target_cut = cuts(cache, cache)
        pending = await receiving.prepare("", target_cut)
        joining = asyncio.create_task(sending.join(pending.params, source_cut))
        await asyncio.wait([joining], timeout=0.05)
        assert not joining.done()
        await receiving.close()
        with pytest.raises(ConnectionLost):
            await joining


@pytest.mark.parametrize(
    "params", [{"segment": "x"}, {"name": "00", "token": 5}, {"name": "zz", "token": "00"}, {"name": "00" * 16}]
)
async def test_parameters_of_another_transport_are_refused(params: dict[str, str | int]) -> None:
    cache = make_cache()
    async with transports(cache, cache) as (sending, _):
        with pytest.raises(ConnectionLost, match="link parameters are not"):
            await sending.join(params, cuts(cache, cache)[0])


async def test_encoded_kv_is_refused_at_both_ends() -> None:
    cache = make_cache()
    cut = Cut(cache.layout, 0, 2, 4, "int8")
    async with transports(cache, cache) as (sending, receiving):
        with pytest.raises(ConnectionLost, match="not encoded as int8"):
            await receiving.prepare("", cut)
        with pytest.raises(ConnectionLost, match="not encoded as int8"):
            await sending.join({"name": "00", "token": "00"}, cut)


async def test_only_the_peer_with_the_token_gets_the_link_however_many_strangers_come_first() -> None:
    source, target = filled(make_cache()), make_cache()
    async with transports(source, target, join_timeout_s=5.0) as (sending, receiving):
        source_cut, target_cut = cuts(source, target)
        pending = await receiving.prepare("", target_cut)
        strangers = []
        for _ in range(3):
            strangers.append(socket.socket(socket.AF_UNIX))
            strangers[-1].connect(b"\0twostroke-kv-" + str(pending.params["name"]).encode())
        with pytest.raises(ConnectionLost, match="the link broke"):
            await sending.join({**pending.params, "token": "00" * 32}, source_cut)
        links = await asyncio.gather(sending.join(pending.params, source_cut), pending.established())
        assert await move(links, [Segment(0, (1,))], [Segment(0, (2,))])
        assert torch.equal(target.tensors[0][2], source.tensors[0][1])
        with pytest.raises(ConnectionLost):
            await sending.join(pending.params, source_cut)
        for stranger in strangers:
            assert stranger.recv(1) == b"", "sent away once the peer had come"
            stranger.close()


@pytest.mark.parametrize("refuses", ["source", "target"])
async def test_a_process_of_another_user_gets_no_link(refuses: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = make_cache()
    real = local.is_same_user

    def is_same_user(connected: socket.socket) -> bool:
        """As if this side ran as somebody else: the listener's end has the name, the connecting one none."""
        if bool(connected.getsockname()) != (refuses == "target"):
            return real(connected)
        monkeypatch.setattr(os, "geteuid", lambda: 4242)
        try:
            return real(connected)
        finally:
            monkeypatch.undo()
            install()

    def install() -> None:
        monkeypatch.setattr(local, "is_same_user", is_same_user)

    install()
    async with transports(cache, cache, join_timeout_s=0.3) as (sending, receiving):
        source_cut, target_cut = cuts(cache, cache)
        pending = await receiving.prepare("", target_cut)
        outcomes = await asyncio.gather(
            sending.join(pending.params, source_cut), pending.established(), return_exceptions=True
        )
        assert [type(outcome) for outcome in outcomes] == [ConnectionLost, ConnectionLost]
        assert ("another user" in str(outcomes[0])) == (refuses == "source")
        assert "timed out" not in str(outcomes[0]), "it was sent away"
        await pending.close()


# --- what the system may refuse ---


@contextlib.contextmanager
def no_descriptors_left() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def without_descriptors(call: Callable[..., Any]) -> Callable[..., Any]:
    def limited(*arguments: Any) -> Any:
        with no_descriptors_left():
            return call(*arguments)

    return limited


def refusing(code: int) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> Any:
        raise OSError(code, os.strerror(code))

    return refuse


def break_descriptors_of_the_source(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(shm, "send_pool", without_descriptors(send_pool))


def break_descriptors_of_the_target(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(shm, "receive_pool", without_descriptors(receive_pool))


def break_mapping(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(shared_pool.mmap, "mmap", refusing(errno.ENOMEM))


def break_passing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(shared_pool.socket, "send_fds", refusing(errno.ENOSPC))


@pytest.mark.parametrize(
    "fault",
    [break_descriptors_of_the_source, break_descriptors_of_the_target, break_mapping, break_passing],
)
async def test_what_the_system_refuses_is_a_lost_connection_on_both_sides(
    fault: Callable[[pytest.MonkeyPatch], None],
) -> None:
    source, target = filled(make_cache()), make_cache()
    async with transports(source, target, join_timeout_s=5.0) as (sending, receiving):
        source_cut, target_cut = cuts(source, target)
        pending = await receiving.prepare("", target_cut)
        with pytest.MonkeyPatch.context() as patch:
            fault(patch)
            outcomes = await asyncio.gather(
                sending.join(pending.params, source_cut), pending.established(), return_exceptions=True
            )
        assert [type(outcome) for outcome in outcomes] == [ConnectionLost, ConnectionLost]
        pending = await receiving.prepare("", target_cut)
        links = await asyncio.gather(sending.join(pending.params, source_cut), pending.established())
        assert await move(links, [Segment(0, (1,))], [Segment(0, (1,))])


async def test_without_a_descriptor_for_the_socket_neither_end_can_begin() -> None:
    cache = make_cache()
    async with transports(cache, cache) as (sending, receiving):
        with no_descriptors_left():
            with pytest.raises(ConnectionLost, match="can't listen"):
                await receiving.prepare("", cuts(cache, cache)[1])
            with pytest.raises(ConnectionLost, match="can't join"):
                await sending.join({"name": "00", "token": "00"}, cuts(cache, cache)[0])
