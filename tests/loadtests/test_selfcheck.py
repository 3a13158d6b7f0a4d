"""The real generator against the stub server, its records against the stub's log, and what a script's answer is worth.

No timing is asserted: delays are generous.
"""

from pathlib import Path

import pytest

from tests.loadtests.selfcheck import MIXED_RATE, check_attainment, rate_error, scripts, timing_errors
from tests.loadtests.stub_server import SCENARIOS, StubRequest, key_of, script_of
from twostroke.loadtests import LoadTestError
from twostroke.loadtests.run_folder import Record, RunFolder
from twostroke.loadtests.workloads.sessions import sessions


def test_attainment_is_what_was_built_into_the_answers_and_every_session_is_sent_once(tmp_path: Path) -> None:
    found = check_attainment(tmp_path, seconds=2.0)
    assert found["attainment_error"] < 1e-9
    assert 0.2 < found["attainment"] < 0.9
    run = RunFolder(tmp_path / "mixed")
    records = list(run.records())
    planned = list(sessions(run.plan()))
    assert sorted(record.session for record in records) == [session.index for session in planned]
    assert abs(len(planned) - 2 * MIXED_RATE) < 25
    assert found["num_requests"] == sum(session.at_s >= run.plan().warm_up_s for session in planned)
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
