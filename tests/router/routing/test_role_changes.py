"""Role changes for the autoscaler: the fewest, and the same whichever router looks."""

import random
from collections import Counter

import msgspec
import pytest

from tests.router.routing.knowing import IDLE, info, load, peers
from twostroke.protocol.stats import StepRole, WorkerInfo, WorkerStats, role_of
from twostroke.router.routing.role_changes import role_changes

Told = tuple[WorkerInfo, WorkerStats]


def told(name: str, stats: WorkerStats = IDLE, role: StepRole | None = None, **changes: bool) -> Told:
    return info(name), msgspec.structs.replace(stats, step_role=role, **changes)


def test_a_worker_changes_only_where_one_is_missing_and_the_same_whatever_there_is_to_do() -> None:
    workers = [told("p0", load(running=3)), told("p1", load(running=1)), told("d0")]
    assert role_changes(workers, {"prefill": 1, "decode": 2}) == {info("p0").peer: "decode"}
    later = [told("p0", load(running=0)), told("p1", load(running=5)), told("d0")]
    assert role_changes(later, {"prefill": 1, "decode": 2}) == {info("p0").peer: "decode"}
    assert role_changes(workers, {"prefill": 1, "decode": 1}) == {}, "one is to end, and Serve ends it"
    assert role_changes(workers, {"prefill": 2, "decode": 2}) == {}, "one is to start"


def test_workers_return_to_the_role_they_began_with_first() -> None:
    workers = [told("p0", load(running=5), "decode"), told("d0"), told("d1")]
    assert role_changes(workers, {"prefill": 1, "decode": 2}) == {info("p0").peer: "prefill"}


def test_workers_that_drain_count_for_nothing() -> None:
    workers = [told("p0", is_draining=True), told("p1"), told("p2"), told("d0", role="even")]
    changes = role_changes(workers, {"prefill": 1, "decode": 2})
    assert changes.keys() <= peers("p1", "p2")
    assert len(changes) == 1


@pytest.mark.parametrize("seed", range(20))
def test_changes_bring_the_numbers_as_near_as_they_can_and_do_not_depend_on_the_order(seed: int) -> None:
    draw = random.Random(seed)
    roles: list[StepRole | None] = [None, "prefill", "decode", "even"]
    names = [f"{draw.choice('pd')}{number}" for number in range(draw.randint(1, 8))]
    workers = [told(name, load(running=draw.randint(0, 3)), draw.choice(roles)) for name in names]
    targets = {"prefill": draw.randint(0, 6), "decode": draw.randint(0, 6)}
    changes = role_changes(workers, targets)  # type: ignore[arg-type]
    shuffled = draw.sample(workers, len(workers))
    assert role_changes(shuffled, targets) == changes  # type: ignore[arg-type]
    after = Counter(changes.get(one.peer, role_of(one, stats)) for one, stats in workers)
    gaps = [targets[role] - after[role] for role in ("prefill", "decode")]
    assert gaps[0] * gaps[1] >= 0, "a role has too many while the other one lacks some"
