"""`make cluster-demo`: what it refuses. All else: tests/e2e/test_several_nodes.py."""

import pytest

from tests.chaos.demo import main
from tests.cluster.command_line import one_line
from tests.rigs.nodes import machines as isolated


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--decode", "1"], "cluster-demo: --decode 1: nodes, from 2 to 16"),
        (["--prefill", "0"], "cluster-demo: --prefill 0: nodes, from 1 to 16"),
        (["--rate", "nan"], "cluster-demo: --rate nan: requests a second, from 0.1 to 50"),
        (
            ["--machines", "loopback", "--unplug"],
            "cluster-demo: --unplug: on the loopback interface there is no cable to cut",
        ),
        (
            ["--machines", "loopback", "--fault", "head"],
            "cluster-demo: --fault head: on the loopback interface the head alone takes requests",
        ),
        (["--fault", "drain", "--unplug"], "cluster-demo: --unplug: with --fault node alone, not drain"),
    ],
)
def test_what_can_not_be_shown_is_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert one_line(capsys) == message


def test_namespaces_that_can_not_be_had_are_refused_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(isolated, "_PROGRAMS", ("ip", "no-such-program"))
    assert main(["--machines", "namespaces"]) == 2
    assert one_line(capsys) == (
        "cluster-demo: --machines namespaces: no-such-program can't be found (Debian: iproute2 and util-linux)"
    )
