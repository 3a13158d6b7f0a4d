"""Each definition of docs/loadtests.md on records reckoned by hand, and when a run tells of the generator."""

import itertools
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.loadtests.report.runs import answer, drawn, facts, miss, plan, write_run
from twostroke.loadtests import LoadTestError
from twostroke.loadtests.plan import SLO, Closed, Plan
from twostroke.loadtests.report.figures import (
    CLIENT_PARTS,
    SERVER_PARTS,
    FrequentError,
    Summary,
    Validity,
    judge,
    judged_rows,
    num_workers,
    read_observations,
    server_parts,
    summarise,
    summarise_observations,
)
from twostroke.loadtests.report.words import utilization_words
from twostroke.loadtests.report.words import verdict as verdict_words
from twostroke.loadtests.run_folder import GeneratorHealth, Record, RunFacts, RunFolder, Sample


def summary(
    *records: Record, run_plan: Plan | None = None, run_facts: RunFacts | None = None, samples: tuple[Sample, ...] = ()
) -> Summary:
    return summarise_observations(run_plan or plan(), run_facts or facts(), read_observations(records), samples)


def test_the_window_is_from_the_end_of_the_warm_up_to_before_the_end() -> None:
    found = summary(answer(1.999, 0.1), answer(2.0, 0.2), answer(9.999, 0.3), answer(10.0, 0.4))
    assert found.window_s == 8.0
    assert found.counts.scheduled == 2
    assert (found.ttft.p50.value, found.ttft.max) == pytest.approx((0.2, 0.3))


def test_the_clock_starts_when_a_request_is_scheduled_not_when_it_is_sent() -> None:
    found = summary(answer(3.0, 1.2, lag_s=0.9))
    assert found.ttft.mean == pytest.approx(1.2)
    assert found.counts.met_ttft == 0


def test_tpot_is_the_time_after_the_first_token_over_the_other_tokens_of_the_usage() -> None:
    found = summary(answer(3.0, 0.5, 0.7, 1.1, output_tokens=7))  # three events that held seven tokens
    assert found.tpot.mean == pytest.approx(0.6 / 6)


def test_an_answer_of_one_token_has_no_tpot_and_met_it() -> None:
    found = summary(answer(3.0, 0.5))
    assert found.tpot is None
    assert (found.counts.met_tpot, found.counts.met) == (1, 1)


def test_without_a_usage_events_are_counted_and_the_report_says_so() -> None:
    found = summary(answer(3.0, 0.5, 0.7, 0.9, output_tokens=None))
    assert found.tpot.mean == pytest.approx(0.2)
    assert found.counts.met_tpot == 0
    assert "1 answers do not tell how many tokens they have" in found.notes[0]


def test_itl_pools_the_raw_gaps_of_all_answers() -> None:
    found = summary(answer(3.0, 0.1, 0.2, 0.4), answer(4.0, 0.1, 0.9))
    assert found.itl.count == 3
    assert (found.itl.mean, found.itl.p50.value, found.itl.max) == pytest.approx((1.1 / 3, 0.2, 0.8))


def test_tail_tbt_is_the_mean_of_the_longest_tenth_of_the_gaps() -> None:
    gaps = [0.01 * number for number in range(1, 21)]
    found = summary(answer(3.0, *itertools.accumulate(gaps, initial=0.5)))
    assert found.tail_tbt == pytest.approx((0.2 + 0.19) / 2)
    assert found.tail_tbt_by_request.mean == pytest.approx((0.2 + 0.19) / 2)


def test_normalised_latency_is_the_whole_time_over_all_tokens() -> None:
    found = summary(answer(3.0, 0.5, 0.7, 0.9))
    assert found.e2e.mean == pytest.approx(0.9)
    assert found.normalised_latency.mean == pytest.approx(0.3)


