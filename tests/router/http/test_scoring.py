"""Prompts that are scored or embedded, over HTTP."""

import base64
import struct
from operator import itemgetter

import openai
import pytest


async def complete(site, path="/v1/completions", status=200, **asked):
    response = await site.http.post(path, json={"model": "fake", "seed": 5, **asked})
    assert response.status_code == status, response.text
    return response.json()


def loglikelihoods(answer, context_lengths):
    """Parse the answer as lm-eval does, which drops the last token, the one that was drawn."""
    found = []
    for choice, length in zip(sorted(answer["choices"], key=itemgetter("index")), context_lengths, strict=True):
        logprobs = choice["logprobs"]["token_logprobs"][length:-1]
        top = choice["logprobs"]["top_logprobs"][length:-1]
        found.append((sum(logprobs), all(one == max(some.values()) for one, some in zip(logprobs, top, strict=True))))
    return found


@pytest.mark.parametrize("num_prefill", [0, 1])
async def test_an_evaluation_harness_gets_the_likelihood_of_each_continuation(site_of, num_prefill):
    requests = [([7, 9], [20, 22]), ([7, 9], [20, 23, 24]), ([1], [30])]
    async with site_of(num_prefill, 1) as site:
        answer = await complete(
            site,
            prompt=[context + continuation for context, continuation in requests],
            max_tokens=1,
            logprobs=1,
            temperature=0,
            echo=True,
        )
        assert loglikelihoods(answer, [len(context) for context, _ in requests]) == [
            (-2.0, True),
            (-4.0, False),
            (-1.0, True),
        ]
        assert answer["usage"]["completion_tokens"] == 3
        reader = site.rig["p0" if num_prefill else "d0"]
        assert [request.max_tokens for request in reader.seen] == [1, 1, 1]
        if num_prefill:
            assert not site.rig["d0"].seen


@pytest.mark.parametrize("num_prefill", [0, 1])
async def test_a_prompt_is_scored_without_an_answer(site_of, num_prefill):
    async with site_of(num_prefill, 1) as site:
        answer = await complete(site, prompt="import os", max_tokens=0, echo=True, logprobs=2, return_token_ids=True)
        (choice,) = answer["choices"]
        token_ids = choice["prompt_token_ids"]
        assert (choice["text"], choice["finish_reason"]) == ("import os", "length")
        assert choice["token_ids"] == []
        told = choice["logprobs"]
        assert "".join(told["tokens"]).endswith("import os")
        assert told["token_logprobs"] == [None, *[-1.0 - token_id % 2 for token_id in token_ids[1:]]]
        assert told["top_logprobs"][0] is None
        assert [len(top) for top in told["top_logprobs"][1:]] == [2 + token_id % 2 for token_id in token_ids[1:]]
        assert told["text_offset"][-1] == len("import os") - len(told["tokens"][-1])
        assert answer["usage"]["completion_tokens"] == 0
        assert answer["usage"]["prompt_tokens"] == len(token_ids)


async def test_an_answer_follows_the_prompt_that_was_scored_once_for_all_choices(site_of):
    asked = {"prompt": [[5, 6, 7], [8, 9]], "n": 2, "max_tokens": 4, "logprobs": 0}
    async with site_of(1, 1) as site:
        plain = await complete(site, **asked)
        echoed = await complete(site, **asked, echo=True)
        assert sum(request.reading is not None for request in site.rig["p0"].seen) == 2
        for one, other, length in zip(plain["choices"], echoed["choices"], [3, 3, 2, 2], strict=True):
            assert other["text"].endswith(one["text"])
            assert other["finish_reason"] == one["finish_reason"]
            assert other["logprobs"]["token_logprobs"][0] is None
            assert other["logprobs"]["tokens"][length:] == one["logprobs"]["tokens"]
        assert echoed["usage"] == plain["usage"]
        assert site.service.pipeline.in_flight == 0


async def test_prompt_logprobs_are_vllms(site_of):
    async with site_of(1, 1) as site:
        answer = await complete(site, prompt=[3, 40, 41], max_tokens=2, prompt_logprobs=1)
        piece = site.service.tokenizer.piece
        (choice,) = answer["choices"]
        assert choice["logprobs"] is None
        assert choice["prompt_logprobs"] == [
            None,
            {"40": {"logprob": -1.0, "rank": 1, "decoded_token": piece(40).text}},
            {
                "42": {"logprob": -1.0, "rank": 1, "decoded_token": piece(42).text},
                "41": {"logprob": -2.0, "rank": 2, "decoded_token": piece(41).text},
            },
        ]
        chat = await complete(
            site,
            "/v1/chat/completions",
            messages=[{"role": "user", "content": "hello"}],
            max_tokens=0,
            prompt_logprobs=0,
            return_token_ids=True,
        )
        assert chat["choices"][0]["message"]["content"] == ""
        assert len(chat["prompt_logprobs"]) == len(chat["prompt_token_ids"])
        assert list(chat["prompt_logprobs"][1]) == [str(chat["prompt_token_ids"][1])]


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 0, "logprobs": 1}, "max_tokens"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ],
)
async def test_what_can_not_be_told_of_a_prompt_is_refused_by_name(site_of, asked, param):
    async with site_of(0, 1) as site:
        answer = await complete(site, status=400, prompt="import os", **asked)
        assert answer["error"]["param"] == param


async def test_a_prompt_is_scored_again_where_its_worker_dies(site_of, until):
    async with site_of(2, 1) as site:
        for name in ("p0", "p1"):
            site.rig[name].poison = lambda tokens: not any(site.rig[one].dead for one in ("p0", "p1"))
        answer = await complete(site, prompt=[3, 40, 41], max_tokens=0, echo=True, logprobs=0)
        assert answer["choices"][0]["logprobs"]["token_logprobs"] == [None, -1.0, -2.0]
        assert sum(site.rig[one].dead for one in ("p0", "p1")) == 1


async def test_offsets_of_an_echoed_prompt_count_the_special_tokens_that_its_text_has(site_of, tokenizer):
    special = next(one for one in range(tokenizer.vocab_size) if tokenizer.is_special(one))
    name = tokenizer.token(special)
    async with site_of(0, 1) as site:

        async def echoed(**asked):
            asked = {"max_tokens": 2, "echo": True, "logprobs": 0, "ignore_eos": True} | asked
            (choice,) = (await complete(site, **asked))["choices"]
            return choice["text"], choice["logprobs"]

        for asked in (
            {"prompt": f"a{name}{name}import"},
            {"prompt": [special, 40, special], "skip_special_tokens": False},
        ):
            text, told = await echoed(**asked)
            assert name in text
            for token, begin, end in zip(told["tokens"], told["text_offset"], told["text_offset"][1:], strict=False):
                assert text[begin:end] in (token, ""), "the tokenizer may have added one, which the text lacks"
            assert sum(text[at:].startswith(name) for at in set(told["text_offset"])) == 2
        text, told = await echoed(prompt=[special, 40, special, 41])
        assert name not in text
        first, second = told["text_offset"][:2]
        assert first == second == 0


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
