"""Drafts by what rows cost and by how often predictions were right; all that ends a draft."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from pydantic import TypeAdapter

from tests.worker.scheduling.scheduler_rig import STOP, TOKEN, Rig
from twostroke.model.step import Constraint
from twostroke.protocol.requests import GenerateRequest, Promise, SampledToken, SamplingParams
from twostroke.protocol.stats import StepCosts
from twostroke.worker.config import SpeculationConfig
from twostroke.worker.scheduling.job import SequenceState
from twostroke.worker.speculator import (
    FORCED_S,
    FORCED_SHARE,
    AcceptanceRates,
    OwnAcceptance,
    RequestPredictor,
)

CHEAP = StepCosts(0.010, 0.001, 0.0, 0.0005, 0.0)
DEAR = StepCosts(0.0001, 0.001, 0.0, 0.010, 0.0)


def a_rig(costs: StepCosts | None = CHEAP, config: SpeculationConfig | None = None, **settings: Any) -> Rig:
    return Rig(costs=costs, has_drafts=True, max_step_tokens=64, speculation=config, **settings)


def drafts_of(rig: Rig, steps: int, token: SampledToken = TOKEN) -> list[int]:
    """Run steps that draw `token` everywhere; return each one's drafted rows."""
    found = []
    for _ in range(steps):
        step = rig.schedule()
        found.append(len(step.batch) - len(step.entries))
        rig.end(step, token)
    return found


def test_an_answer_that_repeats_itself_comes_in_fewer_steps() -> None:
    rig = a_rig()
    job = rig.add(5, 60)
    steps = 0
    while not job.has_ended:
        rig.end(rig.schedule())
        steps += 1
    assert job.sequence.num_output_tokens == 60
    assert steps < 15
    assert rig.speculator.counters.accepted_tokens == 60 - steps


def test_nothing_is_drafted_where_rows_are_dear_or_costs_unknown_or_places_taken() -> None:
    for rig in (a_rig(DEAR), a_rig(None), a_rig(StepCosts(0.0, 0.0, 0.0, 0.0, 0.0)), a_rig(max_batch=1)):
        rig.add(5, 30)
        assert drafts_of(rig, 20) == [0] * 20


def test_nothing_is_drafted_beyond_max_tokens_or_a_stop_token() -> None:
    rig = a_rig()
    job = rig.add(5, 12)
    while not job.has_ended:
        step = rig.schedule()
        assert len(step.batch) <= 12 - job.sequence.num_output_tokens
        rig.end(step)
    rig = a_rig()
    job = rig.add(5, 30)
    job.sequence.token_ids[:] = [7, 8, 9, STOP, 4, 7, 8, 9]
    rig.scheduler.waiting[0].sequence.token_ids = job.sequence.token_ids
    rig.run()  # the prompt
    assert not any(row.token_ids[0] == STOP for row in rig.schedule().batch[1:])


def test_a_wrong_draft_costs_its_rows_and_nothing_else() -> None:
    rig = a_rig()
    job = rig.add(5, 60)
    drafts_of(rig, 8)
    step = rig.schedule()
    assert step.has_drafts
    before = job.sequence.num_output_tokens
    other = SampledToken(TOKEN.token_id + 1)
    (drawn,) = rig.scheduler.complete(step, [other for _ in step.batch])
    assert (drawn.index, drawn.tokens) == (before, (other,))
    assert job.sequence.num_computed == len(job.sequence.token_ids) - 1
    assert not rig.schedule().has_drafts, "the last tokens stand nowhere else"


def test_requests_whose_predictions_fail_are_drafted_less() -> None:
    rates, own = AcceptanceRates(), OwnAcceptance()
    first = own.chance(rates.rate("own", 3))
    for _ in range(20):
        own.note(rates.rate("own", 3), is_right=False)
        rates.note("own", 3, is_right=False)
    assert own.chance(rates.rate("own", 3)) < 0.3 * first
    assert rates.rate("own", 24) == AcceptanceRates().rate("own", 24)
    assert rates.rate("answers", 3) == AcceptanceRates().rate("answers", 3)
    for _ in range(60):
        own.note(rates.rate("own", 24), is_right=True)
    assert own.chance(rates.rate("own", 24)) > 0.85


@pytest.mark.parametrize(("num_more", "most"), [(2.5, 2), (0.5, 0), (-1.0, 0)])
def test_others_drafts_keep_a_promise_or_leave_it_as_it_is(num_more: float, most: int) -> None:
    """The promise holds for a step of so many more rows than it has without drafts."""
    rig, costs = a_rig(), CHEAP
    promised_s = costs.reading_s(4) + costs.decode_s(4, 0) + num_more * costs.row_s
    promised = rig.add(5, 60, promise=Promise("chat", 0, 0.0, None, promised_s))
    for number in range(3):
        rig.add(5, 60, first=1000 * number)
    draft_of = rig.speculator._draft
    rig.speculator._draft = lambda job, skip=0: None if job is promised else draft_of(job, skip)
    assert max(drafts_of(rig, 14)) == most


