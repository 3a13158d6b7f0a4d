"""Padding of a stream's chunks, so that their sizes tell little of their text."""

import json

import pytest

from twostroke.router.openai.answers import OBFUSCATED_BYTES

CHAT = {
    "model": "fake",
    "messages": [{"role": "user", "content": "a"}],
    "max_tokens": 12,
    "seed": 1,
    "ignore_eos": True,
}
COMPLETION = {"model": "fake", "prompt": "abc", "max_tokens": 12, "seed": 1, "ignore_eos": True}


async def chunks_of(site, path: str, body: dict, **options: bool) -> list[bytes]:
    """Return the JSON of all chunks of a stream."""
    answer = await site.http.post(path, json={**body, "stream": True, "stream_options": options})
    assert answer.status_code == 200, answer.text
    *chunks, done = [line[6:] for line in answer.content.split(b"\n\n") if line]
    assert done == b"[DONE]"
    return chunks


def written(chunks: list[bytes]) -> list[object]:
    """Return what the chunks say: not their padding, and no id or time."""
    return [{key: value for key, value in json.loads(one).items() if key in ("choices", "usage")} for one in chunks]


@pytest.mark.parametrize(("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)])
async def test_chunks_are_padded_at_random_to_few_sizes_where_that_is_asked_for(site_of, path: str, body: dict) -> None:
    async with site_of(1, 1) as site:
        plain = await chunks_of(site, path, body, include_usage=True)
        padded = await chunks_of(site, path, body, include_usage=True, include_obfuscation=True)
        assert written(padded) == written(plain)
        assert {len(one) % OBFUSCATED_BYTES for one in padded} == {0}
        assert len({len(one) for one in padded}) < len({len(one) for one in plain})
        paddings = [json.loads(one)["obfuscation"] for one in padded]
        assert len(set(paddings)) == len(paddings)
        assert not any("obfuscation" in json.loads(one) for one in plain), "it is off by default"


async def test_the_deltas_of_a_response_are_padded_alike(site_of) -> None:
    async with site_of(1, 1) as site:
        told = {}
        for is_padded in (False, True):
            options = {"include_obfuscation": is_padded}
            body = {"input": "a", "max_output_tokens": 12, "seed": 1, "ignore_eos": True, "stream": True}
            answer = await site.http.post("/v1/responses", json={**body, "stream_options": options})
            assert answer.status_code == 200, answer.text
            events = [line[6:] for line in answer.content.split(b"\n") if line.startswith(b"data: ")]
            deltas = [one for one in events if json.loads(one)["type"].endswith(".delta")]
            told[is_padded] = [json.loads(one)["delta"] for one in deltas]
            assert {"obfuscation" in json.loads(one) for one in deltas} == {is_padded}
            assert sum(b'"obfuscation"' in one for one in events) == (len(deltas) if is_padded else 0)
        assert told[True] == told[False]
        assert {len(one) % OBFUSCATED_BYTES for one in deltas} == {0}
        paddings = [json.loads(one)["obfuscation"] for one in deltas]
        assert len(set(paddings)) == len(paddings)
