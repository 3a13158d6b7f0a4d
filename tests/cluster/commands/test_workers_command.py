"""`twostroke role` and `twostroke drain WORKER`: which workers a name means, and how long a drain is waited for."""

from typing import Any

import pytest

from tests.cluster.command_line import answering, one_line
from twostroke.cluster.cli import main
from twostroke.cluster.commands import application
from twostroke.cluster.commands.application import chosen, wait_until_empty
from twostroke.protocol.errors import ConfigError


def row(worker_id: str, node: str = "10.0.0.1", running: int = 0, *, reachable: bool = True) -> dict[str, Any]:
    stats = {"num_running": running, "num_waiting": 0, "num_transfers": 0} if reachable else None
    return {"worker_id": worker_id, "role": "decode", "node": node, "nodes": [node], "stats": stats}


ROWS = [row("abc1"), row("abc2", "10.0.0.2"), row("xyz", "10.0.0.2")]


def test_a_name_is_an_id_or_its_beginning_or_a_host() -> None:
    assert chosen(ROWS, "abc1") == [ROWS[0]]
    assert chosen(ROWS, "x") == [ROWS[2]]
    assert chosen(ROWS, "10.0.0.2") == ROWS[1:]
    assert chosen([row("ab"), row("abc")], "ab") == [row("ab")]
    with pytest.raises(ConfigError, match=r"several workers begin so; there are abc1 .*, abc2"):
        chosen(ROWS, "ab")
    with pytest.raises(ConfigError, match=r"no worker has this id or address; there are abc1 .*, abc2 .*, xyz"):
        chosen(ROWS, "nobody")


def test_a_drain_is_waited_for_until_nothing_is_left_or_the_grace_is_over() -> None:
    now = 0.0
    running = [3, 1, 0]

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    def fetch() -> list[dict[str, Any]]:
        return [row("a", running=running.pop(0)), row("b", running=9)]

    assert wait_until_empty(fetch, ["a"], 60.0, lambda: now, sleep) == 0
    assert running == []
    assert wait_until_empty(lambda: [row("a", running=2)], ["a"], 2.0, lambda: now, sleep) == 2
    assert wait_until_empty(lambda: [row("a", reachable=False)], ["a", "gone"], 2.0, lambda: now, sleep) == 0


def test_of_a_host_all_workers_drain_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    orders: list[tuple[str, Any]] = []

    def order(url: str, worker_id: str, body: dict[str, Any]) -> None:
        orders.append((worker_id, body["draining"]))
        if worker_id == "xyz" and body["draining"]:
            raise ConfigError("it is the last")

    monkeypatch.setattr(application, "order", order)
    monkeypatch.setattr(application, "fetch_status", lambda url: {"workers": ROWS})
    with pytest.raises(ConfigError, match="it is the last"):
        application.drain_workers("http://h:1", "10.0.0.2", grace_s=1.0, is_resumed=False)
    assert orders == [("abc2", True), ("xyz", True), ("abc2", False)]


def test_a_refusal_and_a_server_that_is_none_are_told_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["role", "a", "decode", "--url", "http://127.0.0.1:1"]) == 2
    assert "no Twostroke server answers at http://127.0.0.1:1" in one_line(capsys)
    assert main(["drain", "--resume"]) == 2
    assert "--resume: name a worker" in one_line(capsys)
    with answering({"/status": b'{"workers": []}'}) as url:
        assert main(["drain", "a", "--url", url]) == 2
    assert "no worker has this id or address; there are none" in one_line(capsys)
