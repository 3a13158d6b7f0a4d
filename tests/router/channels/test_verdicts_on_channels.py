"""Verdicts, which channels carry between routers."""

import asyncio

import pytest

from twostroke.protocol.errors import WorkerLost
from twostroke.protocol.messages import Cancel, Convicted, Ping, Welcome
from twostroke.protocol.network import TcpNetwork
from twostroke.protocol.requests import Peer
from twostroke.protocol.verdicts import Verdict
from twostroke.router.channels.token_channels import TokenChannels
from twostroke.router.channels.worker_channel import VerdictExchange

SECRET = b"the cluster's secret"
GUILTY, OTHER = Verdict(b"g" * 16, 600.0), Verdict(b"o" * 16, 500.0)


async def test_verdicts_are_exchanged_before_a_channel_is_up_and_what_is_heard_is_not_told_again(info_at, until):
    heard, told = [], []

    async def worker(connection):
        hello = await connection.receive()
        connection.send(Welcome(hello.receiver))
        connection.send(Convicted((GUILTY,)))
        while True:
            message = await connection.receive()
            told.append(message)
            if message == Convicted((OTHER,)):
                connection.send(Convicted((OTHER, GUILTY)))

    network = TcpNetwork(SECRET)
    listener = await network.listen("127.0.0.1", worker)
    info = info_at(listener)
    channels = TokenChannels(network=network, peer=Peer("r", 1), clock=asyncio.get_running_loop().time)
    channels.share_verdicts(VerdictExchange(known=lambda: (GUILTY, OTHER), heard=heard.append))
    await channels.ensure(info)
    assert heard == [(GUILTY,)], "no request can have gone there before"
    await until(lambda: len(heard) == 2)
    assert heard[1] == (OTHER, GUILTY)
    channels.tell_verdicts((GUILTY,))
    channels.tell_verdicts(())
    channels.cancel(info.peer, "last")
    await until(lambda: Cancel("last") in told)
    assert told == [Convicted((OTHER,)), Convicted((GUILTY,)), Cancel("last")]
    with pytest.raises(RuntimeError, match="before the first channel"):
        channels.share_verdicts(VerdictExchange(known=tuple, heard=heard.append))
    await channels.close()
    await listener.close()


async def test_who_welcomes_and_then_tells_something_else_is_no_worker(info_at):
    async def worker(connection):
        hello = await connection.receive()
        connection.send(Welcome(hello.receiver))
        connection.send(Ping())
        await connection.receive()

    network = TcpNetwork(SECRET)
    listener = await network.listen("127.0.0.1", worker)
    channels = TokenChannels(network=network, peer=Peer("r", 1), clock=asyncio.get_running_loop().time)
    with pytest.raises(WorkerLost, match="poison requests"):
        await channels.ensure(info_at(listener))
    await channels.close()
    await listener.close()
