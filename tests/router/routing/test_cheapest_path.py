"""Choices and costs, by numbers that can be checked by hand: a prompt token takes 1 ms, a step at least 10 ms."""

import msgspec
import pytest

from tests.router.routing.knowing import COSTS, IDLE, LAYOUT, OTHER_KIND, QUICK, TIERS, Workers, load, peers
from twostroke.protocol.requests import Promise
from twostroke.protocol.stats import QueuedWork, TierStats
from twostroke.router.fleet import NoPath
from twostroke.router.request_state import Path
from twostroke.router.routing.chooser import (
    HOP_S,
    PathQuery,
    cheapest_path,
    cheapest_prefill,
    decode_cost,
    leave_out,
    path_by_load,
    prefill_cost,
    transfer_s,
    with_source,
)
from twostroke.router.routing.workers import DRAINING


class Fleet(Workers):
    """A request whose paths are chosen."""

    def path(
        self,
        num_tokens=400,
        *,
        cached_tokens=(),
        tier_tokens=(),
        promise=None,
        min_pull_tokens=64,
        failed=(),
        ejected=(),
        **options,
    ):
        """The choice, where workers and their tiers hold as many tokens of the prompt as these say by name."""
        cached_tokens, tier_tokens = dict(cached_tokens), dict(tier_tokens)
        query = PathQuery(num_tokens, 10.0, promise or Promise(), self.classes, min_pull_tokens)
        return cheapest_path(
            self.of("prefill", cached_tokens, tier_tokens),
            self.of("decode", cached_tokens, tier_tokens),
            query,
            left_out=leave_out(failed, ejected),
            **options,
        )

    def names(self, *args, **options):
        path = self.path(*args, **options)
        return tuple(info and info.peer.worker_id for info in (path.prefill, path.decode, path.source))


def test_idle_workers_of_both_roles_share_a_long_prompt():
    assert Fleet([IDLE], [IDLE]).names() == ("p0", "d0", None)


def test_a_prompt_goes_where_it_is_cached_unless_the_queue_there_is_longer_than_what_that_spares():
    short, long = load(waiting=200), load(waiting=500)
    assert Fleet([IDLE, short], [IDLE]).names(cached_tokens={"p1": 320}, min_pull_tokens=None) == ("p1", "d0", None)
    assert Fleet([IDLE, long], [IDLE]).names(cached_tokens={"p1": 320}, min_pull_tokens=None) == ("p0", "d0", None)


def test_a_long_queue_where_it_is_cached_makes_another_pull_it():
    assert Fleet([IDLE, load(waiting=200)], [IDLE]).names(cached_tokens={"p1": 320}) == ("p0", "d0", "p1")
    slow = Fleet([IDLE, load(waiting=200)], [load(running=9)], bytes_per_s=256e3 / 2)
    assert slow.names(cached_tokens={"p1": 320}) == ("p1", "d0", None), "KV takes 2 ms a token"


def test_a_prefix_is_pulled_from_who_has_most_of_it_and_least_to_do():
    fleet = Fleet([IDLE, load(waiting=900)], [load(running=9), load(running=3)])
    assert fleet.names(cached_tokens={"p1": 160, "d0": 320, "d1": 320})[2] == "d1"
    assert fleet.names(cached_tokens={"p1": 352, "d0": 320})[2] == "p1"
    assert fleet.names(cached_tokens={"p1": 352, "d0": 320}, failed=peers("p1"))[2] == "d0"
    assert fleet.names(cached_tokens={"p1": 352, "d0": 320}, ejected=peers("p1", "d0"))[2] is None


def test_nothing_is_pulled_from_workers_of_another_model_nor_by_who_takes_no_kv():
    other = {"layout": msgspec.structs.replace(LAYOUT, model="other")}
    assert Fleet([IDLE], [IDLE, load(running=9)], d1=other).names(cached_tokens={"d1": 320}) == ("p0", "d0", None)
    assert Fleet([IDLE], [load(running=8)], p0={"transfer_addresses": ()}).names(cached_tokens={"d0": 320})[2] is None
    busy = load(running=9)
    assert Fleet([], [busy, IDLE], d0=other).names(cached_tokens={"d0": 320}) == (None, "d1", None)
    assert Fleet([], [busy, IDLE], d1={"transfer_addresses": ()}).names(cached_tokens={"d0": 320}) == (None, "d1", None)


