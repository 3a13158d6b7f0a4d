"""Which workers have a channel, and for how long."""

import asyncio

import pytest

from twostroke.protocol.errors import WorkerLost
from twostroke.protocol.messages import TokenFrame
from twostroke.protocol.requests import SampledToken, TokenEvent


def event(request_id, index):
    return TokenEvent(request_id, index, (SampledToken(index),))


async def connected(rig, name="d0"):
    await rig.channels.ensure(rig[name].info)
    return rig[name].info.peer


async def test_workers_that_left_are_told_so_and_forgotten_once_nobody_uses_them(fleet_of, until):
    async with fleet_of(0, 2) as rig:
        peers = [await connected(rig, name) for name in ("d0", "d1")]
        stream = rig.channels.subscribe(peers[0], "one", max_tokens=5)
        await until(lambda: "router-0" in rig["d0"].connections)
        for _ in range(2):
            rig.channels.follow([rig["d1"].info])
        rig["d0"].connections["router-0"].send(TokenFrame((event("one", 0),)))
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
        peer = await connected(rig)
        stream = rig.channels.subscribe(peer, "one", max_tokens=5)
        await until(lambda: "router-0" in rig["d0"].connections)
        rig.channels.follow([])
        await rig["d0"].die()
        with pytest.raises(WorkerLost):
            await anext(stream)
        rig.channels.follow([])
        assert not rig.channels.is_down(peer)


async def test_a_worker_that_left_by_mistake_is_followed_again(fleet_of, until):
    async with fleet_of(0, 1) as rig:
        peer = await connected(rig)
        rig.channels.subscribe(peer, "one", max_tokens=5)  # so that its channel stays
        await until(lambda: "router-0" in rig["d0"].connections)
        rig.channels.follow([])
        await until(lambda: rig["d0"].told_to_leave == 1)
        rig.channels.follow([rig["d0"].info])
        first = rig["d0"].connections["router-0"]
        await first.close()
        await until(lambda: rig["d0"].connections.get("router-0", first) is not first)
        async with asyncio.timeout(5):
            await rig.channels.ensure(rig["d0"].info)
        rig.channels.follow([])
        await until(lambda: rig["d0"].told_to_leave == 2)


async def test_a_worker_that_left_by_mistake_and_was_cut_off_meanwhile_is_followed_again(fleet_of, until):
    async with fleet_of(0, 1) as rig:
        peer = await connected(rig)
        stream = rig.channels.subscribe(peer, "one", max_tokens=5)
        await until(lambda: "router-0" in rig["d0"].connections)
        rig.channels.follow([])
        await rig["d0"].connections["router-0"].close()
        with pytest.raises(WorkerLost):
            await anext(stream)
        rig.channels.follow([rig["d0"].info])
        async with asyncio.timeout(5):
            await rig.channels.ensure(rig["d0"].info)
        assert rig.channels.is_connected(peer)


class CountedInfo:
    """A worker's facts, with a count of how often anybody has looked."""

    def __init__(self, info):
        self._info = info
        self.num_looks = 0

    def __getattr__(self, name):
        self.num_looks += 1
        return getattr(self._info, name)


async def test_the_same_workers_are_not_looked_at_again_while_one_that_left_still_has_streams(fleet_of, until):
    async with fleet_of(0, 2) as rig:
        leaving = await connected(rig, "d0")
        stream = rig.channels.subscribe(leaving, "one", max_tokens=5)
        others = [CountedInfo(rig["d1"].info)]
        rig.channels.follow(others)
        await until(lambda: rig.channels.is_connected(rig["d1"].info.peer))
        looks = others[0].num_looks
        rig.channels.follow(others)
        assert others[0].num_looks == looks
        stream.close()
        rig.channels.follow(others)
        assert others[0].num_looks == looks
        assert not rig.channels.is_connected(leaving)


async def test_a_router_that_ends_takes_no_worker_down(fleet_of, until):
    async with fleet_of(0, 1) as rig:
        await connected(rig)
        await until(lambda: "router-0" in rig["d0"].connections)
        await rig.channels.close()
        await until(lambda: not rig["d0"].connections)
        assert rig["d0"].told_to_leave == 0
