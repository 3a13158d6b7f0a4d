"""Small runs for the tests of reports: their records written by hand, or drawn."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from twostroke.loadtests.capacity import SWEEP_FILE, SweepResult
from twostroke.loadtests.plan import SLO, Constant, Fixed, Plan
from twostroke.loadtests.run_folder import (
    GeneratorHealth,
    Record,
    RunFacts,
    RunFolder,
    Sample,
    Status,
    read_json,
    record_line,
)


def plan(**fields: Any) -> Plan:
    """10 s, of which the first 2 are warm-up; TTFT within 1 s, TPOT within 0.1 s."""
    usual: dict[str, Any] = {
        "url": "http://127.0.0.1:8000",
        "model": "m",
        "max_context": 1000,
        "arrivals": Constant(1.0),
        "workload": Fixed(10, 3),
        "slo": SLO(ttft_s=1.0, tpot_s=0.1),
        "seconds": 10.0,
        "warm_up_s": 2.0,
    }
    return Plan(**(usual | fields))


def facts(**fields: Any) -> RunFacts:
    usual: dict[str, Any] = {
        "started_at": "2026-11-21T12:00:00.000+00:00",
        "server": {},
        "machine": {"cores": 2},
        "versions": {"locust": "2.47"},
        "generators": (GeneratorHealth(worker=0, num_sent=0, cpu_seconds=1.0, wall_seconds=10.0),),
    }
    return RunFacts(**(usual | fields))


def answer(scheduled_s: float, *token_s: float, lag_s: float = 0.0, **fields: Any) -> Record:
    """A complete answer whose tokens came so long after it was scheduled, one an event."""
    moments = tuple(scheduled_s + after for after in token_s)
    usual: dict[str, Any] = {"input_tokens": 10, "output_tokens": len(moments), "http_status": 200}
    return Record(
        session=0,
        turn=0,
        scheduled_s=scheduled_s,
        sent_s=scheduled_s + lag_s,
        end_s=moments[-1] if moments else scheduled_s + lag_s,
        status="ok",
        token_s=moments,
        **(usual | fields),
    )


def miss(scheduled_s: float, status: Status, error: str | None = None, **fields: Any) -> Record:
    """A request that got no whole answer, given up after a tenth of a second."""
    return Record(0, 0, scheduled_s, scheduled_s, scheduled_s + 0.1, status, error=error, **fields)


def drawn(num_requests: int, seconds: float, seed: int = 0, *, slowness: float = 1.0, tokens: int = 20) -> list[Record]:
    """Complete answers with times of exponential distributions."""
    draw = np.random.default_rng(seed)
    records = []
    for at_s in np.sort(draw.uniform(0, seconds, num_requests)).tolist():
        gaps = draw.exponential(0.05 * slowness, tokens - 1)
        records.append(answer(at_s, *np.cumsum([draw.exponential(0.4 * slowness), *gaps]).tolist()))
    return records


def write_run(
    path: Path,
    records: Sequence[Record],
    run_plan: Plan | None = None,
    run_facts: RunFacts | None = None,
    samples: Sequence[Sample] = (),
) -> RunFolder:
    folder = RunFolder(path)
    path.mkdir(parents=True, exist_ok=True)
    folder.plan_path.write_bytes(msgspec.json.encode(run_plan or plan()))
    folder.facts_path.write_bytes(msgspec.json.encode(run_facts or facts()))
    folder.records_path(0).write_bytes(b"".join(map(record_line, records[::2])))
    folder.records_path(1).write_bytes(b"".join(map(record_line, records[1::2])))
    if samples:
        folder.samples_path.write_bytes(b"".join(msgspec.json.encode(sample) + b"\n" for sample in samples))
    return folder


def read_sweep(folder: Path) -> SweepResult:
    return read_json(folder / SWEEP_FILE, SweepResult)