def test_a_decode_worker_alone_pulls_what_another_worker_holds():
    busy = load(running=9)
    assert Fleet([], [busy, IDLE]).names(cached_tokens={"d0": 320}) == (None, "d1", "d0")
    assert Fleet([load(waiting=2000)], [IDLE]).names(cached_tokens={"p0": 320}) == (None, "d0", "p0")
    assert Fleet([], [busy, IDLE]).names(cached_tokens={"d0": 320, "d1": 272})[2] is None, "48 tokens are too few"
    slow = Fleet([], [busy, IDLE], bytes_per_s=QUICK / 2000)
    assert slow.names(cached_tokens={"d0": 320})[2] is None, (
        "KV takes 2 ms a token, computing the same with who comes next"
    )
    path = Fleet([], [busy, IDLE]).path(401, cached_tokens={"d0": 400})
    assert path.new_tokens == 1
    assert path.estimate.pull_s == pytest.approx(0.002 + 400e-6)
    assert path.estimate.prefill_s == pytest.approx(0.01 + 0.001)


def test_a_prompt_stays_with_a_decode_worker_that_holds_it_while_none_has_less_to_do():
    fleet = Fleet([], [IDLE, IDLE, load(running=1)])
    assert {fleet.names(cached_tokens={"d1": 384}, rotation=turn) for turn in range(3)} == {(None, "d1", None)}
    assert {fleet.names(rotation=turn) for turn in range(2)} == {(None, "d0", None), (None, "d1", None)}


def test_a_decode_worker_alone_computes_what_is_short_if_it_has_little_to_do():
    fleet = Fleet([load(waiting=100)], [load(running=1)])
    assert fleet.names(400, cached_tokens={"d0": 384}) == (None, "d0", None), "16 tokens, which one stream waits for"
    assert fleet.names(400, cached_tokens={"d0": 240})[0] == "p0"
    assert Fleet([load(waiting=100)], [load(running=9)]).names(400, cached_tokens={"d0": 384})[0] == "p0", (
        "nine streams wait"
    )
    assert fleet.names(400, cached_tokens={"d0": 384}, decodes_alone=False)[0] == "p0"


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
    taken = {fleet.names(rotation=turn) for turn in range(2)}
    assert taken == {("p0", "d1", None), ("p1", "d2", None)}


def test_of_two_that_are_about_as_good_the_one_with_less_to_do_is_taken():
    assert (
        Fleet([IDLE, load(waiting=310)], [IDLE]).names(400, cached_tokens={"p1": 320}, min_pull_tokens=None)[0] == "p1"
    )
    assert Fleet([IDLE], [load(running=1), IDLE], d1={"max_batch": 1}).names()[1] == "d1"


def test_an_estimate_tells_the_times_of_the_path_taken():
    path = Fleet([load(waiting=200)], [load(running=2)]).path(400, cached_tokens={"p0": 160, "d0": 160})
    estimate = path.estimate
    assert path.new_tokens == 240
    assert estimate.queue_s == pytest.approx(200 * (0.001 + 0.01 / 500))
    assert (estimate.pull_s, estimate.prefill_s) == (0, pytest.approx(0.01 + 0.24))
    assert estimate.transfer_s == pytest.approx(0.002 + 0.5 * 240e-6), "the last of two layers"
    assert (estimate.decode_slot_s, estimate.step_s) == (0, pytest.approx(0.01 + 3 * 0.002))
    alone = Fleet([], [load(running=2, waiting=200)]).path(400, cached_tokens={"d0": 160})
    assert (alone.prefill, alone.new_tokens) == (None, 240)
    assert alone.estimate.prefill_s == pytest.approx(0.014 + 0.24)
    assert alone.estimate.queue_s == pytest.approx(200 * (0.001 + 0.014 / 498))
    assert alone.estimate.transfer_s == alone.estimate.pull_s == 0


