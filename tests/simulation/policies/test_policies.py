"""Routing policies, crowds and overload on two prefill and two decode workers, and what would be without safeguards."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from tests.simulation.policies.results import Result, percentile, result_of, serve
from tests.simulation.policies.traffic import TRACES, strangers
from twostroke.kvtransfer.receiver import KVReceiver
from twostroke.kvtransfer.transfer import OutgoingPairTransfer
from twostroke.protocol.requests import Promise
from twostroke.router.routing.chooser import Policy
from twostroke.router.slo.classes import SLOClass, SLOConfig
from twostroke.simulator.deployment import SimulatedRequest, SimulatedRun, TracedRequest
from twostroke.worker.transfers import PromptReceiver


def result(kind: str, policy: Policy, *, num_requests: int, seeds: int = 1) -> Result:
    return result_of([serve(TRACES[kind](seed, num_requests), policy) for seed in range(seeds)])


def test_routing_by_cached_prefixes_halves_the_time_to_first_token_in_conversations():
    by_prefix = result("conversations", "kv_aware", num_requests=150)
    in_turn = result("conversations", "round_robin", num_requests=150)
    by_load = result("conversations", "least_loaded", num_requests=150)
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


# --- a crowd without SLO classes: no prompt is computed twice, but without safeguards ---


NUM_REQUESTS = 100
RATE_PER_S = 60.0
"""Some eight times what the decode workers manage with answers of this length and room for so few of them."""
DECODE_CACHE_TOKENS = 6_000
LONGER = 3
"""Factor by which answers are longer than in other traces."""


def run_crowd(seed: int, *, num_requests: int = NUM_REQUESTS) -> SimulatedRun:
    """All requests served to their end."""
    trace = strangers(seed, num_requests=num_requests, rate_per_s=RATE_PER_S, prompt_tokens=600.0, sigma=0.4)
    trace = [replace(one, num_output_tokens=LONGER * one.num_output_tokens) for one in trace]
    return serve(trace, "kv_aware", seed=seed, decode_cache_tokens=DECODE_CACHE_TOKENS, roles="fixed")


def num_computed_twice() -> int:
    served = run_crowd(1).served
    assert len(served) == NUM_REQUESTS
    assert max(one.ttft_s for one in served) > 2.5, "hardly anybody waits"
    return sum(one.computed_twice for one in served)


def test_no_prompt_is_computed_twice_however_long_it_waits():
    assert num_computed_twice() == 0


def _hear_nothing(pair: OutgoingPairTransfer) -> None:
    """The target's request waits for room, and the source's patience ends."""


def _keep_nothing(receiver: KVReceiver, ticket: Any) -> None:
    """The request waits for room, and its offer does not."""


def _wait_for_two_seconds(prompts: PromptReceiver, call: Any, ticket: Any) -> None:
    prompts.offers.await_offer(
        ticket,
        2.0,
        on_offered=lambda: prompts._offered(call, ticket),
        on_missing=lambda: prompts.compute_prompt(call),
    )


@pytest.mark.parametrize(
    ("target", "name", "replacement"),
    [
        pytest.param(OutgoingPairTransfer, "awaited", _hear_nothing, id="sources give up KV that is awaited"),
        pytest.param(KVReceiver, "keep_offer", _keep_nothing, id="offers don't wait with their requests"),
        pytest.param(PromptReceiver, "await_offer", _wait_for_two_seconds, id="requests don't wait for long queues"),
    ],
)
def test_prompts_are_computed_twice_where(
    target: type, name: str, replacement: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(target, name, replacement)
    assert num_computed_twice() > 0


# --- five times the load, of two classes: refused or served in time ---


CAPACITY_PER_S = 15.0
"""The highest rate at which nine of ten requests get what they were promised."""
OVERLOAD = 5.0
INTERACTIVE = SLOClass(name="interactive", ttft_s=1.0, tpot_s=0.03, priority=10)
BATCH = SLOClass(name="batch", ttft_s=4.0, tpot_s=0.1, share=0.1)

WARM_UP_S, USUAL_S, OVERLOAD_S, AFTERWARDS_S = 10.0, 20.0, 15.0, 20.0
RECOVERED_S = 10.0


@dataclass(frozen=True)
class Phase:
    """Outcome of the requests of one span of time."""

    served: Sequence[SimulatedRequest]
    seconds: float

    def of(self, one: SLOClass) -> list[SimulatedRequest]:
        """Those of a class."""
        return [served for served in self.served if served.promise.class_name == one.name]

    def refused_share(self, one: SLOClass) -> float:
        """Return the share of a class's requests that were refused."""
        requests = self.of(one)
        return sum(served.refused for served in requests) / len(requests)

    def admitted(self, one: SLOClass) -> list[SimulatedRequest]:
        """A class's requests that were not refused."""
        return [served for served in self.of(one) if not served.refused]

    @property
    def goodput_per_s(self) -> float:
        """Requests a second that got what they were promised."""
        return sum(map(is_met, self.served)) / self.seconds

    @property
    def attainment(self) -> float:
        """The share of all requests that did."""
        return sum(map(is_met, self.served)) / len(self.served)

    @property
    def worst_ttft(self) -> float:
        """P99 of the admitted requests' times to first token, over what was promised, of the class that is worse."""
        return max(
            percentile([s.ttft_s / (s.promise.ttft_left_s or 1.0) for s in self.admitted(c)], 0.99) for c in _ALL
        )

    @property
    def worst_tpot(self) -> float:
        """The same of the time per token after the first."""
        return max(percentile([s.tpot_s / (s.promise.tpot_s or 1.0) for s in self.admitted(c)], 0.99) for c in _ALL)