def test_attainment_counts_both_and_whatever_was_scheduled() -> None:
    found = summary(
        answer(2.0, 0.9, 0.95),  # met
        answer(3.0, 1.1, 1.15),  # late
        answer(4.0, 0.9, 1.1),  # slow
        miss(5.0, "refused"),
        miss(6.0, "failed"),
        miss(7.0, "failed", token_s=(7.1, 7.15), output_tokens=2),  # broken off after a good beginning
        miss(8.0, "unfinished"),
        answer(9.0, 0.1),  # met
    )
    counts = found.counts
    assert (counts.scheduled, counts.ok, counts.refused, counts.failed, counts.unfinished) == (8, 4, 1, 2, 1)
    assert counts.admitted == 7
    assert (counts.met_ttft, counts.met_tpot, counts.met) == (3, 3, 2)
    assert found.attainment.value == 2 / 8
    assert found.goodput.value == pytest.approx(2 / 8.0)
    assert found.offered_rate == 1.0


def test_a_whole_answer_without_any_text_missed_its_ttft() -> None:
    found = summary(answer(3.0, output_tokens=0))
    assert (found.counts.ok, found.counts.met_ttft) == (1, 0)


def test_a_time_that_is_just_what_was_asked_is_met() -> None:
    found = summary(answer(4.0, 1.0, 1.125), run_plan=plan(slo=SLO(1.0, 0.125)))
    assert found.counts.met == 1


@pytest.mark.parametrize(("slo", "met"), [(SLO(ttft_s=1.0), 1), (SLO(tpot_s=0.1), 1), (SLO(), 2)])
def test_what_is_not_asked_is_met_by_every_whole_answer(slo: SLO, met: int) -> None:
    found = summary(answer(3.0, 0.5, 1.5), answer(4.0, 1.5, 1.55), miss(5.0, "failed"), run_plan=plan(slo=slo))
    assert found.counts.met == met


def test_tokens_are_counted_of_whole_answers_of_the_window() -> None:
    found = summary(
        answer(1.0, 0.1, 0.2),
        answer(3.0, 0.1, 0.2, input_tokens=30, cached_tokens=15),
        miss(4.0, "failed", output_tokens=9),
    )
    assert found.output_rate.value == pytest.approx(2 / 8)
    assert found.input_rate == pytest.approx(30 / 8)
    assert found.cached_share == 0.5


def test_what_a_user_sees_is_one_over_the_median_tpot() -> None:
    found = summary(answer(3.0, 0.5, 0.55), answer(4.0, 0.5, 0.55), answer(5.0, 0.5, 0.9))
    assert found.user_rate == pytest.approx(20.0)


def test_kinds_are_told_apart() -> None:
    found = summary(answer(3.0, 0.5, kind="short"), answer(4.0, 1.5, kind="long"), miss(5.0, "refused", kind="long"))
    assert [(each.kind, each.counts.scheduled, each.counts.refused, each.counts.met) for each in found.by_kind] == [
        ("long", 2, 1, 0),
        ("short", 1, 0, 1),
    ]


def test_gaps_of_events_that_came_together_are_told() -> None:
    assert summary(answer(3.0, 0.5, 0.50001, 0.6, 0.60001, 0.7)).bundled_share == 0.5
    assert summary(answer(3.0, 0.5)).bundled_share is None


def test_errors_are_counted_by_their_words_the_most_frequent_first() -> None:
    found = summary(
        miss(3.0, "failed", "broken"),
        miss(4.0, "refused", "overloaded", http_status=429),
        miss(5.0, "refused", "overloaded", http_status=429),
        miss(1.0, "failed", "in the warm-up"),
        miss(6.0, "unfinished"),
    )
    assert found.errors == [
        FrequentError(2, "refused", 429, "overloaded"),
        FrequentError(1, "failed", None, "broken"),
    ]


def test_errors_that_differ_in_numbers_alone_or_have_one_code_are_one() -> None:
    found = summary(
        miss(
            3.0, "refused", 'Too Many Requests: {"error": {"message": "8 wait", "code": "queue_full"}}', http_status=429
        ),
        miss(
            4.0,
            "refused",
            'Too Many Requests: {"error": {"message": "no room", "code": "queue_full"}}',
            http_status=429,
        ),
        miss(5.0, "failed", "no answer to req-12ab within 1.5 s"),
        miss(6.0, "failed", "no answer to req-7 within 2 s"),
        miss(7.0, "failed", "no answer"),
    )
    assert [(each.count, each.http_status) for each in found.errors] == [(2, 429), (2, None), (1, None)]
    assert found.errors[1].error == "no answer to req-12ab within 1.5 s"