def test_a_pull_is_in_the_estimate_and_what_comes_by_it_need_not_be_computed():
    path = Fleet([IDLE, load(waiting=900)], [IDLE]).path(401, cached_tokens={"p1": 400})
    assert path.source.peer.worker_id == "p1"
    assert path.new_tokens == 1
    assert path.estimate.pull_s == pytest.approx(0.002 + 400e-6)
    assert path.estimate.prefill_s == pytest.approx(0.011)


# --- tiers ---


@pytest.mark.parametrize(
    ("cached_tokens", "tier_tokens", "tier_read_s", "new_tokens"),
    [
        (0, 320, 0.005 + 0.032, 80),
        (160, 320, 0.005 + 0.016, 80),
        (0, 400, 0.005 + 0.0399, 1),  # the last token is always computed
        (320, 320, 0, 80),
        (336, 320, 0, 64),
        (0, 0, 0, 400),
        (395, 399, 0, 5),  # a read is longer than the computing that it spares
    ],
)
def test_what_tiers_hold_is_read_where_that_is_quicker_than_computing_it(
    cached_tokens, tier_tokens, tier_read_s, new_tokens
):
    fleet = Fleet([load(tiers=TIERS)], [])
    fleet["p0"].tier_tokens = tier_tokens
    cost = prefill_cost_of(fleet, "p0", query(400), cached_tokens)
    assert (cost.tier_read_s, cost.new_tokens, cost.pull_s) == (pytest.approx(tier_read_s), new_tokens, 0)
    assert cost.prefill_s == pytest.approx(0.01 + new_tokens * 0.001)
    assert cost.total_s == pytest.approx(cost.tier_read_s + cost.prefill_s)


def test_a_slow_tier_is_not_read():
    fleet = Fleet([load(tiers=(TierStats("disk", num_bytes=1, read_s=0.005, read_token_s=0.001),))], [])
    fleet["p0"].tier_tokens = 320
    assert prefill_cost_of(fleet, "p0", query(400)).new_tokens == 400


@pytest.mark.parametrize(
    ("tier_tokens", "bytes_per_s", "source", "tier_read_s"),
    [
        (320, QUICK, "p1", 0),  # the wire takes 1 us a token, the tier 100
        (320, QUICK / 200, None, 0.037),  # 200 us a token, which is quicker than computing, too
        (320, QUICK / 1000, None, 0.037),  # 1 ms a token
        (80, QUICK / 5, "p1", 0),  # the tier has too little
        (16, QUICK / 1000, None, 0.0066),
    ],
)
def test_of_a_pull_and_a_tiers_read_the_cheaper_is_taken(tier_tokens, bytes_per_s, source, tier_read_s):
    fleet = Fleet([load(tiers=TIERS), load(waiting=900)], [load(running=9)], bytes_per_s=bytes_per_s)
    path = fleet.path(cached_tokens={"p1": 320}, tier_tokens={"p0": tier_tokens})
    assert path.prefill.peer.worker_id == "p0"
    assert (path.source and path.source.peer.worker_id) == source
    assert path.estimate.tier_read_s == pytest.approx(tier_read_s)
    assert (path.estimate.pull_s > 0) == (source is not None)
    assert path.estimate.ttft_s == pytest.approx(
        path.estimate.pull_s + path.estimate.tier_read_s + path.estimate.prefill_s
    )


def test_a_prompt_goes_to_the_worker_whose_tiers_hold_it_unless_the_queue_there_is_longer_than_what_that_spares():
    for waiting, taken in ((200, "p1"), (500, "p0")):
        fleet = Fleet([load(tiers=TIERS), load(waiting=waiting, tiers=TIERS)], [load(running=9)])
        assert fleet.names(tier_tokens={"p1": 320}) == (taken, "d0", None)


def test_streams_of_a_decode_worker_do_not_wait_for_what_is_read():
    path = Fleet([IDLE], [load(running=9, tiers=TIERS)]).path(tier_tokens={"d0": 396})
    assert (path.prefill, path.new_tokens) == (None, 4)
    assert path.estimate.tier_read_s == pytest.approx(0.005 + 0.0396)


