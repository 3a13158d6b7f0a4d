"""The rules of StreamMoves at workers that tell what they like: which streams move, where to, when and how often."""

import asyncio
from dataclasses import dataclass, field
from itertools import pairwise

import pytest

from tests.router.routing.knowing import Rig, request
from twostroke.protocol.requests import Peer, PrefillReply, Promise, TokenEvent
from twostroke.protocol.stats import QueuedWork
from twostroke.router.generate.moves import AT_ONCE, MAX_MOVES, MIN_LEFT, REST_S, RunningStream, StreamMoves
from twostroke.router.request_state import SuspectRequest

LONG_AGO = -100.0


@dataclass
class Calls:
    """First parts under way, by their target; each ends when `done` is set."""

    done: asyncio.Event = field(default_factory=asyncio.Event)
    targets: list[str] = field(default_factory=list)

    async def prefill(self, worker, request, ticket, pull):
        self.targets.append(worker.worker_id)
        await self.done.wait()
        return PrefillReply(TokenEvent("", 0, ()), 0, 0.0, 0.0)


class Channels:
    peer = Peer("router", 1)

    async def ensure(self, info):
        """All are connected."""

    def is_connected(self, worker):
        return False


class Records:
    """Nobody has failed."""

    def ejected(self):
        return frozenset()

    async def await_exclusive_try(self, suspect, path):
        """Nobody is suspected."""

    def on_event(self, attempt, event):
        """Forget it."""


class Scene(Rig):
    """p0, p1, d0 and d1 with room for all, and streams that `add` lets run there."""

    def __init__(self, *, is_flexible=True):
        super().__init__()
        self.calls = Calls()
        self.ended = []
        self.streams = {}
        self.moves = StreamMoves(
            self.calls, self.chooser, Channels(), Records(), b"", self.clock, lambda: "an id", is_flexible=is_flexible
        )

    def add(
        self, name, worker="d0", *, num_sent=5, num_before=0, began=LONG_AGO, num_moves=0, priority=0, max_tokens=500
    ):
        template = request((1, 2, 3), promise=Promise(priority=priority), max_tokens=max_tokens)
        info, sent = self.infos[worker], list(range(num_sent))
        stream = RunningStream(
            template,
            sent,
            SuspectRequest(b""),
            info,
            lambda error: self.ended.append(name),
            began,
            num_moves=num_moves,
            num_before=num_before,
        )
        self.moves._streams.setdefault(info.peer, {})[stream] = None
        self.streams[name] = stream

    def crowd(self, worker="d0", **numbers):
        """Have it need its last blocks within a second."""
        self.tell(worker, **({"num_running": 8, "num_decoding": 8, "free_blocks": 2} | numbers))

    def drain(self, worker="d0"):
        self.tell(worker, is_draining=True)

    async def look(self):
        """Look once at all workers; returns the streams whose move is under way or has ended."""
        self.chooser.look()
        for peer in list(self.moves._streams):
            self.moves._look_at(peer)
        for _ in range(10):
            await asyncio.sleep(0)
        return [name for name, stream in self.streams.items() if stream.is_moving or name in self.ended]


@pytest.fixture
async def scene():
    scene = Scene()
    yield scene
    running = [stream.move for stream in scene.streams.values() if stream.move is not None]
    for move in running:
        move.cancel()
    await asyncio.gather(*running, return_exceptions=True)


async def test_streams_of_a_worker_with_room_stay(scene):
    scene.add("a")
    scene.add("b", "p0")
    assert await scene.look() == []


async def test_all_streams_leave_a_worker_that_drains_however_young_short_or_often_moved(scene):
    scene.drain()
    scene.add("young", began=0.0)
    scene.add("often moved", num_moves=MAX_MOVES)
    scene.add("short", max_tokens=6)
    scene.add("not begun", num_sent=0)
    assert await scene.look() == ["young", "often moved", "short"]


async def test_a_stream_stays_until_the_worker_has_written_a_token_of_it(scene):
    scene.drain()
    scene.add("resumed there", num_sent=5, num_before=5)
    assert await scene.look() == []


async def test_nobody_is_crowded_before_step_costs_are_known(scene):
    for worker in scene.infos:
        scene.tell(worker, costs=None)
    scene.view._typical.clear()
    scene.crowd(costs=None)
    scene.add("a")
    assert await scene.look() == []


