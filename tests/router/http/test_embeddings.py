"""POST /v1/embeddings: what comes in, what goes out, and who computes it."""

import base64
import struct

import openai
import pytest


async def embed(site, status=200, **asked):
    response = await site.http.post("/v1/embeddings", json={"model": "fake", **asked})
    assert response.status_code == status, response.text
    return response.json()


@pytest.mark.parametrize("num_prefill", [0, 1])
@pytest.mark.parametrize("pooling", ["last", "mean", None])
async def test_each_input_gets_a_vector_of_length_one(site_of, num_prefill, pooling):
    async with site_of(num_prefill, 1) as site:
        answer = await embed(site, input=[[3, 4], [0, 5, 6]], pooling=pooling)
        assert answer["object"] == "list"
        assert [(one["object"], one["index"]) for one in answer["data"]] == [("embedding", 0), ("embedding", 1)]
        assert [len(one["embedding"]) for one in answer["data"]] == [4, 4]
        for one, other in zip(answer["data"], ([3, 4, 1, 0], [0, 5, 6, 1]), strict=True):
            length = sum(number**2 for number in other) ** 0.5
            assert one["embedding"] == pytest.approx([number / length for number in other])
        assert answer["usage"] == {
            "prompt_tokens": 5,
            "total_tokens": 5,
            "prompt_tokens_details": {"cached_tokens": 5},  # as the fake worker says
        }
        reader = site.rig["p0" if num_prefill else "d0"]
        assert {request.reading.pooling for request in reader.seen} == {pooling or "last"}
        if num_prefill:
            assert not site.rig["d0"].seen


async def test_vectors_come_in_base64_where_that_is_asked_for(site_of):
    async with site_of(1, 1) as site:
        plain = await embed(site, input="import os")
        packed = await embed(site, input="import os", encoding_format="base64")
        data = base64.b64decode(packed["data"][0]["embedding"])
        assert list(struct.unpack("<4f", data)) == plain["data"][0]["embedding"]


async def test_the_official_client_reads_a_large_batch(site_of):
    async with (
        site_of(2, 1, listen=True) as site,
        openai.AsyncOpenAI(base_url=site.url + "/v1", api_key="none") as client,
    ):
        answer = await client.embeddings.create(model="fake", input=[f"text {i}" for i in range(200)])
        assert [one.index for one in answer.data] == list(range(200))
        assert all(len(one.embedding) == 4 for one in answer.data)
        assert site.service.pipeline.in_flight == 0


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"input": "a", "dimensions": 2}, "dimensions"),
        ({"input": "a", "pooling": "cls"}, "pooling"),
        ({"input": ["a", ""]}, "input.1"),
        ({"input": []}, "input"),
        ({"input": [[1], [2, 2**30]]}, "input"),
        ({"input": [1] * 513}, "input"),
        ({"input": ["a"] * 2049}, "input"),
        ({}, "input"),
    ],
)
async def test_what_can_not_be_embedded_is_refused_by_name(site_of, asked, param):
    async with site_of(0, 1) as site:
        answer = await embed(site, status=400, **asked)
        assert answer["error"]["param"] == param


async def test_long_inputs_are_cut_where_that_is_asked_for(site_of):
    async with site_of(0, 1) as site:
        await embed(site, input=["word " * 600, "b"], truncate_prompt_tokens=-1)
        await embed(site, input=[1, 2, 3], truncate_prompt_tokens=2)
        assert sorted(len(request.token_ids) for request in site.rig["d0"].seen)[-1] == 512
        assert site.rig["d0"].seen[-1].token_ids == (2, 3)