def test_a_prompt_that_is_only_scored_is_read_from_tiers_as_others_are():
    fleet = Fleet([load(tiers=TIERS), IDLE], [])
    prefill = fleet.of("prefill", {}, {"p0": 320})
    path = cheapest_prefill(prefill, [], query(400), left_out={}, rotation=0)
    assert (path.decode.peer.worker_id, path.new_tokens) == ("p0", 80)
    assert path.estimate.tier_read_s == pytest.approx(0.037)


def test_each_kind_of_decode_worker_is_paired_with_its_own_kind():
    other = OTHER_KIND
    fleet = Fleet([IDLE, load(waiting=900)], [load(running=9), load(running=2)], p1=other, d1=other)
    assert fleet.names() == ("p0", "d0", None)
    fleet = Fleet([load(waiting=900), IDLE], [load(running=9), load(running=2)], p1=other, d1=other)
    assert fleet.names() == ("p1", "d1", None)


# --- what one worker costs ---


def query(num_tokens, *, answer_tokens=10.0, promise=None, min_pull_tokens=None):
    return PathQuery(num_tokens, answer_tokens, promise or Promise(), {"standard": (0, 0.0)}, min_pull_tokens)


def prefill_cost_of(fleet, name, wanted, cached_tokens=0, source=None):
    """Return the prefill cost of `name`, which has `cached_tokens` tokens, where `source` has 400."""
    fleet[name].cached_tokens = cached_tokens
    if source is not None:
        fleet[source].cached_tokens = 400
    return prefill_cost(fleet[name], wanted, fleet[source] if source else None)


def queued(*work):
    """(class, priority, share, tokens), waiting at a worker."""
    return msgspec.structs.replace(
        IDLE, queued=tuple(QueuedWork(name, priority, share, tokens, 1) for name, priority, share, tokens in work)
    )


def waits(fleet, promise):
    """Tokens that go first at p0."""
    return fleet["p0"].queue_s(promise, fleet.classes) / fleet["p0"].queue_token_s


@pytest.mark.parametrize(("cached_tokens", "new", "prefill_s"), [(0, 640, 0.66), (160, 480, 0.49), (640, 1, 0.011)])
def test_what_is_cached_needs_no_computing_but_the_last_token_does(cached_tokens, new, prefill_s):
    cost = prefill_cost_of(Fleet([IDLE], []), "p0", query(640), cached_tokens)
    assert (cost.new_tokens, cost.queue_s, cost.pull_s) == (new, 0, 0)
    assert cost.prefill_s == cost.total_s == pytest.approx(prefill_s), "steps of 500 tokens at most"


def test_attention_to_what_is_cached_is_paid_for():
    fleet = Fleet([IDLE], [], costs=msgspec.structs.replace(COSTS, pair_s=1e-6))
    assert prefill_cost_of(fleet, "p0", query(300), 100).prefill_s == pytest.approx(
        0.01 + 0.2 + 1e-6 * 200 * (100 + 100)
    )


@pytest.mark.parametrize(
    ("promise", "ahead"), [(Promise("high", 2), 100), (Promise("middle", 1), 1100), (Promise("low", 0), 6100)]
)
def test_equal_and_higher_classes_go_first_and_lower_ones_do_not(promise, ahead):
    fleet = Fleet([queued(("high", 2, 0.0, 100), ("middle", 1, 0.0, 1000), ("low", 0, 0.0, 5000))], [])
    assert waits(fleet, promise) == pytest.approx(ahead)
    assert fleet["p0"].queue_token_s == pytest.approx(0.001 + 0.01 / 500), "with its share of its step's base"


def test_a_class_whose_requests_have_several_priorities_waits_with_all_of_its_tokens():
    fleet = Fleet([queued(("standard", 5, 0.0, 100), ("standard", 0, 0.0, 200))], [])
    assert waits(fleet, Promise()) == pytest.approx(300)


def test_lower_classes_that_wait_keep_their_share():
    both = Fleet([queued(("high", 1, 0.0, 800), ("low", 0, 0.2, 50))], [])
    assert waits(both, Promise("high", 1)) == pytest.approx(1000), "of every five tokens low gets one, while it waits"
    assert waits(Fleet([queued(("high", 1, 0.0, 800))], []), Promise("high", 1)) == pytest.approx(800)


