"""Steps with drafts in closed form, beside the speculator in the exact simulation."""

import random

import pytest
from msgspec.structs import replace

from tests.planning.test_coarse import coarse, lengths
from twostroke.planning.costs.drafted_steps import decode_step, drafted_step, most_tokens, repeated_share
from twostroke.planning.costs.profiles import H100, SMALL
from twostroke.planning.layouts import Layout, batch_sizes
from twostroke.planning.workload import SLOTargets, Workload
from twostroke.simulator.deployment import NEW, TracedRequest, Users, answer_token, serve
from twostroke.worker.profile import WorkerProfile

ANSWER = 240


def exact(profile: WorkerProfile, users: int) -> tuple[float, float]:
    """Time per token, and tokens of an event, of users who ask for the same answers again and again."""
    draw = random.Random(1)
    trace = [
        TracedRequest(0.0, tuple(draw.choices(range(30_000), k=draw.randrange(16, 2500))), ANSWER)
        for _ in range(max(12, 2 * users))
    ]
    run = serve(
        trace,
        "kv_aware",
        profile,
        users=Users(users, 0.0, 1e9),
        prefill=0,
        decode=1,
        prefill_cache_tokens=profile.kv_tokens,
        decode_cache_tokens=profile.kv_tokens,
        warm=12,
    )
    events = sum(len(one.token_s) for one in run.served)
    return sum(one.tpot_s for one in run.served) / len(run.served), ANSWER * len(run.served) / events


@pytest.mark.parametrize("repeated", [0.3, 0.6, 0.9])
@pytest.mark.parametrize(("known", "users"), [(SMALL, 1), (SMALL, 24), (H100, 4)])
def test_a_decode_step_is_as_event_by_event(known: WorkerProfile, users: int, repeated: float) -> None:
    """Prompts cost nothing here, so that steps are decodes alone."""
    costs = replace(known.costs, token_s=1e-9, pair_s=0.0, context_s=known.costs.context_s / 50)
    profile = replace(known, costs=costs, repeated=repeated, kv_tokens=400_000)
    token_s, tokens = exact(profile, users)
    step = drafted_step(profile, users, 1300)
    assert step.token_s == pytest.approx(token_s, rel=0.12)
    assert step.tokens == pytest.approx(tokens, rel=0.15)


@pytest.mark.parametrize("rate", [0.5, 3.0])
@pytest.mark.parametrize("repeated", [0.3, 0.6])
def test_an_aggregated_fleet_writes_as_quickly_as_event_by_event(rate: float, repeated: float) -> None:
    profile, trace, draw = replace(SMALL, repeated=repeated), lengths(120, rate, log_prompt=5.0), random.Random(1)
    asked = [TracedRequest(at_s, tuple(draw.choices(range(30_000), k=prompt)), out) for at_s, prompt, out in trace]
    memory = {"prefill_cache_tokens": profile.kv_tokens, "decode_cache_tokens": profile.kv_tokens}
    served = serve(asked, "kv_aware", profile, prefill=0, decode=1, **memory).served[20:]
    closed = coarse(trace, 0, 1, profile=profile)[20:]
    assert sum(one.tpot_s for one in closed) == pytest.approx(sum(one.tpot_s for one in served), rel=0.15)


def test_a_step_without_repeated_text_is_the_plain_one() -> None:
    step = drafted_step(SMALL, 7, 300.0, 0.001, has_prompts=True)
    assert (step.seconds, step.drafted, step.tokens) == (step.plain_s, 0.0, 1.0)


def test_rows_are_drafted_as_far_as_they_pay_and_have_room_and_keep_the_promise() -> None:
    def linear(row_s: float, batch: float = 8, repeated: float = 0.6, **bounds: float) -> float:
        return decode_step(lambda rows: 0.01 + rows * row_s, batch, repeated, **bounds).drafted

    assert linear(0.0001) > linear(0.002) > linear(0.1) == 0
    assert linear(0.0001, most_rows=12) < 4.5 < linear(0.0001)
    assert linear(0.001, batch=250) < linear(0.0001, batch=250)
    free, promised, broken = (linear(0.001, repeated=0.3, promised_s=s) for s in (1.0, 0.0185, 0.001))
    assert free > promised > broken > 0, "others' drafts keep a promise, and break none further that is broken anyway"
    assert linear(0.001, batch=1, promised_s=0.001) == linear(0.001, batch=1), "its own drafts make room"


def test_a_share_is_found_again_from_what_was_accepted() -> None:
    tokens = most_tokens(0.4)
    assert repeated_share(1 - 1 / tokens, 1) == pytest.approx(0.4)
    assert (repeated_share(0, 100), repeated_share(0, 0), repeated_share(99, 100)) == (0.0, 0.0, 1.0)


@pytest.mark.parametrize("repeated", [0.3, 0.6])
def test_short_answers_have_their_share_of_repeated_text(repeated: float) -> None:
    for begin in range(0, 4000, 321):
        tokens = [answer_token(place, repeated) for place in range(begin, begin + 240)]
        assert sum(token < NEW for token in tokens) / 240 == pytest.approx(repeated, abs=0.12)


def test_formulas_know_that_answers_end_sooner_where_drafts_are_right() -> None:
    """A step takes 7 ms, so that only drafts keep a promise of 6 ms per token."""
    workload, promise = Workload("alike", ((200, 200),)), SLOTargets(2.0, 0.006)
    served, batches = [], []
    for repeated in (0.0, 0.6):
        layout = Layout("disaggregated", H100, 1, H100, 1).with_repeated(repeated)
        served.append(layout.goodput(workload, promise))
        batch = batch_sizes(layout.decode, workload, 20.0)
        assert batch is not None
        batches.append(batch.mean)
    assert served[1] > 5.0 > served[0] == 0
    assert batches[1] < 0.65 * batches[0]
