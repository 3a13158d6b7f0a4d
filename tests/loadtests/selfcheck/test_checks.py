"""The real generator, in a process of its own, against the stub server. No timing is asserted: delays are generous."""

from pathlib import Path

from twostroke.loadtests.run_folder import RunFolder
from twostroke.loadtests.selfcheck.checks import MIXED_RATE, check_attainment, scripts
from twostroke.loadtests.workloads.sessions import sessions


def test_attainment_is_what_was_built_into_the_answers_and_every_session_is_sent_once(tmp_path: Path) -> None:
    found = check_attainment(tmp_path, seconds=2.0)
    assert found.attainment_error < 1e-9
    assert 0.2 < found.attainment < 0.9
    run = RunFolder(tmp_path / "mixed")
    records = list(run.records())
    planned = list(sessions(run.plan()))
    assert sorted(record.session for record in records) == [session.index for session in planned]
    assert abs(len(planned) - 2 * MIXED_RATE) < 25
    assert found.num_requests == sum(session.at_s >= run.plan().warm_up_s for session in planned)
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
