"""Routers follow decisions that are made elsewhere."""

import asyncio
import threading

import pytest
from ray.exceptions import RpcError

from twostroke.cluster.autoscaling import decision_watch
from twostroke.cluster.autoscaling.decision_watch import STALE_S, DecisionWatch
from twostroke.router.observe.scaling import RoleScaling, Scaling

NOW = 10_000.0


def decided(at: float, target: int = 2) -> Scaling:
    return Scaling(at, {"decode": RoleScaling(target, "demand")}, {}, {})


class Head:
    """Fake of Ray's head: what is published, or an error."""

    def __init__(self, entry: Scaling | Exception | None):
        self.entry = entry

    def __call__(self) -> Scaling | None:
        if isinstance(self.entry, Exception):
            raise self.entry
        return self.entry


def watch_of(head: Head) -> DecisionWatch:
    return DecisionWatch(head, interval_s=5.0, wall_clock=lambda: NOW)


async def test_the_last_decision_is_known() -> None:
    head = Head(None)
    watch = watch_of(head)
    await watch.check()
    assert watch.latest() is None
    head.entry = decided(NOW - 3)
    await watch.check()
    assert watch.latest() == head.entry


async def test_a_decision_of_an_earlier_application_is_not_taken_for_this_ones() -> None:
    head = Head(decided(NOW - STALE_S - 5.1))
    watch = watch_of(head)
    await watch.check()
    assert watch.latest() is None


async def test_decisions_are_known_though_the_clock_of_the_head_is_an_hour_behind() -> None:
    head = Head(decided(NOW - 3600))
    watch = watch_of(head)
    await watch.check()
    await watch.check()
    assert watch.latest() is None  # it may be an earlier application's
    head.entry = decided(NOW - 3595)
    await watch.check()
    assert watch.latest() == head.entry


@pytest.mark.parametrize("failure", [RpcError("the head is gone"), RuntimeError("a bug of the client's")])
async def test_what_is_known_stays_while_nothing_can_be_learnt_and_that_is_said_once(
    caplog: pytest.LogCaptureFixture, failure: Exception
) -> None:
    head = Head(decided(NOW))
    watch = watch_of(head)
    await watch.check()
    known = watch.latest()
    head.entry = failure
    await watch.check()
    await watch.check()
    assert watch.latest() == known
    assert len(caplog.records) == 1
    head.entry = decided(NOW, target=3)
    await watch.check()
    assert watch.latest() == head.entry


async def test_it_looks_by_itself_at_once_when_it_is_told_to_and_no_more_when_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(decision_watch, "LOOK_S", 3600.0)
    looked = [threading.Event(), threading.Event()]
    count = 0

    def published() -> Scaling:
        nonlocal count
        looked[count].set()
        count += 1
        return decided(NOW)

    watch = DecisionWatch(published, interval_s=5.0, wall_clock=lambda: NOW)
    watch.start()
    assert await asyncio.to_thread(looked[0].wait, 5)
    await asyncio.to_thread(watch.look_soon)
    assert await asyncio.to_thread(looked[1].wait, 5)
    await watch.close()
    await watch.close()
