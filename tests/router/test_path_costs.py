"""Costs by numbers that can be checked by hand: a prompt token takes 1 ms, a step at least 10 ms, KV 1 ms a token."""

import msgspec
import numpy as np
import pytest

from twostroke.protocol.kv_layout import KVLayout
from twostroke.protocol.requests import Address, Peer, Promise
from twostroke.protocol.stats import QueuedWork, StepCosts, WorkerInfo, WorkerStats
from twostroke.router.routing.fleet_view import AVAILABLE, WorkerTable
from twostroke.router.routing.in_flight import Load
from twostroke.router.routing.path_costs import (
    HOP_S,
    Need,
    decode_costs,
    prompt_cost,
    prompt_costs,
    queue_s,
    transfer_s,
)
from twostroke.router.slo.classes import ServiceClasses

LAYOUT = KVLayout("a model", "bfloat16", 2, 4, 8, 16)
COSTS = StepCosts(base_s=0.01, token_s=0.001, pair_s=0.0, row_s=0.002, context_s=1e-6)
BYTES_PER_S = 256_000.0  # a token has 2 layers x (K, V) x 4 heads x 8 x 2 bytes
IDLE = WorkerStats(free_blocks=100, total_blocks=100)
STANDARD = Promise()


def info(role, name, **changes):
    base = WorkerInfo(role, Peer(name, 1), Address("h", 1), (Address("h", 2),), LAYOUT, 100, 10_000, 500, 8)
    return msgspec.structs.replace(base, **changes)


def table(*stats, role="prefill", costs=COSTS, **changes):
    """Of workers that have told `stats`."""
    made = WorkerTable([info(role, f"{role[0]}{row}", **changes) for row in range(len(stats))], ServiceClasses())
    for row, told in enumerate(stats):
        made.update(row, told, Load(), costs, AVAILABLE, BYTES_PER_S)
    return made


def need(num_tokens, *, answer_tokens=10.0, promise=STANDARD, min_pull_tokens=None):
    return Need(num_tokens, answer_tokens, promise, min_pull_tokens)


def held(*tokens):
    return np.array(tokens, float)


def queued(*work):
    """(class, priority, share, tokens), waiting at a worker."""
    return msgspec.structs.replace(
        IDLE, queued=tuple(QueuedWork(name, priority, share, tokens, 1) for name, priority, share, tokens in work)
    )


def test_what_is_cached_needs_no_computing_but_the_last_token_does():
    costs = prompt_costs(table(IDLE, IDLE, IDLE), need(640), held(0, 160, 640), None)
    assert costs.own.new_tokens.tolist() == [640, 480, 1]
    assert costs.own.prefill_s == pytest.approx([0.02 + 0.64, 0.01 + 0.48, 0.01 + 0.001]), "steps of 500 tokens at most"
    assert costs.queue_s.tolist() == [0, 0, 0]
    assert costs.total_s == pytest.approx(costs.own.prefill_s)


def test_attention_to_what_is_cached_is_paid_for():
    made = table(IDLE, costs=msgspec.structs.replace(COSTS, pair_s=1e-6))
    costs = prompt_costs(made, need(300), held(100), None)
    assert costs.own.prefill_s == pytest.approx([0.01 + 0.2 + 1e-6 * 200 * (100 + 100)])


def test_a_prefix_is_pulled_where_that_is_quicker_than_computing_it():
    made = table(IDLE, IDLE)
    slow = prompt_costs(made, need(401, min_pull_tokens=64), held(0, 350), held(400, 400))
    assert prompt_cost(slow, 0) == (0.0, 0.0, pytest.approx(0.01 + 0.401), 401), "KV takes as long, and the hop on top"
    made.columns.token_transfer_s[:] /= 4
    quick = prompt_costs(made, need(401, min_pull_tokens=64), held(0, 350), held(400, 400))
    assert prompt_cost(quick, 0) == (0.0, pytest.approx(HOP_S + 0.1), pytest.approx(0.01 + 0.001), 1)
    assert prompt_cost(quick, 1) == (0.0, 0.0, pytest.approx(0.01 + 0.051), 51), "50 tokens less are too few"
    assert quick.total_s == pytest.approx([HOP_S + 0.1 + 0.01 + 0.001, 0.01 + 0.051])


def test_equal_and_higher_classes_go_first_and_lower_ones_do_not():
    made = table(queued(("high", 2, 0.0, 100), ("middle", 1, 0.0, 1000), ("low", 0, 0.0, 5000)))
    per_token_s = 0.001 + 0.01 / 500  # its share of its step's base
    for promise, ahead in ((Promise("high", 2), 100), (Promise("middle", 1), 1100), (Promise("low", 0), 6100)):
        assert queue_s(made, promise) == pytest.approx([ahead * per_token_s])


