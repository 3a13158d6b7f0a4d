"""Requests of the benches: plans of the load tests, at a server that they have started, and single requests."""

import asyncio
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from twostroke.loadtests.generator.alone import Sent, send
from twostroke.loadtests.generator.http_stream import ClientExchange, endpoint_of
from twostroke.loadtests.generator.run_facts import api_key, served_model
from twostroke.loadtests.plan import SLO, Arrivals, Closed, Fixed, Plan
from twostroke.loadtests.report.estimates import percentile
from twostroke.loadtests.run_folder import Record

FIRST_TOKEN_ID = 300  # ordinary in any vocabulary
PATIENCE_S = 300.0
"""Longest time of a whole request; one that takes longer has failed."""
ENDLESS_S = 1e6  # of plans that end with their requests


def plan_at(url: str, arrivals: Arrivals, workload: Fixed, seconds: float = ENDLESS_S, *, seed: int = 0) -> Plan:
    """Make a plan for the model that a server of ours serves. Raises LoadTestError where none answers."""
    model = served_model(url)
    context = model.max_context or workload.input_tokens + workload.output_tokens
    return Plan(url, model.name, context, arrivals, workload, SLO(), seconds, seed=seed, vocabulary=model.vocabulary)


def send_whole(plan: Plan) -> list[Record]:
    """Send a plan, all of whose answers are to be of the length that was asked for. Raises ValueError."""
    return [whole(record) for record in send(plan).records]


def medians_alone(url: str, workload: Fixed, requests: int) -> tuple[float, float]:
    """Return the medians of TTFT and TPOT of requests one after the other, after as many that warm everything up.

    Raises ValueError where an answer is not whole.
    """
    records = send_whole(plan_at(url, Closed(1, requests=2 * requests), workload, seed=1))[requests:]
    ttft_s, tpot_s = (percentile(spread(records, name), 50) or 0.0 for name in ("ttft_s", "tpot_s"))
    return ttft_s, tpot_s


def spread(records: Iterable[Record], name: str) -> list[float]:
    """Return one time of each record, `ttft_s` or `tpot_s`, where it has it."""
    return [value for record in records if (value := getattr(record, name)) is not None]


def latencies(records: Iterable[Record]) -> dict[str, float | None]:
    """Return percentiles of the times to the first token, and between events with tokens, as they came."""
    records = list(records)
    times = {"ttft": spread(records, "ttft_s"), "itl": [gap for record in records for gap in record.gaps_s]}
    return {f"{name}_p{p}_s": percentile(values, p) for name, values in times.items() for p in (50, 99)}


def exact_records(sent: Sent) -> list[Record]:
    """Return the records of a plan, in the order of their sending; an answer of another length has failed."""
    return [exact(record) for record in sorted(sent.records, key=lambda record: record.scheduled_s)]


def exact(record: Record) -> Record:
    """An answer of another length than was asked for has failed."""
    if record.status != "ok" or record.output_tokens == record.planned_output_tokens:
        return record
    error = f"{record.output_tokens} tokens instead of {record.planned_output_tokens}"
    return msgspec.structs.replace(record, status="failed", error=error)


def whole(record: Record) -> Record:
    """Raises ValueError where it is no complete answer of the length that was asked for."""
    if (judged := exact(record)).status != "ok":
        raise ValueError(judged.error)
    return record


def completion_body(model: str, prompt: Sequence[int], max_tokens: int) -> dict[str, Any]:
    """Make a request for exactly `max_tokens` greedy tokens. All servers of open models know `ignore_eos`."""
    return {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
    }


async def stream_completion(url: str, body: Mapping[str, Any], limit_s: float = PATIENCE_S) -> ClientExchange:
    """POST `body` to the server at `url`, without /v1, on a connection of its own, streamed, with usage.

    Never raises for what the server does: the result then says why it is broken.
    """
    payload = json.dumps({**body, "stream": True, "stream_options": {"include_usage": True}}).encode()
    result = ClientExchange(time.monotonic())
    try:
        async with asyncio.timeout(limit_s):
            endpoint = endpoint_of(url, api_key())
            reader, writer = await asyncio.open_connection(*endpoint.address[:2])
            try:
                writer.write(endpoint.request("/v1/completions", payload))
                while data := await reader.read(65536):
                    result.arrivals.append((time.monotonic(), data))
            finally:
                writer.close()
    except TimeoutError:
        result.broken = f"no answer within {limit_s:g} s"
    except OSError as error:
        result.broken = f"no connection: {error}"
    return result
