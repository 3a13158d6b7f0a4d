"""Single streamed completions, as tests of servers send them."""

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from twostroke.loadtests.generator.http_stream import ClientExchange, make_endpoint
from twostroke.loadtests.generator.run_facts import api_key

PATIENCE_S = 300.0
"""Longest time of a whole request; one that takes longer has failed."""


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
            endpoint = make_endpoint(url, api_key())
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
