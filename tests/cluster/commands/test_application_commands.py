"""`twostroke await`: a deployed application runs, fails, or takes too long."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from tests.cluster.command_line import one_line
from twostroke.cluster.cli import main
from twostroke.cluster.commands.application import failure_of


def waited(looks: Sequence[Mapping[str, Any] | None], patience_s: float = 60.0) -> tuple[str | None, float]:
    """(the failure, seconds) where Serve tells these one after another, the last again and again."""
    told, now = list(looks), 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    return failure_of(lambda: told.pop(0) if len(told) > 1 else told[0], patience_s, lambda: now, sleep), now


def app(status: str, message: str = "", **deployments: str) -> dict[str, Any]:
    of_each = {name: {"status": "UNHEALTHY", "message": said} for name, said in deployments.items()}
    return {"status": status, "message": message, "deployments": of_each}


def test_an_application_that_comes_to_run_is_waited_for() -> None:
    failure, waited_s = waited([None, app("NOT_STARTED"), app("DEPLOYING"), app("RUNNING")])
    assert failure is None
    assert waited_s > 0


def test_one_that_failed_to_deploy_is_waited_for_no_longer_and_says_why() -> None:
    failure, waited_s = waited([app("DEPLOYING"), app("DEPLOY_FAILED", "no such model", Router="never started")])
    assert failure == "the application is DEPLOY_FAILED\nno such model\nRouter is UNHEALTHY: never started"
    assert waited_s < 10


@pytest.mark.parametrize(
    ("last", "status"), [(app("DEPLOYING", DecodeWorker="no room"), "DEPLOYING"), (None, "not known to Serve")]
)
def test_what_takes_longer_than_it_may_is_a_failure(last: Mapping[str, Any] | None, status: str) -> None:
    failure, waited_s = waited([last], patience_s=60.0)
    assert failure is not None
    assert failure.startswith(f"the application is {status}")
    assert 60 <= waited_s < 70


def test_a_wait_of_no_possible_length_is_told_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["await", "--seconds", "nan"]) == 2
    assert one_line(capsys) == "twostroke: --seconds nan: more than 0, up to 86400"


def test_an_address_that_is_none_is_told_with_its_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["await", "--address", "10.0.0.10:8265"]) == 2
    assert capsys.readouterr().err.startswith("twostroke: --address 10.0.0.10:8265: ")
