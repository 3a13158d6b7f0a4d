"""The real generator against a stub server whose every instant is known: its times, rate, attainment and verdict.

Times and rates are asserted by `-m wide` alone, on a machine with nothing else to do; elsewhere delays are generous.
"""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

from tests.loadtests.stub_server import (
    MIXED_LIMIT_S,
    MIXED_SLO,
    MODEL,
    SCENARIOS,
    VOCABULARY,
    Script,
    StubRequest,
    key_of,
    script_of,
    stub_server,
)
from twostroke.loadtests import LoadTestError
from twostroke.loadtests.generator.runner import run_plan
from twostroke.loadtests.plan import SLO, Constant, Fixed, Plan, Poisson, Session
from twostroke.loadtests.report.estimates import percentile
from twostroke.loadtests.report.figures import Summary, summarise
from twostroke.loadtests.run_folder import Record, RunFolder
from twostroke.loadtests.workloads.prompts import token_ids
from twostroke.loadtests.workloads.sessions import sessions

INPUT_TOKENS = 64
STREAMS = 50  # at once, of each sending process
STREAM_TOKENS = 250  # 20 ms after each other, on average
STREAM_S = 0.275 + (STREAM_TOKENS - 1) * 0.02
STEADY_SLO = SLO(ttft_s=0.2)  # P99 of the lag may be 5% of it: 10 ms
MIXED_RATE = 20.0
FLOOD_RATE = 10_000.0  # requests a second, several times what one process can send
MAX_TIME_ERROR_S = 0.010  # P99
MAX_RATE_ERROR = 0.01


PLAN = Plan(
    url="",
    model=MODEL,
    max_context=INPUT_TOKENS + STREAM_TOKENS,
    arrivals=Constant(1.0),
    workload=Fixed(INPUT_TOKENS, 2),
    slo=SLO(),
    seconds=1.0,
    vocabulary=VOCABULARY,
    request_limit_s=60.0,
)


def timing_errors(records: Iterable[Record], served: Sequence[StubRequest]) -> tuple[list[float], list[float]]:
    """Return the errors of the generator's TTFT and ITL against the stub's, for all whole answers, in seconds.

    TTFT runs from the scheduled instant to the first token, against the stub's time from the request's last byte to
    that token, so lateness in sending is an error too. ITL compares each gap. Raises LoadTestError where a record
    has no request at the stub, or another number of tokens, and where there are no gaps.
    """
    by_key = {f"{each.key:x}": each for each in served}
    ttft_s: list[float] = []
    itl_s: list[float] = []
    for record in records:
        if record.status != "ok" or record.ttft_s is None:
            continue
        stub = by_key.get(record.request_id or "")
        if stub is None or len(stub.token_s) != len(record.token_s):
            raise LoadTestError(f"session {record.session} got another number of tokens than the stub has sent")
        ttft_s.append(abs(record.ttft_s - (stub.token_s[0] - stub.arrived_s)))
        itl_s += [abs(gap - (b - a)) for gap, (a, b) in zip(record.gaps_s, pairwise(stub.token_s), strict=True)]
    if not itl_s:
        raise LoadTestError("no answer of two tokens or more came whole: there are no times to compare")
    return ttft_s, itl_s


def rate_error(rate: float, served: Sequence[StubRequest]) -> float:
    """Return the relative error of the rate at which requests reached the stub."""
    if len(served) < 2:
        raise LoadTestError(f"the stub got {len(served)} requests: nothing can be said of their rate")
    arrived = sorted(each.arrived_s for each in served)
    return abs((len(arrived) - 1) / (arrived[-1] - arrived[0]) / rate - 1)


def scripts(plan: Plan, scenario: str, sessions: Iterable[Session]) -> list[Script]:
    """Return what the stub does with each session's only request."""
    turns = [session.turns[0] for session in sessions]
    return [script_of(scenario, key_of(token_ids(turn.prompt, plan.vocabulary)), turn.output_tokens) for turn in turns]


def analytic_attainment(plan: Plan, scenario: str, sessions: Iterable[Session]) -> float:
    """The share of the requests scheduled after the warm-up whose script meets the plan's SLO."""
    judged = scripts(plan, scenario, (session for session in sessions if session.at_s >= plan.warm_up_s))
    return sum(script.meets(plan.slo) for script in judged) / len(judged)


def carry_out(plan: Plan, scenario: str, folder: Path) -> tuple[RunFolder, Summary, list[StubRequest]]:
    """Run against a stub of this scenario, into a subfolder of its name."""
    with stub_server(scenario) as (url, served):
        run = run_plan(msgspec.structs.replace(plan, url=url, name=f"selfcheck {scenario}"), folder / scenario)
    return run, summarise(run), served


