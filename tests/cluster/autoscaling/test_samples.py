"""Reports of routers add up to one sample of the system, however routers come and go."""

from collections.abc import Mapping
from dataclasses import replace

from twostroke.cluster.autoscaling.samples import (
    LATE_S,
    Arrived,
    Counted,
    RouterCounters,
    RouterSample,
    count,
    scaling_signals,
)
from twostroke.protocol.stats import StepCosts

BEGUN = 1000.0


def sample(uptime_s: float = 1.0, **numbers: float) -> RouterSample:
    return RouterSample(uptime_s, {name.replace("__", "."): one for name, one in numbers.items()})


def heard(samples: Mapping[str, RouterSample], ago_s: Mapping[str, float] | None = None) -> Counted:
    """Each router was heard so long ago; by default now."""
    ago_s = ago_s or {}
    return Counted(
        BEGUN, last={name: RouterCounters(1.0, BEGUN - ago_s.get(name, 0.0), 0.0, Arrived()) for name in samples}
    )


def test_the_routers_counters_add_up() -> None:
    samples = {"a": sample(requests=3, prompt_tokens=30), "b": sample(requests=4, prompt_tokens=50)}
    counted = count(Counted(BEGUN), samples, {"a", "b"}, BEGUN + 2)
    assert (counted.arrived.requests, counted.arrived.prompt_tokens) == (7, 80)
    counted = count(counted, {"a": sample(2.0, requests=5, prompt_tokens=60)}, {"a", "b"}, BEGUN + 3)  # b is silent
    counted = count(counted, {"b": sample(3.0, requests=4, prompt_tokens=50)}, {"a", "b"}, BEGUN + 4)
    assert (counted.arrived.requests, counted.arrived.prompt_tokens) == (9, 110)


def test_what_came_before_the_counting_began_is_no_burst() -> None:
    old = sample(100.0, requests=500)
    counted = count(Counted(BEGUN), {"a": old}, {"a", "b"}, BEGUN)
    assert counted.arrived.requests == 0
    counted = count(counted, {"a": old, "b": old}, {"a", "b"}, BEGUN + 1)  # it took longer to tell
    assert counted.arrived.requests == 0
    counted = count(counted, {"b": sample(101.0, requests=501)}, {"a", "b"}, BEGUN + 2)
    assert counted.arrived.requests == 1


def test_the_sum_goes_on_where_a_router_takes_anothers_place() -> None:
    counted = count(Counted(BEGUN), {"a": sample(requests=10)}, {"a"}, BEGUN + 2)
    counted = count(counted, {"c": sample(requests=2)}, {"c"}, BEGUN + 4)
    assert counted.arrived.requests == 12
    assert set(counted.last) == {"c"}  # those that are gone are not kept


def test_a_reading_that_comes_late_is_no_burst() -> None:
    """Serve's controller may be held up, and then hears all at once what routers have told meanwhile."""
    counted = count(Counted(BEGUN), {"a": sample(1.0, requests=50)}, {"a"}, BEGUN + 2)
    counted = count(counted, {"a": sample(16.0, requests=200)}, {"a"}, BEGUN + 17)
    signals = scaling_signals({"a": sample(16.0)}, counted, {}, {})
    assert (signals.at_s, signals.arrived.requests) == (15.0, 200)
    both = {"a": sample(16.0, requests=200), "older": sample(900.0)}
    counted = count(counted, both, {"a", "older"}, BEGUN + 17)
    assert counted.elapsed_s == 15.0  # it has run for longer, and tells from now on
    counted = count(counted, {"a": sample(17.0), "older": sample(901.0)}, {"a", "older"}, BEGUN + 18)
    assert counted.elapsed_s == 16.0


def test_no_look_is_longer_than_the_time_that_the_listener_has_seen_pass() -> None:
    """Whatever a router says of its time: a rate over more of it would be too low, and workers would go."""
    counted = count(Counted(BEGUN), {"a": sample(1.0)}, {"a"}, BEGUN + 2)
    counted = count(counted, {"a": sample(602.0)}, {"a"}, BEGUN + 3)
    assert counted.elapsed_s == 1.0 + LATE_S
    counted = count(counted, {"a": sample(2.0)}, {"a"}, BEGUN + 4)
    assert counted.elapsed_s == 1.0 + LATE_S  # nor does time go back