async def test_streams_leave_a_worker_that_the_fleet_has_no_more(scene):
    scene.add("a")
    scene.infos.pop("d0")
    assert await scene.look() == ["a"]


async def test_no_more_than_so_many_leave_a_draining_worker_at_once(scene):
    scene.drain()
    for number in range(AT_ONCE["drain"] + 3):
        scene.add(str(number))
    assert len(await scene.look()) == AT_ONCE["drain"]
    assert len(await scene.look()) == AT_ONCE["drain"]
    scene.calls.done.set()
    await scene.look()
    assert len(scene.ended) == AT_ONCE["drain"]


async def test_the_youngest_of_the_lowest_class_leaves_a_crowded_worker_first(scene):
    scene.crowd()
    scene.add("old", priority=-1, began=-50.0)
    scene.add("young", priority=-1, began=-10.0)
    scene.add("youngest, of a higher class", began=-5.0)
    assert await scene.look() == ["young"]
    assert await scene.look() == ["young"], "one at a time"


@pytest.mark.parametrize(
    "unfit",
    [
        {"num_moves": MAX_MOVES},
        {"began": -0.9 * REST_S},
        {"max_tokens": 5 + MIN_LEFT - 1},
        {"num_sent": 0},
    ],
    ids=["moved often", "just came", "nearly done", "not begun"],
)
async def test_a_stream_stays_at_a_crowded_worker_if_it(scene, unfit):
    scene.crowd()
    scene.add("unfit", **unfit)
    scene.add("fit")
    assert await scene.look() == ["fit"]


async def test_streams_leave_a_prefill_worker_when_prompts_come_two_at_a_time_and_for_decode_workers(scene):
    for number in range(3):
        scene.add(str(number), "p0")
    scene.tell("p0", queued=(QueuedWork("standard", 0, 0.0, 100, 1),))
    assert len(await scene.look()) == AT_ONCE["prompts"]
    assert set(scene.calls.targets) <= {"d0", "d1"}


async def test_prompts_drive_no_stream_from_a_decode_worker(scene):
    scene.add("a")
    scene.tell("d0", queued=(QueuedWork("standard", 0, 0.0, 100, 1),))
    assert await scene.look() == []


@pytest.mark.parametrize("is_flexible", [True, False])
async def test_streams_go_to_prefill_workers_where_roles_are_flexible(is_flexible):
    scene = Scene(is_flexible=is_flexible)
    scene.drain()
    scene.tell("d1", free_blocks=0)
    scene.add("a")
    scene.calls.done.set()
    await scene.look()
    assert [target[0] for target in scene.calls.targets] == (["p"] if is_flexible else [])
    assert scene.ended == (["a"] if is_flexible else [])


async def test_a_stream_stays_where_nobody_has_room_and_leaves_once_somebody_has(scene):
    scene.drain()
    scene.add("a")
    for other in ("p0", "p1", "d1"):
        scene.tell(other, free_blocks=0)
    assert await scene.look() == []
    assert scene.moves.num_failed.total() == 0
    scene.tell("d1")
    assert await scene.look() == ["a"]


async def test_nobody_goes_to_a_worker_that_drains_too(scene):
    for name in ("d0", "d1"):
        scene.drain(name)
    scene.add("a")
    scene.calls.done.set()
    await scene.look()
    assert scene.calls.targets[0][0] == "p"


async def test_two_crowded_workers_do_not_hand_a_stream_to_and_fro():
    scene = Scene(is_flexible=False)
    for name in ("d0", "d1"):
        scene.crowd(name, free_blocks=30, num_running=20, num_decoding=20)
    scene.calls.done.set()
    where, began, num_moves, moved_at = "d0", 0.0, 0, []
    for _ in range(400):
        scene.clock.now += 0.25
        scene.moves._streams.clear()
        scene.ended.clear()
        scene.add("a", where, began=began, num_moves=num_moves)
        await scene.look()
        if scene.ended:
            where, began, num_moves = scene.calls.targets[-1], scene.clock.now, num_moves + 1
            moved_at.append(scene.clock.now)
    assert len(moved_at) == MAX_MOVES
    assert all(later - earlier >= REST_S for earlier, later in pairwise((0.0, *moved_at)))


async def test_the_hold_at_the_target_lasts_as_long_as_the_first_part(scene):
    scene.drain()
    scene.add("a")
    await scene.look()
    assert scene.chooser.in_flight == 1
    scene.calls.done.set()
    await scene.look()
    assert scene.chooser.in_flight == 0