def test_a_class_whose_requests_have_several_priorities_waits_with_all_of_its_tokens():
    made = table(queued(("standard", 5, 0.0, 100), ("standard", 0, 0.0, 200)))
    assert queue_s(made, STANDARD) == pytest.approx(300 * made.columns.queue_token_s)


def test_lower_classes_that_wait_keep_their_share():
    made = table(queued(("high", 1, 0.0, 800), ("low", 0, 0.2, 50)), queued(("high", 1, 0.0, 800)))
    waits = queue_s(made, Promise("high", 1)) / made.columns.queue_token_s
    assert waits == pytest.approx([1000, 800]), "of every five tokens the low class gets one, while it waits"


def test_a_class_with_a_share_does_not_wait_for_all_above_it():
    made = table(queued(("high", 1, 0.0, 9000), ("low", 0, 0.2, 100)))
    assert queue_s(made, Promise("low", 0, 0.2)) / made.columns.queue_token_s == pytest.approx([500])


def test_a_class_that_nobody_has_heard_of_waits_as_its_priority_says():
    made = table(queued(("low", 0, 0.0, 300)))
    assert queue_s(made, Promise("new", 5)).tolist() == [0]
    assert queue_s(made, Promise("newer", -1)) / made.columns.queue_token_s == pytest.approx([300])


def test_prefill_hides_the_transfer_but_for_the_last_layer_of_its_last_step():
    made = table(IDLE, IDLE, role="decode")
    left_s = transfer_s(made.decode, need(400), held(0, 160), hidden_s=0.3, last_tokens=100)
    assert left_s == pytest.approx([HOP_S + 0.1, HOP_S + 0.05]), (
        "400 and 240 tokens to send in 0.3 s; half of 100 after"
    )


def test_a_decode_step_takes_longer_with_each_request_and_its_context():
    busy = msgspec.structs.replace(IDLE, num_running=4, context_tokens=2000)
    costs = decode_costs(table(IDLE, busy, role="decode").decode, need(1000))
    assert costs.step_s == pytest.approx([0.01 + 0.002 + 0.001, 0.01 + 5 * 0.002 + 0.003])
    assert costs.slot_s.tolist() == [0, 0]
    assert costs.total_s == pytest.approx(10 * costs.step_s)


def test_a_full_batch_lets_one_in_when_one_has_ended():
    full = msgspec.structs.replace(IDLE, num_running=8)
    costs = decode_costs(table(full, role="decode").decode, need(100, answer_tokens=40))
    assert costs.slot_s == pytest.approx([(0.01 + 8 * 0.002) * 40 / 8])


def test_without_blocks_for_the_prompt_so_many_must_end_as_hold_them():
    tight = msgspec.structs.replace(IDLE, num_running=4, context_tokens=1200, free_blocks=10)
    costs = decode_costs(table(tight, role="decode").decode, need(760, answer_tokens=40))
    step_s = 0.01 + 4 * 0.002 + 0.0012
    assert costs.slot_s == pytest.approx([2 * step_s * 40 / 4]), "600 tokens too many: two requests of 300"


def test_a_promised_time_per_token_limits_the_batch_whosever_it_is():
    strict = msgspec.structs.replace(IDLE, num_running=4, tightest_tpot_s=0.018)
    loose = msgspec.structs.replace(IDLE, num_running=4)
    own = need(0, answer_tokens=40, promise=Promise(tpot_s=0.018))
    waits = decode_costs(table(strict, loose, role="decode").decode, need(0, answer_tokens=40)).slot_s
    assert waits == pytest.approx([0.018 * 40 / 4, 0], rel=1e-3), "a step with it takes 0.020 s: one must end first"
    assert decode_costs(table(loose, role="decode").decode, own).slot_s == pytest.approx([0.018 * 40 / 4], rel=1e-3)


def test_a_prompt_computed_by_a_decode_worker_stalls_its_streams_and_who_comes_next():
    busy = msgspec.structs.replace(IDLE, num_running=4)
    costs = prompt_costs(table(IDLE, busy, role="decode"), need(400), held(0, 160), None).own
    assert costs.prefill_s == pytest.approx([0.01 + 0.4, 0.018 + 0.24])
    assert costs.total_s - costs.prefill_s == pytest.approx([0.4, 5 * 0.24])


def test_promised_times_make_a_decode_workers_chunks_small():
    strict = msgspec.structs.replace(IDLE, num_running=4, tightest_tpot_s=0.119)
    costs = prompt_costs(table(strict, role="decode"), need(400), held(0), None).own
    assert costs.prefill_s == pytest.approx([4 * 0.018 + 0.4]), "101 tokens beside a step of 0.018 s"


def test_a_worker_that_drains_is_marked():
    made = table(IDLE, msgspec.structs.replace(IDLE, is_draining=True))
    assert not made.all_available
    made.update(1, IDLE, Load(), COSTS, AVAILABLE, BYTES_PER_S)
    assert made.all_available