def test_a_class_with_a_share_does_not_wait_for_all_above_it():
    fleet = Fleet([queued(("high", 1, 0.0, 9000), ("low", 0, 0.2, 100))], [])
    assert waits(fleet, Promise("low", 0, 0.2)) == pytest.approx(500)


def test_a_class_that_nobody_has_heard_of_waits_as_its_priority_says():
    fleet = Fleet([queued(("low", 0, 0.0, 300))], [])
    assert (waits(fleet, Promise("new", 5)), waits(fleet, Promise("newer", -1))) == (0, pytest.approx(300))


@pytest.mark.parametrize(("cached_tokens", "left_s"), [(0, 0.1), (160, 0.05)])
def test_prefill_hides_the_transfer_but_for_the_last_layer_of_its_last_step(cached_tokens, left_s):
    fleet = Fleet([], [IDLE], bytes_per_s=QUICK / 1000)
    fleet["d0"].cached_tokens = cached_tokens
    left = transfer_s(fleet["d0"], query(400), hidden_s=0.3, last_tokens=100)
    assert left == pytest.approx(HOP_S + left_s), "400 and 240 tokens to send in 0.3 s; half of 100 after"


WITH_CONTEXT = msgspec.structs.replace(COSTS, context_s=1e-6)
EIGHT = {"d0": {"max_batch": 8}}


def decode_cost_of(stats, wanted):
    return decode_cost(Fleet([], [stats], costs=WITH_CONTEXT, **EIGHT)["d0"], wanted)


def test_a_decode_step_takes_longer_with_each_request_and_its_context():
    busy = decode_cost_of(load(running=4, context_tokens=2000), query(1000))
    assert busy.step_s == pytest.approx(0.01 + 5 * 0.002 + 0.003)
    assert (busy.slot_s, busy.total_s) == (0, pytest.approx(10 * busy.step_s))
    assert decode_cost_of(IDLE, query(1000)).step_s == pytest.approx(0.01 + 0.002 + 0.001)


def test_a_decode_step_reads_the_experts_that_its_rows_hit_and_a_prompts_all():
    costs = msgspec.structs.replace(COSTS, experts_s=0.04, expert_share=0.5)
    fleet = Fleet([IDLE], [IDLE, load(running=1), load(running=2, tightest_tpot_s=0.034)], costs=costs)
    steps = [decode_cost(fleet[name], query(10)) for name in ("d0", "d1", "d2")]
    assert steps[0].step_s == pytest.approx(0.01 + 0.002 + 0.02)
    assert steps[1].step_s == pytest.approx(0.01 + 0.004 + 0.03)
    assert steps[2].step_s == pytest.approx(0.01 + 0.006 + 0.035)
    # 17 ms too long: more than the two, who end one by one.
    assert steps[2].slot_s == pytest.approx(2 * 10 * (0.01 + 0.004 + 0.03) / 2)
    assert prefill_cost_of(fleet, "p0", query(400)).prefill_s == pytest.approx(0.05 + 0.4)
    assert prefill_cost_of(fleet, "d1", query(400)).prefill_s == pytest.approx(0.05 + 0.002 + 0.4)


def test_a_slot_is_there_when_as_many_have_ended_as_batch_blocks_or_promises_want():
    full = decode_cost_of(load(running=8), query(100, answer_tokens=40))
    assert full.slot_s == pytest.approx((0.01 + 8 * 0.002) * 40 / 8), "one of the batch"
    tight = decode_cost_of(load(running=4, context_tokens=1200, free_blocks=10), query(760, answer_tokens=40))
    step_s = 0.01 + 4 * 0.002 + 0.0012
    assert tight.slot_s == pytest.approx(2 * step_s * 40 / 4), "600 tokens too many: two requests of 300"
    strict, loose = load(running=4, tightest_tpot_s=0.018), load(running=4)
    promised = decode_cost_of(strict, query(0, answer_tokens=40)).slot_s
    assert promised == pytest.approx(0.018 * 40 / 4, rel=1e-3), "a step with it takes 0.020 s: one must end first"
    assert decode_cost_of(loose, query(0, answer_tokens=40)).slot_s == 0
    own = decode_cost_of(loose, query(0, answer_tokens=40, promise=Promise(tpot_s=0.018)))
    assert own.slot_s == pytest.approx(promised, rel=1e-3)


