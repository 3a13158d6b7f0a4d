"""One channel: what comes on it, how it ends and comes back."""

import asyncio

import pytest

from twostroke.protocol.errors import WorkerLost
from twostroke.protocol.messages import (
    BlocksChanged,
    BlocksHeld,
    Convicted,
    Drain,
    Hello,
    Ping,
    Refuse,
    ReportBlocks,
    StatsFrame,
    TokenFrame,
    Welcome,
)
from twostroke.protocol.network import TcpNetwork
from twostroke.protocol.requests import Peer, SampledToken, TokenEvent
from twostroke.protocol.stats import WorkerStats
from twostroke.router.channels.token_channels import TokenChannels
from twostroke.router.channels.worker_channel import ChannelListener, TokenChannelConfig

SECRET = b"the cluster's secret"


def event(request_id, index):
    return TokenEvent(request_id, index, (SampledToken(index),))


async def connected(rig, name="d0"):
    await rig.channels.ensure(rig[name].info)
    return rig[name].info.peer


async def test_events_reach_the_stream_of_their_request_alone(fleet_of, until):
    async with fleet_of(0, 1) as rig:
        peer = await connected(rig)
        one = rig.channels.subscribe(peer, "one", max_tokens=5)
        two = rig.channels.subscribe(peer, "two", max_tokens=5)
        await until(lambda: "router-0" in rig["d0"].connections)
        rig["d0"].connections["router-0"].send(TokenFrame((event("two", 0), event("nobody", 0), event("one", 7))))
        assert (await anext(one)).index == 7
        assert (await anext(two)).index == 0
        assert one.take_queued() == []
        one.close()
        two.close()


async def test_stats_are_remembered_and_forgotten_with_the_channel(fleet_of, until):
    async with fleet_of(0, 1) as rig:
        peer = await connected(rig)
        await until(lambda: rig.channels.stats(peer) == rig["d0"].stats)
        await rig["d0"].die()
        await until(lambda: rig.channels.stats(peer) is None)
        assert rig.channels.is_down(peer)
        assert not rig.channels.is_connected(peer)


async def test_a_dropped_channel_fails_its_streams_after_what_had_come(fleet_of, until):
    async with fleet_of(0, 1) as rig:
        peer = await connected(rig)
        stream = rig.channels.subscribe(peer, "one", max_tokens=5)
        await until(lambda: "router-0" in rig["d0"].connections)
        rig["d0"].connections["router-0"].send(TokenFrame((event("one", 0),)))
        await until(lambda: stream.heard)
        await rig["d0"].die()
        await until(lambda: rig.channels.is_down(peer))
        assert (await anext(stream)).index == 0
        with pytest.raises(WorkerLost):
            await anext(stream)
        with pytest.raises(WorkerLost):
            rig.channels.subscribe(peer, "two", max_tokens=5)


async def test_a_dropped_channel_is_told_once_and_each_further_attempt_for_debugging_alone(fleet_of, until, caplog):
    caplog.set_level("DEBUG", logger="twostroke.router.channels.worker_channel")

    def told():
        return [record.levelname for record in caplog.records if "dropped" in record.message]

    async with fleet_of(0, 1) as rig:
        peer = await connected(rig)
        await until(lambda: "router-0" in rig["d0"].connections)
        first = rig["d0"].connections["router-0"]
        await first.close()
        await until(lambda: rig["d0"].connections.get("router-0", first) is not first)
        await until(lambda: rig.channels.is_connected(peer))
        await rig["d0"].die()
        await until(lambda: len(told()) >= 4)
        assert told()[:4] == ["INFO", "INFO", "DEBUG", "DEBUG"]


async def test_a_channel_comes_back_by_itself_while_its_worker_is_followed(fleet_of, until):
    async with fleet_of(0, 1) as rig:
        peer = await connected(rig)
        await until(lambda: "router-0" in rig["d0"].connections)
        first = rig["d0"].connections["router-0"]
        await first.close()
        await until(lambda: rig["d0"].connections.get("router-0", first) is not first)
        await until(lambda: rig.channels.is_connected(peer))


async def test_a_worker_that_sends_more_than_was_asked_for_is_cut_off(fleet_of, until):
    async with fleet_of(0, 1) as rig:
        peer = await connected(rig)
        stream = rig.channels.subscribe(peer, "one", max_tokens=3)
        await until(lambda: "router-0" in rig["d0"].connections)
        rig["d0"].connections["router-0"].send(TokenFrame(tuple(event("one", i) for i in range(50))))
        await until(lambda: stream.heard)
        assert len(stream.take_queued()) == 5
        with pytest.raises(WorkerLost, match="more tokens"):
            await anext(stream)


async def test_nobody_listening_is_told_at_once(fleet_of):
    async with fleet_of(0, 1) as rig:
        await rig["d0"].close()
        with pytest.raises(WorkerLost):
            await rig.channels.ensure(rig["d0"].info)


async def listen_with(answer, **config):
    """Channels to a listener that answers a hello with `answer` (a message, or None for silence after a welcome)."""

    async def handler(connection):
        hello = await connection.receive()
        assert isinstance(hello, Hello)
        connection.send(answer(hello))
        connection.send(Convicted(()))
        await connection.receive()
        await asyncio.Event().wait()

    network = TcpNetwork(SECRET)
    listener = await network.listen("127.0.0.1", handler)
    settings = TokenChannelConfig(
        ping_s=0.02, silence_s=0.06, connect_s=0.5, backoff_first_s=0.01, backoff_most_s=0.02, **config
    )
    channels = TokenChannels(network=network, peer=Peer("r", 1), clock=asyncio.get_running_loop().time, config=settings)
    return listener, channels


