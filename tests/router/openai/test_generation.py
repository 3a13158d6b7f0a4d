import asyncio
import itertools
from contextlib import aclosing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twostroke.protocol.errors import WorkerLost
from twostroke.protocol.requests import GenerateRequest, SampledToken, SamplingParams, TokenEvent
from twostroke.router.openai.answers import ChoiceDelta
from twostroke.router.openai.generation import ChoiceWriter, run_choices
from twostroke.router.request_state import ChoiceJob, RequestState


def choice(index=0, group=0, *, stop=(), min_tokens=0, logprobs=None):
    sampling = SamplingParams(logprobs=logprobs)
    request = GenerateRequest("", "", (1,), 1, sampling, 100, min_tokens)
    return RequestState(ChoiceJob(request, index, group, tuple(stop)), 0.0)


def events_of(token_ids, cuts, finish):
    """The tokens as events that end at `cuts`."""
    bounds = [0, *sorted({cut for cut in cuts if 0 < cut < len(token_ids)}), len(token_ids)]
    for begin, end in itertools.pairwise(bounds):
        tokens = tuple(SampledToken(token_id, -1.0) for token_id in token_ids[begin:end])
        yield TokenEvent("r", begin, tokens, finish if end == len(token_ids) else None)


def write(tokenizer, token_ids, cuts, finish="length", **job_fields):
    writer = ChoiceWriter(choice(**job_fields), tokenizer)
    deltas = []
    for event in events_of(token_ids, cuts, finish):
        deltas.append(writer.add(event))
        if deltas[-1].finish_reason:
            break
    return deltas


IDS = st.lists(st.integers(6, 262) | st.integers(6, 4095), min_size=1, max_size=40)


@settings(max_examples=200, deadline=None)
@given(token_ids=IDS, cuts=st.lists(st.integers(1, 40)), finish=st.sampled_from(["length", "stop"]))
def test_text_does_not_depend_on_how_tokens_come(tokenizer, token_ids, cuts, finish):
    deltas = write(tokenizer, token_ids, cuts, finish)
    shown = token_ids[:-1] if finish == "stop" else token_ids
    assert "".join(delta.text for delta in deltas) == tokenizer.decode(shown)
    assert [token for delta in deltas for token in delta.token_ids] == token_ids
    assert [delta.finish_reason for delta in deltas if delta.finish_reason] == [finish]


@settings(max_examples=200, deadline=None)
@given(token_ids=IDS, cuts=st.lists(st.integers(1, 40)), at=st.integers(0, 30), length=st.integers(1, 6))
def test_a_stop_string_cuts_the_same_however_tokens_come(tokenizer, token_ids, cuts, at, length):
    text = tokenizer.decode(token_ids)
    stop = text[at : at + length] or "none"
    one_by_one = write(tokenizer, token_ids, range(1, 40), stop=[stop])
    in_lumps = write(tokenizer, token_ids, cuts, stop=[stop])
    for deltas in (one_by_one, in_lumps):
        assert "".join(delta.text for delta in deltas) == text.split(stop)[0]
        assert deltas[-1].finish_reason == ("stop" if stop in text else "length")
    assert sum((delta.token_ids for delta in one_by_one), ()) == sum((delta.token_ids for delta in in_lumps), ())


def test_no_stop_string_counts_before_min_tokens(tokenizer):
    token_ids = tokenizer._encode("a b a b a b", False)
    deltas = write(tokenizer, token_ids, [], stop=["a"], min_tokens=2)
    assert "".join(delta.text for delta in deltas) == "a b "


@settings(max_examples=100, deadline=None)
@given(token_ids=IDS)
def test_offsets_point_at_the_text_of_their_token(tokenizer, token_ids):
    deltas = write(tokenizer, token_ids, [3, 7], logprobs=0)
    shown = [token for delta in deltas for token in delta.shown]
    assert len(shown) == len(token_ids)
    for i, token in enumerate(shown):
        assert token.offset == len(tokenizer.decode(token_ids[:i]).rstrip("�")) or "�" in tokenizer.decode(token_ids)


async def test_the_leader_of_each_prompt_starts_alone():
    started, go = [], {0: asyncio.Event(), 2: asyncio.Event()}

    async def generate(one):
        started.append(one.job.index)
        if one.job.index in go:
            await go[one.job.index].wait()
        yield ChoiceDelta(one.job.index, "x", (1,), (), "stop")

    choices = [choice(0, 0), choice(1, 0), choice(2, 1), choice(3, 1)]
    async with aclosing(run_choices(choices, generate)) as deltas:
        first = asyncio.ensure_future(anext(deltas))
        for _ in range(10):
            await asyncio.sleep(0)
        assert started == [0, 2]
        go[2].set()
        assert (await first).index == 2
        assert (await anext(deltas)).index == 3
        assert started == [0, 2, 3]
        go[0].set()
        assert [delta.index async for delta in deltas] == [0, 1]


async def test_more_deltas_than_the_queue_holds_all_arrive():
    async def generate(one):
        for i in range(1000):
            yield ChoiceDelta(one.job.index, str(i), (1,), (), None)

    seen = {0: [], 1: [], 2: []}
    async with aclosing(run_choices([choice(i, i) for i in range(3)], generate)) as deltas:
        async for delta in deltas:
            seen[delta.index].append(int(delta.text))
    assert all(one == list(range(1000)) for one in seen.values())


@pytest.mark.parametrize("read", [0, 1, 300])
async def test_leaving_early_or_failing_leaves_no_task(read):
    closed = []

    async def generate(one):
        try:
            for _ in range(10_000):
                yield ChoiceDelta(one.job.index, "x", (1,), (), None)
                await asyncio.sleep(0)
        finally:
            closed.append(one.job.index)

    before = asyncio.all_tasks()
    async with aclosing(run_choices([choice(i, i) for i in range(3)], generate)) as deltas:
        for _ in range(read):
            await anext(deltas)
    assert asyncio.all_tasks() == before
    assert sorted(closed) == ([0, 1, 2] if read else [])


async def test_the_first_failure_is_told_as_it_is():
    async def generate(one):
        yield ChoiceDelta(one.job.index, "x", (1,), (), None)
        if one.job.index == 1:
            raise WorkerLost("this one")
        await asyncio.Event().wait()

    async with aclosing(run_choices([choice(i, i) for i in range(3)], generate)) as deltas:
        with pytest.raises(WorkerLost, match="this one"):
            [delta async for delta in deltas]
