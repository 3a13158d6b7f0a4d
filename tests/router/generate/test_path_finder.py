"""Waiting for workers, and what is held meanwhile."""

from types import SimpleNamespace

import pytest

from tests.router.routing.chooser_rig import Rig, request
from twostroke.protocol.errors import ConnectionLost
from twostroke.router.fleet import NoPath
from twostroke.router.generate.config import PipelineConfig
from twostroke.router.generate.path_finder import PathFinder


def finder_of(rig):
    records = SimpleNamespace(ejected=frozenset, strangers_to=lambda worker: frozenset())
    return PathFinder(
        chooser=rig.chooser, channels=rig.channels, records=records, clock=rig.clock, config=PipelineConfig()
    )


async def test_a_path_comes_with_its_places_held_and_a_word_on_how_long_the_choice_took():
    rig = Rig()
    finder, took = finder_of(rig), []
    finder.on_decision = took.append
    path, hold = await finder.find(request(), (), ())
    assert (path.decode.peer.worker_id[0], rig.chooser.in_flight, took) == ("d", len(path.workers), [0.0])
    hold.release()
    assert rig.chooser.in_flight == 0


async def test_nobody_there_is_refused_at_once_and_holds_nothing():
    rig = Rig()
    rig.infos.clear()
    with pytest.raises(NoPath):
        await finder_of(rig).find(request(), (), ())
    assert rig.chooser.in_flight == 0


async def test_a_worker_that_can_not_be_reached_after_all_is_given_back():
    rig = Rig()

    async def ensure(info):
        raise ConnectionLost("a bug")

    rig.channels.ensure = ensure
    with pytest.raises(ConnectionLost):
        await finder_of(rig).find(request(), (), ())
    assert rig.chooser.in_flight == 0
