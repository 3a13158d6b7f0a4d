import pytest

from twostroke.protocol.requests import Peer
from twostroke.router.routing.in_flight import InFlight, Load, Place

P, D = Peer("p", 1), Peer("d", 1)


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def counts(clock):
    return InFlight(clock)


def places(tokens=100, class_name="standard"):
    return Place(D, 0, tokens, class_name), Place(P, tokens, tokens, class_name)


def test_requests_that_come_together_see_each_other(counts):
    counts.hold(places())
    counts.hold(places())
    assert counts.load(P).prompt_tokens("standard", 0) == 200
    assert (counts.load(D).requests(0), counts.load(D).context_tokens(0)) == (2, 200)
    assert counts.load(D).prompt_tokens("standard", 0) == 0
    assert counts.total() == 4


def test_a_place_is_given_up_once_and_the_others_with_the_last_release(counts):
    hold = counts.hold(places())
    hold.release(P)
    hold.release(P)
    assert (counts.load(P).requests(0), counts.load(D).requests(0)) == (0, 1)
    hold.release()
    hold.release()
    assert counts.total() == 0


def test_work_that_the_workers_numbers_count_in_is_not_counted_twice(counts, clock):
    counts.hold(places(100))
    clock.now = 1.0
    counts.told(P)
    assert counts.load(P).prompt_tokens("standard", 100) == 100
    assert counts.load(P).prompt_tokens("standard", 450) == 450, "others' are in there too"
    counts.hold(places(30))
    assert counts.load(P).prompt_tokens("standard", 450) == 480


def test_a_request_that_was_under_way_when_the_worker_told_its_numbers_is_not_in_them(counts, clock):
    clock.now = 1.0
    counts.hold(places(100))
    clock.now = 1.01
    counts.told(P)
    assert counts.load(P).prompt_tokens("standard", 0) == 100
    assert counts.load(P).prompt_tokens("standard", 300) == 400
    clock.now = 1.5
    counts.told(P)
    assert counts.load(P).prompt_tokens("standard", 300) == 300


def test_what_has_ended_since_the_worker_told_its_numbers_is_taken_off(counts, clock):
    hold = counts.hold(places(100))
    clock.now = 1.0
    counts.told(P)
    hold.release(P)
    assert counts.load(P).prompt_tokens("standard", 450) == 350
    assert counts.load(P).prompt_tokens("standard", 100) == 0
    counts.told(P)
    assert counts.load(P).prompt_tokens("standard", 450) == 450


def test_a_long_prompt_that_is_nearly_read_counts_with_what_is_left(counts, clock):
    counts.hold(places(100_000))
    clock.now = 60.0
    counts.told(P)
    assert counts.load(P).prompt_tokens("standard", 500) == 500


def test_classes_are_told_apart(counts):
    counts.hold(places(100, "high"))
    counts.hold(places(10, "low"))
    load = counts.load(P)
    assert (load.prompt_tokens("high", 0), load.prompt_tokens("low", 0), load.prompt_tokens("other", 7)) == (100, 10, 7)


def test_after_the_first_token_no_prompt_is_left_to_compute(counts, clock):
    hold = counts.hold([Place(D, 80, 100)])
    hold.prompt_computed()
    hold.prompt_computed()
    assert counts.load(D).prompt_tokens("standard", 0) == 0
    assert counts.load(D).requests(0) == 1
    clock.now = 1.0
    counts.told(D)
    hold.release()
    assert counts.load(D).requests(1) == 0


def test_a_worker_that_is_gone_leaves_no_trace_once_its_requests_have_ended(counts):
    hold = counts.hold(places())
    counts.keep({D})
    hold.release()
    counts.keep({D})
    assert set(counts._loads) == {D}
    counts.told(D)
    assert not counts._loads


def test_whose_load_has_changed_is_told(clock):
    changed = []
    counts = InFlight(clock, changed.append)
    hold = counts.hold(places())
    hold.release(P)
    assert changed == [D, P, P]


def test_a_worker_without_any_work_of_ours_has_what_it_tells():
    assert Load().requests(5) == 5
