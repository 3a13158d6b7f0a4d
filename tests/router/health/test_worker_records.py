"""Records of workers' failures, and when workers get requests again."""

from types import SimpleNamespace

import pytest

from tests.router.routing.knowing import info
from twostroke.protocol.errors import RequestError, TransferFailed, WorkerFailed, WorkerLeaving, WorkerLost
from twostroke.protocol.requests import BlockedRequest, BlockedRequests
from twostroke.router.request_state import AttemptContext, AttemptEnded, DecodeFailed, Path, PrefillLost
from twostroke.router.worker_health import Ejection, EjectionConfig, PoisonRequest, SuspectsConfig, WorkerRecords

P, D, D1 = info("p0"), info("d0"), info("d1")
PAIR = Path(P, D)


class Scene:
    """Records of a fleet of p0, d0 and d1, at a time set by hand."""

    def __init__(self):
        self.now = 0.0
        self.num_looks = 0
        fleet = SimpleNamespace(workers=self._workers)
        channels = SimpleNamespace(
            is_connected=lambda worker: True,
            fell_silent=lambda worker: worker == D1.peer,
            tell_blocked=lambda requests: None,
        )
        self.blocked = BlockedRequests(lambda: self.now)
        self.records = WorkerRecords(
            fleet=fleet,
            channels=channels,
            clock=lambda: self.now,
            ejection=EjectionConfig(),
            suspects=SuspectsConfig(),
            blocked=self.blocked,
            draw=lambda: 0.0,
        )

    def _workers(self):
        self.num_looks += 1
        return [P, D, D1]

    def attempt(self, request, path=PAIR):
        return AttemptContext(path, request, [], self.records.suspects.open(request))


@pytest.fixture
def scene():
    return Scene()


async def test_a_pair_that_was_kept_apart_is_tried_by_the_next_when_the_one_that_tried_it_tells_nothing(
    scene, a_request
):
    records, attempt = scene.records, scene.attempt(a_request())
    for _ in range(2):
        records.on_event(attempt, PrefillLost(TransferFailed("no route")))
    assert records.unreachable_prefill_for(D.peer) == {P.peer}
    scene.now = 3.0
    await records.await_exclusive_try(attempt.suspect, PAIR)
    assert records.unreachable_prefill_for(D.peer) == {P.peer}, "others wait for the result"
    records.on_event(attempt, AttemptEnded(3.0, None, has_decoded=False))  # its client has left
    assert records.unreachable_prefill_for(D.peer) == set()


async def test_while_nobody_fails_a_request_looks_at_no_worker(scene):
    records = scene.records
    assert records.ejected() == records.unreachable_prefill_for(D.peer) == frozenset()
    assert scene.num_looks == 0


async def test_a_worker_that_fails_again_and_again_is_left_out(scene, a_request):
    attempt = scene.attempt(a_request())
    for _ in range(5):
        scene.records.on_event(attempt, DecodeFailed(WorkerFailed("a bug")))
    assert scene.records.ejected() == {D.peer}


async def test_a_request_that_is_blocked_before_the_prefill_worker_is_called_does_not_get_there(scene, a_request):
    suspect = scene.attempt(a_request()).suspect
    await scene.records.await_exclusive_try(suspect, PAIR)
    scene.blocked.learn([BlockedRequest(suspect.fingerprint, 600.0)])
    with pytest.raises(PoisonRequest):
        scene.records.begin_prefill(suspect, P.peer)


@pytest.mark.parametrize("answer", [RequestError("too many wait", status=429), WorkerLeaving("not begun")])
async def test_a_request_that_a_prefill_worker_gave_back_is_no_suspect_of_its_death(scene, a_request, answer):
    records = scene.records
    given_back, other = (scene.attempt(a_request(token_ids=(i,), num_prompt_tokens=1)) for i in range(2))
    for attempt in (given_back, other):
        await records.await_exclusive_try(attempt.suspect, PAIR)
        records.begin_prefill(attempt.suspect, P.peer)
    records.on_event(given_back, PrefillLost(answer))
    records.on_event(other, PrefillLost(WorkerLost("it died")))
    assert [records.suspects.is_suspect(attempt.suspect) for attempt in (given_back, other)] == [False, True]


async def test_a_worker_that_fell_silent_makes_no_suspects(scene, a_request):
    path = Path(None, D1)
    attempt = scene.attempt(a_request(), path)
    await scene.records.await_exclusive_try(attempt.suspect, path)
    scene.records.on_event(attempt, DecodeFailed(WorkerLost("it fell silent")))
    assert not scene.records.suspects.is_suspect(attempt.suspect)


