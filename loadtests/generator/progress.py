"""How a run goes, for people: a line each second."""

import msgspec


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