def test_a_router_counts_as_heard_for_as_long_as_it_tells_something_new() -> None:
    counted = count(Counted(BEGUN), {"a": sample(1.0), "b": sample(1.0)}, {"a", "b"}, BEGUN + 2)
    counted = count(counted, {"a": sample(2.0), "b": sample(1.0)}, {"a", "b"}, BEGUN + 3)
    assert counted.heard_since(BEGUN + 2) == {"a"}
    assert counted.heard_since(BEGUN + 1) == {"a", "b"}


def test_routers_that_tell_out_of_step_make_time_no_faster() -> None:
    routers = {"a", "b"}
    counted = count(Counted(BEGUN), {"a": sample(100.0), "b": sample(99.5)}, routers, BEGUN + 100)
    for second in range(101, 121):
        late = {"a": 0.5, "b": 0.0} if second % 2 else {"a": 0.0, "b": 0.5}
        samples = {name: sample(second - late[name]) for name in sorted(routers)}
        counted = count(counted, samples, routers, BEGUN + second)
    assert 19.5 <= counted.elapsed_s <= 20.5


def test_a_router_that_has_ended_is_not_counted_again_by_what_it_told_last() -> None:
    counted = count(Counted(BEGUN), {"a": sample(requests=10)}, {"a"}, BEGUN + 2)
    for second in range(3):
        samples = {"a": sample(requests=10), "b": sample(requests=1)}
        counted = count(counted, samples, {"b"}, BEGUN + 3 + second)
    assert counted.arrived.requests == 11


def test_workers_count_once_as_the_router_sees_them_that_reaches_most() -> None:
    samples = {
        "old": sample(1.0, prefill__running=1, decode__running=2, decode__queued_tokens=70, decode__max_batch=64),
        "newer": sample(2.0, prefill__running=1, decode__running=2, decode__queued_tokens=90, decode__max_batch=64),
        "new": sample(3.0, prefill__running=0, decode__running=0),  # has just started
    }
    counted = heard(samples, {"old": 2.0, "newer": 1.0})
    signals = scaling_signals(samples, counted, {"prefill": 1, "decode": 3}, {"decode": 1.0})
    assert (signals.decode.running, signals.decode.target, signals.decode.queued_tokens) == (2, 3, 90)
    assert (signals.decode.max_batch, signals.decode.gpus_each, signals.prefill.gpus_each) == (64, 1.0, 0.0)


def test_a_router_that_hangs_says_nothing_of_workers_while_others_tell() -> None:
    hung = sample(1.0, decode__running=3, decode__queued_tokens=9000)
    fresh = sample(7.0, decode__running=2, decode__queued_tokens=0)
    samples = {"hung": hung, "fresh": fresh}
    signals = scaling_signals(samples, heard(samples, {"hung": LATE_S + 1}), {"decode": 2}, {})
    assert (signals.decode.running, signals.decode.queued_tokens) == (2, 0)
    assert scaling_signals({"hung": hung}, heard({"hung": hung}), {}, {}).decode.running == 3  # nobody knows better


def test_costs_are_there_once_a_worker_knows_its_own() -> None:
    told = {"base_s": 0.1, "token_s": 0.2, "pair_s": 0.3, "row_s": 0.4, "context_s": 0.5, "num_samples": 9}
    known = sample(decode__running=1, **{f"decode__{name}": one for name, one in told.items()})
    signals = scaling_signals({"a": known}, heard({"a": known}), {"decode": 1}, {})
    assert signals.decode.costs == StepCosts(0.1, 0.2, 0.3, 0.4, 0.5, 9)
    assert signals.prefill == replace(signals.prefill, running=0, target=0, costs=None)
    told |= {"experts_s": 0.6, "expert_share": 0.7}
    mixture = sample(decode__running=1, **{f"decode__{name}": one for name, one in told.items()})
    signals = scaling_signals({"a": mixture}, heard({"a": mixture}), {"decode": 1}, {})
    assert signals.decode.costs == StepCosts(*told.values())


def test_the_tightest_promise_is_that_of_whichever_router_is_asked_for_it() -> None:
    samples = {"a": sample(ttft_s=0.0, tpot_s=0.1), "b": sample(ttft_s=2.0, tpot_s=0.05)}
    signals = scaling_signals(samples, heard(samples), {}, {})
    assert (signals.ttft_s, signals.tpot_s) == (2.0, 0.05)
    assert scaling_signals({"a": sample()}, heard({"a": sample()}), {}, {}).ttft_s is None
