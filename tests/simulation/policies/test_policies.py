"""The routing policies on two prefill and two decode workers; `python -m tests.simulation.policies` tells more."""

from tests.simulation.policies.deployment import serve
from tests.simulation.policies.results import Result, result_of
from tests.simulation.policies.traffic import TRACES
from twostroke.router.routing.chooser import Policy


def result(kind: str, policy: Policy, *, num_requests: int, seeds: int = 1) -> Result:
    return result_of([serve(TRACES[kind](seed, num_requests), policy) for seed in range(seeds)])


def test_routing_by_cached_prefixes_halves_the_time_to_first_token_in_conversations():
    by_prefix = result("conversations", "kv_aware", num_requests=300)
    in_turn = result("conversations", "round_robin", num_requests=300)
    by_load = result("conversations", "least_loaded", num_requests=300)
    assert 0.5 < in_turn.prefill_busy < 0.9, "the load is not what it is meant to be"
    assert in_turn.mean_ttft_s >= 2.0 * by_prefix.mean_ttft_s
    assert by_load.mean_ttft_s >= 1.2 * by_prefix.mean_ttft_s
    assert by_prefix.hit_rate > by_load.hit_rate + 0.1
    assert by_prefix.mean_tpot_s <= 1.2 * by_load.mean_tpot_s


def test_routing_by_cached_prefixes_is_no_worse_than_by_load_where_no_prefix_comes_again():
    by_prefix = result("strangers", "kv_aware", num_requests=120, seeds=2)
    by_load = result("strangers", "least_loaded", num_requests=120, seeds=2)
    assert by_prefix.hit_rate == by_load.hit_rate == 0
    assert by_prefix.mean_ttft_s <= 1.03 * by_load.mean_ttft_s
    assert by_prefix.p99_ttft_s <= 1.1 * by_load.p99_ttft_s


def test_a_run_replays_exactly():
    trace = TRACES["conversations"](5, 40)
    assert serve(trace, "kv_aware") == serve(trace, "kv_aware")