@pytest.mark.parametrize(
    "answer",
    [
        lambda hello: Refuse("not you"),
        lambda hello: Welcome(Peer("w", 6)),
        lambda hello: Welcome(Peer("x", 5)),
        lambda hello: hello,
    ],
    ids=["refused", "another epoch", "another worker", "no welcome"],
)
async def test_only_the_named_incarnation_is_accepted(info_at, answer):
    listener, channels = await listen_with(answer)
    with pytest.raises(WorkerLost):
        await channels.ensure(info_at(listener))
    await channels.close()
    await listener.close()


async def test_a_silent_worker_counts_as_lost(info_at):
    listener, channels = await listen_with(lambda hello: Welcome(hello.receiver))
    info = info_at(listener)
    await channels.ensure(info)
    stream = channels.subscribe(info.peer, "one", max_tokens=3)
    async with asyncio.timeout(5):
        with pytest.raises(WorkerLost):
            await anext(stream)
    await channels.close()
    await listener.close()


async def test_a_stall_of_our_own_loop_drops_no_channel(info_at, until):
    hellos, pings = [], []

    async def echo(connection):
        hello = await connection.receive()
        hellos.append(hello)
        connection.send(Welcome(hello.receiver))
        connection.send(Convicted(()))
        while True:
            pings.append(await connection.receive())
            connection.send(Ping())

    skipped_s = 0.0
    network = TcpNetwork(SECRET)
    listener = await network.listen("127.0.0.1", echo)
    channels = TokenChannels(
        network=network,
        peer=Peer("r", 1),
        clock=lambda: asyncio.get_running_loop().time() + skipped_s,
        config=TokenChannelConfig(ping_s=0.01, silence_s=10.0),
    )
    info = info_at(listener)
    await channels.ensure(info)
    stream = channels.subscribe(info.peer, "one", max_tokens=3)
    skipped_s = 1000.0
    heard = len(pings)
    await until(lambda: len(pings) >= heard + 3)
    assert len(hellos) == 1
    assert channels.is_connected(info.peer)
    stream.close()
    await channels.close()
    await listener.close()


async def test_an_unexpected_failure_is_told_and_the_channel_comes_back(fleet_of, until, monkeypatch, caplog):
    async with fleet_of(0, 1) as rig:
        whole = TcpNetwork.connect

        async def bug(*_):
            monkeypatch.setattr(TcpNetwork, "connect", whole)
            raise ZeroDivisionError

        monkeypatch.setattr(TcpNetwork, "connect", bug)
        async with asyncio.timeout(5):
            with pytest.raises(WorkerLost, match="ZeroDivisionError"):
                await rig.channels.ensure(rig["d0"].info)
        assert "met a bug" in caplog.text
        await until(lambda: rig.channels.is_connected(rig["d0"].info.peer))


async def test_blocks_are_asked_for_and_told_only_where_somebody_listens(info_at, until):
    asked, heard = [], []

    async def worker(connection):
        hello = await connection.receive()
        connection.send(Welcome(hello.receiver))
        connection.send(Convicted(()))
        while True:
            message = await connection.receive()
            if isinstance(message, ReportBlocks):
                asked.append(hello.sender.worker_id)
                connection.send(BlocksHeld(b"", True, True, len(asked)))

    network = TcpNetwork(SECRET)
    listener = await network.listen("127.0.0.1", worker)
    info = info_at(listener)
    for name, blocks in (("deaf", None), ("keen", lambda peer, message: heard.append(message) or len(heard) > 1)):
        channels = TokenChannels(network=network, peer=Peer(name, 1), clock=asyncio.get_running_loop().time)
        changed = []
        channels.listen(ChannelListener(told=lambda peer, stats: None, changed=changed.append, blocks=blocks))
        await channels.ensure(info)
        with pytest.raises(RuntimeError, match="before the first channel"):
            channels.listen(ChannelListener(told=lambda peer, stats: None, changed=changed.append, blocks=None))
        await until(lambda wanted=blocks: wanted is None or len(heard) == 2)
        await channels.close()
        assert changed == [info.peer, info.peer], "up and down"
    assert asked == ["keen", "keen"], "again, since the first answer was not understood"
    assert [message.sequence for message in heard] == [1, 2]
    await listener.close()


async def test_blocks_of_a_worker_that_leaves_are_news_to_nobody_until_it_is_back(info_at, until):
    asked, heard, told = [], [], []

    async def worker(connection):
        hello = await connection.receive()
        connection.send(Welcome(hello.receiver))
        connection.send(Convicted(()))
        while True:
            match await connection.receive():
                case ReportBlocks():
                    asked.append(hello.sender.worker_id)
                    connection.send(BlocksHeld(b"", True, True, len(asked)))
                case Drain():
                    connection.send(BlocksChanged(2, b"", b""))
                    connection.send(StatsFrame(WorkerStats(is_draining=True)))

    network = TcpNetwork(SECRET)
    listener = await network.listen("127.0.0.1", worker)
    info = info_at(listener)
    channels = TokenChannels(network=network, peer=Peer("router", 1), clock=asyncio.get_running_loop().time)
    channels.listen(
        ChannelListener(
            told=lambda peer, stats: told.append(stats),
            changed=lambda peer: None,
            blocks=lambda peer, message: heard.append(message) or True,
        )
    )
    await channels.ensure(info)
    await until(lambda: len(heard) == 1)
    channels.subscribe(info.peer, "one", max_tokens=5)  # so that its channel stays
    channels.follow([])
    await until(lambda: told)
    assert len(heard) == 1, "it would be indexed again, and nobody would forget it"
    channels.follow([info])
    await until(lambda: len(heard) == 2)
    assert len(asked) == 2
    await channels.close()
    await listener.close()
