"""How a run goes, for people: a line each second."""

import msgspec

from loadtests.live import percentile
from loadtests.locust_head import Head


class Progress(msgspec.Struct, frozen=True):
    """Of a run so far, all processes together."""

    elapsed_s: float
    sent: int
    under_way: int
    ok: int
    refused: int
    failed: int
    attainment: float | None  # of requests that are over, the warm-up's left out
    ttft_p50_s: float | None
    lag_p99_s: float | None
    is_over: bool
    error: str | None


def progress_of(head: Head) -> Progress:
    total = head.live.total()
    return Progress(
        elapsed_s=max(0.0, head.elapsed_s),
        sent=total.sent,
        under_way=total.sent - total.over,
        ok=total.ok,
        refused=total.refused,
        failed=total.failed,
        attainment=total.met / total.judged if total.judged else None,
        ttft_p50_s=percentile([total.ttft], 50),
        lag_p99_s=percentile([total.lag], 99),
        is_over=head.is_over,
        error=head.error,
    )
