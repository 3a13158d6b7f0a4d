"""The head sends orders to the processes and adds up their reports. Messages are a list, without Locust."""

import json
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from tests.cluster.command_line import answering
from twostroke.loadtests.generator.live import Second
from twostroke.loadtests.generator.locust_head import LocustHead
from twostroke.loadtests.generator.locust_sender import BEGIN, PREPARE, Prepared, PrepareOrder, SenderReport
from twostroke.loadtests.plan import SLO, Fixed, Plan, Poisson
from twostroke.loadtests.run_folder import GeneratorHealth, RunFolder

MODELS = {"data": [{"id": "m", "owned_by": "twostroke"}]}
STATUS = {"workers": [{"role": "prefill"}, {"role": "decode"}]}
encode = msgspec.msgpack.encode


class Told:
    """A head of two processes, what it sent, and what it left."""

    def __init__(self, url: str, folder: RunFolder):
        plan = Plan(url, "m", 4096, Poisson(1.0), Fixed(5, 2), SLO(), 10.0, num_workers=2)
        self.sent: list[tuple[str, bytes, str | None]] = []
        self.progress: list[int] = []
        self.folder = folder
        self.head = LocustHead(
            plan,
            folder,
            lambda kind, content, client: self.sent.append((kind, content, client)),
            lambda head: self.progress.append(head.progress.sent),
        )

    def begin(self) -> None:
        self.head.start(["a", "b"])
        self.head.on_prepared(encode(Prepared(0)))
        self.head.on_prepared(encode(Prepared(1)))

    def report(self, worker: int, elapsed_s: float, *, over: bool = False, error: str | None = None) -> None:
        health = GeneratorHealth(worker, 3, 0.5, elapsed_s)
        self.head.on_report(encode(SenderReport(worker, elapsed_s, {1: Second(sent=3, ok=2)}, health, over, error)))


@pytest.fixture
def told(tmp_path: Path) -> Iterator[Told]:
    bodies = {"/v1/models": MODELS, "/version": {"version": "1"}, "/status": STATUS}
    with answering({path: json.dumps(body).encode() for path, body in bodies.items()}) as url:
        yield Told(url, RunFolder(tmp_path / "run"))


def test_all_begin_at_one_instant_when_all_are_prepared(told: Told) -> None:
    told.head.start(["a", "b"])
    assert [(kind, client) for kind, _, client in told.sent] == [(PREPARE, "a"), (PREPARE, "b")]
    orders = [msgspec.msgpack.decode(content, type=PrepareOrder) for _, content, _ in told.sent]
    assert orders == [PrepareOrder(told.head.plan, worker, is_twostroke=True) for worker in (0, 1)]
    told.head.on_prepared(encode(Prepared(1)))
    assert len(told.sent) == 2
    told.head.on_prepared(encode(Prepared(0)))
    assert [(kind, client) for kind, _, client in told.sent[2:]] == [(BEGIN, "a"), (BEGIN, "b")]
    assert told.sent[2][1] == told.sent[3][1]


def test_a_run_is_over_when_all_shares_are_and_until_then_counts_as_ended_early(told: Told) -> None:
    assert told.folder.facts().ended_early
    told.begin()
    told.report(0, 10.0, over=True)
    assert (told.head.is_over, told.folder.facts().ended_early) == (False, True)
    told.report(1, 11.0, over=True)
    assert (told.head.is_over, told.folder.facts().ended_early) == (True, False)
    facts = told.folder.facts()
    assert [generator.num_sent for generator in facts.generators] == [3, 3]
    assert facts.server["workers"] == STATUS["workers"]
    assert facts.server["version"] == "1"


def test_reports_add_up_and_only_seconds_that_all_have_told_of_are_whole(told: Told) -> None:
    told.begin()
    told.report(0, 5.2)
    assert told.head.whole_seconds == 0
    told.report(1, 4.1)
    assert told.head.whole_seconds == 4
    assert told.progress == [3, 6]
    progress = told.head.progress
    assert (progress.elapsed_s, progress.sent, progress.ok, progress.under_way) == (5.2, 6, 4, 2)


def test_a_share_that_is_lost_ends_the_run_early(told: Told) -> None:
    told.begin()
    told.report(0, 3.0, over=True, error="ended from outside")
    told.report(1, 3.0, over=True)
    assert told.head.error == "ended from outside"
    assert told.folder.facts().ended_early


def test_a_process_that_is_gone_ends_the_run_unless_its_share_was_sent(told: Told) -> None:
    told.begin()
    told.report(0, 3.0, over=True)
    told.head.lose_all_but({"b"})
    assert not told.head.is_over
    told.head.lose_all_but(set())
    assert told.head.is_over
    assert told.head.error == "sending process 1 is gone"
    assert told.folder.facts().ended_early


def test_a_plan_that_a_process_can_t_carry_out_is_not_begun(told: Told) -> None:
    told.head.start(["a", "b"])
    told.head.on_prepared(encode(Prepared(0)))
    told.head.on_prepared(encode(Prepared(1, "day.csv: not there")))
    assert (told.head.is_over, told.head.error) == (True, "day.csv: not there")
    assert BEGIN not in [kind for kind, _, _ in told.sent]


def test_another_number_of_processes_than_planned_is_refused(told: Told) -> None:
    told.head.start(["a"])
    assert told.head.error == "the plan is for 2 processes, and 1 are there"
    assert told.sent == []


def test_facts_that_can_t_be_written_leave_those_before_and_are_told(told: Told) -> None:
    told.begin()
    before = told.folder.facts()
    (told.folder.path / "run.new").mkdir()  # as good as a full disk
    for worker in (0, 1):
        told.report(worker, 2.0, over=True)
    assert told.head.is_over
    assert "run.json: " in told.head.error
    assert told.folder.facts() == before
