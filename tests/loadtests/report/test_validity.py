"""When a run tells of the generator, and not of the server."""

from typing import Any

import msgspec
import pytest

from tests.loadtests.report.runs import answer, facts, miss, plan
from twostroke.loadtests.plan import SLO, Plan
from twostroke.loadtests.records import Record
from twostroke.loadtests.report.figures import judged_rows
from twostroke.loadtests.report.observations import Validity, judge, read_observations
from twostroke.loadtests.run_folder import GeneratorHealth


def verdict(*records: Record, run_plan: Plan | None = None, **fields: Any) -> Validity:
    run_plan, run_facts = run_plan or plan(), facts(**fields)
    seen = read_observations(records)
    return judge(run_plan, run_facts, seen, judged_rows(run_plan, run_facts, seen))


def answers(count: int, **fields: Any) -> list[Record]:
    return [answer(2.0 + 8.0 * number / count, 0.5, **fields) for number in range(count)]


def test_a_run_that_kept_its_schedule_is_valid() -> None:
    assert verdict(*answers(100, lag_s=0.004)) == Validity(True)


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


def test_one_late_request_in_a_hundred_is_forgiven() -> None:
    assert verdict(*answers(99), answer(5.0, 0.5, lag_s=0.4)).valid


def test_lag_in_the_warm_up_does_not_count() -> None:
    assert verdict(answer(1.0, 0.9, lag_s=0.5), *answers(10)).valid


def test_lag_is_not_judged_without_an_slo() -> None:
    assert verdict(*answers(10, lag_s=0.3), run_plan=plan(slo=SLO())).valid


def test_a_saturated_generator_makes_a_run_invalid() -> None:
    healths = (GeneratorHealth(0, 5, cpu_seconds=7.9, wall_seconds=10.0), GeneratorHealth(1, 5, 8.1, 10.0))
    found = verdict(*answers(10), generators=healths)
    assert found.reasons == (
        "generator process 1 was saturated: 81% of a core, above 80%; use more generator processes",
    )


def test_requests_without_a_record_make_a_run_invalid() -> None:
    found = verdict(*answers(10), generators=(GeneratorHealth(0, 12, 1.0, 10.0),))
    assert found.reasons == ("12 requests were sent, and only 10 have a record",)


def test_a_run_that_was_ended_early_is_invalid() -> None:
    found = verdict(*answers(8), ended_early=True)
    assert found.reasons == ("the run was ended early: 9 s of 10 s were sent",)


def test_a_run_without_requests_in_its_window_is_invalid() -> None:
    assert verdict(answer(1.0, 0.1)).reasons == ("no request was scheduled in the window, so nothing was measured",)


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


def test_a_request_that_was_never_sent_contradicts_nothing() -> None:
    assert verdict(*answers(10), miss(9.0, "unfinished")).valid