def test_answers_end_sooner_and_steps_may_be_longer_where_drafts_are_right():
    plain, drafting = load(running=4), msgspec.structs.replace(load(running=4), draft_speedup=2.0)
    wanted = query(0, answer_tokens=40, promise=Promise(tpot_s=0.018))
    costs = [decode_cost_of(stats, wanted) for stats in (plain, drafting)]
    assert costs[0].slot_s > costs[1].slot_s == 0, "a step with it takes 0.020 s, and a token half of that"
    assert costs[1].total_s == pytest.approx(40 * costs[1].step_s / 2)
    path = Fleet([], [plain, drafting], costs=WITH_CONTEXT, **EIGHT).path(1)
    assert path.decode.peer.worker_id == "d1"
    assert path.estimate.token_s == pytest.approx(path.estimate.step_s / 2)


def test_a_prompt_computed_by_a_decode_worker_stalls_its_streams_and_who_comes_next():
    fleet = Fleet([], [IDLE, load(running=4)])
    for name, cached_tokens, prefill_s, stalled_s in (("d0", 0, 0.41, 0.4), ("d1", 160, 0.018 + 0.24, 5 * 0.24)):
        cost = prefill_cost_of(fleet, name, query(400), cached_tokens)
        assert (cost.prefill_s, cost.total_s) == (pytest.approx(prefill_s), pytest.approx(prefill_s + stalled_s))


def test_promised_times_make_a_decode_workers_chunks_small():
    strict = Fleet([], [load(running=4, tightest_tpot_s=0.119)])
    cost = prefill_cost_of(strict, "d0", query(400))
    assert cost.prefill_s == pytest.approx(4 * 0.018 + 0.4), "101 tokens beside a step of 0.018 s"


# --- by load and in turn ---


class ByLoad(Fleet):
    """Workers that have not reported their costs."""

    def __init__(self, prefill, decode, **changes):
        super().__init__(prefill, decode, costs=None, **changes)

    def path(self, num_tokens=20, *, failed=(), ejected=(), rotation=None):
        workers = self.of("prefill", {}), self.of("decode", {})
        return path_by_load(*workers, num_tokens, left_out=leave_out(failed, ejected), rotation=rotation)


def test_the_least_loaded_of_each_role_is_taken():
    fleet = ByLoad([load(waiting=50), load(waiting=10)], [load(running=3), load(running=2)])
    assert fleet.names() == ("p1", "d1", None)
    assert ByLoad([], [IDLE] * 5).names() == (None, "d0", None), "names break ties"


def test_a_decode_worker_with_room_comes_before_an_idle_one_without_and_of_equals_the_one_with_more():
    assert ByLoad([], [load(free_blocks=1), load(running=9)]).names() == (None, "d1", None)
    assert ByLoad([], [load(free_blocks=50), load(free_blocks=60)]).names() == (None, "d1", None)


def test_block_and_tensor_parallel_sizes_may_differ_within_a_pair():
    other = msgspec.structs.replace(LAYOUT, block_size=64, tp_size=2)
    assert ByLoad([IDLE], [IDLE], p0={"layout": other}).names() == ("p0", "d0", None)


def test_in_turn_each_worker_of_a_role_is_taken_whatever_its_load():
    fleet = ByLoad([IDLE, load(waiting=900)], [load(running=number) for number in range(3)])
    assert [fleet.names(rotation=turn)[:2] for turn in range(4)] == [
        ("p0", "d0"),
        ("p1", "d1"),
        ("p0", "d2"),
        ("p1", "d0"),
    ]
    assert fleet.names(rotation=0, failed=peers("d0")) == ("p0", "d1", None)


# --- by cost and by load ---

either = pytest.mark.parametrize("of", [Fleet, ByLoad])


