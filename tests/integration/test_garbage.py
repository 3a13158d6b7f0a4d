"""Requests leave no reference cycles: a collection of Python's garbage that finds some stops every stream."""

import asyncio
import collections
import gc
from typing import Any

from tests.integration.test_structured_output import MODEL, Site, site

MESSAGES = [{"role": "user", "content": "Hi"}]
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
WRONG = {"type": "json_schema", "json_schema": {"name": "wrong", "schema": {"type": "nonsense"}}}
BODIES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/v1/completions", {"prompt": "Hello there", "logprobs": 1}),
    ("/v1/completions", {"prompt": "Hello there", "stream": True, "stop": ["\n"]}),
    ("/v1/chat/completions", {"messages": MESSAGES, "stream": True, "tools": [TOOL]}),
    ("/v1/chat/completions", {"messages": MESSAGES, "n": 2, "logprobs": True}),
    ("/v1/chat/completions", {"messages": MESSAGES, "stream": True, "response_format": {"type": "json_object"}}),
)
CLIENTS_OWN = ("httpx.", "builtins.", "collections.")
"""Modules whose objects the test's client leaves, and those whose objects belong to whoever refers to them."""


async def _send_all(here: Site) -> None:
    for path, body in BODIES:
        answer = await here.http.post(path, json={"model": MODEL, "max_tokens": 8, **body})
        assert answer.status_code == 200, answer.text
    refused = {"model": MODEL, "messages": MESSAGES, "response_format": WRONG}
    assert (await here.http.post("/v1/chat/completions", json=refused)).status_code == 400
    await here.served.idle()
    for _ in range(20):
        await asyncio.sleep(0)  # tasks that have ended are let go of by callbacks of callbacks


async def test_no_request_leaves_anything_to_the_collection_of_garbage() -> None:
    async with site() as here:
        await _send_all(here)  # what first requests make stays
        gc.collect()
        gc.disable()
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            for _ in range(3):
                await _send_all(here)
            gc.collect()
            kinds = collections.Counter(f"{type(one).__module__}.{type(one).__qualname__}" for one in gc.garbage)
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()
        running = {name: count for name, count in kinds.items() if name in ("builtins.coroutine", "builtins.frame")}
        ours = {name: count for name, count in kinds.items() if not name.startswith(CLIENTS_OWN)}
        assert not running | ours
        assert here.served.fleet.stats("decode").transfers_done >= 4 * len(BODIES)
