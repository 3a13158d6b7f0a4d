"""The feed: its contents, its subscribers and its bounds."""

import asyncio
import json
import logging
from contextlib import aclosing

import pytest

from twostroke.protocol.errors import RequestError
from twostroke.protocol.kv_layout import KVLayout
from twostroke.protocol.requests import Address, GenerateRequest, Peer, SamplingParams
from twostroke.protocol.stats import WorkerInfo
from twostroke.router.observe import feed as feed_module
from twostroke.router.observe.feed import MAX_ENDED, MAX_OF_ONE_KEY, MAX_SEQUENCES, MAX_SUBSCRIBERS, Feed
from twostroke.router.observe.request_log import RequestLog
from twostroke.router.request_state import (
    AttemptContext,
    AttemptEnded,
    AttemptStarted,
    ChoiceJob,
    Path,
    RequestState,
    StreamMove,
    SuspectRequest,
)

MARK = "xylophonic-marmalade"


@pytest.fixture(autouse=True)
def _quick_looks(monkeypatch):
    monkeypatch.setattr(feed_module, "LOOK_S", 0.0)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def a_feed(clock, *, rows=lambda: [], is_over=lambda: False) -> Feed:
    return Feed("router-0", rows, clock, is_over)


def begun(feed: Feed, *, tenant=None, choices=1, minted=True, request_id="ab" * 16) -> RequestLog:
    log = RequestLog(request_id, "POST", "/v1/chat/completions", 100.0, {}, has_minted_id=minted, tenant=tenant)
    feed.began(log)
    requests = [GenerateRequest(f"r{k}", "", (1, 2, 3), 3, SamplingParams(), 9) for k in range(choices)]
    log.generates([RequestState(ChoiceJob(one), 100.0) for one in requests], is_stream=True)
    return log


def ended(feed: Feed, log: RequestLog, at: float = 101.0) -> None:
    log.ended = at
    feed.over(log)


def parsed(told: bytes) -> list[dict]:
    return [json.loads(one.removeprefix("data: ")) for one in told.decode().split("\n\n") if one]


async def look(events) -> list[dict]:
    async with asyncio.timeout(10):
        return parsed(await anext(events))


async def test_a_sequence_is_told_once_and_then_what_changes_and_at_last_how_it_ended() -> None:
    clock = Clock()
    feed = a_feed(clock)
    log = begun(feed)
    (state,) = log.choices
    async with aclosing(feed.events(None, sees_all=True)) as events:
        assert (await look(events))[0] | {"now": 0} == {"kind": "hello", "now": 0, "router": "router-0", "sees": "all"}
        first, workers = await look(events)
        assert (first["id"], first["label"], first["state"], first["prompt_tokens"]) == ("1.0", "ab" * 16, "waiting", 3)
        assert workers["kind"] == "workers"
        state.tokens, state.first_token = [7] * 40, 100.5  # however many tokens come between two looks
        assert await look(events) == [
            {"kind": "sequence", "now": 100.0, "id": "1.0", "output_tokens": 40, "first_token": 100.5}
        ]
        state.stop(40, 100.9)
        ended(feed, log)
        (last,) = await look(events)
        assert last | {"now": 0} == {
            "kind": "sequence", "now": 0, "id": "1.0", "state": "over", "finished": 100.9, "end": "stop"
        }  # fmt: skip
    assert not feed._under_way


async def test_a_stream_that_moves_is_told_with_both_workers_and_is_no_failure() -> None:
    feed = a_feed(Clock())
    (state,) = begun(feed).choices
    request = GenerateRequest("r0", "", (1, 2, 3), 3, SamplingParams(), 9)
    first, second = (AttemptContext(Path(None, worker(name)), request, (), SuspectRequest(b"")) for name in "pd")
    async with aclosing(feed.events(None, sees_all=True)) as events:
        await look(events)
        state.on_event(first, AttemptStarted(100.1))
        assert (await look(events))[0]["moves"] == []
        state.on_event(first, AttemptEnded(101.5, None, True, StreamMove(worker("d"), "drain")))
        state.on_event(second, AttemptStarted(101.5))
        (told,) = await look(events)
        assert told["moves"] == [[101.5, "p", "d"]]
        assert (told["attempt"], told["decode"]) == (2, "d")
        assert "prefill_failures" not in told


def worker(name: str) -> WorkerInfo:
    layout = KVLayout("m", "bfloat16", 1, 1, 1, 16)
    return WorkerInfo("decode", Peer(name, 1), Address("", 0), (Address("", 0),), layout, 8, 64)


async def test_a_clients_own_request_id_is_not_told() -> None:
    feed = a_feed(Clock())
    begun(feed, minted=False, request_id=MARK)
    async with aclosing(feed.events(None, sees_all=True)) as events:
        await look(events)
        (sequence, _) = await look(events)
        assert sequence["label"] is None
        assert MARK not in json.dumps(sequence)