async def test_refusals_for_want_of_room_do_not_count_against_a_worker(scene, a_request):
    attempt = scene.attempt(a_request())
    for _ in range(20):
        error = RequestError("too many wait", code="overloaded", status=429)
        scene.records.on_event(attempt, DecodeFailed(error))
    assert scene.records.ejected() == frozenset()


# --- who is left out, for how long, and how they come back ---

ALL = ["a", "b", "c", "d"]


class Failing:
    """An Ejection whose clock is set by hand, and that draws no jitter."""

    def __init__(self, draw: float = 0.0, **config):
        self.now = 0.0
        self.ejection = Ejection[str](EjectionConfig(**config), clock=lambda: self.now, draw=lambda: draw)

    def fail(self, worker: str, times: int = 5) -> None:
        for _ in range(times):
            self.ejection.failed(worker)

    def out(self) -> set[str]:
        return set(self.ejection.ejected(ALL))


def test_a_worker_that_fails_often_enough_in_a_row_is_left_out_for_a_while():
    scene = Failing()
    scene.fail("a", 4)
    assert scene.out() == set()
    scene.fail("a", 1)
    assert scene.out() == {"a"}
    scene.now = 2.1
    assert scene.out() == set()


def test_a_success_between_failures_starts_the_row_anew():
    scene = Failing()
    scene.fail("a", 4)
    scene.ejection.succeeded("a")
    scene.fail("a", 4)
    assert scene.out() == set()


def test_a_worker_that_fails_every_other_request_is_left_out_by_its_rate():
    scene = Failing()
    for _ in range(10):
        scene.fail("a", 1)
        scene.ejection.succeeded("a")
    assert scene.out() == set(), "twenty outcomes are needed"
    scene.fail("a", 1)
    assert scene.out() == {"a"}


def test_half_of_all_are_left_out_at_most_and_a_single_one_never():
    scene = Failing()
    for worker in ALL:
        scene.fail(worker)
    assert len(scene.out()) == 2
    assert scene.ejection.ejected(["a"]) == frozenset()


@pytest.fixture
def probing():
    """A scene in which a request is to find out whether a, left out before, can do it again."""
    scene = Failing()
    scene.fail("a")
    scene.now = 3.0
    scene.ejection.begin("a")
    return scene


def test_one_request_finds_out_whether_the_worker_can_do_it_again(probing):
    assert probing.out() == {"a"}, "others wait for what comes of it"
    probing.ejection.succeeded("a")
    assert probing.out() == set()


def test_a_failed_probe_leaves_the_worker_out_for_twice_as_long(probing):
    probing.fail("a", 1)
    probing.now = 6.9
    assert probing.out() == {"a"}
    probing.now = 7.1
    assert probing.out() == set()


def test_a_probe_whose_client_leaves_tells_nothing_and_the_next_request_is_one(probing):
    probing.ejection.unresolved("a")
    assert probing.out() == set()
    probing.ejection.begin("a")
    assert probing.out() == {"a"}


def test_a_lost_connection_is_one_failure_however_many_requests_tell_of_it():
    scene = Failing()
    for _ in range(100):
        scene.ejection.lost("a")
    assert scene.out() == set()
    for second in range(1, 5):
        scene.now = float(second)
        scene.ejection.lost("a")
    assert scene.out() == {"a"}


def test_the_time_is_shortened_at_random_and_bounded():
    scene = Failing(draw=1.0, first_s=2.0, most_s=3.0)
    scene.fail("a")
    scene.now = 1.1
    assert scene.out() == set()
    for _ in range(10):
        scene.ejection.begin("a")
        scene.fail("a", 1)
        scene.now += 1.6
        assert scene.out() == set()


def test_ten_requests_in_a_row_make_up_for_what_was():
    scene = Failing()
    scene.fail("a")
    scene.now = 3.0
    for _ in range(10):
        scene.ejection.begin("a")
        scene.ejection.succeeded("a")
    scene.fail("a")
    scene.now = 5.1
    assert scene.out() == set(), "two seconds again, not four"


def test_those_that_are_gone_are_forgotten():
    scene = Failing()
    scene.fail("a")
    scene.ejection.keep_where(lambda worker: worker != "a")
    assert scene.out() == set()
