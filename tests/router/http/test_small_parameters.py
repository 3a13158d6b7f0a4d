"""Parameters of vLLM's and OpenAI's that change little, over HTTP: what each does, and what the workers are told."""

import pytest

PROMPT = {"prompt": "import os", "max_tokens": 12, "seed": 5}


async def choices(site, status=200, **asked):
    response = await site.http.post("/v1/completions", json={"model": "fake", **PROMPT, **asked})
    assert response.status_code == status, response.text
    return response.json() if status != 200 else response.json()["choices"]


async def test_the_best_of_several_candidates_have_the_likeliest_tokens(site_of):
    async with site_of(0, 1) as site:
        every = await choices(site, n=5, logprobs=0, prompt=["a", "b"])
        site.rig["d0"].seen.clear()
        best = await choices(site, n=2, best_of=5, prompt=["a", "b"])
        assert len(site.rig["d0"].seen) == 10
        assert [one["index"] for one in best] == [0, 1, 2, 3]
        assert all(one["logprobs"] is None for one in best)

        def mean(choice):
            logprobs = choice["logprobs"]["token_logprobs"]
            return sum(logprobs) / max(1, len(logprobs))

        for told, of_prompt in ((best[:2], every[:5]), (best[2:], every[5:])):
            ranked = sorted(of_prompt, key=mean, reverse=True)
            assert [one["text"] for one in told] == [one["text"] for one in ranked[:2]]


async def test_a_stop_string_is_shown_where_that_is_asked_for(site_of):
    async with site_of(0, 1) as site:
        ((plain,), (stopped,), (shown,)) = [
            await choices(site, **asked)
            for asked in ({}, {"stop": "e"}, {"stop": "e", "include_stop_str_in_output": True})
        ]
        assert "e" in plain["text"], "choose another stop string"
        assert shown["text"] == stopped["text"] + "e" == plain["text"].split("e")[0] + "e"


async def test_special_tokens_have_their_names_where_that_is_asked_for(site_of, tokenizer):
    special = next(one for one in range(tokenizer.vocab_size) if tokenizer.is_special(one))
    async with site_of(0, 1) as site:
        site.rig["d0"].corrupt = lambda event: event
        asked = {"prompt": [special, 40], "echo": True, "max_tokens": 1}
        (hidden,), (plain,) = [await choices(site, **asked, skip_special_tokens=skips) for skips in (True, False)]
        assert (hidden["text"] == plain["text"]) != (tokenizer.token(special) in plain["text"])


async def test_the_workers_are_told_what_may_be_drawn_and_who_shares_prefixes(site_of, tokenizer):
    async with site_of(0, 1) as site:
        await choices(site, allowed_token_ids=[5, 5, 9], bad_words=["os"], cache_salt="mine")
        await choices(site, cache_salt="")
        first, second = site.rig["d0"].seen
        assert first.sampling.allowed_token_ids == (5, 9)
        ways = {tuple(tokenizer.encode_word(way)) for way in ("os", " os")}
        assert set(first.sampling.bad_words) == ways
        assert len(first.cache_salt) == 16
        assert second.cache_salt == b""
        assert second.sampling.bad_words == ()


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"n": 2, "best_of": 1}, "best_of"),
        ({"n": 1, "best_of": 2, "stream": True}, "best_of"),
        ({"n": 1, "best_of": 33, "prompt": ["a", "b"]}, "n"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [2**30]}, "allowed_token_ids"),
        ({"bad_words": ["x" * 65]}, "bad_words.0"),
        ({"bad_words": ["x"], "response_format": {"type": "json_object"}}, "bad_words"),
        ({"truncate_prompt_tokens": 0}, "prompt"),
        ({"suffix": "x"}, "suffix"),
    ],
)
async def test_what_can_not_be_is_refused_by_name(site_of, asked, param):
    async with site_of(0, 1) as site:
        assert (await choices(site, status=400, **asked))["error"]["param"] == param


@pytest.mark.parametrize(
    ("param", "asked"),
    [
        ("n", {"n": 9}),
        ("n", {"prompt": ["a"] * 9}),
        ("logprobs", {"logprobs": 7, "max_tokens": 12}),
        ("prompt_logprobs", {"prompt_logprobs": 9, "prompt": [5] * 10, "max_tokens": 1}),
        ("prompt_logprobs", {"prompt_logprobs": 4, "prompt": [[5] * 10, [6] * 10], "max_tokens": 1}),
        ("prompt_logprobs", {"echo": True, "logprobs": 10, "prompt": [5] * 10, "max_tokens": 0}),
    ],
)
async def test_choices_times_tokens_times_logprobs_have_a_bound(site_of, param, asked):
    async with site_of(0, 1, max_response_items=100) as site:
        refused = await choices(site, 400, **asked)
        assert refused["error"]["param"] == param
        assert "router.max_response_items" in refused["error"]["message"]
        assert site.rig["d0"].seen == []
        if not (asked.get("prompt_logprobs") or asked.get("echo")):
            response = await site.http.post(
                "/v1/completions", json={"model": "fake", **PROMPT, **asked, "stream": True}
            )
            assert response.status_code == 200, "a stream holds nothing of what it has sent"
        (fits,) = await choices(site, logprobs=6)
        assert fits["text"]
