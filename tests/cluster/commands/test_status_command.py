"""`twostroke status`: once, and with --watch, which follows a server that goes away and comes back until Ctrl-C."""

import io
import json
from typing import Any

import msgspec
import pytest
from rich.console import Console

from tests.cluster.command_line import answering
from twostroke.cluster.cli import main
from twostroke.cluster.commands.status import LOAD, STATUS, class_rows, scaling_rows, watch, whole_view, worker_rows
from twostroke.protocol.errors import ConfigError
from twostroke.protocol.stats import QueuedWork, StepCosts, WorkerStats


def worker(**stats: Any) -> dict[str, Any]:
    told = msgspec.to_builtins(WorkerStats(total_blocks=64, **stats))
    return {"role": "decode", "worker_id": "w1", "epoch": "0abc", "reachable": True, "stats": told}


def status(*workers: dict[str, Any], **more: Any) -> dict[str, Any]:
    told = {"model": "m", "ready": True, "places_held": 0, "workers": list(workers), **more}
    return json.loads(json.dumps(told))


def run_watch(answers: list[dict[str, Any] | None], *, is_terminal: bool) -> str:
    """Return what is printed where these answers come, one in two seconds, until Ctrl-C. None means that nobody
    answers."""
    console = Console(file=io.StringIO(), width=200, height=50, force_terminal=is_terminal, color_system=None)
    now = 0.0

    def fetch() -> dict[str, Any]:
        answer = answers.pop(0)
        if answer is None:
            raise ConfigError("no Twostroke server answers")
        return answer

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds
        if not answers:
            raise KeyboardInterrupt

    assert watch("http://here", fetch, 2.0, console, clock=lambda: now, sleep=sleep) == 0
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def row(view: str) -> list[str]:
    return next(line for line in reversed(view.splitlines()) if "w1" in line).split()


COUNTED = {
    "owned_blocks": 3,
    "pulled_tokens": 11,
    "transfers_failed": 14,
    "transfers_given_up": 2,  # are no failures
    "transfer_digest_failures": 14,
    "transfer_links_lost": 15,
    "preemptions": 16,
    "swaps": 9,
}


def test_once_it_shows_a_row_for_each_worker(capsys):
    with answering({"/status": json.dumps(status(worker(**COUNTED))).encode()}) as url:
        assert main(["status", "--url", url, "--interval", "0.1"]) == 0
    shown = row(capsys.readouterr().out)
    assert shown[:5] == ["w1", "decode", "0", "0", "3/64"]
    assert shown[-6:] == ["11", "12", "14", "15", "16", "9"]


@pytest.mark.parametrize(("defaults", "told"), [({"temperature": 1.0}, False), ({"temperature": 0.6}, True)])
def test_the_models_sampling_defaults_are_told_where_there_are_any(defaults, told):
    look, console = status(worker(), sampling_defaults=defaults), Console(width=120, file=io.StringIO())
    console.print(whole_view(STATUS, look, look, 1.0, console))
    assert ("where a request says nothing: temperature 0.6" in console.file.getvalue()) == told


@pytest.mark.parametrize("count", [1, 4, 20])
def test_a_narrow_terminal_shows_every_number_unbroken_with_workers_side_by_side(count):
    workers = [worker(preemptions=16) | {"worker_id": f"worker{i:02}", "epoch": str(i)} for i in range(count)]
    workers[-1]["stats"] = None
    look, console = status(*workers), Console(width=80, file=io.StringIO())
    console.print(whole_view(STATUS, look, look, 1.0, console))
    lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    words = [line.split() for line in lines]
    shown = [word for line in words for word in line if word.startswith(("worker0", "worker1"))]
    assert shown == [one["worker_id"] for one in workers]
    preempted = [number for line in words if line[:1] == ["preempted"] for number in line[1:]]
    assert preempted == ["16"] * (count - 1)
    assert "…" not in console.file.getvalue()
    assert sum(line.count("unreachable") for line in lines) == 1


