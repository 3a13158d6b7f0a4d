"""Five times the load, on virtual time: refused or served in time; and what it would be without the safeguards."""

import pytest

from tests.simulation.policies.overload import BATCH, INTERACTIVE, Outcome, run_overload


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
    overload = run_overload(0, admission=False).overload
    assert overload.worst_ttft > 5.0
    assert overload.goodput_per_s < 0.8 * outcome.overload.goodput_per_s


def test_without_a_share_the_lower_class_starves(outcome: Outcome):
    overload = run_overload(0, batch=BATCH.model_copy(update={"share": 0.0})).overload
    assert len(overload.admitted(BATCH)) < 0.55 * len(outcome.overload.admitted(BATCH))
