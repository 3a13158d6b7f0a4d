"""What a scrape tells of workers."""

from protocol.stats import WorkerInfo, WorkerStats
from protocol.tickets import Address, Peer
from router.metrics import RouterMetrics

INFO = WorkerInfo("decode", Peer("d0", 1), Address("127.0.0.1", 1), None, "print", 16, 64, 1024)


def test_a_workers_damage_is_told_under_its_name():
    stats = WorkerStats(transfer_digest_failures=2, broken_logit_rows=3)
    text = RouterMetrics("tiny", lambda: [(INFO, stats)]).text().decode()
    assert 'twostroke:kv_transfer_digest_failures_total{role="decode",worker="d0"} 2.0' in text
    assert 'twostroke:broken_logit_rows_total{role="decode",worker="d0"} 3.0' in text