@pytest.mark.parametrize("is_terminal", [True, False])
def test_rates_are_those_between_the_last_two_answers(is_terminal):
    steps = [
        worker(
            generated_tokens=tokens,
            steps=tokens,
            step_seconds=tokens * 0.002,
            costs=StepCosts(0.0015, 0, 0, 0, 0),
            flops=tokens * 1e9,
            peak_flops_per_s=4e11,
        )
        for tokens in (0, 50, 250)
    ]
    shown = row(run_watch([status(one) for one in steps], is_terminal=is_terminal))
    assert shown[2] == "serving"
    assert shown[8:14] == ["2.0", "1.50", "25.0%", "-", "0.0", "100.0"], "the memory's limit is not known"


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_server_that_goes_away_is_told_of_and_shown_again_when_it_is_back(is_terminal):
    old, new = worker(generated_tokens=100), worker(generated_tokens=300)
    gone = run_watch([status(old), None], is_terminal=is_terminal)
    assert "no Twostroke server answers; trying again" in gone
    assert "What it said 2 s ago" in gone
    back = run_watch([status(old), None, status(new)], is_terminal=is_terminal)
    assert row(back)[11] == "-", "no rate over a time when nobody answered"
    assert "trying again" not in back[back.rindex("w1") :]


def test_a_server_that_has_not_come_up_yet_is_waited_for():
    assert "m — ready" in run_watch([None, None, status(worker())], is_terminal=False)


def test_workers_that_take_nothing_are_named_so():
    rows = worker_rows(
        LOAD,
        status(),
        status(
            worker(is_draining=True),
            worker() | {"ejected": True},
            worker() | {"reachable": False},
            worker() | {"stats": None},
        ),
        1.0,
    )
    assert [row[2] for row in rows] == ["draining", "ejected", "unreachable", "unreachable"]


def test_queues_are_summed_up_by_class_beside_what_the_class_was_kept_of_its_promise():
    queued = (QueuedWork("fast", 1, 0.0, 100, 2), QueuedWork("slow", 0, 0.0, 30, 1))
    look = status(worker(queued=queued), worker(queued=queued[:1]), slo_classes=[{"name": "fast", "attainment": 0.875}])
    assert class_rows(look) == [["fast", "4", "200", "87.5%"], ["slow", "1", "30", "-"]]


@pytest.mark.parametrize("how", [[], ["--watch"]])
@pytest.mark.parametrize("arguments", [["--url", "nowhere"], ["--interval", "0"], ["--interval", "nan"]])
def test_what_can_never_work_is_refused_at_once(arguments, how, capsys):
    assert main(["status", *how, *arguments]) == 2
    assert arguments[0] in capsys.readouterr().err


def test_the_autoscalers_last_decision_and_last_change_are_shown_with_their_age():
    roles = {
        "prefill": {"running": 1, "target": 2, "reason": "steady", "last_change": "demand", "changed_ago_s": 90.4},
        "decode": {"running": 1, "target": 1, "reason": "cooldown", "last_change": None, "changed_ago_s": None},
    }
    told = status(worker(), autoscaling={"age_s": 1.2, "roles": roles, "demand": {}})
    assert scaling_rows(told) == [
        [
            "prefill",
            "1",
            "2",
            "1: still loading, or is there no room? `ray status -v`",
            "steady, 1 s ago",
            "demand, 90 s ago",
        ],
        ["decode", "1", "1", "-", "cooldown, 1 s ago", "-"],
    ]
    assert "cooldown, 1 s ago" in run_watch([told], is_terminal=False)
    assert scaling_rows(status(worker(), autoscaling=None)) == []


@pytest.mark.parametrize(
    ("running", "changed_ago_s", "shown"),
    [
        (3, 5.0, "-"),
        (4, 5.0, "-"),  # one leaves
        (1, 5.0, "2, starting"),
        (1, 300.0, "2: still loading, or is there no room? `ray status -v`"),
        (1, None, "2: still loading, or is there no room? `ray status -v`"),  # nobody was asked for: one is lost
    ],
)
def test_a_worker_that_does_not_come_is_told_apart_from_one_that_starts(running, changed_ago_s, shown):
    decode = {
        "running": running,
        "target": 3,
        "reason": "steady",
        "last_change": None if changed_ago_s is None else "demand",
        "changed_ago_s": changed_ago_s,
    }
    told = status(worker(), autoscaling={"age_s": 1.2, "roles": {"decode": decode}, "demand": {}})
    assert scaling_rows(told)[0][3] == shown


def test_workers_of_another_version_are_named() -> None:
    view = run_watch([status(worker(), other_versions={"prefill": ["p7", "p8"]})], is_terminal=False)
    assert "left out, of another version than the router: 2 prefill (p7, p8)" in view
    assert "another version" not in run_watch([status(worker(), other_versions={})], is_terminal=False)
