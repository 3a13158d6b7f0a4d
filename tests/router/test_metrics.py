"""What a scrape tells of workers."""

import msgspec

from protocol.errors import RequestError, WorkerLost
from protocol.kv_layout import KVLayout
from protocol.stats import QueuedWork, WorkerInfo, WorkerStats
from protocol.tickets import Address, Peer
from router.metrics import RouterMetrics
from router.policy import Path
from router.stages import Stages

LAYOUT = KVLayout("digest", "bfloat16", 2, 4, 8, 16)
INFO = WorkerInfo("decode", Peer("d0", 1), Address("127.0.0.1", 1), (), LAYOUT, 64, 1024)
PREFILL = msgspec.structs.replace(INFO, role="prefill", peer=Peer("p0", 2))


def test_a_workers_damage_is_told_under_its_name():
    stats = WorkerStats(
        transfer_digest_failures=2, broken_logit_rows=3, transfer_retries=4, transfer_links_lost=5, pulled_tokens=6
    )
    text = RouterMetrics("tiny", lambda: [(INFO, stats)]).text().decode()
    for name, value in (
        ("kv_transfer_digest_failures", 2),
        ("broken_logit_rows", 3),
        ("kv_transfer_retries", 4),
        ("kv_transfer_links_lost", 5),
        ("kv_pulled_tokens", 6),
    ):
        assert f'twostroke:{name}_total{{role="decode",worker="d0"}} {value}.0' in text


def test_owned_blocks_are_told_by_role_and_are_0_when_idle():
    numbers = [(PREFILL, WorkerStats(total_blocks=64, owned_blocks=0)), (INFO, WorkerStats(owned_blocks=7))]
    text = RouterMetrics("tiny", lambda: numbers).text().decode()
    assert 'twostroke:kv_blocks_owned{role="prefill",worker="p0"} 0.0' in text
    assert 'twostroke:kv_blocks_owned{role="decode",worker="d0"} 7.0' in text


def test_queues_are_told_by_class_once_whatever_its_requests_priorities():
    queued = (QueuedWork("fast", 1, 0.0, 100, 2), QueuedWork("fast", 5, 0.0, 30, 1), QueuedWork("slow", 0, 0.0, 7, 1))
    text = RouterMetrics("tiny", lambda: [(PREFILL, WorkerStats(queued=queued))]).text().decode()
    for line in (
        'queued_tokens{role="prefill",slo_class="fast",worker="p0"} 130.0',
        'queued_requests{role="prefill",slo_class="fast",worker="p0"} 3.0',
        'queued_tokens{role="prefill",slo_class="slow",worker="p0"} 7.0',
    ):
        assert text.count(f"twostroke:{line}") == 1


def test_workers_that_are_left_out_or_leave_are_told():
    numbers = [(PREFILL, WorkerStats(is_draining=True)), (INFO, WorkerStats())]
    text = RouterMetrics("tiny", lambda: numbers, lambda: {INFO.peer}).text().decode()
    for line in (
        'worker_ejected{role="decode",worker="d0"} 1.0',
        'worker_ejected{role="prefill",worker="p0"} 0.0',
        'worker_draining{role="prefill",worker="p0"} 1.0',
        'worker_draining{role="decode",worker="d0"} 0.0',
    ):
        assert f"twostroke:{line}" in text


def test_errors_are_counted_by_status_and_code_and_failed_attempts_by_kind():
    metrics = RouterMetrics("tiny", tuple)
    metrics.refused(RequestError("a client's own words", code="overloaded", status=429))
    metrics.refused(WorkerLost("w1 has died"))
    stages = Stages(0.0, attempts=2, admit=0.5)
    stages.end_attempt(0.5, 1.0, Path(PREFILL, INFO), WorkerLost("w1 has died"))
    stages.end_attempt(1.5, 2.0, Path(PREFILL, INFO), None)
    metrics.begun(5)
    metrics.ended(stages, "stop")
    text = metrics.text().decode()
    for line in (
        'requests_refused_total{code="overloaded",model_name="tiny",status="429"} 1.0',
        'requests_refused_total{code="worker_lost",model_name="tiny",status="503"} 1.0',
        'request_attempt_failures_total{error="WorkerLost",model_name="tiny"} 1.0',
        'request_resumes_total{model_name="tiny"} 1.0',
        'request_admission_time_seconds_sum{model_name="tiny"} 0.5',
    ):
        assert f"twostroke:{line}" in text
    assert "w1" not in text
