"""Channels: the workers that have one, its messages, its end and its return."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from twostroke.protocol.errors import WorkerLost
from twostroke.protocol.kv_layout import KVLayout
from twostroke.protocol.messages import (
    BlocksChanged,
    BlocksHeld,
    Cancel,
    Drain,
    Ping,
    Refuse,
    ReportBlocks,
    RequestsBlocked,
    StatsFrame,
    TokenFrame,
    Welcome,
)
from twostroke.protocol.network import TcpNetwork
from twostroke.protocol.requests import (
    LOG_CONTEXT,
    BlockedRequest,
    BlockedRequests,
    LogContext,
    Peer,
    SampledToken,
    TokenEvent,
)
from twostroke.protocol.stats import WorkerInfo, WorkerStats
from twostroke.router.observe.log_format import JsonLines
from twostroke.router.token_channels import ChannelListener, TokenChannelConfig, TokenChannels, join_fresh

SECRET = b"the cluster's secret"
LAYOUT = KVLayout("a model", "float32", 1, 1, 8, 16)
_NOBODY = ChannelListener()
GUILTY, OTHER, THIRD = (BlockedRequest(letter * 16, 600.0) for letter in (b"g", b"o", b"t"))


def events(request_id, *indices):
    return TokenFrame(tuple(TokenEvent(request_id, index, (SampledToken(index),)) for index in indices))


async def connected(rig, until, name="d0"):
    """The worker, once both sides know of the channel."""
    await rig.channels.ensure(rig[name].info)
    await until(lambda: "router-0" in rig[name].connections)
    return rig[name].info.peer


def say(rig, message, name="d0"):
    rig[name].connections["router-0"].send(message)


async def comes_again(rig, until, name="d0"):
    """The channel breaks, and there is another."""
    first = rig[name].connections["router-0"]
    await first.close()
    await until(lambda: rig[name].connections.get("router-0", first) is not first)


# --- who is followed ---


async def test_workers_that_left_are_told_so_and_forgotten_once_nobody_uses_them(fleet_of, until):
    async with fleet_of(0, 2) as rig:
        peers = [await connected(rig, until, name) for name in ("d0", "d1")]
        stream = rig.channels.subscribe(peers[0], "one", max_tokens=5)
        for _ in range(2):
            rig.channels.follow([rig["d1"].info])
        say(rig, events("one", 0))
        assert (await anext(stream)).index == 0
        await until(lambda: rig["d0"].told_to_leave == 1)
        stream.close()
        rig.channels.follow([rig["d1"].info])
        assert not rig.channels.is_connected(peers[0])
        assert rig.channels.is_connected(peers[1])
        with pytest.raises(WorkerLost):
            rig.channels.subscribe(peers[0], "two", max_tokens=5)


async def test_a_worker_that_left_and_then_dies_fails_its_streams_at_once_and_is_not_looked_for(fleet_of, until):
    async with fleet_of(0, 1) as rig:
        peer = await connected(rig, until)
        stream = rig.channels.subscribe(peer, "one", max_tokens=5)
        rig.channels.follow([])
        await rig["d0"].die()
        with pytest.raises(WorkerLost):
            await anext(stream)
        rig.channels.follow([])
        assert not rig.channels.is_down(peer)


@pytest.mark.parametrize("is_cut_off", [False, True])
async def test_a_worker_that_left_by_mistake_is_followed_again(fleet_of, until, is_cut_off):
    async with fleet_of(0, 1) as rig:
        peer = await connected(rig, until)
        stream = rig.channels.subscribe(peer, "one", max_tokens=5)  # so that its channel stays
        rig.channels.follow([])
        await until(lambda: rig["d0"].told_to_leave == 1)
        if is_cut_off:
            await rig["d0"].connections["router-0"].close()
            with pytest.raises(WorkerLost):
                await anext(stream)
        rig.channels.follow([rig["d0"].info])
        if not is_cut_off:
            await comes_again(rig, until)
        async with asyncio.timeout(5):
            await rig.channels.ensure(rig["d0"].info)
        assert rig.channels.is_connected(peer)
        rig.channels.follow([])
        await until(lambda: rig["d0"].told_to_leave == 2)


async def test_a_router_that_ends_takes_no_worker_down(fleet_of, until):
    async with fleet_of(0, 1) as rig:
        await connected(rig, until)
        await rig.channels.close()
        await until(lambda: not rig["d0"].connections)
        assert rig["d0"].told_to_leave == 0


# --- one channel ---


async def test_what_is_told_of_a_channel_is_about_no_request_though_one_has_opened_it(fleet_of, until, caplog):
    caplog.handler.setFormatter(JsonLines({}))
    caplog.set_level("INFO", logger="twostroke")
    async with fleet_of(0, 2) as rig:
        rig.channels.follow([])
        before = LOG_CONTEXT.set(LogContext("a client's"))
        await connected(rig, until)
        LOG_CONTEXT.reset(before)
        await rig["d0"].connections["router-0"].close()
        await until(lambda: "dropped" in caplog.text)
    assert "a client's" not in caplog.text


async def test_events_reach_the_stream_of_their_request_alone(fleet_of, until):
    async with fleet_of(0, 1) as rig:
        peer = await connected(rig, until)
        one, two = (rig.channels.subscribe(peer, name, max_tokens=5) for name in ("one", "two"))
        for frame in (events("two", 0), events("nobody", 0), events("one", 7)):
            say(rig, frame)
        assert (await anext(one)).index == 7
        assert (await anext(two)).index == 0
        assert one.take_queued() == []


async def test_stats_are_remembered_and_forgotten_with_the_channel(fleet_of, until):
    async with fleet_of(0, 1) as rig:
        peer = await connected(rig, until)
        await until(lambda: rig.channels.stats(peer) == rig["d0"].stats)
        await rig["d0"].die()
        await until(lambda: rig.channels.stats(peer) is None)
        assert rig.channels.is_down(peer)
        assert not rig.channels.is_connected(peer)


async def test_a_dropped_channel_fails_its_streams_after_what_had_come(fleet_of, until):
    async with fleet_of(0, 1) as rig:
        peer = await connected(rig, until)
        stream = rig.channels.subscribe(peer, "one", max_tokens=5)
        say(rig, events("one", 0))
        await until(lambda: stream.heard)
        await rig["d0"].die()
        await until(lambda: rig.channels.is_down(peer))
        assert (await anext(stream)).index == 0
        with pytest.raises(WorkerLost):
            await anext(stream)
        with pytest.raises(WorkerLost):
            rig.channels.subscribe(peer, "two", max_tokens=5)


async def test_a_dropped_channel_comes_back_and_is_told_once_each_further_attempt_for_debugging_alone(
    fleet_of, until, caplog
):
    caplog.set_level("DEBUG", logger="twostroke.router.token_channels")

    def told():
        return [record.levelname for record in caplog.records if "dropped" in record.message]

    async with fleet_of(0, 1) as rig:
        peer = await connected(rig, until)
        await comes_again(rig, until)
        await until(lambda: rig.channels.is_connected(peer))
        await rig["d0"].die()
        await until(lambda: len(told()) >= 4)
        assert told()[:4] == ["INFO", "INFO", "DEBUG", "DEBUG"]


async def test_a_worker_that_sends_more_than_was_asked_for_is_cut_off(fleet_of, until):
    async with fleet_of(0, 1) as rig:
        peer = await connected(rig, until)
        stream = rig.channels.subscribe(peer, "one", max_tokens=3)
        say(rig, events("one", *range(50)))
        await until(lambda: stream.heard)
        assert len(stream.take_queued()) == 5
        with pytest.raises(WorkerLost, match="more tokens"):
            await anext(stream)


async def test_nobody_listening_is_told_at_once(fleet_of):
    async with fleet_of(0, 1) as rig:
        await rig["d0"].close()
        with pytest.raises(WorkerLost):
            await rig.channels.ensure(rig["d0"].info)


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


# --- to workers of a kind that no fleet has ---


@pytest.fixture
def channels_to():
    """Call it as `async with channels_to(worker) as (channels, info)`.

    `worker(connection, message)` answers each message; the first is the router's hello.
    """

    @asynccontextmanager
    async def make(
        worker, *, clock=lambda: asyncio.get_running_loop().time(), listener=_NOBODY, blocked=None, **config
    ):
        async def serve(connection):
            while True:
                worker(connection, await connection.receive())

        network = TcpNetwork(SECRET)
        listening = await network.listen("127.0.0.1", serve)
        channels = TokenChannels(
            network=network,
            peer=Peer("r", 1),
            clock=clock,
            config=TokenChannelConfig(**config),
            listener=listener,
            blocked=blocked,
        )
        try:
            yield channels, WorkerInfo("decode", Peer("w", 5), listening.address, (), LAYOUT, 10, 100)
        finally:
            await channels.close()
            await listening.close()

    return make


def welcome(connection, hello, *blocked):
    connection.send(Welcome(hello.receiver))
    connection.send(RequestsBlocked(blocked))


def answers(answer):
    """A worker that answers the hello so, and then is silent."""

    def worker(connection, message):
        if not isinstance(message, Ping):
            connection.send(answer(message))
            connection.send(RequestsBlocked(()))

    return worker


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
async def test_only_the_named_incarnation_is_accepted(channels_to, answer):
    async with channels_to(answers(answer)) as (channels, info):
        with pytest.raises(WorkerLost):
            await channels.ensure(info)


async def test_who_welcomes_and_then_tells_something_else_is_no_worker(channels_to):
    def worker(connection, hello):
        connection.send(Welcome(hello.receiver))
        connection.send(Ping())

    async with channels_to(worker) as (channels, info):
        with pytest.raises(WorkerLost, match="poison requests"):
            await channels.ensure(info)


async def test_a_silent_worker_counts_as_lost(channels_to):
    worker = answers(lambda hello: Welcome(hello.receiver))
    async with channels_to(worker, ping_s=0.02, silence_s=0.06) as (channels, info):
        await channels.ensure(info)
        stream = channels.subscribe(info.peer, "one", max_tokens=3)
        async with asyncio.timeout(5):
            with pytest.raises(WorkerLost):
                await anext(stream)
        assert channels.fell_silent(info.peer)


async def test_a_stall_of_our_own_loop_drops_no_channel(channels_to, until):
    heard, skipped_s = [], 0.0

    def worker(connection, message):
        heard.append(message)
        if isinstance(message, Ping):
            connection.send(Ping())
        else:
            welcome(connection, message)

    def clock():
        return asyncio.get_running_loop().time() + skipped_s

    async with channels_to(worker, clock=clock, ping_s=0.01, silence_s=10.0) as (channels, info):
        await channels.ensure(info)
        skipped_s = 1000.0
        before = len(heard)
        await until(lambda: len(heard) >= before + 3)
        assert channels.is_connected(info.peer)
        assert heard[1:] == [Ping()] * (len(heard) - 1), "it has said hello once"


def tells_blocks(reports):
    """A worker that tells of its blocks as often as it is asked, and of a change when it is taken down."""

    def worker(connection, message):
        match message:
            case ReportBlocks():
                reports.append(message)
                connection.send(BlocksHeld(b"", True, True, len(reports)))
            case Drain():
                connection.send(BlocksChanged(2, b"", b""))
                connection.send(StatsFrame(WorkerStats(is_draining=True)))
            case Ping():
                pass
            case _:
                welcome(connection, message)

    return worker


async def test_blocks_are_asked_for_and_told_only_where_somebody_listens(channels_to, until):
    reports, heard, changed = [], [], []

    listener = ChannelListener(
        on_connection=lambda peer, is_up: changed.append(peer),
        on_blocks=lambda peer, message: heard.append(message) or len(heard) > 1,
    )

    async with channels_to(tells_blocks(reports)) as (channels, info):
        await channels.ensure(info)
    assert not reports
    async with channels_to(tells_blocks(reports), listener=listener) as (channels, info):
        await channels.ensure(info)
        await until(lambda: len(heard) == 2)
    assert changed == [info.peer, info.peer], "up and down"
    assert len(reports) == 2, "again, since the first answer was not understood"
    assert [message.sequence for message in heard] == [1, 2]


async def test_a_hung_engine_is_counted_once_however_often_it_is_told(channels_to, until):
    told = []

    def worker(connection, message):
        welcome(connection, message)
        if not told:
            told.append(message)
            for _ in range(3):
                connection.send(StatsFrame(WorkerStats(has_hung=True)))
            connection.send(StatsFrame(WorkerStats(has_hung=True, num_running=1)))

    async with channels_to(worker) as (channels, info):
        await channels.ensure(info)
        await until(lambda: (stats := channels.stats(info.peer)) is not None and stats.num_running == 1)
        assert channels.num_hung == {info.role: 1}


async def test_after_a_gap_in_news_of_tiers_these_alone_are_asked_for(channels_to, until):
    asked = []

    def worker(connection, message):
        if isinstance(message, ReportBlocks):
            asked.append(message)
            connection.send(BlocksHeld(b"", True, True, 0, is_tier=not message.cache or len(asked) == 1))
        elif not isinstance(message, Ping):
            welcome(connection, message)

    listener = ChannelListener(on_blocks=lambda peer, message: len(asked) > 1)
    async with channels_to(worker, listener=listener) as (channels, info):
        await channels.ensure(info)
        await until(lambda: len(asked) == 2)
    assert asked == [ReportBlocks(), ReportBlocks(cache=False)]


async def test_blocks_of_a_worker_that_leaves_are_news_to_nobody_until_it_is_back(channels_to, until):
    reports, heard, told = [], [], []

    listener = ChannelListener(
        on_stats=lambda peer, stats: told.append(stats),
        on_blocks=lambda peer, message: heard.append(message) or True,
    )

    async with channels_to(tells_blocks(reports), listener=listener) as (channels, info):
        await channels.ensure(info)
        await until(lambda: len(heard) == 1)
        channels.subscribe(info.peer, "one", max_tokens=5)  # so that its channel stays
        channels.follow([])
        await until(lambda: told)
        assert len(heard) == 1, "it would be indexed again, and nobody would forget it"
        channels.follow([info])
        await until(lambda: len(heard) == 2)
        assert len(reports) == 2


async def test_blocked_requests_are_exchanged_before_a_channel_is_up_and_later_ones_pass_on(channels_to, until):
    told = []
    blocked = BlockedRequests(lambda: 0.0)
    blocked.learn([OTHER])

    def worker(connection, message):
        if not told:
            welcome(connection, message, GUILTY)
        if message == RequestsBlocked((OTHER, GUILTY)):
            connection.send(RequestsBlocked((THIRD,)))
        told.append(message)

    async with channels_to(worker, blocked=blocked) as (channels, info):
        await channels.ensure(info)
        assert blocked.blocks(GUILTY.fingerprint), "no request can have gone there before"
        await until(lambda: blocked.blocks(THIRD.fingerprint))
        channels.tell_blocked((GUILTY,))
        channels.tell_blocked(())
        channels.send(info.peer, Cancel("last"))
        await until(lambda: Cancel("last") in told)
        assert told[1:] == [RequestsBlocked((OTHER, GUILTY)), RequestsBlocked((GUILTY,)), Cancel("last")]


# --- a stream's events, joined ---


def event(index, *tokens, finish=None):
    return TokenEvent("r", index, tuple(SampledToken(token) for token in tokens), finish)


@pytest.mark.parametrize(
    ("events", "sent", "joined"),
    [
        ([event(0, 7)], [], event(0, 7)),
        ([event(0, 7), event(0, 7), event(1, 8)], [], event(0, 7, 8)),
        ([event(0, 7)], [7], None),
        ([event(0, 7, 8, 9)], [7, 8], event(2, 9)),
        ([event(0, 7, finish="stop")], [7], event(1, finish="stop")),
        ([event(2, 9, finish="length"), event(3, 1)], [7, 8], event(2, 9, finish="length")),
        ([event(0, 7, finish="stop")], [7, 8, 9], None),
    ],
)
def test_joining_keeps_each_token_once(events, sent, joined):
    assert join_fresh(events, sent) == joined


@pytest.mark.parametrize(
    ("events", "sent"),
    [
        ([event(0, 8)], [7]),
        ([event(0, 7, 9, 10)], [7, 8]),
        ([event(0, 7), event(0, 8)], []),
        ([event(0, 8, finish="stop")], [7]),
        ([event(1, 8)], []),
        ([event(-1, 8)], [8]),
    ],
    ids=["another", "another later", "another at once", "another at the end", "a gap", "no index"],
)
def test_what_does_not_go_on_from_what_was_sent_is_a_lost_worker(events, sent):
    with pytest.raises(WorkerLost):
        join_fresh(events, sent)