def test_attainment_at_other_scales_judges_the_same_answers_again() -> None:
    found = summary(answer(3.0, 0.5, 0.55), answer(4.0, 0.5, 0.65), answer(5.0, 3.9, 3.95), miss(6.0, "refused"))
    scales = {round(point.scale, 3): point for point in found.slo_scales}
    assert (scales[1.0].attainment, scales[1.0].ttft_attainment, scales[1.0].tpot_attainment) == (0.25, 0.5, 0.5)
    assert scales[4.0].attainment == 0.75
    assert scales[0.25].attainment == 0.0


def test_goodput_for_each_worker_takes_the_workers_that_the_server_told_of() -> None:
    workers = [{"role": "prefill", "worker": "p"}, {"role": "decode", "worker": "d"}]
    found = summary(answer(3.0, 0.5), answer(4.0, 0.5), run_facts=facts(server={"workers": workers}))
    assert found.num_workers == {"prefill": 1.0, "decode": 1.0}
    assert found.goodput_per_worker.value == pytest.approx(2 / 8 / 2)


def test_utilisation_is_the_mean_of_the_windows_samples_by_role_where_it_is_told() -> None:
    samples = [
        msgspec.structs.replace(sample(at_s, "a"), mfu=mfu, mbu=2 * mfu)
        for at_s, mfu in ((0.5, 0.9), (3.0, 0.1), (4.0, 0.3))
    ]
    found = summary(answer(3.0, 0.5), samples=(*samples, sample(5.0, "untold")))
    assert found.mfu == {"decode": pytest.approx(0.2)}, "the first is of the warm-up"
    assert found.mbu == {"decode": pytest.approx(0.4)}
    assert utilization_words(found.mfu, found.mbu) == "decode 20.0% and 40.0%"
    assert utilization_words({}, {}) == ""


def test_workers_that_came_during_the_run_count_for_as_long_as_they_were_seen() -> None:
    told = facts(server={"workers": [{"role": "decode"}]})
    samples = [sample(0.0, "a"), sample(1.0, "a"), sample(2.0, "a"), sample(2.0, "b")]
    assert num_workers(told, samples) == {"decode": pytest.approx(4 / 3)}
    assert num_workers(told, samples[:2]) == {"decode": 1.0}


def test_a_server_that_tells_no_workers_has_no_goodput_for_each() -> None:
    found = summary(answer(3.0, 0.5))
    assert (found.num_workers, found.goodput_per_worker) == ({}, None)


def test_a_run_without_requests_has_no_figures_and_is_no_measurement() -> None:
    found = summary()
    assert (found.attainment, found.ttft, found.itl, found.tail_tbt, found.slo_scales) == (None, None, None, None, [])
    assert found.goodput.value == 0.0
    assert not found.validity.valid


def test_a_run_that_was_ended_early_is_judged_until_its_last_request() -> None:
    found = summary(answer(3.0, 0.5), answer(4.0, 0.5), run_facts=facts(ended_early=True))
    assert found.window_s == pytest.approx(2.0)
    assert found.counts.scheduled == 2
    assert not found.validity.valid


def test_a_closed_loop_is_said_to_be_one() -> None:
    assert "closed loop" in summary(answer(3.0, 0.5), run_plan=plan(arrivals=Closed(4))).notes[0]


def test_a_folders_records_of_all_processes_are_one_run(tmp_path: Path) -> None:
    records = drawn(60, 10.0)
    assert summarise(write_run(tmp_path, records)) == summary(*records[::2], *records[1::2])


def test_a_folder_that_is_none_of_a_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(LoadTestError, match=r"plan\.json: not there"):
        summarise(RunFolder(tmp_path))