def test_attainment_is_what_was_built_into_the_answers_and_every_session_is_sent_once(tmp_path: Path) -> None:
    asked = msgspec.structs.replace(
        PLAN,
        arrivals=Poisson(MIXED_RATE),
        slo=MIXED_SLO,
        seconds=2.0,
        warm_up_s=0.2,
        request_limit_s=MIXED_LIMIT_S,
    )
    run, summary, _ = carry_out(asked, "mixed", tmp_path)
    assert summary.attainment is not None
    assert summary.attainment.value == pytest.approx(analytic_attainment(asked, "mixed", sessions(asked)), abs=1e-9)
    assert 0.2 < summary.attainment.value < 0.9
    records = list(run.records())
    planned = list(sessions(run.plan()))
    assert sorted(record.session for record in records) == [session.index for session in planned]
    assert abs(len(planned) - 2 * MIXED_RATE) < 25
    assert summary.counts.scheduled == sum(session.at_s >= run.plan().warm_up_s for session in planned)
    played = scripts(run.plan(), "mixed", planned)
    for record in records:
        script = played[record.session]
        whole = script.status == 200 and script.ending == "whole"
        assert record.http_status == script.status
        assert record.status == ("ok" if whole else "refused" if script.status in (429, 503) else "failed")
        assert record.output_tokens == (len(script.gaps_s) + 1 if whole else None)
    assert {record.status for record in records} == {"ok", "refused", "failed"}
    assert {script.ending for script in played} == {"whole", "broken", "silent"}
    assert 1 in {record.output_tokens for record in records}


@pytest.mark.wide
def test_times_and_the_rate_are_the_stubs_own_with_as_many_streams_as_a_process_may_have(tmp_path: Path) -> None:
    rate = STREAMS / STREAM_S
    steady = msgspec.structs.replace(
        PLAN,
        arrivals=Constant(rate),
        workload=Fixed(INPUT_TOKENS, STREAM_TOKENS),
        slo=STEADY_SLO,
        seconds=30.0,
        warm_up_s=STREAM_S,  # until then there are fewer streams
    )
    run, summary, served = carry_out(steady, "steady", tmp_path)
    ttft_s, itl_s = timing_errors((each for each in run.records() if each.scheduled_s >= steady.warm_up_s), served)
    assert summary.validity.valid
    assert max(percentile(ttft_s, 99) or 1.0, percentile(itl_s, 99) or 1.0) <= MAX_TIME_ERROR_S
    assert rate_error(rate, served) <= MAX_RATE_ERROR


@pytest.mark.wide
def test_more_than_one_process_can_send_is_no_verdict_on_the_server(tmp_path: Path) -> None:
    flood = msgspec.structs.replace(PLAN, arrivals=Constant(FLOOD_RATE), slo=MIXED_SLO)
    assert not carry_out(flood, "immediate", tmp_path)[1].validity.valid


def record(
    token_s: tuple[float, ...], *, request_id: str = "ff", scheduled_s: float = 0.0, lag_s: float = 0.0
) -> Record:
    return Record(
        session=0,
        turn=0,
        scheduled_s=scheduled_s,
        sent_s=scheduled_s + lag_s,
        end_s=9.0,
        status="ok",
        output_tokens=len(token_s),
        token_s=token_s,
        request_id=request_id,
    )


def test_errors_are_those_of_durations_whatever_the_clocks_begin_with() -> None:
    served = StubRequest(0xFF, arrived_s=1000.0, token_s=[1000.5, 1000.7, 1000.8])
    ttft_s, itl_s = timing_errors([record((2.51, 2.70, 2.83), scheduled_s=2.0)], [served])
    assert ttft_s == pytest.approx([0.01])
    assert itl_s == pytest.approx([0.01, 0.03])


def test_late_sending_is_an_error_of_ttft() -> None:
    served = StubRequest(0xFF, arrived_s=1000.3, token_s=[1000.8, 1000.9])  # sent 0.3 s after it was due
    late = record((2.8, 2.9), scheduled_s=2.0, lag_s=0.3)
    assert timing_errors([late], [served])[0] == pytest.approx([0.3])


def test_without_whole_answers_there_is_no_error_of_0_but_none_at_all() -> None:
    failed = Record(session=0, turn=0, scheduled_s=0.0, sent_s=0.0, end_s=1.0, status="failed", error="broke")
    with pytest.raises(LoadTestError, match="no times to compare"):
        timing_errors([failed], [])


@pytest.mark.parametrize(
    "served", [StubRequest(0xFE, 0.0, [1.0]), StubRequest(0xFF, 0.0, [1.0, 2.0])], ids=["unknown", "lost"]
)
def test_a_token_that_was_lost_is_no_timing_error_but_a_wrong_generator(served: StubRequest) -> None:
    with pytest.raises(LoadTestError, match="another number of tokens"):
        timing_errors([record((1.0,))], [served])


def test_the_rate_is_that_of_the_gaps() -> None:
    assert rate_error(10.0, [StubRequest(index, index / 10) for index in range(11)]) == pytest.approx(0)
    assert rate_error(10.0, [StubRequest(index, index / 9) for index in range(11)]) == pytest.approx(0.1)
    with pytest.raises(LoadTestError, match="got 1 requests"):
        rate_error(10.0, [StubRequest(0, 0.0)])


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_script_follows_from_the_prompt_alone(scenario: str) -> None:
    key = key_of(list(range(100)))
    assert key == key_of(list(range(16))) != key_of(list(range(1, 17)))
    assert script_of(scenario, key, 20) == script_of(scenario, key, 20)
