"""A live server's workers follow the load, out and in, and no answer suffers. KV goes by gloo."""

import asyncio
import json
import random
import urllib.request
from collections.abc import Iterator

import pytest

from tests.e2e.conftest import MODEL, Server, serving
from tests.rigs.completions import completion_body, stream_completion
from tests.rigs.processes import eventually
from twostroke.loadtests.generator.http_stream import ClientExchange, read_stream

CLIENTS = 24
LONG_ANSWERS = 2
OUT_S, IN_S = 90.0, 60.0

CONFIG = {
    "kv_transfer": {"transport": "torch_distributed"},
    "prefill": {"threads": 1, "block_size": 16},
    # Blocks are cut into units of half their size on their way. There is room for fewer requests than clients.
    "decode": {"threads": 1, "block_size": 32, "num_blocks": 350},
    # The long answers of a worker that leaves are handed over. All prompts go by the prefill workers.
    "router": {"drain_grace_s": 0.5, "decodes_alone": False, "roles": "fixed"},
    "slo": {"classes": [{"name": "standard", "ttft_s": 0.5, "tpot_s": 0.5}], "admission": False},
    "autoscaling": {
        "enabled": True,
        "prefill": {"min": 1, "max": 2},
        "decode": {"min": 1, "max": 2},
        "interval_s": 0.5,
        "cooldown_s": 3,
        "reversals_per_hour": 100,  # of a busy machine's noise
    },
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    path = tmp_path_factory.mktemp("config") / "config.yaml"
    path.write_text(json.dumps(CONFIG))  # YAML takes JSON
    yield from serving("--config", str(path))


def test_both_roles_scale_out_and_in_and_every_answer_is_whole(server: Server) -> None:
    results = asyncio.run(out_and_in(server))
    eventually("one worker of each role is left", lambda: workers(server) == (1, 1), within_s=IN_S)
    eventually("all blocks are free again", lambda: server.owned_blocks() == 0)
    told = urllib.request.urlopen(f"{server.url}/metrics", timeout=30).read().decode()
    assert len(results) > CLIENTS + LONG_ANSWERS
    for result, num_tokens in results:
        answer = read_stream(result)
        assert (answer.status, answer.usage.completion_tokens) == ("ok", num_tokens), answer.error
    for role in ("prefill", "decode"):
        assert f'twostroke:autoscaling_target{{role="{role}"' in told


def test_kv_goes_by_gloo_and_the_tokens_are_those_of_one_engine(server: Server, expected: list[list[int]]) -> None:
    server.check_ways("torch_distributed")
    server.check_tokens(expected)


async def out_and_in(server: Server) -> list[tuple[ClientExchange, int]]:
    """Load until there are more workers, then long answers while these become fewer. What came, and what was asked."""
    results: list[tuple[ClientExchange, int]] = []
    draw = random.Random(4)
    has_grown = asyncio.Event()

    async def ask(prompt_tokens: int, max_tokens: int) -> None:
        body = completion_body(MODEL, [draw.randint(300, 1000) for _ in range(prompt_tokens)], max_tokens)
        results.append((await stream_completion(server.url, body), max_tokens))

    async def client() -> None:
        while not has_grown.is_set():
            await ask(600, 40)

    async def watch() -> None:
        await asyncio.to_thread(eventually, "both roles have grown", lambda: min(workers(server)) == 2, OUT_S)
        has_grown.set()

    async with asyncio.TaskGroup() as group:
        group.create_task(watch())
        for _ in range(CLIENTS):
            group.create_task(client())
    async with asyncio.TaskGroup() as group:
        for _ in range(LONG_ANSWERS):
            group.create_task(ask(30, 3000))
    return results


def workers(server: Server) -> tuple[int, int]:
    """(prefill, decode) that can take requests."""
    roles = (server.status()["autoscaling"] or {"roles": {}})["roles"]
    return tuple(roles[role]["running"] if role in roles else 0 for role in ("prefill", "decode"))  # type: ignore[return-value]