def test_a_requests_own_drafts_make_room_in_its_promise() -> None:
    plain_s = CHEAP.base_s + CHEAP.row_s
    promised_s = plain_s + 2.5 * CHEAP.row_s
    rig = a_rig()
    job = rig.add(5, 60, promise=Promise("chat", 0, 0.0, None, promised_s))
    drafted = drafts_of(rig, 12)
    assert max(drafted) > 2
    seconds = sum(plain_s + count * CHEAP.row_s for count in drafted)
    assert seconds / job.sequence.num_output_tokens < promised_s


def test_a_promise_that_no_plain_step_keeps_is_kept_by_drafts() -> None:
    plain_s = CHEAP.base_s + CHEAP.row_s
    rig = a_rig()
    job = rig.add(5, 180, promise=Promise("chat", 0, 0.0, None, 0.5 * plain_s))
    drafted = drafts_of(rig, 20)
    assert max(drafted) > 4
    seconds = sum(plain_s + count * CHEAP.row_s for count in drafted)
    assert seconds / job.sequence.num_output_tokens < 0.5 * plain_s


def test_newcomers_have_places_beside_each_other_by_what_steps_of_ended_answers_drew() -> None:
    """Five rows take half as long again as one, which is the most without drafts under so tight a promise."""
    promise = Promise("chat", 0, 0.0, None, 0.0125)
    costs = StepCosts(0.010, 0.001, 0.0, 0.0012, 0.0)
    places = []
    for has_drafts in (False, True):
        rig = Rig(costs=costs, has_drafts=has_drafts, max_step_tokens=64, num_blocks=512)
        for _ in range(12):
            earlier = rig.add(5, 100, promise=promise)
            while not earlier.has_ended:
                rig.run()
        jobs = [rig.add(5, 100, promise=promise) for _ in range(8)]
        rig.run()
        rig.run()
        places.append(sum(job.has_place for job in jobs))
    assert places == [5, 8]


def test_a_step_with_drafts_is_not_followed_and_likely_ones_are_waited_for() -> None:
    rig = a_rig()
    rig.add(5, 60)
    rig.end(rig.schedule())
    first = rig.schedule()
    assert not rig.scheduler.schedule(first).is_empty, "nothing to repeat yet"
    rig = a_rig()
    rig.add(5, 60)
    drafts_of(rig, 8)
    assert rig.scheduler.schedule(rig.schedule()).is_empty


class ForcedTokens:
    """Stands for a grammar's forced text."""

    def __init__(self, token_ids: Sequence[int], soon: Sequence[float] = ()):
        self.token_ids, self.soon = token_ids, soon

    def catch_up(self, *_: object) -> None:
        """Everything is known."""

    def predict(self, most: int, _: AcceptanceRates) -> list[tuple[int, float]]:
        return [(token_id, 0.9) for token_id in self.token_ids[:most]]

    def chances_soon(self) -> Sequence[float]:
        return self.soon


@pytest.mark.parametrize(
    ("prompt", "forced", "drafted"),
    [
        ([1, 2, 3, 4, 5], [11, 12, 13], [11, 12, 13]),
        ([*range(30), 4, 5, 6, *range(24)], [24, 25], [24, 25, 26]),  # the match goes on behind it
        ([7, 8, 9, 4, 5, 6, 7, 8, 9], [4, 11], [4, 11]),  # the likelier one where they part
    ],
)
def test_forced_text_is_drafted_with_what_is_known_to_follow_it(
    prompt: list[int], forced: list[int], drafted: list[int]
) -> None:
    sequence = SequenceState(GenerateRequest("", "", tuple(prompt), len(prompt), SamplingParams(), 60), 4)
    sequence.forced_text = ForcedTokens(forced)  # type: ignore[assignment]
    token_ids, chances = RequestPredictor(sequence, None, AcceptanceRates()).predict(8)
    assert token_ids[: len(drafted)] == drafted
    assert chances[1] > 0.8


@pytest.mark.parametrize(("soon", "is_empty"), [([0.5] * 6, True), ([0.01] * 6, False)])
def test_text_that_is_soon_forced_is_waited_for(soon: list[float], is_empty: bool) -> None:
    rig = a_rig()
    job = rig.add(5, 60)
    job.sequence.forced_text = ForcedTokens((), soon)  # type: ignore[assignment]
    rig.end(rig.schedule())
    assert rig.scheduler.schedule(rig.schedule()).is_empty == is_empty