@st.composite
def records(draw: Any) -> list[Record]:
    made: list[Record] = []
    moment = st.floats(0, 12, allow_nan=False)
    after = st.floats(0.001, 3, allow_nan=False)
    for _ in range(draw(st.integers(0, 12))):
        status = draw(st.sampled_from(["ok", "refused", "failed", "unfinished"]))
        kind = draw(st.sampled_from(["", "long"]))
        if status == "ok":
            times = itertools.accumulate(draw(st.lists(after, max_size=5)))
            made.append(answer(draw(moment), *times, kind=kind))
        else:
            made.append(miss(draw(moment), status, kind=kind))
    return made


@settings(deadline=None, max_examples=50)  # each reckons a whole summary
@given(records())
def test_sums_match_and_shares_are_shares(made: list[Record]) -> None:
    found = summary(*made)
    for counts in (found.counts, *(each.counts for each in found.by_kind)):
        assert counts.scheduled == counts.ok + counts.refused + counts.failed + counts.unfinished
        assert counts.met <= min(counts.met_ttft, counts.met_tpot)
        assert max(counts.met_ttft, counts.met_tpot) <= counts.ok
    assert sum(each.counts.scheduled for each in found.by_kind) == found.counts.scheduled
    for share in (found.attainment, found.ttft_attainment, found.tpot_attainment):
        assert share is None or 0 <= share.value <= 1
    attainments = [point.attainment for point in found.slo_scales]
    assert attainments == sorted(attainments)  # a laxer SLO is met by no fewer
    assert found.goodput.value * found.window_s == pytest.approx(found.counts.met)
    assert sum(each.count for each in found.errors) == found.counts.refused + found.counts.failed


def counted(at_s: float, worker: str, drafted: float, accepted: float, generated: float) -> Sample:
    counters = {"draft_tokens": drafted, "accepted_tokens": accepted, "generated_tokens": generated}
    return msgspec.structs.replace(sample(at_s, worker), **counters)


def test_drafts_are_counted_from_the_windows_first_sample_on_over_all_workers() -> None:
    samples = (
        counted(0.5, "a", 0.0, 0.0, 0.0),  # of the warm-up
        counted(3.0, "a", 100.0, 50.0, 500.0),
        counted(3.0, "b", 0.0, 0.0, 7.0),
        counted(4.0, "a", 140.0, 80.0, 560.0),
        counted(4.0, "b", 20.0, 10.0, 47.0),
        counted(5.0, "a", 20.0, 10.0, 20.0),  # it began anew
        sample(5.0, "untold"),
    )
    found = summary(answer(3.0, 0.5), samples=samples).drafts
    assert found is not None
    assert found.drafted_tokens == 40 + 20 + 20
    assert found.acceptance_rate == pytest.approx((30 + 10 + 10) / 80)
    assert found.accepted_per_token == pytest.approx(50 / (60 + 40 + 20))
    assert found.tokens_per_step == pytest.approx(120 / 70)


def test_servers_that_draft_nothing_or_tell_nothing_have_no_figures_of_drafts() -> None:
    silent = (sample(3.0, "a"), sample(4.0, "a"))
    without = (counted(3.0, "a", 0.0, 0.0, 5.0), counted(4.0, "a", 0.0, 0.0, 9.0))
    for samples in (silent, without, without[:1]):
        assert summary(answer(3.0, 0.5), samples=samples).drafts is None


def sample(at_s: float, worker: str) -> Sample:
    return Sample(at_s, "decode", worker, running=1.0, waiting=0.0, waiting_tokens=0.0, kv_usage=0.5)


def verdict(*records: Record, run_plan: Plan | None = None, **fields: Any) -> Validity:
    run_plan, run_facts = run_plan or plan(), facts(**fields)
    seen = read_observations(records)
    return judge(run_plan, run_facts, seen, judged_rows(run_plan, run_facts, seen))


def answers(count: int, **fields: Any) -> list[Record]:
    return [answer(2.0 + 8.0 * number / count, 0.5, **fields) for number in range(count)]


