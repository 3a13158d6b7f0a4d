"""Answers of clients whose decode worker dies in the middle: the same as without the death."""

import json

import pytest

COMPLETION = {"model": "fake", "prompt": [5, 6, 7, 8], "max_tokens": 24, "seed": 4}
CHAT = {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 24, "seed": 4}

ASKED = {
    "greedy": ("completions", {**COMPLETION, "temperature": 0}),
    "n": ("completions", {**COMPLETION, "n": 3}),
    "logprobs": ("completions", {**COMPLETION, "logprobs": 3}),
    "echo": ("completions", {**COMPLETION, "prompt": "once", "echo": True}),
    "stop": ("completions", {**COMPLETION, "max_tokens": 60, "stop": ["e", "zz"], "min_tokens": 12}),
    "penalties": (
        "completions",
        {**COMPLETION, "presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.3},
    ),
    "several prompts": ("completions", {**COMPLETION, "prompt": [[5, 6], [7, 8, 9]], "n": 2}),
    "token ids": ("completions", {**COMPLETION, "return_token_ids": True}),
    "chat": ("chat/completions", {**CHAT, "n": 2, "logprobs": True, "top_logprobs": 2}),
}


async def answer_of(site, path, asked, *, stream):
    if stream:
        asked = {**asked, "stream": True}
    answer = await site.http.post(f"/v1/{path}", json=asked)
    assert answer.status_code == 200, answer.text
    if not stream:
        body = answer.json()
        return body["choices"], {name: body["usage"][name] for name in ("prompt_tokens", "completion_tokens")}
    events = [line for line in answer.text.splitlines() if line.startswith("data: ")]
    assert events[-1] == "data: [DONE]"
    return together(events[:-1])


def together(events):
    """The text of each choice, and how it ended: chunks may be cut elsewhere."""
    texts, ends = {}, {}
    for line in events:
        for choice in json.loads(line.removeprefix("data: "))["choices"]:
            said = choice.get("text", (choice.get("delta") or {}).get("content")) or ""
            texts[choice["index"]] = texts.get(choice["index"], "") + said
            if choice["finish_reason"] is not None:
                assert choice["index"] not in ends, "one end"
                ends[choice["index"]] = choice["finish_reason"]
    return texts, ends


@pytest.mark.parametrize(("num_prefill", "stream"), [(1, False), (0, True)], ids=["whole", "stream"])
@pytest.mark.parametrize("name", ASKED)
async def test_an_answer_is_the_same_although_its_decode_worker_dies_in_the_middle(site_of, name, num_prefill, stream):
    path, asked = ASKED[name]
    async with site_of(num_prefill, 2) as site:
        undisturbed = await answer_of(site, path, asked, stream=stream)
        longest = max(len(one.token_ids) for worker in site.rig.fleet.all.values() for one in worker.seen)
        workers = [site.rig["d0"], site.rig["d1"]]

        def die_once(tokens):
            if len(tokens) != longest + 5:
                return False
            for worker in workers:
                worker.poison = None
            return True

        for _ in range(2):
            for worker in workers:
                worker.poison = die_once
            assert await answer_of(site, path, asked, stream=stream) == undisturbed
            (dead,) = (worker for worker in workers if worker.dead)
            await dead.start()
        resumes = (await site.http.get("/metrics")).text.split("twostroke:request_resumes_total{")[1].splitlines()[0]
        assert float(resumes.split()[-1]) > 0
