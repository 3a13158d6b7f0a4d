"""Whole runs, by Locust's own processes against the stub server, and the server's queues, read from its metrics.

Two processes, since one is the selfcheck's test.
"""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from tests.loadtests.stub_server import MODEL, VOCABULARY, stub_server
from twostroke.loadtests import LoadTestError, RunLost
from twostroke.loadtests.generator.live import ProgressDisplay, RunProgress
from twostroke.loadtests.generator.runner import parse_samples, run_plan
from twostroke.loadtests.plan import SLO, Constant, Fixed, Plan
from twostroke.loadtests.run_folder import RunFolder, Sample, read_records
from twostroke.loadtests.workloads.sessions import sessions

PLAN = Plan(
    url="",
    model=MODEL,
    max_context=4096,
    arrivals=Constant(20.0),
    workload=Fixed(8, 4),
    slo=SLO(ttft_s=30.0),
    seconds=1.0,
    vocabulary=VOCABULARY,
    num_workers=2,
)
ENDLESS = msgspec.structs.replace(PLAN, seconds=600.0)


def run(plan: Plan, scenario: str, folder: Path) -> RunFolder:
    with stub_server(scenario) as (url, _):
        return run_plan(msgspec.structs.replace(plan, url=url), folder, show=False)


def when_sent(monkeypatch: pytest.MonkeyPatch, act: Callable[[], None]) -> None:
    """Have something happen as soon as requests are told to be under way."""
    shown: list[RunProgress] = []

    def show(_: ProgressDisplay, progress: RunProgress) -> None:
        shown.append(progress)
        if [each.sent > 0 for each in shown].count(True) == 1:
            act()

    monkeypatch.setattr(ProgressDisplay, "show", show)


def locusts() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if "locust" in child.cmdline()]


def test_processes_send_a_plan_between_them_and_leave_a_whole_folder(tmp_path: Path) -> None:
    folder = run(PLAN, "immediate", tmp_path / "run")
    planned = [session.index for session in sessions(PLAN)]
    records = list(folder.records())
    assert sorted(record.session for record in records) == planned
    assert {record.status for record in records} == {"ok"}
    assert [len(list(read_records(folder.records_path(worker)))) for worker in (0, 1)] == [len(planned) / 2] * 2
    facts = folder.facts()
    assert not facts.ended_early
    assert [generator.worker for generator in facts.generators] == [0, 1]
    assert sum(generator.num_sent for generator in facts.generators) == len(planned)
    assert all(generator.cpu_seconds > 0 for generator in facts.generators)
    assert facts.server["models"][0]["id"] == MODEL
    assert facts.versions.keys() == {"twostroke", "locust", "python"}
    assert folder.samples() == []
    assert folder.plan().seconds == PLAN.seconds
    assert locusts() == []
    with pytest.raises(LoadTestError, match="has a run already"):
        run_plan(PLAN, folder.path, show=False)


def test_a_run_that_ctrl_c_ends_has_a_record_of_everything_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    when_sent(monkeypatch, interrupt)
    endless = msgspec.structs.replace(ENDLESS, workload=Fixed(8, 250))
    with pytest.raises(KeyboardInterrupt):
        run(endless, "steady", tmp_path / "run")
    folder = RunFolder(tmp_path / "run")
    facts, records = folder.facts(), list(folder.records())
    assert facts.ended_early
    assert sum(generator.num_sent for generator in facts.generators) == len(records) > 0
    assert "unfinished" in {record.status for record in records}
    assert locusts() == []


def test_a_lost_process_ends_the_run_and_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def kill_one() -> None:
        worker = next(process for process in locusts() if "--worker" in process.cmdline())
        os.kill(worker.pid, signal.SIGKILL)

    when_sent(monkeypatch, kill_one)
    with pytest.raises(RunLost, match=r"sending process \d was killed by SIGKILL"):
        run(ENDLESS, "immediate", tmp_path / "run")
    folder = RunFolder(tmp_path / "run")
    assert folder.facts().ended_early
    assert list(folder.records())
    assert locusts() == []


@pytest.mark.parametrize(
    ("wrong", "fault"),
    [
        ({"arrivals": Constant(-1.0)}, "rate -1"),
        ({"vocabulary": 0}, "--vocabulary"),
        ({"workload": Fixed(5000, 1)}, "don't fit"),
    ],
)
def test_a_plan_that_can_t_be_carried_out_leaves_nothing(tmp_path: Path, wrong: dict[str, Any], fault: str) -> None:
    with pytest.raises(LoadTestError, match=fault):
        run_plan(msgspec.structs.replace(PLAN, **wrong), tmp_path / "run", show=False)
    assert not (tmp_path / "run").exists()


def test_where_no_server_answers_the_reason_is_locust_s_last_word(tmp_path: Path) -> None:
    nowhere = msgspec.structs.replace(PLAN, url="http://127.0.0.1:9", num_workers=1)
    with pytest.raises(LoadTestError, match=r"no server answers at http://127\.0\.0\.1:9: Connection refused"):
        run_plan(nowhere, tmp_path / "run", show=False)


OURS = """\
# HELP twostroke:num_requests_running Requests that take part in steps.
# TYPE twostroke:num_requests_running gauge
twostroke:num_requests_running{role="prefill",worker="p1"} 1.0
twostroke:num_requests_running{role="decode",worker="d1"} 12.0
twostroke:num_requests_waiting{role="prefill",worker="p1"} 3.0
twostroke:num_waiting_tokens{role="prefill",worker="p1"} 4096.0
twostroke:kv_cache_usage_perc{role="decode",worker="d1"} 0.25
twostroke:model_flops_utilization{role="decode",worker="d1"} 0.02
twostroke:model_bandwidth_utilization{role="decode",worker="d1"} 0.5
twostroke:spec_decode_num_draft_tokens_total{role="decode",worker="d1"} 40.0
twostroke:spec_decode_num_accepted_tokens_total{role="decode",worker="d1"} 30.0
twostroke:worker_generation_tokens_total{role="decode",worker="d1"} 90.0
twostroke:generation_tokens_total{model_name="m",router="router-0"} 91.0
twostroke:router_requests_in_flight{model_name="m"} 13.0
"""
VLLM = """\
vllm:num_requests_running{engine="0",model_name="m"} 5.0
vllm:num_requests_waiting{engine="0",model_name="m"} 2.0
vllm:gpu_cache_usage_perc{engine="0",model_name="m"} 0.5
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 8.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 4.0
vllm:generation_tokens_total{engine="0",model_name="m"} 12.0
"""


def test_each_worker_of_ours_has_a_sample() -> None:
    decode = Sample(2.5, "decode", "d1", running=12, waiting=0, waiting_tokens=0, kv_usage=0.25, mfu=0.02, mbu=0.5)
    assert parse_samples(OURS, 2.5) == [
        msgspec.structs.replace(decode, draft_tokens=40, accepted_tokens=30, generated_tokens=90),
        Sample(2.5, "prefill", "p1", running=1, waiting=3, waiting_tokens=4096, kv_usage=0),
    ]


def test_an_engine_of_vllm_is_a_worker_that_decodes() -> None:
    engine = Sample(1.0, "decode", "0", running=5, waiting=2, waiting_tokens=0, kv_usage=0.5)
    drafts = {"draft_tokens": 8.0, "accepted_tokens": 4.0, "generated_tokens": 12.0}
    assert parse_samples(VLLM, 1.0) == [msgspec.structs.replace(engine, **drafts)]


def test_a_server_that_tells_nothing_has_none() -> None:
    assert parse_samples("<html>not found</html>\nprocess_cpu_seconds_total 4.0\n", 1.0) == []