@either
def test_workers_that_failed_are_ejected_or_drain_are_taken_for_want_of_others_and_never_to_prefill(of):
    fleet = of([IDLE], [IDLE, load(running=9)])
    assert fleet.names(failed=peers("p0", "d0")) == (None, "d1", None)
    assert fleet.names(failed=peers("d0", "d1")) == ("p0", "d0", None)
    assert fleet.names(ejected=peers("p0", "d0")) == (None, "d1", None)
    assert fleet.names(failed=peers("d0"), ejected=peers("d1")) == ("p0", "d1", None)
    leaving = load(is_draining=True)
    assert of([leaving, load(waiting=10)], [leaving, load(running=1)]).names() == ("p1", "d1", None)
    assert of([leaving], [leaving, load(running=1)]).names() == (None, "d1", None)
    for nobody in (of([IDLE], [leaving]), of([IDLE], []), of([IDLE], [IDLE], d0={"max_context": 10})):
        with pytest.raises(NoPath) as caught:
            nobody.path()
        assert caught.value.status == 503


@either
@pytest.mark.parametrize(
    "changes",
    [
        {"p0": OTHER_KIND},
        {"p0": {"layout": msgspec.structs.replace(LAYOUT, dtype="float32")}},
        {"p0": {"max_context": 10}},
        {"d0": {"transfer_addresses": ()}},
    ],
)
def test_a_prefill_worker_that_cannot_serve_the_pair_is_passed_over(of, changes):
    assert of([IDLE], [load(running=8)], **changes).names() == (None, "d0", None)


def source_of(cached_tokens, *, min_tokens=100, num_tokens=1001, failed=(), **changes):
    """Return the source of a pull to p0, where p0, p1, d0 and d1 hold as many tokens as `cached_tokens` says."""
    fleet = ByLoad([IDLE, IDLE], [load(running=1), IDLE], **changes)
    path = with_source(
        Path(fleet["p0"].info, fleet["d1"].info),
        [*fleet.of("prefill", cached_tokens), *fleet.of("decode", cached_tokens)],
        num_tokens,
        min_tokens,
        leave_out(failed, ()),
    )
    return path.source and path.source.peer.worker_id


@pytest.mark.parametrize(
    ("cached_tokens", "source"),
    [
        ({"p0": 100, "p1": 300, "d0": 600, "d1": 500}, "d0"),
        ({"p1": 300}, "p1"),
        ({"d0": 300, "d1": 300}, "d1"),  # the one with fewer requests
        ({"p0": 200, "d0": 299}, None),
        ({"p0": 200, "d0": 300}, "d0"),
        ({}, None),
    ],
)
def test_a_prefix_is_pulled_from_whoever_holds_most_of_it_where_that_spares_enough(cached_tokens, source):
    assert source_of(cached_tokens) == source


def test_the_last_token_of_a_prompt_is_never_worth_a_pull():
    assert source_of({"p0": 864, "d0": 992}, num_tokens=992) == "d0"
    assert source_of({"p0": 864, "d0": 992}, num_tokens=992, min_tokens=128) is None


def test_a_prefix_is_never_pulled_from_a_worker_that_failed_or_whose_kv_does_not_fit():
    assert source_of({"d0": 600, "d1": 500}, failed=peers("d0")) == "d1"
    assert source_of({"d0": 600, "d1": 500}, d0=OTHER_KIND) == "d1"
    assert source_of({"d0": 600}, p0={"transfer_addresses": ()}) is None


# --- a prefill worker alone ---


def guest(fleet, **options):
    """Return the names of the path where prefill workers may write answers."""
    return fleet.names(prefill_decodes=True, decodes_alone=False, **options)[:2]


def test_a_pair_serves_while_decode_workers_have_room_and_the_way_is_short():
    assert guest(Fleet([IDLE], [IDLE])) == ("p0", "d0")


def test_a_prefill_worker_writes_the_answer_where_its_steps_are_shorter():
    assert guest(Fleet([IDLE], [load(running=5)])) == (None, "p0"), "12 ms, and 22 ms at the decode worker"


