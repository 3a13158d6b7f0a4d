"""What routers tell adds up to one look at the system, however they come and go."""

from dataclasses import replace

from twostroke.cluster.autoscaling.readings import Counted, Reading, count, signals_of
from twostroke.protocol.stats import StepCosts

BEGUN = 1000.0


def reading(at: float = 1.0, *, started_at: float = BEGUN + 1, **numbers: float) -> Reading:
    return Reading(at, {"started_at": started_at, **{name.replace("__", "."): one for name, one in numbers.items()}})


def test_the_routers_counters_add_up() -> None:
    readings = {"a": reading(requests=3, prompt_tokens=30), "b": reading(requests=4, prompt_tokens=50)}
    counted = count(Counted(BEGUN), readings, {"a", "b"})
    assert (counted.arrived.requests, counted.arrived.prompt_tokens) == (7, 80)
    counted = count(counted, {"a": reading(requests=5, prompt_tokens=60)}, {"a", "b"})  # b is silent
    counted = count(counted, {"b": reading(requests=4, prompt_tokens=50)}, {"a", "b"})
    assert (counted.arrived.requests, counted.arrived.prompt_tokens) == (9, 110)


def test_what_came_before_the_counting_began_is_no_burst() -> None:
    old = reading(started_at=BEGUN - 100, requests=500)
    counted = count(Counted(BEGUN), {"a": old}, {"a", "b"})
    assert counted.arrived.requests == 0
    counted = count(counted, {"a": old, "b": old}, {"a", "b"})  # it took longer to tell
    assert counted.arrived.requests == 0
    counted = count(counted, {"b": reading(started_at=BEGUN - 100, requests=501)}, {"a", "b"})
    assert counted.arrived.requests == 1


def test_the_sum_goes_on_where_a_router_takes_anothers_place() -> None:
    counted = count(Counted(BEGUN), {"a": reading(requests=10)}, {"a"})
    counted = count(counted, {"c": reading(requests=2)}, {"c"})
    assert counted.arrived.requests == 12
    assert set(counted.last) == {"c"}  # those that are gone are not kept


def test_a_reading_that_comes_late_is_no_burst() -> None:
    """Serve's controller may be held up, and then hears all at once what routers have told meanwhile."""
    counted = count(Counted(BEGUN), {"a": reading(100.0, requests=50)}, {"a"})
    counted = count(counted, {"a": reading(115.0, requests=200)}, {"a"})
    signals = signals_of({"a": reading(115.0)}, counted, {}, {})
    assert (signals.at_s, signals.arrived.requests) == (15.0, 200)
    counted = count(counted, {"a": reading(115.0, requests=200), "ahead": reading(900.0)}, {"a", "ahead"})
    assert counted.elapsed_s == 15.0  # another machine's clock
    counted = count(counted, {"a": reading(116.0), "ahead": reading(901.0)}, {"a", "ahead"})
    assert counted.elapsed_s == 16.0


def test_routers_that_tell_out_of_step_make_time_no_faster() -> None:
    routers = {"a", "b"}
    counted = count(Counted(BEGUN), {"a": reading(100.0), "b": reading(99.5)}, routers)
    for second in range(101, 121):
        late = {"a": 0.5, "b": 0.0} if second % 2 else {"a": 0.0, "b": 0.5}
        counted = count(counted, {name: reading(second - late[name]) for name in routers}, routers)
    assert counted.elapsed_s == 20.0


def test_a_router_that_has_ended_is_not_counted_again_by_what_it_told_last() -> None:
    counted = count(Counted(BEGUN), {"a": reading(requests=10)}, {"a"})
    for _ in range(3):
        counted = count(counted, {"a": reading(requests=10), "b": reading(requests=1)}, {"b"})
    assert counted.arrived.requests == 11


def test_workers_count_once_as_the_router_sees_them_that_reaches_most() -> None:
    readings = {
        "old": reading(1.0, prefill__running=1, decode__running=2, decode__queued_tokens=70, decode__max_batch=64),
        "newer": reading(2.0, prefill__running=1, decode__running=2, decode__queued_tokens=90, decode__max_batch=64),
        "new": reading(3.0, prefill__running=0, decode__running=0),  # has just started
    }
    signals = signals_of(readings, Counted(BEGUN), {"prefill": 1, "decode": 3}, {"decode": 1.0})
    assert (signals.decode.running, signals.decode.target, signals.decode.queued_tokens) == (2, 3, 90)
    assert (signals.decode.max_batch, signals.decode.gpus_each, signals.prefill.gpus_each) == (64, 1.0, 0.0)


def test_a_router_that_hangs_says_nothing_of_workers_while_others_tell() -> None:
    hung = reading(1.0, decode__running=3, decode__queued_tokens=9000)
    fresh = reading(7.0, decode__running=2, decode__queued_tokens=0)
    signals = signals_of({"hung": hung, "fresh": fresh}, Counted(BEGUN), {"decode": 2}, {})
    assert (signals.decode.running, signals.decode.queued_tokens) == (2, 0)
    assert signals_of({"hung": hung}, Counted(BEGUN), {}, {}).decode.running == 3  # nobody knows better


def test_costs_are_there_once_a_worker_knows_its_own() -> None:
    told = {"base_s": 0.1, "token_s": 0.2, "pair_s": 0.3, "row_s": 0.4, "context_s": 0.5, "num_samples": 9}
    known = reading(decode__running=1, **{f"decode__{name}": one for name, one in told.items()})
    signals = signals_of({"a": known}, Counted(BEGUN), {"decode": 1}, {})
    assert signals.decode.costs == StepCosts(0.1, 0.2, 0.3, 0.4, 0.5, 9)
    assert signals.prefill == replace(signals.prefill, running=0, target=0, costs=None)
    told |= {"experts_s": 0.6, "expert_share": 0.7}
    mixture = reading(decode__running=1, **{f"decode__{name}": one for name, one in told.items()})
    signals = signals_of({"a": mixture}, Counted(BEGUN), {"decode": 1}, {})
    assert signals.decode.costs == StepCosts(*told.values())


def test_the_tightest_promise_is_that_of_whichever_router_is_asked_for_it() -> None:
    readings = {"a": reading(ttft_s=0.0, tpot_s=0.1), "b": reading(ttft_s=2.0, tpot_s=0.05)}
    signals = signals_of(readings, Counted(BEGUN), {}, {})
    assert (signals.ttft_s, signals.tpot_s) == (2.0, 0.05)
    assert signals_of({"a": reading()}, Counted(BEGUN), {}, {}).ttft_s is None
