"""`twostroke loadtest`: told like all commands, though it may not be installed whole."""

import sys

import pytest

from tests.cluster.command_line import one_line
from twostroke.cluster import cli


def test_a_load_test_s_error_is_one_line_and_a_wrong_setting(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["loadtest", "run"]) == cli.CONFIG_ERROR_EXIT
    assert one_line(capsys) == "twostroke: --arrivals poisson needs --rate"


def test_missing_packages_are_told_with_the_way_to_get_them(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "_LOADTESTS_NEED", ("sys", "no_such_package"))
    assert cli.main(["loadtest", "run", "--rate", "1"]) == cli.CONFIG_ERROR_EXIT
    told = "twostroke: loadtest needs no_such_package: in the project's checkout, pip install '.[loadtest]'"
    assert one_line(capsys) == told


def test_our_own_process_is_never_patched_by_gevent() -> None:
    with pytest.raises(SystemExit):
        cli.main(["loadtest", "run", "--help"])
    assert "locust" not in sys.modules