def test_a_prefill_worker_writes_the_answer_where_decode_workers_have_no_room():
    full = load(running=32)
    assert guest(Fleet([IDLE], [full])) == (None, "p0")
    assert guest(Fleet([IDLE], [load(running=5, free_blocks=1)])) == (None, "p0")
    assert Fleet([IDLE], [full]).names(decodes_alone=False)[:2] == ("p0", "d0"), "roles are fixed"


def test_a_prefill_worker_writes_the_answer_where_its_kv_has_a_long_way():
    slow = Fleet([IDLE], [IDLE], bytes_per_s=256e3)
    assert guest(slow) == (None, "p0"), "400 tokens take 0.4 s, the answer 0.13 s"


def test_the_time_that_prompts_take_is_missing_to_answers_beside_them():
    busy = Fleet([IDLE], [load(running=5)], bytes_per_s=2560e3)
    assert guest(busy) == (None, "p0"), "the way takes 36 ms"
    busy["p0"].prompt_share = 0.8
    assert guest(busy) == ("p0", "d0"), "so a step takes five times as long"


def test_on_a_shared_cpu_an_answer_at_the_prefill_worker_costs_the_streams_of_the_decode_worker():
    here = {"machine": "host-1"}
    slow = Fleet([IDLE], [load(running=5)], bytes_per_s=2560e3, p0=here, d0=here)
    assert guest(slow) == ("p0", "d0")
    elsewhere = Fleet([IDLE], [load(running=5)], bytes_per_s=2560e3, p0=here, d0={"machine": "host-2"})
    assert guest(elsewhere) == (None, "p0")


def test_an_answer_with_a_promised_time_between_tokens_stays_away_from_prompts():
    promise = Promise(tpot_s=0.05)
    full = load(running=32)
    assert guest(Fleet([IDLE], [full]), promise=promise) == (None, "p0"), "nothing is there that it would wait for"
    assert guest(Fleet([load(running=1)], [full]), promise=promise) == ("p0", "d0")


def test_an_answer_that_may_not_fit_into_the_prefill_workers_cache_is_not_written_there():
    fleet = Fleet([IDLE], [load(running=32)])
    query = PathQuery(400, 10.0, Promise(), fleet.classes, 64, most_tokens=1700)
    path = cheapest_path(fleet.of("prefill", {}), fleet.of("decode", {}), query, prefill_decodes=True)
    assert path.decode.peer.worker_id == "d0", "100 blocks hold 1,600 tokens"


def test_a_prefill_worker_writes_where_no_decode_worker_is_sound():
    promise = Promise(tpot_s=0.05)
    lost = Fleet([load(running=1)], [IDLE])
    assert guest(lost, failed=peers("d0"), promise=promise) == (None, "p0")
    assert lost.names(failed=peers("d0"))[:2] == ("p0", "d0"), "fixed roles wait for the worker to come back"
    cold = Fleet([IDLE], [IDLE], costs=None)
    cold["d0"].tier = DRAINING
    prefill, decode = cold.of("prefill", {}), cold.of("decode", {})
    path = path_by_load(prefill, decode, 400, prefill_decodes=True)
    assert (path.kind, path.decode.peer.worker_id) == ("prefill", "p0")
    with pytest.raises(NoPath):
        path_by_load(prefill, decode, 400)


def test_a_path_is_named_by_who_computes_the_prompt_and_who_writes():
    fleet = Fleet([IDLE], [load(running=32)])
    assert fleet.path(prefill_decodes=True).kind == "prefill"
    assert fleet.path(decodes_alone=False).kind == "prefill_decode"
    assert Fleet([], [IDLE]).path().kind == "decode"


def test_a_prompt_beside_streams_of_a_shared_cpu_costs_them_time_wherever_it_is_computed():
    streams = load(running=5)
    here, elsewhere = {"machine": "host-1"}, {"machine": "host-2"}
    own = Fleet([load(waiting=1500)], [streams], p0=here, d0=elsewhere)
    assert own.names() == ("p0", "d0", None), "5 streams and the next would wait 0.4 s each at d0"
    shared = Fleet([load(waiting=1500)], [streams], p0=here, d0=here)
    assert shared.names() == (None, "d0", None), "they lose nearly as much beside p0, where the prompt waits 1.5 s"
