"""This module measures orders to workers: how soon one that drains is empty, and what streams feel of that.

Each round begins streams with `ANSWER_TOKENS` to go until a decode worker writes `NUM_STREAMS` of them. Where that is
the only one, a prefill worker becomes a decode worker for the round: the last that writes answers may not drain. The
worker changes its role and back while it writes, then drains; when it is empty it takes requests again.
"""

import itertools
import json
import random
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from twostroke.benchmarks.clients import completion_body
from twostroke.benchmarks.console import say
from twostroke.cluster.commands.application import num_requests, order, wait_until_empty
from twostroke.cluster.local.asking import fetch_status
from twostroke.loadtests.generator.http_stream import ClientExchange, endpoint_of, stream
from twostroke.loadtests.generator.run_facts import api_key, served_model
from twostroke.loadtests.report.estimates import percentile
from twostroke.protocol.errors import ConfigError

NUM_STREAMS, ANSWER_TOKENS, PROMPT_TOKENS = 16, 1000, 64
MOST_BEGUN = 4 * NUM_STREAMS
"""Streams of a round: other workers write some of them."""
BEGIN_S = 0.1
"""Time between two streams' beginnings, which is longer than a worker's news takes."""
SETTLE_S = 2.0
"""Time that streams have before an order, and after it: the gaps that end in it count."""
GRACE_S = 10.0
LEFT_S = 30.0
"""Age at which a stream is left, however much of its answer is still to come."""


def measure_orders(url: str, rounds: int) -> dict[str, float | int | None]:
    """Return the slowest drain and change of role, and the P99 of the gaps of streams that a drain moved.

    Where n streams were moved, the n longest gaps count, one of each stream that was read. The server is idle but for
    this. Raises ConfigError where it refuses an order, or no decode worker gets enough streams.
    """
    drains: list[float] = []
    changes: list[float] = []
    gaps: list[float] = []
    for number in range(rounds):
        exchanges: list[ClientExchange] = []
        with ThreadPoolExecutor(MOST_BEGUN) as readers:  # which ends with the streams
            worker = _begin(url, number, exchanges, readers)
            time.sleep(SETTLE_S)
            changes += [_timed(url, worker, {"role": role}) for role in ("even", "decode")]
            helper = _helper(url)
            if helper is not None:
                changes.append(_timed(url, helper, {"role": "decode"}))
            time.sleep(SETTLE_S)
            num_streams = num_requests(_workers(url, "decode")[worker])
            began = time.monotonic()
            _timed(url, worker, {"draining": True})
            left = wait_until_empty(lambda: fetch_status(url)["workers"], [worker], GRACE_S)
            ended = time.monotonic()
            _timed(url, worker, {"draining": False})
            if helper is not None:
                changes.append(_timed(url, helper, {"role": "prefill"}))
        longest = sorted((longest_gap_s(one, began, ended + SETTLE_S) for one in exchanges), reverse=True)
        gaps += longest[:num_streams]
        drains.append(ended - began)
        told = ", ".join(f"{gap:.2f}" for gap in longest[:3])
        say(f"{worker} drained {num_streams} streams in {drains[-1]:.2f} s, {left} are left; gaps up to {told} s")
    return {
        "drain_s": max(drains),
        "moved_gap_p99_s": percentile(gaps, 99),
        "moved_streams": len(gaps),
        "role_change_s": max(changes),
    }


def longest_gap_s(exchange: ClientExchange, since: float, until: float) -> float:
    """Return the longest time between two pieces of an answer, the later of which came in this time."""
    pieces = itertools.pairwise(at for at, _ in exchange.arrivals)
    return max((later - at for at, later in pieces if since <= later <= until), default=0.0)


def _begin(url: str, seed: int, exchanges: list[ClientExchange], readers: ThreadPoolExecutor) -> str:
    """Begin streams until a decode worker has enough; return its id. Raises ConfigError where none gets them."""
    model, endpoint, draw = served_model(url), endpoint_of(url, api_key()), random.Random(seed)
    for _ in range(MOST_BEGUN):
        prompt = [draw.randrange(model.vocabulary) for _ in range(PROMPT_TOKENS)]
        body = completion_body(model.name, prompt, ANSWER_TOKENS) | {"stream": True}
        request = endpoint.request("/v1/completions", json.dumps(body).encode())
        exchanges.append(ClientExchange(time.monotonic()))
        readers.submit(stream, endpoint, request, exchanges[-1], LEFT_S)
        time.sleep(BEGIN_S)
        for worker, row in _workers(url, "decode").items():
            if num_requests(row) >= NUM_STREAMS:
                return worker
    raise ConfigError(f"no decode worker of {url} writes {NUM_STREAMS} of {MOST_BEGUN} streams")


def _helper(url: str) -> str | None:
    """Return a prefill worker's id where there is only one decode worker."""
    return next(iter(_workers(url, "prefill"))) if len(_workers(url, "decode")) == 1 else None


def _workers(url: str, home_role: str) -> dict[str, Mapping[str, Any]]:
    return {row["worker_id"]: row for row in fetch_status(url)["workers"] if row["home_role"] == home_role}


def _timed(url: str, worker: str, body: Mapping[str, Any]) -> float:
    """Give an order; return the seconds until the server said that it is carried out."""
    began = time.monotonic()
    order(url, worker, body)
    return time.monotonic() - began
