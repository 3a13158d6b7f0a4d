"""Choices, with costs that can be checked by hand: a prompt token takes 1 ms, a step at least 10 ms."""

import msgspec
import numpy as np
import pytest

from twostroke.protocol.kv_layout import KVLayout
from twostroke.protocol.requests import Address, Peer, Promise
from twostroke.protocol.stats import QueuedWork, StepCosts, WorkerInfo, WorkerStats
from twostroke.router.routing.cheapest_path import cheapest_path
from twostroke.router.routing.fleet_view import AVAILABLE, UNWELCOME, WorkerTable
from twostroke.router.routing.in_flight import Load
from twostroke.router.routing.path_costs import Need
from twostroke.router.routing.policy import NoPath
from twostroke.router.slo.classes import ServiceClasses

LAYOUT = KVLayout("a model", "bfloat16", 2, 4, 8, 16)
COSTS = StepCosts(base_s=0.01, token_s=0.001, pair_s=0.0, row_s=0.002, context_s=0.0)
IDLE = WorkerStats(free_blocks=100, total_blocks=100)
QUICK = 256e6
"""Bytes a second: of KV a million tokens."""


def load(*, running=0, waiting=0, **changes):
    """A worker with so many requests that decode, and so many prompt tokens that wait."""
    queued = (QueuedWork("standard", 0, 0.0, waiting, 1),) if waiting else ()
    return msgspec.structs.replace(IDLE, num_running=running, queued=queued, **changes)


class Fleet:
    """Prefill workers p0, p1, ... and decode workers d0, d1, ... that have told these numbers."""

    def __init__(self, prefill, decode, *, bytes_per_s=QUICK, down=(), **changes):
        infos = [self.info("prefill", f"p{row}", **changes) for row in range(len(prefill))]
        infos += [self.info("decode", f"d{row}", **changes) for row in range(len(decode))]
        self.table = WorkerTable(infos, ServiceClasses())
        for row, (info, stats) in enumerate(zip(infos, (*prefill, *decode), strict=True)):
            tier = UNWELCOME if info.peer.worker_id in down else AVAILABLE
            self.table.update(row, stats, Load(), COSTS, tier, bytes_per_s)

    def info(self, role, name, **changes):
        base = WorkerInfo(role, Peer(name, 1), Address("h", 1), (Address("h", 2),), LAYOUT, 100, 10_000, 500, 32)
        return msgspec.structs.replace(base, **changes.get(name, {}))

    def path(self, num_tokens=400, *, held=(), promise=None, min_pull_tokens=64, **options):
        """The choice, where workers hold as many tokens of the prompt as `held` says by name."""
        held = dict(held)
        tokens = np.array([held.get(info.peer.worker_id, 0) for info in self.table.infos], float)
        need = Need(num_tokens, 10.0, promise or Promise(), min_pull_tokens)
        return cheapest_path(self.table, need, tokens, **options)

    def names(self, *args, **options):
        path = self.path(*args, **options)
        return tuple(info and info.peer.worker_id for info in (path.prefill, path.decode, path.source))


def peers(*names):
    return {Peer(name, 1) for name in names}


def test_idle_workers_of_both_roles_share_a_long_prompt():
    assert Fleet([IDLE], [IDLE]).names() == ("p0", "d0", None)


def test_a_prompt_goes_where_it_is_cached_unless_the_queue_there_is_longer_than_what_that_spares():
    short, long = load(waiting=200), load(waiting=500)
    assert Fleet([IDLE, short], [IDLE]).names(held={"p1": 320}, min_pull_tokens=None) == ("p1", "d0", None)
    assert Fleet([IDLE, long], [IDLE]).names(held={"p1": 320}, min_pull_tokens=None) == ("p0", "d0", None)


def test_a_long_queue_where_it_is_cached_makes_another_pull_it():
    assert Fleet([IDLE, load(waiting=200)], [IDLE]).names(held={"p1": 320}) == ("p0", "d0", "p1")
    slow = Fleet([IDLE, load(waiting=200)], [load(running=9)], bytes_per_s=256e3 / 2)
    assert slow.names(held={"p1": 320}) == ("p1", "d0", None), "KV takes 2 ms a token"


def test_a_prefix_is_pulled_from_who_has_most_of_it_and_least_to_do():
    fleet = Fleet([IDLE, load(waiting=900)], [load(running=9), load(running=3)])
    assert fleet.names(held={"p1": 160, "d0": 320, "d1": 320})[2] == "d1"
    assert fleet.names(held={"p1": 352, "d0": 320})[2] == "p1"
    assert fleet.names(held={"p1": 352, "d0": 320}, failed=peers("p1"))[2] == "d0"
    assert fleet.names(held={"p1": 352, "d0": 320}, ejected=peers("p1", "d0"))[2] is None


