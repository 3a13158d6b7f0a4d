"""The benches' clients send what they should, and count what comes."""

import json
import socket
from typing import Any

import msgspec
import pytest

from tests.loadtests.generator.scripted_server import HEAD, end, scripted_server, token_event
from twostroke.benchmarks.clients import completion_body, exact, stream_completion, whole
from twostroke.benchmarks.overload import (
    ATTAINMENT,
    BATCH,
    INTERACTIVE,
    classes_for,
    find_capacity,
    has_met,
    settings_of,
)
from twostroke.cluster.config.config import read_config
from twostroke.loadtests.generator.http_stream import read_stream
from twostroke.loadtests.run_folder import Record

CLASSES = classes_for(0.5, 0.05)


def test_a_server_reads_the_classes_that_the_overload_is_measured_with() -> None:
    slo = read_config(json.loads(json.dumps(settings_of(CLASSES)))).slo
    assert {one.name: one for one in slo.classes} == CLASSES
    assert slo.default == BATCH
    assert CLASSES[INTERACTIVE].priority > CLASSES[BATCH].priority
    assert (CLASSES[BATCH].ttft_s, CLASSES[BATCH].tpot_s) == (2.0, 0.2)


def answered(ttft_s: float, kind: str = INTERACTIVE, **more: Any) -> Record:
    return Record(*(0, 0, 0.0, 0.0, 2.0, "ok", kind), token_s=(ttft_s, ttft_s + 0.1), **more)


def test_a_request_has_what_its_own_class_is_promised() -> None:
    assert not has_met(answered(1.0, output_tokens=2), CLASSES)
    assert has_met(answered(1.0, BATCH, output_tokens=2), CLASSES)
    assert not has_met(msgspec.structs.replace(answered(0.1, output_tokens=3), status="refused"), CLASSES)


@pytest.mark.parametrize("limit", [14.0, 17.0, 20.0, 23.0, 26.0])
def test_the_capacity_is_the_highest_rate_at_which_enough_requests_have_it(limit: float) -> None:
    tried: list[float] = []

    def at(rate: float, seed: int) -> list[Record]:
        tried.append(rate)
        in_time = 100 if rate <= limit else 100 * ATTAINMENT - 1
        return [answered(0.1 if number < in_time else 9.0, output_tokens=3) for number in range(100)]

    found = find_capacity(at, CLASSES, peak=30.0)
    assert limit / 1.1 <= found <= limit
    assert found == max(rate for rate in tried if rate <= limit)
    assert tried[0] == 12.0


def test_a_server_that_never_attains_has_half_of_the_least_rate() -> None:
    assert find_capacity(lambda rate, seed: [answered(9.0)], CLASSES, peak=30.0) == 6.0


def test_an_answer_that_lacks_tokens_has_failed() -> None:
    assert whole(answered(0.1, output_tokens=3, planned_output_tokens=3)).ttft_s == 0.1
    short = answered(0.1, output_tokens=3, planned_output_tokens=4)
    assert exact(short).status == "failed"
    with pytest.raises(ValueError, match="3 tokens instead of 4"):
        whole(short)


async def test_a_request_asks_for_greedy_tokens_of_a_fixed_number_and_for_usage() -> None:
    async with scripted_server(lambda body: [HEAD, token_event("a"), end(len(body["prompt"]), 1)]) as server:
        answer = read_stream(await stream_completion(server.url, completion_body("m", [5, 6, 7], 1)))
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 1)
    [body] = server.bodies
    assert body.pop("path") == "/v1/completions"
    asked = {"model": "m", "prompt": [5, 6, 7], "max_tokens": 1, "temperature": 0, "ignore_eos": True}
    assert body == asked | {"stream": True, "stream_options": {"include_usage": True}}


async def test_a_server_that_does_not_answer_in_time_is_told() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        result = await stream_completion(url, {}, limit_s=0.05)
    assert result.broken == "no answer within 0.05 s"
    result = await stream_completion(url, {})  # nobody is there any more
    assert "no connection" in (result.broken or "")