async def test_a_tenant_sees_his_own_alone_and_no_workers() -> None:
    feed = a_feed(Clock(), rows=lambda: [{"id": "d0"}])
    for tenant in ("ann", "bob", "ann"):
        begun(feed, tenant=tenant)
    ended(feed, begun(feed, tenant="bob"))
    async with (
        aclosing(feed.events("ann", sees_all=False)) as of_ann,
        aclosing(feed.events("root", sees_all=True)) as all_,
    ):
        assert (await look(of_ann))[0]["sees"] == "own"
        assert {(one["kind"], one["id"]) for one in await look(of_ann)} == {("sequence", "2.0"), ("sequence", "3.0")}
        await look(all_)
        assert len([one for one in await look(all_) if one["kind"] == "sequence"]) == 4


async def test_who_reads_slowly_is_told_what_he_missed_and_nothing_queues_up() -> None:
    clock = Clock()
    feed = a_feed(clock)
    async with aclosing(feed.events(None, sees_all=True)) as events:
        await look(events)
        await look(events)
        for _ in range(MAX_ENDED + 30):
            ended(feed, begun(feed))
        told = await look(events)
        assert told[0]["kind"] == "lagged"
        assert told[0]["missed"] == 30
        assert len([one for one in told if one["kind"] == "sequence"]) == MAX_ENDED
        begun(feed)
        assert [one["kind"] for one in await look(events)] == ["sequence"]


async def test_of_many_sequences_the_oldest_are_told_and_of_the_others_their_number() -> None:
    feed = a_feed(Clock())
    begun(feed, choices=MAX_SEQUENCES + 7)
    async with aclosing(feed.events(None, sees_all=True)) as events:
        await look(events)
        *sequences, workers = await look(events)
        assert len(sequences) == MAX_SEQUENCES
        assert workers["hidden"] == 7


async def test_who_comes_later_is_told_what_ended_lately() -> None:
    clock = Clock()
    feed = a_feed(clock)
    ended(feed, begun(feed), at=100.0)
    clock.now += 60
    ended(feed, begun(feed), at=155.0)
    async with aclosing(feed.events(None, sees_all=True)) as events:
        await look(events)
        assert [one["id"] for one in await look(events) if one["kind"] == "sequence"] == ["2.0"]


async def test_only_so_many_may_listen_and_one_key_has_few_of_the_places() -> None:
    feed = a_feed(Clock())
    listening = [feed.events("ann", sees_all=False) for _ in range(MAX_OF_ONE_KEY)]
    listening += [feed.events(None, sees_all=True) for _ in range(MAX_SUBSCRIBERS - MAX_OF_ONE_KEY - 1)]
    for one in listening:
        await anext(one)
    with pytest.raises(RequestError, match="too many"):
        await anext(feed.events("ann", sees_all=False))
    listening.append(feed.events("bob", sees_all=False))
    await anext(listening[-1])
    with pytest.raises(RequestError) as refused:
        await anext(feed.events("cid", sees_all=False))
    assert refused.value.status == 429
    for one in listening:
        await one.aclose()
    async with aclosing(feed.events("cid", sees_all=False)) as events:
        await anext(events)


async def test_it_ends_by_itself_and_when_the_router_is_about_to_end() -> None:
    clock, is_over = Clock(), False
    feed = a_feed(clock, is_over=lambda: is_over)
    async with aclosing(feed.events(None, sees_all=True)) as events:
        await look(events)
        await look(events)
        clock.now += feed_module.MAX_S
        assert [one async for one in events] == []
    is_over = True
    async with aclosing(feed.events(None, sees_all=True)) as events:
        await look(events)
        assert [one async for one in events] == []


async def test_no_word_of_a_prompt_reaches_feed_or_logs(site_of, until, caplog) -> None:
    caplog.set_level(logging.DEBUG)
    async with site_of(1, 1, listen=True) as site:
        await until(lambda: not site.service.missing())
        body = {
            "messages": [{"role": "user", "content": f"{MARK} {MARK}"}],
            "max_tokens": 5,
            "user": MARK,
            "stop": [MARK],
        }
        await site.http.post("/v1/chat/completions", json=body, headers={"x-request-id": MARK[:4]})
        await site.http.post("/v1/chat/completions", json=body | {"temperature": MARK})
        async with site.http.stream("GET", f"{site.url}/nothing"):
            pass
        async with aclosing(site.service.feed.events(None, sees_all=True)) as events:
            told = await anext(events) + await anext(events)
    assert b'"output_tokens":5' in told
    assert MARK.encode() not in told
    assert b"decode" in told
    ours = [record.getMessage() for record in caplog.records if not record.name.startswith(("httpx", "httpcore"))]
    assert ours
    assert not [line for line in ours if MARK in line]
