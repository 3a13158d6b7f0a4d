"""What the console of `twostroke serve` tells of workers that go and come."""

from typing import Any

from twostroke.cluster.local.server import FleetWatch


def status(*workers: str, unreachable: str = "") -> dict[str, Any]:
    """Workers as `role id epoch`."""
    told = [one.split() for one in workers]
    return {
        "workers": [
            {"role": role, "worker_id": worker_id, "epoch": epoch, "reachable": worker_id != unreachable}
            for role, worker_id, epoch in told
        ]
    }


def test_a_worker_that_is_lost_and_the_one_in_its_place_are_told_once() -> None:
    watch = FleetWatch({"decode": 2})
    assert watch.look(status("decode a 1", "decode b 2")) == []
    assert watch.look(status("decode b 2")) == ["Decode worker a is lost: 1 of 2 decode workers are there"]
    assert watch.look(status("decode b 2")) == []
    assert watch.look(status("decode b 2", "decode c 3")) == ["Decode worker c is up: 2 of 2 decode workers are there"]


def test_a_worker_that_nobody_reaches_is_lost_and_one_that_started_anew_is_another() -> None:
    watch = FleetWatch({"prefill": 1})
    watch.look(status("prefill a 1"))
    assert len(watch.look(status("prefill a 1", unreachable="a"))) == 1
    assert watch.look(status("prefill a 1")) == ["Prefill worker a is up: 1 of 1 prefill workers are there"]
    assert [line.split(":")[0] for line in watch.look(status("prefill a 2"))] == [
        "Prefill worker a is lost",
        "Prefill worker a is up",
    ]


def test_a_server_that_does_not_answer_is_told_once_and_so_is_its_return() -> None:
    watch = FleetWatch({"decode": 1})
    watch.look(status("decode a 1"))
    assert watch.no_answer("refused") == ["The server does not answer: refused"]
    assert watch.no_answer("refused") == []
    assert watch.look(status("decode a 1")) == ["The server answers again"]


def scaled(status: dict[str, Any], target: int, change: str | None = None) -> dict[str, Any]:
    return status | {"autoscaling": {"roles": {"decode": {"target": target, "last_change": change}}}}


def test_a_worker_that_the_autoscaler_took_has_left_and_one_that_is_missing_is_lost() -> None:
    watch = FleetWatch({"decode": 1})
    assert watch.look(scaled(status("decode a 1"), 1)) == []
    assert watch.look(scaled(status("decode a 1"), 2, "demand")) == [
        "The autoscaler asks for 2 decode workers instead of 1 (demand)"
    ]
    assert watch.look(scaled(status("decode a 1", "decode b 2"), 2, "demand")) == [
        "Decode worker b is up: 2 of 2 decode workers are there"
    ]
    assert watch.look(scaled(status("decode a 1"), 2, "demand")) == [
        "Decode worker b is lost: 1 of 2 decode workers are there"
    ]
    watch.look(scaled(status("decode a 1", "decode c 3"), 2, "demand"))
    assert watch.look(scaled(status("decode a 1", "decode c 3"), 1, "spare")) == [
        "The autoscaler asks for 1 decode worker instead of 2 (spare)"
    ]
    assert watch.look(scaled(status("decode c 3"), 1, "spare")) == [
        "Decode worker a has left: 1 of 1 decode workers are there"
    ]