@pytest.mark.parametrize(
    ("records", "slo"),
    [
        (answers(100, lag_s=0.004), SLO(1.0, 0.1)),
        ([*answers(99), answer(5.0, 0.5, lag_s=0.4)], SLO(1.0, 0.1)),
        ([answer(1.0, 0.9, lag_s=0.5), *answers(10)], SLO(1.0, 0.1)),
        (answers(10, lag_s=0.3), SLO()),
        ([*answers(10), miss(9.0, "unfinished")], SLO(1.0, 0.1)),
    ],
    ids=["on time", "one late in a hundred", "late in the warm-up", "late without an SLO", "never sent"],
)
def test_a_run_that_tells_of_the_server_is_valid(records: list[Record], slo: SLO) -> None:
    assert verdict(*records, run_plan=plan(slo=slo)) == Validity(True)


def test_lag_may_take_a_twentieth_of_the_ttft_that_it_adds_to() -> None:
    assert SLO(1.0, 0.1).lag_limit_s == pytest.approx(0.05)
    assert SLO(tpot_s=0.1).lag_limit_s == pytest.approx(0.005)
    assert SLO().lag_limit_s is None


def test_lag_above_it_at_p99_makes_a_run_invalid() -> None:
    found = verdict(*answers(98), *answers(2, lag_s=0.06))
    assert not found.valid
    assert "P99 of the lag is 60 ms, above 5% of the SLO (50 ms)" in found.reasons[0]


@pytest.mark.parametrize(
    ("cpu_seconds", "advice"), [(0.5, "something else kept the machine busy"), (6.0, "more generator")]
)
def test_what_helps_against_lag_depends_on_who_was_busy(cpu_seconds: float, advice: str) -> None:
    found = verdict(*answers(10, lag_s=0.1), generators=(GeneratorHealth(0, 10, cpu_seconds, 10.0),))
    assert advice in found.reasons[0]


@pytest.mark.parametrize(
    ("records", "known", "reason"),
    [
        (
            answers(10),
            {"generators": (GeneratorHealth(0, 5, 7.9, 10.0), GeneratorHealth(1, 5, 8.1, 10.0))},
            "generator process 1 was saturated: 81% of a core, above 80%; use more generator processes",
        ),
        (
            answers(10),
            {"generators": (GeneratorHealth(0, 12, 1.0, 10.0),)},
            "12 requests were sent, and only 10 have a record",
        ),
        (answers(8), {"ended_early": True}, "the run was ended early: 9 s of 10 s were sent"),
        ([answer(1.0, 0.1)], {}, "no request was scheduled in the window, so nothing was measured"),
    ],
)
def test_a_run_that_tells_of_the_generator_is_invalid(
    records: list[Record], known: dict[str, Any], reason: str
) -> None:
    assert verdict(*records, **known).reasons == (reason,)


def failures(count: int, **fields: Any) -> list[Record]:
    return [miss(2.0 + 8.0 * number / count, "failed", **fields) for number in range(count)]


def test_a_run_in_which_nearly_all_failed_is_invalid_and_names_the_commonest_error() -> None:
    refused = [miss(9.0, "refused", error="busy") for _ in range(300)]
    broken = [*failures(2, error="the stream has no end"), *failures(89, error="404 no model 'x7'")]
    assert verdict(*refused, *broken, *answers(11)).valid  # 89% of those that were not refused
    found = verdict(*refused, *broken, *answers(10))
    assert found.reasons == ("91 of 101 requests failed; 89 of them: 404 no model 'x7'",)


def test_a_run_whose_answers_the_client_could_not_read_is_invalid() -> None:
    unread = failures(2, error="an event is no JSON", is_unreadable=True)
    assert verdict(*unread, *answers(198)).valid
    reasons = verdict(*unread, *answers(197)).reasons
    assert reasons == ("the client could not read 2 of 199 answers; 2 of them: an event is no JSON",)


def test_an_invalid_run_has_no_verdict_on_the_server() -> None:
    found = summary(*failures(10, error="no connection: refused"))
    assert verdict_words(plan(), found) == "The run is invalid, so it does not judge the server."