def test_nothing_is_pulled_from_workers_of_another_model_nor_by_who_takes_no_kv():
    other = {"layout": msgspec.structs.replace(LAYOUT, model="other")}
    assert Fleet([IDLE], [IDLE, load(running=9)], d1=other).names(held={"d1": 320}) == ("p0", "d0", None)
    assert Fleet([IDLE], [load(running=8)], p0={"transfer_addresses": ()}).names(held={"d0": 320})[2] is None
    busy = load(running=9)
    assert Fleet([], [busy, IDLE], d0=other).names(held={"d0": 320}) == (None, "d1", None)
    assert Fleet([], [busy, IDLE], d1={"transfer_addresses": ()}).names(held={"d0": 320}) == (None, "d1", None)


def test_a_decode_worker_alone_pulls_what_another_worker_holds():
    busy = load(running=9)
    assert Fleet([], [busy, IDLE]).names(held={"d0": 320}) == (None, "d1", "d0")
    assert Fleet([load(waiting=2000)], [IDLE]).names(held={"p0": 320}) == (None, "d0", "p0")
    assert Fleet([], [busy, IDLE]).names(held={"d0": 320, "d1": 272})[2] is None, "48 tokens are too few"
    slow = Fleet([], [busy, IDLE], bytes_per_s=QUICK / 2000)
    assert slow.names(held={"d0": 320})[2] is None, "KV takes 2 ms a token, computing the same with who comes next"
    path = Fleet([], [busy, IDLE]).path(401, held={"d0": 400})
    assert path.new_tokens == 1
    assert path.estimate.pull_s == pytest.approx(0.002 + 400e-6)
    assert path.estimate.prefill_s == pytest.approx(0.01 + 0.001)


def test_a_prompt_stays_with_a_decode_worker_that_holds_it_while_none_has_less_to_do():
    fleet = Fleet([], [IDLE, IDLE, load(running=1)])
    assert {fleet.names(held={"d1": 384}, turn=turn) for turn in range(3)} == {(None, "d1", None)}
    assert {fleet.names(turn=turn) for turn in range(2)} == {(None, "d0", None), (None, "d1", None)}


def test_a_decode_worker_alone_computes_what_is_short_if_it_has_little_to_do():
    fleet = Fleet([load(waiting=100)], [load(running=1)])
    assert fleet.names(400, held={"d0": 384}) == (None, "d0", None), "16 tokens, which one stream waits for"
    assert fleet.names(400, held={"d0": 240})[0] == "p0"
    assert Fleet([load(waiting=100)], [load(running=9)]).names(400, held={"d0": 384})[0] == "p0", "nine streams wait"
    assert fleet.names(400, held={"d0": 384}, decodes_alone=False)[0] == "p0"


def test_a_decode_worker_alone_computes_a_prompt_when_prefill_queues_are_long():
    assert Fleet([load(waiting=2000)], [IDLE]).names(400) == (None, "d0", None)
    assert Fleet([load(waiting=2000)], [load(running=9)]).names(400)[0] == "p0", "nine streams would stand still"


def test_a_promise_that_streams_were_given_keeps_prompts_away_from_their_worker():
    promised = load(running=1, tightest_tpot_s=0.015)
    assert Fleet([load(waiting=100)], [load(running=1)]).names(32) == (None, "d0", None)
    assert Fleet([load(waiting=100)], [promised]).names(128)[0] == "p0"


def test_the_decode_worker_with_the_shorter_steps_is_taken():
    assert Fleet([IDLE], [load(running=9), load(running=2)]).names() == ("p0", "d1", None)


def test_a_class_waits_for_those_above_it_alone():
    lower = msgspec.structs.replace(IDLE, queued=(QueuedWork("low", 0, 0.0, 3000, 3),))
    equal = msgspec.structs.replace(IDLE, queued=(QueuedWork("high", 1, 0.0, 300, 1),))
    fleet = Fleet([lower, equal], [load(running=9)])
    assert fleet.names(promise=Promise("high", 1))[0] == "p0"
    assert fleet.names(promise=Promise("low", 0))[0] == "p1"


def test_workers_that_are_about_as_good_are_taken_in_turn():
    fleet = Fleet([IDLE, IDLE, load(waiting=300)], [load(running=1), IDLE, IDLE])
    taken = {fleet.names(turn=turn) for turn in range(2)}
    assert taken == {("p0", "d1", None), ("p1", "d2", None)}


