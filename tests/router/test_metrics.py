"""What a scrape tells of workers."""

import msgspec

from protocol.kv_layout import KVLayout
from protocol.stats import WorkerInfo, WorkerStats
from protocol.tickets import Address, Peer
from router.metrics import RouterMetrics

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