@pytest.mark.parametrize(
    "record",
    [
        answer(3.0, 0.5, 0.4, 0.6),  # tokens back in time
        answer(3.0, 0.5, lag_s=0.6),  # a token before the request was sent
        answer(3.0, 0.5, lag_s=-0.5),  # sent before it was scheduled
        msgspec.structs.replace(answer(3.0, 0.5), end_s=3.2),  # over before its last token
    ],
)
def test_moments_in_no_possible_order_make_a_run_invalid(record: Record) -> None:
    found = verdict(record, *answers(100), run_plan=plan(slo=SLO()))
    assert found.reasons == ("the moments of 1 records are in no possible order: a clock jumped",)


DISAGGREGATED = {
    "admit_s": 0.01,
    "ttft_s": 0.5,
    "prefill_queue_s": 0.1,
    "prefill_s": 0.35,
    "transfer_s": 0.47,
    "decode_queue_s": 0.03,
    "decode_s": 1.0,
}


def parts(stages: dict[str, float], ttft_s: float, e2e_s: float) -> dict[str, float]:
    return dict(zip(SERVER_PARTS, server_parts(stages, ttft_s, e2e_s), strict=True))


def test_of_the_transfer_only_what_prefill_did_not_hide_is_a_part() -> None:
    found = parts(DISAGGREGATED, ttft_s=0.52, e2e_s=1.55)
    assert found == pytest.approx(
        {
            "to the server and back": 0.02,
            "admission": 0.01,
            "prefill queue": 0.1,
            "prefill": 0.35,
            "handing over": 0.04,  # of 0.5 to the first token
            "KV transfer after prefill": 0.02,  # of 0.47, 0.45 passed during queue and prefill
            "decode queue": 0.03,
            "decode": 0.98,  # what is left of 1.03 after the first token
        }
    )


def test_a_transfer_that_prefill_hid_is_no_part() -> None:
    assert parts(DISAGGREGATED | {"transfer_s": 0.4}, 0.5, 1.5)["KV transfer after prefill"] == 0.0


def test_a_prompt_that_the_decode_worker_computed_waited_in_its_queue_first() -> None:
    found = parts({"admit_s": 0.01, "ttft_s": 0.3, "decode_queue_s": 0.1, "decode_s": 1.0}, 0.3, 1.3)
    assert (found["prefill queue"], found["prefill"]) == pytest.approx((0.1, 0.19))
    assert (found["decode queue"], found["decode"]) == pytest.approx((0.0, 1.0))


@settings(deadline=None)
@given(
    st.dictionaries(st.sampled_from([*DISAGGREGATED]), st.floats(0, 5)),
    st.floats(0, 5),
    st.floats(0, 5),
)
def test_parts_add_up_to_the_whole_and_none_is_negative(
    stages: dict[str, float], ttft_s: float, after_s: float
) -> None:
    found = server_parts(stages, ttft_s, ttft_s + after_s)
    assert sum(found) == pytest.approx(ttft_s + after_s)
    assert min(found) >= -1e-9


def test_stages_are_means_of_all_answers() -> None:
    quicker = DISAGGREGATED | {"prefill_s": 0.25}
    found = summary(answer(3.0, 0.5, 1.5, stages=DISAGGREGATED), answer(4.0, 0.5, 1.5, stages=quicker)).stages
    assert [part.name for part in found] == list(SERVER_PARTS)
    assert next(part.mean_s for part in found if part.name == "prefill") == pytest.approx(0.3)


def test_a_server_that_tells_no_stages_has_two_parts() -> None:
    found = summary(answer(3.0, 0.5, 1.5, stages=DISAGGREGATED), answer(4.0, 0.3, 0.8)).stages
    assert [(part.name, part.mean_s) for part in found] == [
        (CLIENT_PARTS[0], pytest.approx(0.4)),
        (CLIENT_PARTS[1], pytest.approx(0.75)),
    ]
    assert summary(miss(3.0, "failed")).stages == []