def test_of_two_that_are_about_as_good_the_one_with_less_to_do_is_taken():
    assert Fleet([IDLE, load(waiting=310)], [IDLE]).names(400, held={"p1": 320}, min_pull_tokens=None)[0] == "p1"
    assert Fleet([IDLE], [load(running=1), IDLE], d1={"max_batch": 1}).names()[1] == "d1"


def test_an_estimate_tells_the_times_of_the_path_taken():
    path = Fleet([load(waiting=200)], [load(running=2)]).path(400, held={"p0": 160, "d0": 160})
    estimate = path.estimate
    assert path.new_tokens == 240
    assert estimate.queue_s == pytest.approx(200 * (0.001 + 0.01 / 500))
    assert (estimate.pull_s, estimate.prefill_s) == (0, pytest.approx(0.01 + 0.24))
    assert estimate.transfer_s == pytest.approx(0.002 + 0.5 * 240e-6), "the last of two layers"
    assert (estimate.decode_slot_s, estimate.step_s) == (0, pytest.approx(0.01 + 3 * 0.002))
    alone = Fleet([], [load(running=2, waiting=200)]).path(400, held={"d0": 160})
    assert (alone.prefill, alone.new_tokens) == (None, 240)
    assert alone.estimate.prefill_s == pytest.approx(0.014 + 0.24)
    assert alone.estimate.queue_s == pytest.approx(200 * (0.001 + 0.014 / 498))
    assert alone.estimate.transfer_s == alone.estimate.pull_s == 0


def test_a_pull_is_in_the_estimate_and_what_comes_by_it_need_not_be_computed():
    path = Fleet([IDLE, load(waiting=900)], [IDLE]).path(401, held={"p1": 400})
    assert path.source.peer.worker_id == "p1"
    assert path.new_tokens == 1
    assert path.estimate.pull_s == pytest.approx(0.002 + 400e-6)
    assert path.estimate.prefill_s == pytest.approx(0.011)


def test_a_prefill_worker_that_failed_is_never_taken_and_a_decode_worker_only_for_want_of_another():
    fleet = Fleet([IDLE], [IDLE, load(running=9)])
    assert fleet.names(failed=peers("p0", "d0")) == (None, "d1", None)
    assert fleet.names(failed=peers("d0", "d1"))[:2] == ("p0", "d0")
    assert fleet.names(ejected=peers("d0"), failed=peers("d1"))[1] == "d0"
    assert fleet.names(ejected=peers("p0"))[0] is None


def test_workers_whose_channel_is_down_count_like_those_that_failed():
    fleet = Fleet([IDLE], [IDLE, load(running=9)], down=("p0", "d0"))
    assert fleet.names() == (None, "d1", None)
    assert fleet.names(failed=peers("d1"))[1] == "d0"


def test_workers_that_drain_take_nothing_new():
    leaving = load(is_draining=True)
    assert Fleet([leaving], [leaving, load(running=9)]).names() == (None, "d1", None)
    with pytest.raises(NoPath):
        Fleet([IDLE], [leaving]).path()


@pytest.mark.parametrize(
    "change",
    [
        {"layout": msgspec.structs.replace(LAYOUT, model="other")},
        {"layout": msgspec.structs.replace(LAYOUT, dtype="float32")},
        {"max_context": 100},
    ],
)
def test_a_prefill_worker_that_cannot_serve_the_pair_is_passed_over(change):
    assert Fleet([IDLE, load(waiting=300)], [load(running=8)], p0=change).names()[:2] == ("p1", "d0")
    assert Fleet([IDLE], [load(running=8)], p0=change).names()[:2] == (None, "d0")


def test_each_kind_of_decode_worker_is_paired_with_its_own_kind():
    other = {"layout": msgspec.structs.replace(LAYOUT, model="other")}
    fleet = Fleet([IDLE, load(waiting=900)], [load(running=9), load(running=2)], p1=other, d1=other)
    assert fleet.names() == ("p0", "d0", None)
    fleet = Fleet([load(waiting=900), IDLE], [load(running=9), load(running=2)], p1=other, d1=other)
    assert fleet.names() == ("p1", "d1", None)


def test_a_decode_worker_that_takes_no_kv_computes_the_prompt():
    assert Fleet([IDLE], [IDLE], d0={"transfer_addresses": ()}).names() == (None, "d0", None)


def test_nobody_there_is_503():
    for fleet in (Fleet([IDLE], []), Fleet([IDLE], [IDLE], d0={"max_context": 100})):
        with pytest.raises(NoPath) as caught:
            fleet.path()
        assert caught.value.status == 503