@dataclass(frozen=True)
class Outcome:
    """The phases of a run."""

    usual: Phase
    overload: Phase
    recovered: Phase


_ALL = (INTERACTIVE, BATCH)


def run_overload(
    seed: int,
    *,
    batch: SLOClass = BATCH,
    admission: bool = True,
    overload_s: float = OVERLOAD_S,
    afterwards_s: float = AFTERWARDS_S,
) -> Outcome:
    """Usual load, then five times that for so long, then usual load again for so long."""
    trace: list[TracedRequest] = []
    at_s = 0.0
    starts: list[float] = []
    for seconds, rate in ((WARM_UP_S, 0.3), (USUAL_S, 1.0), (overload_s, OVERLOAD), (afterwards_s, 1.0)):
        starts.append(at_s)
        trace += _arrivals(f"{seed} {at_s}", at_s, seconds, rate * CAPACITY_PER_S, (INTERACTIVE, batch))
        at_s += seconds
    _, usual_s, begins_s, over_s = starts
    run = serve(trace, "kv_aware", slo=SLOConfig(classes=(INTERACTIVE, batch), admission=admission))
    return Outcome(
        usual=_phase(run, usual_s, begins_s),
        overload=_phase(run, begins_s, over_s),
        recovered=_phase(run, over_s + RECOVERED_S, at_s),
    )


def is_met(served: SimulatedRequest) -> bool:
    """Return whether a request got what it was promised."""
    promise = served.promise
    is_in_time = promise.ttft_left_s is None or served.ttft_s <= promise.ttft_left_s
    is_quick = promise.tpot_s is None or served.tpot_s <= promise.tpot_s
    return not served.refused and is_in_time and is_quick


def _arrivals(
    seed: str, begin_s: float, seconds: float, rate_per_s: float, classes: tuple[SLOClass, ...]
) -> list[TracedRequest]:
    draw = random.Random(seed)
    number = int(seconds * rate_per_s * 2)
    requests = strangers(
        draw.randrange(1 << 30), num_requests=number, rate_per_s=rate_per_s, prompt_tokens=600.0, sigma=0.4
    )
    return [
        TracedRequest(begin_s + one.at_s, one.token_ids, one.num_output_tokens, _promise(draw.choice(classes)))
        for one in requests
        if one.at_s < seconds
    ]


def _promise(one: SLOClass) -> Promise:
    return Promise(one.name, one.priority, one.share, one.ttft_s, one.tpot_s)


def _phase(run: SimulatedRun, begin_s: float, end_s: float) -> Phase:
    return Phase([one for one in run.served if begin_s <= one.at_s < end_s], end_s - begin_s)


@pytest.fixture(scope="module")
def outcome() -> Outcome:
    return run_overload(0)


def test_admitted_requests_keep_their_times_and_the_others_are_refused(outcome: Outcome):
    # What fails otherwise than with 429 raises.
    assert outcome.overload.worst_ttft <= 1.5
    assert outcome.overload.worst_tpot <= 1.5
    assert outcome.usual.attainment >= 0.9, "the usual load is not what it is meant to be"
    assert outcome.overload.goodput_per_s >= 0.9 * outcome.usual.goodput_per_s


def test_the_lower_class_is_refused_first_and_does_not_starve(outcome: Outcome):
    overload = outcome.overload
    assert overload.refused_share(BATCH) > overload.refused_share(INTERACTIVE) + 0.1
    admitted = len(overload.admitted(BATCH))
    assert admitted >= 0.8 * BATCH.share * (admitted + len(overload.admitted(INTERACTIVE)))


def test_all_is_as_usual_ten_seconds_after_the_overload(outcome: Outcome):
    assert outcome.recovered.attainment >= 0.9


def test_without_admission_requests_are_late(outcome: Outcome):
    overload = run_overload(0, admission=False, overload_s=5.0, afterwards_s=0.0).overload
    assert overload.worst_ttft > 5.0
    assert overload.goodput_per_s < 0.8 * outcome.overload.goodput_per_s


def test_without_a_share_the_lower_class_starves(outcome: Outcome):
    overload = run_overload(0, batch=BATCH.model_copy(update={"share": 0.0}), afterwards_s=0.0).overload
    assert len(overload.admitted(BATCH)) < 0.55 * len(outcome.overload.admitted(BATCH))