def test_forced_text_is_looked_for_in_a_tenth_of_a_step_and_no_longer() -> None:
    """The first requests go on with theirs."""
    rig = a_rig(num_blocks=512, max_batch=64)
    jobs = [rig.add(5, 60, first=1000 * number) for number in range(30)]
    while any(job.sequence.num_output_tokens < 1 for job in jobs):
        rig.run()
    for job in jobs:
        job.sequence.forced_text = ForcedTokens(())  # type: ignore[assignment]
    rig.run()
    num_followed = int(FORCED_SHARE * (CHEAP.reading_s(30) + CHEAP.decode_s(30, 0)) / FORCED_S)
    followed = [job.sequence.forced_text is not None for job in jobs]
    assert 5 < sum(followed) <= num_followed < 30
    assert followed == sorted(followed, reverse=True)


def test_prompts_get_their_tokens_and_time_beside_drafts() -> None:
    """The prompt's chunks are as long as without drafts, but for the few tokens that these take."""
    chunks = {}
    for has_drafts in (False, True):
        rig = Rig(costs=CHEAP, has_drafts=has_drafts, max_step_tokens=128, max_batch=64, num_blocks=512)
        for number in range(4):
            rig.add(5, 180, first=1000 * number)
        drafts_of(rig, 12)
        prompt = rig.add(150, 1, first=90_000)
        step = rig.schedule()
        assert step.has_drafts == has_drafts
        assert len(step.batch) - len(step.entries) <= 128 // 8
        chunks[has_drafts] = next(len(entry.step.token_ids) for entry in step.entries if entry.job is prompt)
    assert chunks[True] >= 0.75 * chunks[False] > 0


def test_a_step_is_waited_for_by_the_room_that_it_will_have_beside_prompts() -> None:
    """An eighth of 32 tokens is taken by four decodes: the step is scheduled ahead, as it would have no drafts."""
    rig = Rig(costs=CHEAP, has_drafts=True, max_step_tokens=32, max_batch=32, num_blocks=512)
    for number in range(4):
        rig.add(5, 180, first=1000 * number)
    drafts_of(rig, 12)
    step = rig.scheduler.schedule()
    assert rig.scheduler.schedule(step).is_empty, "drafts are expected"
    rig.end(step)
    rig.add(150, 1, first=90_000)
    step = rig.schedule()
    assert not step.has_drafts
    assert not rig.scheduler.schedule(step).is_empty


def test_rows_stay_within_a_step_however_many_may_be_drafted() -> None:
    rig = a_rig(max_batch=64, config=SpeculationConfig(num_speculative_tokens=64))
    rig.add(5, 190)
    assert 12 < max(drafts_of(rig, 12)) <= 63


@pytest.mark.parametrize("fails", ["row", "grammar"])
def test_a_draft_whose_row_failed_is_drawn_again_without_it(fails: str) -> None:
    rig = a_rig()
    job = rig.add(5, 60)
    drafts_of(rig, 8)
    step = rig.schedule()
    (entry,) = step.entries
    assert len(entry.drafts) > 2
    row = entry.drafts[1]
    if fails == "row":
        row.draw.fault.note(ArithmeticError())
    else:
        failed = Constraint(None, lambda: None)  # type: ignore[arg-type, return-value]
        failed.fail(row.start + 1)
        draw = msgspec.structs.replace(row.draw, constraint=failed)
        drafts = (entry.drafts[0], msgspec.structs.replace(row, draw=draw), *entry.drafts[2:])
        step = replace(step, entries=(msgspec.structs.replace(entry, drafts=drafts),))
    (drawn,) = rig.end(step)
    assert len(drawn.tokens) == 2
    assert not job.has_ended


@pytest.mark.parametrize("written", ["off", False, {"method": "off"}])
def test_the_method_alone_is_a_setting(written: Any) -> None:
    found = TypeAdapter(SpeculationConfig).validate_python(written)
    assert (found.method, found.is_on, found.uses_answers) == ("off", False, False)


def test_the_head_drafts_one_token_where_the_text_repeats_nothing_while_it_is_right() -> None:
    """The engine notes behind each draw what the head expects."""

    def drafted(steps: int, *, is_right: bool) -> list[int]:
        found = []
        for _ in range(steps):
            step = rig.schedule()
            found.append(len(step.batch) - len(step.entries))
            tokens = []
            for row in step.batch:
                position = row.start + len(row.token_ids)
                tokens.append(SampledToken(100 + position))  # a text in which nothing comes twice
                assert row.draw is not None
                assert row.draw.mtp is not None
                row.draw.mtp.note(position + 1, 101 + position if is_right else 7)
            rig.scheduler.complete(step, tokens)
        return found

    rig = a_rig(StepCosts(0.010, 0.001, 0.0, 0.004, 0.0), SpeculationConfig(method="mtp"))
    job = rig.add(5, 190)
    assert drafted(20, is_right=True)[2:] == [1] * 18
    assert job.sequence.num_output_tokens > 35
    assert sum(drafted(40, is_right=False)[-20:]) < 5
    without = a_rig()
    without.add(5, 20)
    assert without.schedule().batch[0].draw.mtp is None
